"""transformers' Trainer with ferry's optimizer: master weights and moments lie in host memory and on NVMe. The
lines that a Trainer script gains end in "ferry".

    pip install . torch transformers accelerate      # in the sources: docs/embedding.md
    python examples/embed_torch.py /mnt/nvme
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ferry_offload.torch import OffloadAdamW  # ferry


class Squares(torch.utils.data.Dataset):
    """Sequences that a small model learns in some steps."""

    def __len__(self):
        return 512

    def __getitem__(self, i):
        tokens = torch.tensor([(i + n * n) % 61 for n in range(64)])
        return {"input_ids": tokens, "labels": tokens}


def main(storage, output):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                                         intermediate_size=352, vocab_size=64)).to(torch.bfloat16)
    arguments = TrainingArguments(output_dir=output, max_steps=20, per_device_train_batch_size=4, learning_rate=3e-3,
                                  gradient_accumulation_steps=2, logging_steps=5, save_steps=20, report_to=[],
                                  use_cpu=not torch.cuda.is_available(),
                                  max_grad_norm=0)  # ferry clips
    trainer = Trainer(model, arguments, train_dataset=Squares(), optimizer_cls_and_kwargs=(OffloadAdamW, {  # ferry
        "lr": arguments.learning_rate,  # ferry
        "max_norm": 1.0,  # ferry
        "accumulation_steps": arguments.gradient_accumulation_steps,  # ferry
        "host": "4MiB",  # ferry
        "nvme": [storage],  # ferry
    }))  # ferry
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print("loss", " ".join(f"{float(loss):.3f}" for loss in losses))
    print("the loss fell" if float(losses[-1]) < float(losses[0]) else "the loss did not fall")
    print(trainer.optimizer.optimizer.stats)  # of ferry's, inside accelerate's


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: embed_torch.py DIRECTORY [OUTPUT]")
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "embed_torch.out")

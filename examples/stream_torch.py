"""A decoder of transformers whose blocks do not fit on the device together: their weights lie in host memory, what autograd
saves and the optimizer's state on NVMe. The loop is an ordinary one.

    pip install . torch transformers      # in the sources: docs/embedding.md
    python examples/stream_torch.py /mnt/nvme
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ferry_offload.torch import OffloadAdamW, offload_activations, stream_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = LlamaConfig(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=704,
                     vocab_size=64, use_cache=False)


def initial(name):
    """In place of a directory of safetensors files: a weight by its name."""
    shape = SHAPES[name]
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape) / shape[-1]**0.5


def main(storage):
    global SHAPES
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)  # it takes no memory
    SHAPES = {name: p.shape for name, p in model.named_parameters()}
    stream = stream_model(model, host="64MiB", weights=initial, device=DEVICE, device_blocks=3)
    optimizer = OffloadAdamW(stream.parameters(), lr=1e-3, max_norm=1.0, host="24MiB", nvme=[storage])
    stream.train_with(optimizer)
    offload = offload_activations("8MiB", nvme=[storage])
    losses = []
    for step in range(12):
        tokens = torch.tensor([[(step + i + n * n) % 61 for n in range(64)] for i in range(8)], device=DEVICE)
        with offload:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("loss", " ".join(f"{loss:.3f}" for loss in losses))
    print("the loss fell" if losses[-1] < losses[0] else "the loss did not fall")
    for stats in (stream.stats, offload.stats, optimizer.stats):
        print(stats)
    del loss
    offload.close()
    optimizer.close()
    stream.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: stream_torch.py DIRECTORY")
    main(sys.argv[1])

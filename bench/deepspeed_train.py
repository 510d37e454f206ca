"""DeepSpeed's side of the comparisons, in a process of its own: ZeRO-3 with offload on a Hugging Face Llama.

    python3 bench/deepspeed_train.py WORKLOAD.json      (bench/peers.py writes it)

Prints a JSON line a step. Pinned memory, pipelined reads and writes, 18 buffers (below 16 it stops on an
assertion), 1 MiB blocks, 8 I/O threads: the best of the settings tried.
"""

import json
import os
import sys
import time

SUB_GROUP = 100_000_000  # elements that the optimizer works on at once
BUFFERS = 18  # of the swapper to NVMe


def settings(workload):
    batch, optimizer = workload["batch"], workload["optimizer"]
    world = int(os.environ["WORLD_SIZE"])
    nvme = {"nvme_path": workload["nvme"]} if workload["offload"] == "nvme" else {}
    zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": SUB_GROUP,
            "reduce_bucket_size": 200_000_000, "stage3_prefetch_bucket_size": 100_000_000,
            "stage3_param_persistence_threshold": 10_000, "stage3_max_live_parameters": 300_000_000,
            "stage3_max_reuse_distance": 300_000_000,
            "offload_optimizer": {"device": workload["offload"], "pin_memory": True, "buffer_count": BUFFERS,
                                  "pipeline_read": True, "pipeline_write": True, "fast_init": True, **nvme},
            "offload_param": {"device": "cpu", "pin_memory": True}}
    return {"train_batch_size": batch["micro_batch"] * batch["micro_batches"] * world,
            "train_micro_batch_size_per_gpu": batch["micro_batch"],
            "gradient_accumulation_steps": batch["micro_batches"], "gradient_clipping": workload["clip_norm"],
            "bf16": {"enabled": True}, "steps_per_print": 1_000_000,
            "optimizer": {"type": "AdamW", "params": {"lr": optimizer["lr"], "betas": optimizer["betas"],
                                                      "weight_decay": optimizer["weight_decay"]}},
            "zero_optimization": zero,
            "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 8, "single_submit": False,
                    "overlap_events": True}}


def model_of(workload, config):
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = workload["model"]
    llama = LlamaConfig(hidden_size=shape["hidden"], intermediate_size=shape["intermediate"],
                        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
                        num_key_value_heads=shape["kv_heads"], vocab_size=shape["vocab"],
                        tie_word_embeddings=shape["tie_embeddings"], max_position_embeddings=4096,
                        attn_implementation="sdpa", use_cache=False)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(llama)
        torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable()
    return model.train()


def bytes_on_drives():
    """What this process has read from drives and written to them so far."""
    with open("/proc/self/io", encoding="ascii") as file:
        counts = dict(line.split(": ") for line in file)
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


def batches(workload, count):
    """This rank's micro-batches of the token file in order, from its start again at its end."""
    import torch
    from peers import tokens_of

    tokens = torch.tensor(tokens_of(workload["tokens"]), dtype=torch.int64)
    rows, length = workload["batch"]["micro_batch"], workload["batch"]["sequence"]
    size = rows * length
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for index in range(rank, count * world, world):
        first = index * size % (len(tokens) - size)
        yield tokens[first:first + size].view(rows, length).cuda()


def main():
    # As torchrun would say it of the one process.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    with open(sys.argv[1], encoding="utf-8") as file:
        workload = json.load(file)
    import deepspeed
    import torch

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = settings(workload)
    deepspeed.init_distributed()
    model = model_of(workload, config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    micro_batches = workload["batch"]["micro_batches"]
    data = batches(workload, workload["steps"] * micro_batches)
    for step in range(1, workload["steps"] + 1):
        torch.cuda.synchronize()
        start, moved = time.perf_counter(), bytes_on_drives()
        for _ in range(micro_batches):
            tokens = next(data)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if os.environ["RANK"] == "0":
            print(json.dumps({"step": step, "seconds": seconds, "loss": loss.item(),
                              "bytes_moved": bytes_on_drives() - moved}), flush=True)


if __name__ == "__main__":
    main()

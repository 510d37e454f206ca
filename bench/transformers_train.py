"""transformers' side of bench/compute.py, in a process of its own: bf16 weights, fused AdamW on them, SDPA.

    python3 bench/transformers_train.py WORKLOAD.json      (bench/compute.py writes it)

Prints a JSON line a step; ends with 77 where a step does not fit the GPU's memory.
"""

import json
import sys
import time

NO_ROOM = 77


def run(workload):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    config = AutoConfig.from_pretrained(workload["model"])
    config.use_cache = False
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.train()
    if workload["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step_of = torch.compile(model) if workload["compiled"] else model
    shape = (workload["sequences"], workload["sequence"])
    for step in range(1, workload["steps"] + 1):
        tokens = torch.randint(config.vocab_size, shape, device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step_of(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        print(json.dumps({"step": step, "seconds": time.perf_counter() - start, "loss": loss.item()}), flush=True)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        workload = json.load(file)
    import torch

    try:
        run(workload)
    except torch.cuda.OutOfMemoryError as error:
        print(error, file=sys.stderr)
        sys.exit(NO_ROOM)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""OffloadAdamW in a plain PyTorch loop, its state in host memory, beside the same loop with the state on the GPU.

transformers' decoders with random weights in bf16, checkpointed blocks, 16,384 random tokens a step. On the GPU's side
masters and moments are fp32 there, by torch's fused AdamW; gradients are widened and weights rounded around it. Both clip
by a norm that is never reached (--max-norm changes that). torchao's side keeps weights and moments in bf16, as the model is,
and clips nothing: 6 bytes a parameter, as ferry's with a split master and moments in int8 (4 of fp32 master, 2 of moments). A
process a side and round; the first steps do not count.

    bench/offload_torch.py                 1 B and 3 B
    bench/offload_torch.py --models 1b     one of them

Needs torch, transformers and the package of python/ (docs/embedding.md); with torchao its CPUOffloadOptimizer is a side.
"""
import importlib.util
import json
import statistics
import subprocess
import sys
import time

import common
from common import SideFailed, compared, plain

SHAPES = {"1b": ({"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
                  "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256}, 0.74),  # 1 / 1.35
          "3b": ({"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
                  "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32000}, 0.77)}  # 1 / 1.30
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 160, "vocab_size": 512}


# What ferry's sides are. --gpu-state is the share's, and model= is set where it says so.
FERRY = {"ferry": {}, "bf16": {"moments": "bf16"}, "small": {"moments": "int8", "master": "split"},
         "late": {"moments": "int8", "master": "split", "model": True}, "share": {"model": True, "gpu_state": True}}
NAMES = {"ferry": "the state in host memory", "bf16": "moments in bf16", "small": "a split master and moments in int8",
         "late": "a split master, moments in int8 and model="}


class Nothing:
    """Forward and backward alone: no optimizer ends a step sooner."""

    def __init__(self, parameters):
        self.parameters = parameters

    def step(self):
        pass

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


class OnTheGpu:
    """fp32 masters and moments beside the model."""

    def __init__(self, torch, parameters, max_norm):
        self.torch, self.parameters, self.max_norm = torch, parameters, max_norm
        self.masters = [p.detach().float() for p in parameters]
        self.adamw = torch.optim.AdamW(self.masters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self):
        self.torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm, foreach=True)
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = parameter.grad.float()
        self.adamw.step()
        for master in self.masters:
            master.grad = None
        self.torch._foreach_copy_([p.data for p in self.parameters], self.masters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


class OfTorchao:
    """Its gradients leave in backward too, and nothing clips them. Masters are fp32 where weights are."""

    def __init__(self, torch, parameters):
        from torchao.optim import CPUOffloadOptimizer
        self.parameters = parameters
        self.adamw = CPUOffloadOptimizer(parameters, torch.optim.AdamW, offload_gradients=True, fused=True, lr=1e-5,
                                         betas=(0.9, 0.95), weight_decay=0.1)

    def step(self):
        self.adamw.step()

    def zero_grad(self):
        self.adamw.zero_grad()


def optimizer_of(side, torch, model, work):
    parameters = list(model.parameters())
    if side == "gpu":
        return OnTheGpu(torch, parameters, work["max_norm"])
    if side == "torchao":
        return OfTorchao(torch, parameters)
    if side == "backward":
        return Nothing(parameters)
    from ferry_offload.torch import OffloadAdamW
    more = dict(FERRY[side])
    if "model" in more:
        more["model"] = model
    if "gpu_state" in more:
        more["gpu_state"] = "0" if work["tiny"] else work["gpu_state"]
    return OffloadAdamW(parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, max_norm=work["max_norm"],
                        host=work["host"], **more)


def child(work):
    """One side: prints a JSON line a step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    device = "cpu" if work["tiny"] else "cuda"
    config = LlamaConfig(**work["shape"], tie_word_embeddings=True, max_position_embeddings=8192, use_cache=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = optimizer_of(work["side"], torch, model, work)
    for _ in range(work["steps"]):
        tokens = torch.randint(config.vocab_size, (work["sequences"], work["sequence"]), device=device)
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        gpu = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
        seconds = time.perf_counter() - start
        stats = getattr(optimizer, "stats", None)
        ahead = stats.updates_committed / (stats.updates_committed + stats.updates_in_step) if stats and stats.steps else None
        print(json.dumps({"seconds": seconds, "gpu_bytes": gpu, "ahead": ahead, "host_bytes": stats.host_bytes if stats else 0}), flush=True)


def measure(options, model, side):
    shape = TINY if options.tiny else SHAPES[model][0]
    work = {"side": side, "shape": shape, "tiny": options.tiny, "sequences": 2 if options.tiny else 8,
            "sequence": 32 if options.tiny else 2048, "max_norm": options.max_norm, "host": options.host, "gpu_state": options.gpu_state,
            "steps": options.warmup + options.steps}
    ran = subprocess.run([sys.executable, __file__, "--child", json.dumps(work)], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise SideFailed(f"{model}, {side}: {ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else ran.returncode}")
    steps = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")][options.warmup:]
    return {"seconds": statistics.median(s["seconds"] for s in steps), "gib": max(s["gpu_bytes"] for s in steps) / 2**30,
            "ahead": steps[-1]["ahead"], "host": steps[-1]["host_bytes"] / 2**30}


def rows_of(model, runs, target, gpu_state):
    """Of each side of ferry's, beside the state on the GPU and beside torchao."""
    rows = []

    def row(name, side, theirs, key="seconds", least=None):
        ours, others = ([run[key] for run in runs.get(one, [])] for one in (side, theirs))
        if not ours or not all(ours):  # on the CPU no memory is counted
            return
        last, unit = runs[side][-1], "s" if key == "seconds" else "GiB"
        more = {} if not last["host"] else {"host_gib": last["host"]}
        if last["ahead"] is not None:
            more |= {"ahead": last["ahead"], "note": f"{100 * last['ahead']:.0f} % of the updates stood before step()"}
        rows.append(compared(name, ours, others, unit, least, **more) if others else plain(name, ours, unit, **more))

    names = NAMES | {"share": f"{gpu_state} of the state on the GPU and model="}
    for side, name in names.items():
        least = {"ferry": target, "late": 0.91, "share": 0.91}.get(side)  # 1 / 1.10 with model=
        row(f"{model}: a step with {name}", side, "gpu", least=least)
    row(f"{model}: forward and backward alone", "backward", "gpu")
    if runs.get("torchao"):
        for side, name in names.items():
            row(f"{model}: beside torchao's, {name}", side, "torchao", least=1.3 if side in ("ferry", "small", "late") else None)
        row(f"{model}: beside torchao's, forward and backward alone", "backward", "torchao")
    for side in ("ferry", "small", "share"):
        row(f"{model}: the GPU's memory with {names[side]}", side, "gpu", "gib")
    return rows


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(json.loads(sys.argv[2]))
    parser = common.parser_of(__doc__)
    parser.set_defaults(ferry=None)  # it is not run
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--sides", nargs="+", choices=[*FERRY, "gpu", "backward", "torchao"], help="these alone; default: all")
    parser.add_argument("--steps", type=common.at_least(1), default=6, help="that count")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--host", default="80GiB", help="host memory for the optimizer")
    parser.add_argument("--gpu-state", default="4GiB", help="the share of the state that stays on the GPU, on one side")
    parser.add_argument("--max-norm", type=float, default=1e6)
    options = parser.parse_args()
    missing = [name for name in ("torch", "transformers", "ferry_offload") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"python3 cannot import {' and '.join(missing)}: docs/embedding.md says how to install them")
    rows, notes = [], []
    has_torchao = importlib.util.find_spec("torchao") is not None and not options.tiny
    if not has_torchao:
        notes.append("torchao is not installed")
    for model in options.models:
        names = [*FERRY, "gpu", "backward", *(["torchao"] if has_torchao and model == "1b" else [])]
        names = [name for name in names if not options.sides or name in options.sides]
        sides = {name: lambda model=model, name=name: measure(options, model, name) for name in names}
        rows += rows_of(model, common.turns(sides, options.rounds, options.seconds), SHAPES[model][1], options.gpu_state)
    if not rows:
        sys.exit("nothing could be measured")
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

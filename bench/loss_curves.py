#!/usr/bin/env python3
"""Loss curves of ferry in bf16 or fp16 beside PyTorch's, for five seeds.

A seed fixes a small Llama's first weights (transformers makes them) and the order of the text. PyTorch and ferry
train it from there on the same batches. The five curves of PyTorch lie apart by what the seeds differ in: ferry's
curve of a seed must never be farther from PyTorch's of the same seed than PyTorch's five are from each other. How
far those five are apart at one step is chance (0.09 to 0.7 within ten steps), so it is averaged over the steps around.

PyTorch's bf16: weights and activations are bf16, master weights and AdamW fp32. Its fp16: autocast, with a GradScaler
from 65,536 (needs a GPU).

    bench/loss_curves.py [--precision bf16 fp16] [--device cpu] [--steps 100] [--seeds 5] [--json FILE]

Needs PyTorch, transformers and a built ferry; writes to a temporary directory. Exit code 1: a curve is outside. The
seeds are the rounds: there are no --rounds and no --seconds, no --tiny but for --steps and --seeds, and no --set.
"""
import argparse
import contextlib
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

import common
import needs

sys.path.insert(0, str(common.ROOT / "tests" / "golden"))

SEQUENCE, MICRO_BATCH, MICRO_BATCHES, VOCAB = 256, 4, 2, 256
SIZES = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQUENCE,
         "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
AROUND = 5  # steps to either side over which PyTorch's range is averaged
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
CLIP = 1.0


def write_text(path):
    """This project's own sources, as bytes."""
    files = sorted(p for folder in ("src", "aio", "swap", "tests", "docs", "include")
                   for p in (common.ROOT / folder).rglob("*")
                   if p.suffix in (".cc", ".h", ".md", ".py", ".cu"))
    path.write_bytes(b"".join(p.read_bytes() for p in files))


def batches(text, seed, step):
    """The (inputs, targets) of a step's micro-batches, in ferry's order."""
    import make_train_golden as golden
    import torch

    count = (len(text) - 1) // SEQUENCE
    for first in range((step - 1) * MICRO_BATCHES, step * MICRO_BATCHES):
        of_run = range(first * MICRO_BATCH, (first + 1) * MICRO_BATCH)
        begins = [golden.shuffled(seed, s // count, count, s % count) * SEQUENCE for s in of_run]
        yield (torch.stack([text[b:b + SEQUENCE] for b in begins]),
               torch.stack([text[b + 1:b + 1 + SEQUENCE] for b in begins]))


def first_model(seed):
    import torch
    import transformers

    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def pytorch_curve(model, text, seed, options, precision):
    import torch
    import torch.nn.functional as F

    model = model.to(options.device).eval()
    weights = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in weights.values() if p.dim() > 1]},
         {"params": [p for p in weights.values() if p.dim() == 1], "weight_decay": 0.0}],
        lr=ADAMW["lr"], betas=ADAMW["betas"], eps=1e-8, weight_decay=ADAMW["weight_decay"])
    half = precision == "fp16"
    scaler = torch.amp.GradScaler(options.device, init_scale=65536.0, enabled=half)
    losses = []
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in batches(text, seed, step):
            inputs, targets = inputs.to(options.device), targets.to(options.device)
            context = torch.autocast(options.device, torch.float16) if half else contextlib.nullcontext()
            with context:
                used = weights if half else {n: p.to(torch.bfloat16) for n, p in weights.items()}
                out = torch.func.functional_call(model, used, (inputs,), {"use_cache": False}).logits
            part = F.cross_entropy(out.float().flatten(0, 1), targets.flatten()) / MICRO_BATCHES
            scaler.scale(part).backward()
            loss += part.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)
    return losses


def ferry_curve(directory, tokens, seed, options, precision):
    config = {"model": {"path": str(directory)}, "data": {"tokens": str(tokens), "held_back": 0},
              "batch": {"sequence": SEQUENCE, "micro_batch": MICRO_BATCH, "micro_batches": MICRO_BATCHES},
              "optimizer": ADAMW, "clip_norm": CLIP, "precision": precision, "device": options.device, "seed": seed,
              "steps": options.steps, "evaluate": {"micro_batches": 0}}
    file = directory.parent / f"{directory.name}-{precision}.json"
    file.write_text(json.dumps(config))
    done = subprocess.run([options.ferry, "train", file, "--json", "--no-bound"], stdout=subprocess.PIPE, text=True,
                          check=True)
    steps = [line for line in map(json.loads, done.stdout.splitlines()) if "loss" in line]
    skipped = [line["step"] for line in steps if line["skipped"]]
    if skipped:
        print(f"{precision}, seed {seed}: ferry skipped the steps {skipped}")
    return [line["loss"] for line in steps]


def compare(pytorch, ferry):
    """A row a step: how far PyTorch's five lie apart around it, and ferry from PyTorch's of the same seed."""
    ranges = [max(theirs) - min(theirs) for theirs in zip(*pytorch)]
    rows = []
    for step, (theirs, ours) in enumerate(zip(zip(*pytorch), zip(*ferry)), start=1):
        spread = statistics.mean(ranges[max(0, step - 1 - AROUND):step + AROUND])
        away = max(abs(a - b) for a, b in zip(theirs, ours))
        rows.append({"step": step, "pytorch": list(theirs), "ferry": list(ours), "spread": spread, "away": away,
                     "share": away / spread})
    return rows


def report(precision, rows):
    """Prints the curves, and returns the row of where they are farthest apart."""
    print(f"\n{precision}: loss of {len(rows[0]['ferry'])} seeds")
    print(f"{'step':>6} {'PyTorch, least':>15} {'most':>9} {'ferry, least':>13} {'most':>9} {'apart':>9} {'of spread':>10}")
    shown = [1, 2, 5, 10, 20, 40, 60, 80, len(rows)]
    for row in (rows[s - 1] for s in sorted({s for s in shown if s <= len(rows)})):
        print(f"{row['step']:>6} {min(row['pytorch']):>15.4f} {max(row['pytorch']):>9.4f} {min(row['ferry']):>13.4f} "
              f"{max(row['ferry']):>9.4f} {row['away']:>9.5f} {100 * row['share']:>9.2f}%")
    worst = max(rows, key=lambda row: row["share"])
    inside = worst["share"] <= 1
    print(f"farthest from PyTorch's own: {100 * worst['share']:.2f}% of the spread, step {worst['step']}: "
          f"{'inside' if inside else 'OUTSIDE'}")
    return common.judged(f"{precision}: distance to PyTorch beside PyTorch's spread", worst["away"], "nats",
                         worst["spread"], [1 / max(worst["share"], 1e-9)], 1, note=f"step {worst['step']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=common.HelpFormatter)
    parser.add_argument("--ferry", type=common.program, default=str(common.ROOT / "build/release/ferry"),
                        help="the built program")
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp16"], default=["bf16"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=common.at_least(1), default=100, help="of each curve")
    parser.add_argument("--seeds", type=common.at_least(2), default=5, help="curves of each side")
    parser.add_argument("--json", metavar="FILE", type=common.output_file,
                        help="write the rows as JSON there, and the curves")
    options = parser.parse_args()
    needs.packages("torch", "transformers")
    import torch
    import transformers

    result = {"machine": common.machine(), "command": shlex.join(sys.argv), "rows": [], "device": options.device,
              "pytorch": torch.__version__, "transformers": transformers.__version__, "steps": options.steps}
    with tempfile.TemporaryDirectory(prefix="ferry-curves-") as folder:
        folder = pathlib.Path(folder)
        write_text(folder / "text")
        subprocess.run([options.ferry, "data", folder / "text", "-o", folder / "tokens.bin"], check=True,
                       stdout=subprocess.DEVNULL)
        text = torch.frombuffer(bytearray((folder / "text").read_bytes()), dtype=torch.uint8).long()
        for precision in options.precision:
            pytorch, ferry = [], []
            for seed in range(1, options.seeds + 1):
                model = first_model(seed)
                directory = folder / f"seed{seed}"
                model.save_pretrained(directory)
                ferry.append(ferry_curve(directory, folder / "tokens.bin", seed, options, precision))
                pytorch.append(pytorch_curve(model, text, seed, options, precision))
            result[precision] = compare(pytorch, ferry)
            result["rows"].append(report(precision, result[precision]))
    if options.json:
        common.write_whole(options.json, json.dumps(result) + "\n")
    sys.exit(0 if all(row["outcome"] == "met" for row in result["rows"]) else 1)


if __name__ == "__main__":
    main()

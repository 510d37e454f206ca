#!/usr/bin/env python3
"""Held-back loss with int8 moments beside the spread of five seeds with fp32 moments.

The quick start's model (examples/quickstart.json), all in memory, for 1,000 steps; with --large one of 100 M parameters,
in bf16, for 300 steps. A seed fixes the first weights and the
order of the text. With a smaller format the loss at the end must never be farther from that with fp32 moments of the same
seed than the seeds with fp32 moments are from each other.

    bench/moments_loss.py [--large] [--moments int8 bf16] [--steps 1000] [--seeds 5] [--device cuda] [--at-once 3] [--json FILE]

Exit code 1: a loss lies outside.
"""
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import common


# 100 M parameters, whose steps are of 8,192 tokens.
LARGE = {"precision": "bf16",
         "model": {"hidden": 768, "layers": 14, "heads": 12, "kv_heads": 12, "head_dim": 64, "intermediate": 2048,
                   "vocab": 256},
         "batch": {"sequence": 512, "micro_batch": 16, "micro_batches": 1},
         "optimizer": {"lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
STEPS, STEPS_OF_LARGE = 1000, 300


def train(options, config, seed, moments):
    """The last held-back loss, in nats."""
    optimizer = {**config["optimizer"], "moments": moments}
    config = {**config, "seed": seed, "optimizer": optimizer, "device": options.device}
    file = options.folder / f"{moments}-{seed}.json"
    file.write_text(json.dumps(config))
    done = subprocess.run([options.ferry, "train", file, "--json", "--no-bound"], stdout=subprocess.PIPE, text=True,
                          check=True)
    losses = [line["evaluation_loss"] for line in map(json.loads, done.stdout.splitlines())
              if "evaluation_loss" in line]
    print(f"{moments}, seed {seed}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return losses[-1]


def rows_of(moments, losses, fp32):
    """Farthest from fp32 moments with the same seed, beside how far those lie apart by their seeds; and all of them."""
    spread, away = max(fp32) - min(fp32), max(abs(a - b) for a, b in zip(losses, fp32))
    yield common.judged(f"held-back loss with {moments} moments, farthest from fp32's of the same seed", away, "nats", spread,
                        [spread / max(away, 1e-9)], 1, note=f"the reference is the spread of {len(fp32)} seeds")
    yield common.plain(f"held-back loss with {moments} moments", losses, "nats")


def main():
    parser = common.parser_of(__doc__, rounds=1)
    parser.add_argument("--tokens", help="token file; default: the quick start's, else made of ferry's own texts")
    parser.add_argument("--moments", nargs="+", choices=["int8", "bf16"], default=["int8"])
    parser.add_argument("--large", action="store_true", help="a model of 100 M parameters")
    parser.add_argument("--steps", type=common.at_least(1),
                        help=f"of each run; default: {STEPS}, with --large {STEPS_OF_LARGE}")
    parser.add_argument("--seeds", type=common.at_least(2), default=5, help="runs with each format")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--at-once", type=common.at_least(1), default=1, help="runs at the same time")
    options = parser.parse_args()
    config = common.config_of(common.ROOT / "examples/quickstart.json")
    if options.large and not options.tiny:
        config.update(LARGE)
    options.steps = options.steps or (STEPS_OF_LARGE if options.large else STEPS)
    if options.tiny:
        options.steps, options.seeds = 2, 2
        config["batch"].update(micro_batch=1, micro_batches=1)
    config["steps"] = config["schedule"]["total_steps"] = options.steps
    config["schedule"]["warmup_steps"] = min(config["schedule"]["warmup_steps"], options.steps)
    config["evaluate"] = {"every": max(1, options.steps // 4), "micro_batches": config["evaluate"]["micro_batches"]}
    del config["budgets"]
    with common.scratch() as options.folder:
        config["data"]["tokens"] = common.tokens_for(options, config, options.folder)
        asked = [(seed, moments) for moments in ("fp32", *options.moments) for seed in range(1, options.seeds + 1)]
        with ThreadPoolExecutor(options.at_once) as runs:
            found = list(runs.map(lambda run: train(options, config, *run), asked))
    losses = {moments: found[i * options.seeds:(i + 1) * options.seeds]
              for i, moments in enumerate(("fp32", *options.moments))}
    rows = [common.plain("held-back loss with fp32 moments", losses["fp32"], "nats")]
    for moments in options.moments:
        rows += rows_of(moments, losses[moments], losses["fp32"])
    size = f"{config['model']['layers']} blocks of {config['model']['hidden']}"
    common.report(options, rows, [f"{options.steps} steps of {size}, {config['data']['tokens'].rsplit('/', 1)[-1]}"])
    sys.exit(0 if options.tiny or all(row.get("outcome", "met") == "met" for row in rows) else 1)


if __name__ == "__main__":
    main()

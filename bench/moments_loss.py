#!/usr/bin/env python3
"""Held-back loss with int8 moments beside the spread of five seeds with fp32 moments.

The quick start's model (examples/quickstart.json), all in memory, for 1,000 steps. A seed fixes the first weights and the
order of the text. Of fp32 moments each of the seeds is trained, of the smaller format the first one: its loss at the end
must lie within the others', and the distance to its own fp32 run is printed beside.

    bench/moments_loss.py [--moments int8 bf16] [--steps 1000] [--seeds 5] [--device cuda] [--at-once 3] [--json FILE]

Exit code 1: a loss lies outside.
"""
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import common


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


def row_of(moments, loss, fp32):
    """The share of the seeds' spread that lies between the loss and the middle of it, as a ratio of at least 1 inside."""
    low, high = min(fp32), max(fp32)
    away = abs(loss - (low + high) / 2) / ((high - low) / 2)
    return common.judged(f"held-back loss with {moments} moments", loss, "nats", (low + high) / 2, [1 / max(away, 1e-9)], 1,
                         note=f"fp32 moments: {low:.4f} to {high:.4f} over {len(fp32)} seeds; {fp32[0]:.4f} with the same seed")


def main():
    parser = common.parser_of(__doc__, rounds=1)
    parser.add_argument("--tokens", help="token file; default: the quick start's, else made of ferry's own texts")
    parser.add_argument("--moments", nargs="+", choices=["int8", "bf16"], default=["int8"])
    parser.add_argument("--steps", type=common.at_least(1), default=1000, help="of each run")
    parser.add_argument("--seeds", type=common.at_least(2), default=5, help="runs with fp32 moments")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--at-once", type=common.at_least(1), default=1, help="runs at the same time")
    options = parser.parse_args()
    config = common.config_of(common.ROOT / "examples/quickstart.json")
    if options.tiny:
        options.steps, options.seeds = 2, 2
        config["batch"].update(micro_batch=1, micro_batches=1)
    config["steps"] = config["schedule"]["total_steps"] = options.steps
    config["schedule"]["warmup_steps"] = min(config["schedule"]["warmup_steps"], options.steps)
    config["evaluate"] = {"every": max(1, options.steps // 4), "micro_batches": config["evaluate"]["micro_batches"]}
    del config["budgets"]
    with common.scratch() as options.folder:
        config["data"]["tokens"] = common.tokens_for(options, config, options.folder)
        asked = [(1, moments) for moments in options.moments]
        asked += [(seed, "fp32") for seed in range(1, options.seeds + 1)]
        with ThreadPoolExecutor(options.at_once) as runs:
            losses = list(runs.map(lambda run: train(options, config, *run), asked))
        smaller, fp32 = dict(zip(options.moments, losses)), losses[len(options.moments):]
    rows = [row_of(moments, loss, fp32) for moments, loss in smaller.items()]
    rows += [common.plain("held-back loss with fp32 moments", fp32, "nats")]
    common.report(options, rows, [f"{options.steps} steps of {config['data']['tokens'].rsplit('/', 1)[-1]}"])
    sys.exit(0 if options.tiny or all(row.get("outcome", "met") == "met" for row in rows) else 1)


if __name__ == "__main__":
    main()

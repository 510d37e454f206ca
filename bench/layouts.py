#!/usr/bin/env python3
"""The best ways for many GPUs to share tensors, layers and state, by `ferry plan --layouts`; and how far plans of runs that
fit this machine are from what these take.

The first rows are arithmetic: nothing of that size was run. The others train a small model on CPU ranks in every way
that so many ranks can divide tensors and layers, and compare a step with the one that `ferry plan` simulates. With fewer
cores than ranks these take turns, and the plan says so of no rank: then the ratio is of little use.

    bench/layouts.py --measured-ranks 2
"""
import json
import os
import subprocess
import sys

import common
from common import compared, plain
from training import NEVER_CLIPPED, TINY, SideFailed, train, words_of

CONFIG = common.ROOT / "examples/quickstart.json"
SEQUENCE = 2048
# By name: hidden, blocks, heads, and the width of the MLP that makes 12 hidden^2 of a block; sequences a step.
MODELS = {"13B": (5120, 40, 40, 512), "30B": (7168, 48, 56, 768), "65B": (8192, 80, 64, 1024),
          "175B": (12288, 96, 96, 1536), "530B": (20480, 105, 128, 1920), "1T": (25600, 128, 160, 3072)}
GPUS = {"13B": 64, "30B": 128, "65B": 256, "175B": 1024, "530B": 2240, "1T": 3072}
NETWORKS = ("400Gbit", "10Gbit")


def layouts(options, directory, name, network):
    """What `ferry plan --layouts` says of a model on its GPUs, eight a host."""
    hidden, blocks, heads, sequences = MODELS[name]
    model = {"hidden": hidden, "layers": blocks, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads,
             "intermediate": hidden * 8 // 3 // 256 * 256, "vocab": 51200}
    file = directory / f"{name}.json"
    file.write_text(json.dumps({"model": model, "data": {"tokens": "none.bin"}, "precision": "bf16",
                                "batch": {"sequence": SEQUENCE, "micro_batch": 1, "micro_batches": sequences},
                                "budgets": {"host": "1TiB"}}))
    done = subprocess.run([options.ferry, "plan", str(file), "--layouts", "--json", "--ranks", str(GPUS[name]),
                           "--ranks-per-host", "8", "--network", network, "--gpu", options.gpu],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{name} over {network}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def text_of(layout):
    return (f"T {layout['tensor']}, P {layout['pipeline']}, D {layout['replicas']}, ZeRO {layout['zero_stage']}, "
            f"{layout['micro_batches']} x {layout['micro_batch']}")


def large(options, directory):
    rows, notes = [], []
    for name in options.models:
        for network in NETWORKS:
            found = layouts(options, directory, name, network)
            best, *others = found["layouts"]
            rows.append(plain(f"{name} on {GPUS[name]} {options.gpu}, {network}: a step", [best["seconds"]], "s"))
            waits = best["bubble_seconds"] / best["seconds"]
            notes.append(f"{name}, {network}: {text_of(best)}, state on the {best['state']}; "
                         f"{best['device_bytes'] / 2**30:.1f} GiB of device memory, bubble {waits:.0%}; then "
                         + "; ".join(f"{text_of(one)} {one['seconds']:.3g} s" for one in others))
    return rows, notes


def ways(ranks):
    """Replicas alone, ranks that share tensors, stages of layers; these do not go together yet."""
    return [(1, 1), (ranks, 1), (1, ranks)]


def planned(options, settings, ranks):
    done = subprocess.run([options.ferry, "plan", str(CONFIG), "--json", "--ranks", str(ranks),
                           *words_of(settings, options.settings)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SideFailed(done.stderr.strip())
    return json.loads(done.stdout)["prediction"]["step_seconds"]


def measured(options, directory):
    rows = []
    config = common.config_of(CONFIG)
    for ranks in options.measured_ranks:
        launcher = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks))
        sides = {}
        for tensor, pipeline in ways(ranks):
            settings = {"steps": options.steps, "data.tokens": common.tokens_for(options, config, directory),
                        "evaluate.every": 0, "evaluate.micro_batches": 0, **NEVER_CLIPPED,
                        "batch.micro_batches": 4 * ranks, "threads": ranks, "zero.stage": 1,
                        "parallel.tensor": tensor, "parallel.pipeline": pipeline, **(TINY if options.tiny else {})}

            def one(settings=settings, ranks=ranks, launcher=launcher):
                run = train(options, CONFIG, settings, warmup=1, bound=False, launcher=launcher)
                run.plan_seconds = planned(options, settings, ranks)
                return run
            sides[f"{ranks} ranks, T {tensor}, P {pipeline}: a step"] = one
        for name, runs in common.turns(sides, options.rounds, options.seconds).items():
            rows.append(compared(name, [run.step_seconds for run in runs], [run.plan_seconds for run in runs], "s"))
    return rows


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--gpu", choices=("a100", "h100", "h200"), default="h100", help="of the large models")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="large ones")
    parser.add_argument("--measured-ranks", type=common.at_least(2), nargs="*", default=[2],
                        help="numbers of CPU ranks to run")
    parser.add_argument("--steps", type=common.at_least(2), default=6, help="of each run")
    options = parser.parse_args()
    with common.scratch() as directory:
        rows, notes = large(options, directory)
        rows += measured(options, directory)
    cores = len(os.sched_getaffinity(0))
    if options.measured_ranks:
        notes.append(f"runs on {cores} cores; the ratio is of the planned step over the measured one")
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

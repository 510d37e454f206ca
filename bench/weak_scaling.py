#!/usr/bin/env python3
"""ZeRO-3 on several GPUs of one host beside one of them: the 3 B model, 16,384 tokens a GPU, state in memory.

Each side's step is taken beside its own lower bound, since ranks share a host's memory and
cores; the ratio is the ranks' share over the single GPU's. Beside them DeepSpeed on as many GPUs.

    bench/weak_scaling.py --ranks 2
"""
import os
import shutil
import sys

import common
import needs
import peers
from common import compared, judged, plain
from training import NEVER_CLIPPED, TINY, WARMUP, bound_at_peaks_rows, bound_row, prediction_row, train

CONFIG = common.ROOT / "examples/3b_gpu.json"
TARGETS = {2: 0.95, 4: 0.92}  # of weak scaling, by ranks
BESIDE_DEEPSPEED = {2: 2.0}


def mpirun(ranks, cores=0):
    """The words that start so many ranks here, each left to place its own threads, or bound to so many cores of its own."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    where = ["--map-by", f"slot:PE={cores}", "--bind-to", "core"] if cores else ["--oversubscribe", "--bind-to", "none"]
    return ["mpirun", "-n", str(ranks), *where, *as_root]


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--ranks", type=common.at_least(1), default=2, help="one a GPU; the other side is one of them")
    parser.add_argument("--host", default="100GiB", help="host budget, of all ranks together")
    parser.add_argument("--steps", type=common.at_least(1), default=7, help="of each run of ferry's")
    parser.add_argument("--warmup", type=common.at_least(0), default=WARMUP, help="first steps left out")
    parser.add_argument("--peer-steps", type=common.at_least(2), default=4, help="of DeepSpeed, the first one left out")
    options = parser.parse_args()
    common.check_steps(parser, options)
    if not shutil.which("mpirun"):
        sys.exit("mpirun is not here (apt-get install openmpi-bin)")
    if not options.tiny:
        needs.gpus(options.ranks)
    with common.scratch() as directory:
        config = common.config_of(CONFIG)
        tokens = common.tokens_for(options, config, directory)
        settings = {"steps": options.steps, "data.tokens": tokens, "evaluate.micro_batches": 0, **NEVER_CLIPPED,
                    "budgets.host": options.host, **(TINY if options.tiny else {})}
        needs.plan(options, CONFIG, settings)

        def ferry(ranks, launcher):
            return train(options, CONFIG, {**settings, "batch.micro_batches": ranks}, warmup=options.warmup,
                         launcher=launcher)
        sides = {"one": lambda: ferry(1, ()), "ranks": lambda: ferry(options.ranks, mpirun(options.ranks))}
        why_not = peers.why_no_deepspeed(options)
        if not why_not:
            workload = peers.workload_of(config, tokens)
            sides["DeepSpeed"] = lambda: peers.deepspeed(workload, options.peer_steps, directory, gpus=options.ranks)
        runs = common.turns(sides, options.rounds, options.seconds)
    if not {"one", "ranks"} <= set(runs):
        sys.exit("one side could not be measured")
    report(options, runs, [why_not] if why_not else [])


def report(options, runs, notes):
    one, ranks, many = runs["one"], runs["ranks"], f"{options.ranks} ranks"
    shares = {name: [run.bound / run.step_seconds for run in runs[name]] for name in ("one", "ranks")}
    rows = [bound_row("one GPU", one), *bound_at_peaks_rows("one GPU", one), prediction_row("one GPU", one),
            bound_row(many, ranks), *bound_at_peaks_rows(many, ranks), prediction_row(many, ranks),
            judged(f"{many}: share of bound beside one GPU's", common.spread(shares["ranks"]).middle, "share",
                   common.spread(shares["one"]).middle, [n / s for n, s in zip(shares["ranks"], shares["one"])],
                   TARGETS.get(options.ranks)),
            plain(f"{many}: communication that compute waits for, a step",
                  [run.summary["exposed_comm_seconds"] for run in ranks], "s"),
            plain(f"{many}: tokens a second and GPU", [run.tokens_per_second / options.ranks for run in ranks], "1/s")]
    if "DeepSpeed" in runs:
        rows.append(compared(f"{many}, beside DeepSpeed", [run.tokens_per_second for run in ranks],
                             [run.tokens_per_second for run in runs["DeepSpeed"]], "1/s",
                             BESIDE_DEEPSPEED.get(options.ranks), less_is_better=False))
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

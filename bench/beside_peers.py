#!/usr/bin/env python3
"""Training the 3 B model with its state in memory, beside DeepSpeed ZeRO-3 and LLMQ: tokens a second.

Same shape, same tokens, as many a step; GPU memory capped at 20 GiB, host budget 100 GiB for ferry. ferry
runs with a limit of the norm that never binds, with the same where its configuration says so
(swap.expect_clipped: blocks then keep more for backward), and with one that clips every step; the peers take no
notice of the difference and run once. Beside them ferry's step beside its lower bound and how busy the GPU's
compute was.

    bench/beside_peers.py --llmq /opt/llmq/train                     16,384 tokens a step
    bench/beside_peers.py --llmq /opt/llmq/train --micro-batches 4   65,536
"""
import sys

import common
import needs
import peers
from common import compared, plain
from step_trace import Trace
from training import GIB, NEVER_CLIPPED, TINY, WARMUP, bound_at_peaks_rows, bound_row, prediction_row, train

CONFIG = common.ROOT / "examples/3b_gpu.json"
UNCLIPPED, EXPECTED, CLIPPED = "ferry, never clipped", "ferry, never clipped, as expected", "ferry, clipped"
VARIANTS = {UNCLIPPED: NEVER_CLIPPED, EXPECTED: {**NEVER_CLIPPED, "swap.expect_clipped": 0}, CLIPPED: {"clip_norm": 1.0}}
# ferry's tokens a second over the peer's, by micro-batches a step.
TARGETS = {1: {**{(variant, peer): target for variant in (UNCLIPPED, EXPECTED)
                  for peer, target in (("LLMQ", 1.5), ("DeepSpeed", 2.6))}, (CLIPPED, "LLMQ"): 1.2},
           4: {(variant, peer): target for variant in (UNCLIPPED, EXPECTED)
               for peer, target in (("LLMQ", 1.08), ("DeepSpeed", 2.0))}}
COMPUTE_BUSY = 0.95  # with 4 micro-batches


def sides_of(options, directory):
    """What can be measured here, and why the rest cannot."""
    config = common.config_of(CONFIG)
    tokens = common.tokens_for(options, config, directory)
    settings = {"steps": options.steps, "data.tokens": tokens, "evaluate.micro_batches": 0,
                "budgets.host": options.host, "batch.micro_batches": options.micro_batches,
                **(TINY if options.tiny else {})}
    needs.plan(options, CONFIG, settings)

    def ferry(variant):
        trace = directory / "trace.json"
        run = train(options, CONFIG, {**settings, **VARIANTS[variant]}, warmup=options.warmup, trace=trace)
        run.compute_busy = Trace(trace, options.warmup + 1).busy("compute")
        return run
    sides = {variant: lambda variant=variant: ferry(variant) for variant in VARIANTS}
    workload = peers.workload_of(config, tokens)
    workload["batch"]["micro_batches"] = options.micro_batches
    missing = {"LLMQ": peers.why_no_llmq(options), "DeepSpeed": peers.why_no_deepspeed(options)}
    run_peer = {"LLMQ": lambda: peers.llmq(options.llmq, workload, options.peer_steps, directory),
                "DeepSpeed": lambda: peers.deepspeed(workload, options.peer_steps, directory)}
    sides.update({peer: run_peer[peer] for peer, why in missing.items() if not why})
    return sides, [why for why in missing.values() if why]


def rows_of(name, runs):
    rows = [plain(f"{name}: tokens a second", [run.tokens_per_second for run in runs], "1/s"),
            plain(f"{name}: step", [run.step_seconds for run in runs], "s"),
            plain(f"{name}: start-up", [run.startup_seconds for run in runs], "s")]
    if all(run.gpu_peak for run in runs):
        rows.append(plain(f"{name}: GPU peak", [run.gpu_peak / GIB for run in runs], "GiB"))
    return rows


def rows_of_ferry(name, runs, micro_batches):
    last = runs[-1]
    rows = [bound_row(name, runs, note=f"bound by {last.summary['binding']}; {last.speculation}"),
            *bound_at_peaks_rows(name, runs), prediction_row(name, runs),
            compared(f"{name}: compute busy", [run.compute_busy for run in runs], [1.0] * len(runs), "share",
                     target=COMPUTE_BUSY if micro_batches == 4 else None, less_is_better=False)]
    if last.summary.get("mfu"):
        rows.append(plain(f"{name}: MFU", [run.summary["mfu"] for run in runs], "share"))
    return rows


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--llmq", metavar="PROGRAM", type=common.program, help="LLMQ's `train`; without it LLMQ is left out")
    parser.add_argument("--peer-steps", type=common.at_least(2), default=4,
                        help="steps of a peer's run, the first one left out")
    parser.add_argument("--micro-batches", type=common.at_least(1), default=1, help="of 8 sequences of 2,048 tokens")
    parser.add_argument("--host", default="100GiB", help="ferry's host budget")
    parser.add_argument("--steps", type=common.at_least(1), default=7, help="of each run of ferry's")
    parser.add_argument("--warmup", type=common.at_least(0), default=WARMUP, help="ferry's first steps left out; a peer's: 1")
    options = parser.parse_args()
    common.check_steps(parser, options, steady=2)  # for a whole one in the trace
    with common.scratch() as directory:
        sides, notes = sides_of(options, directory)
        runs = common.turns(sides, options.rounds, options.seconds)
    if not runs:
        sys.exit("nothing could be measured")
    rows = [row for name, of_side in runs.items() for row in rows_of(name, of_side)]
    targets = TARGETS.get(options.micro_batches, {})
    for variant in VARIANTS:
        if variant not in runs:
            continue
        rows += rows_of_ferry(variant, runs[variant], options.micro_batches)
        rows += [compared(f"{variant}, beside {peer}", [run.tokens_per_second for run in runs[variant]],
                          [run.tokens_per_second for run in runs[peer]], "1/s", targets.get((variant, peer)),
                          less_is_better=False) for peer in ("LLMQ", "DeepSpeed") if peer in runs]
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

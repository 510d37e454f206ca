#!/usr/bin/env python3
"""Two hosts of two ranks joined by a slow network: ranks of a host that share tensors, and hosts that are stages of a
pipeline, beside ZeRO stage 3 alone.

All sides train the same global batch. Hosts are namespaces as in slow_network.py, which says what that takes. Ranks of
one host talk through memory or the loopback device, which nothing slows down. With fewer cores than ranks the figures
are of a network that binds and of processors that take turns.

    bench/shared_tensors.py --mbit 50 200
"""
import os
import sys

import common
from common import compared, plain
from slow_network import CONFIG, Hosts, sent, why_not
from training import NEVER_CLIPPED, TINY, train

ALONE = "ZeRO 3 alone"
# By name: ranks that share tensors, stages of layers, and ZeRO's stage.
SIDES = {ALONE: (1, 1, 3), "2 share tensors, ZeRO 3": (2, 1, 3), "2 share tensors, ZeRO 1": (2, 1, 1),
         "4 share tensors": (4, 1, 1), "2 stages of layers, ZeRO 1": (1, 2, 1)}
HOSTS, RANKS_PER_HOST = 2, 2


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--mbit", type=common.at_least(1), nargs="+", default=[100], help="rates to go through")
    parser.add_argument("--steps", type=common.at_least(1), default=4, help="of each run")
    parser.add_argument("--micro-batches", type=common.at_least(1), default=HOSTS * RANKS_PER_HOST,
                        help="of a step, a multiple of the ranks")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="besides ZeRO 3 alone")
    parser.add_argument("--warmup", type=common.at_least(0), default=1, help="first steps left out")
    options = parser.parse_args()
    common.check_steps(parser, options)
    if reason := why_not():
        sys.exit(reason)
    runs = {}
    with common.scratch() as directory, Hosts(HOSTS, directory, RANKS_PER_HOST) as hosts:
        config = common.config_of(CONFIG)
        ranks = HOSTS * RANKS_PER_HOST
        settings = {"steps": options.steps, "data.tokens": common.tokens_for(options, config, directory),
                    "evaluate.every": 0, "evaluate.micro_batches": 0, "budgets.nvme": [], "budgets.device": "unlimited",
                    "budgets.host": "unlimited", **NEVER_CLIPPED, "batch.micro_batch": 1,
                    "batch.micro_batches": options.micro_batches, "threads": ranks, **(TINY if options.tiny else {})}
        for mbit in options.mbit:
            hosts.set_rate(mbit)

            def ferry(tensor, pipeline, stage):
                before = hosts.arrived()
                found = train(options, CONFIG, {**settings, "parallel.tensor": tensor, "parallel.pipeline": pipeline,
                                                "zero.stage": stage},
                              warmup=options.warmup, bound=False, launcher=hosts.launcher())
                found.on_the_wire = hosts.arrived() - before
                return found
            sides = {name: lambda side=side: ferry(*side) for name, side in SIDES.items()
                     if name == ALONE or name in options.sides}
            runs[mbit] = common.turns(sides, options.rounds, options.seconds)
    report(options, runs)


def report(options, runs):
    rows = []
    for mbit, by_side in runs.items():
        if ALONE not in by_side:
            sys.exit(f"{mbit} Mbit/s: ZeRO alone could not be measured")
        alone = by_side.pop(ALONE)
        rows.append(plain(f"{mbit} Mbit/s: {ALONE}, a step", [one.step_seconds for one in alone], "s"))
        rows.append(plain(f"{mbit} Mbit/s: {ALONE}, left the first host", [one.on_the_wire for one in alone], "B"))
        for name, shared in by_side.items():
            rows.append(compared(f"{mbit} Mbit/s: {name}, a step", [one.step_seconds for one in shared],
                                 [one.step_seconds for one in alone], "s"))
            rows.append(compared(f"{mbit} Mbit/s: {name}, left the first host", [one.on_the_wire for one in shared],
                                 [one.on_the_wire for one in alone], "B"))
            rows.append(plain(f"{mbit} Mbit/s: {name}, sent by a rank a step", [sent(one)[0] for one in shared], "B"))
    cores = len(os.sched_getaffinity(0))
    notes = [f"{HOSTS} hosts of {RANKS_PER_HOST} ranks on {cores} cores; namespaces joined by veth, tc tbf, no delay"]
    if cores < HOSTS * RANKS_PER_HOST + 1:
        notes.append("fewer cores than ranks and network need: these are not figures of a network alone")
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Hosts joined by a slow network: every way in which their ranks can share tensors, layers and state, beside ZeRO stage 3
alone, and beside what was predicted.

T ranks share tensors, P stages of layers pass on to each other, and D replicas share the state at --zero. T x P x D is
the number of ranks, and all sides train the same global batch. Ranks are numbered so that T is nearest and P farthest.

Hosts are namespaces, or ferry emulates the network, as in slow_network.py, which says what either takes. What stays in a
host is not slowed down. Bind ranks to cores (--bind) where there are enough. A rank of one thread computes on one and
sends on another. With fewer cores than ranks the figures are of a network that binds and of processors that take turns.

    bench/shared_tensors.py --ranks 8 --ranks-per-host 4 --emulate throttle --delay 50 --bind 2 --mbit 300

Of each rate the script first measures the link between hosts (`ferry bench comm`). Of each side `ferry plan --network`
plans a step over that link. It chooses the schedule of a pipeline too, which the run then takes. The first rank's memory
stands beside the plan's as well: they are the same to the byte.
"""
import os
import sys
import time

import common
from common import SideFailed, compared, plain
from slow_network import CONFIG, Held, Hosts, Link, holds_up, planned, predicted, sent
from training import NEVER_CLIPPED, TINY, train

ALONE = "ZeRO 3 alone"
ALONE_SIDE = (1, 1, 3)
BLOCKS = 8  # as many stages
GAIN, PREDICTED_WITHIN = 2, 0.15


def sides_of(options):
    """By name: ranks that share tensors, stages of layers, and ZeRO's stage. The first is what the others stand beside."""
    sides = {ALONE: ALONE_SIDE}
    divisors = [number for number in range(1, options.ranks + 1) if options.ranks % number == 0]
    for tensor in divisors:
        for pipeline in (number for number in divisors if options.ranks % (tensor * number) == 0):
            replicas = options.ranks // (tensor * pipeline)
            for stage in options.zero if replicas > 1 else [1]:
                if (tensor, pipeline, stage) != ALONE_SIDE:
                    state = f", ZeRO {stage}" if replicas > 1 else ""
                    sides[f"T {tensor}, P {pipeline}, D {replicas}{state}"] = (tensor, pipeline, stage)
    return sides


def memory_in(found):
    """Bytes of a plan, or that a run reserved: of the first rank, on its device and its host."""
    return found["device_bytes"] + found["host_bytes"]


class Side:
    """One way to share, over one rate: its plan, made once, and runs that keep what each of them sent."""

    def __init__(self, options, hosts, link, settings, name):
        self._options, self._hosts, self._link, self._name = options, hosts, link, name
        self._settings, self._plan = settings, None

    def run(self):
        began = time.monotonic()
        if self._plan is None:
            self._plan = planned(self._options, self._settings, self._link)
            if "pipeline" in self._plan:
                chosen = self._plan["pipeline"]
                self._settings = {**self._settings, "parallel.schedule": chosen["schedule"],
                                  "parallel.virtual_stages": chosen["virtual_stages"]}
        before = self._hosts.arrived()
        run = train(self._options, CONFIG, self._settings, warmup=self._options.warmup, bound=False,
                    launcher=self._hosts.launcher())
        run.on_the_wire = self._hosts.arrived() - before
        run.planned = predicted(self._plan)["none", "none", False]
        run.planned_memory = memory_in(self._plan)
        run.schedule = self._settings.get("parallel.schedule", "")
        print(f"{self._name}{', ' if run.schedule else ''}{run.schedule}: {run.step_seconds:.3g} s a step, planned "
              f"{run.planned:.3g} s; plan and run took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return run


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--ranks", type=common.at_least(2), default=4, help="in all")
    parser.add_argument("--ranks-per-host", type=common.at_least(1), default=2, help="a divisor of the ranks")
    parser.add_argument("--mbit", type=common.at_least(1), nargs="+", default=[100], help="rates to go through")
    parser.add_argument("--steps", type=common.at_least(1), default=4, help="of each run")
    parser.add_argument("--micro-batches", type=common.at_least(1),
                        help="of a step, a multiple of the ranks; default: two a rank")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), nargs="+", default=[1], help="stages of the replicas")
    parser.add_argument("--sides", nargs="+", metavar="T,P", help="only these, such as 2,1 1,2; default: all")
    parser.add_argument("--warmup", type=common.at_least(0), default=1, help="first steps left out")
    parser.add_argument("--emulate", choices=("namespaces", "throttle"), help="default: namespaces where they can be had")
    parser.add_argument("--delay", type=common.at_least(0), default=0, metavar="US", help="of each exchange, with throttle")
    parser.add_argument("--bind", type=common.at_least(1), default=0, metavar="CORES",
                        help="each rank to so many of its own, with throttle")
    options = parser.parse_args()
    common.check_steps(parser, options)
    if options.ranks % options.ranks_per_host or options.ranks == options.ranks_per_host:
        parser.error("--ranks-per-host must leave several hosts of as many ranks each")
    cores = len(os.sched_getaffinity(0))
    if cores < options.ranks * options.bind:
        parser.error(f"--bind: {options.ranks} ranks have {cores} cores")
    sides = sides_of(options)
    if options.sides:
        asked = [tuple(map(int, text.split(","))) for text in options.sides]
        sides = {name: side for name, side in sides.items() if name == ALONE or side[:2] in asked}
    throttles = holds_up(options)
    here = options.ranks_per_host
    micro_batches = options.micro_batches or 2 * options.ranks
    runs, links = {}, {}
    with common.scratch() as directory, (Held(options.ranks, options.delay, here, options.bind) if throttles
                                         else Hosts(options.ranks // here, directory, here)) as hosts:
        config = common.config_of(CONFIG)
        settings = {"steps": options.steps, "data.tokens": common.tokens_for(options, config, directory),
                    "evaluate.every": 0, "evaluate.micro_batches": 0, "budgets.nvme": [], "budgets.device": "unlimited",
                    "budgets.host": "unlimited", **NEVER_CLIPPED, **(TINY if options.tiny else {}), "batch.micro_batch": 1,
                    "batch.micro_batches": micro_batches, "threads": options.ranks, "model.layers": BLOCKS}
        for mbit in options.mbit:
            hosts.set_rate(mbit)
            try:
                links[mbit] = Link(options, hosts, mbit, directory)
            except SideFailed as failure:
                sys.exit(f"{mbit} Mbit/s: {failure}")
            print(f"{mbit} Mbit/s: {links[mbit].mbit:.4g} Mbit/s between two hosts", file=sys.stderr, flush=True)
            runs[mbit] = common.turns(
                {name: Side(options, hosts, links[mbit], {**settings, "parallel.tensor": tensor, "parallel.pipeline": pipeline,
                                                          "zero.stage": stage}, f"{mbit} Mbit/s: {name}").run
                 for name, (tensor, pipeline, stage) in sides.items()}, options.rounds, options.seconds)
    report(options, runs, links, throttles, micro_batches)


def rows_of(rate, name, runs, alone, throttles):
    """Of a side at a rate: its step beside ZeRO alone, what it sends, and what was predicted."""
    steps = [one.step_seconds for one in runs]
    rows = []
    if runs is alone:
        rows.append(plain(f"{rate}: {name}, a step", steps, "s"))
    else:
        rows.append(compared(f"{rate}: {name}, a step", steps, [one.step_seconds for one in alone], "s",
                             note=runs[0].schedule))
    if not throttles:
        rows.append(compared(f"{rate}: {name}, left the first host", [one.on_the_wire for one in runs],
                             [one.on_the_wire for one in alone], "B"))
    rows.append(plain(f"{rate}: {name}, sent by a rank a step", [sent(one)[0] for one in runs], "B"))
    rows.append(compared(f"{rate}: {name}, planned", steps, [one.planned for one in runs], "s", 1 - PREDICTED_WITHIN,
                         target_high=1 + PREDICTED_WITHIN))
    rows.append(compared(f"{rate}: {name}, the first rank's memory", [memory_in(one.summary["reserved"]) for one in runs],
                         [one.planned_memory for one in runs], "B", 1, target_high=1))
    return rows


def best_row(rate, by_side):
    """The fastest side, by medians over the rounds."""
    alone = by_side[ALONE]
    rivals = {name: [one.step_seconds for one in runs] for name, runs in by_side.items() if name != ALONE}
    name = min(rivals, key=lambda one: common.spread(rivals[one]).middle)
    return compared(f"{rate}: the best, a step", rivals[name], [one.step_seconds for one in alone], "s", GAIN, note=name)


def report(options, runs, links, throttles, micro_batches):
    rows = []
    for mbit, by_side in runs.items():
        if ALONE not in by_side:
            sys.exit(f"{mbit} Mbit/s: ZeRO alone could not be measured")
        rate = f"{mbit} Mbit/s"
        rows.append(plain(f"{rate}: between two hosts", links[mbit].mbit, "Mbit/s"))
        if len(by_side) > 1:
            rows.append(best_row(rate, by_side))
        for name, shared in by_side.items():
            rows += rows_of(rate, name, shared, by_side[ALONE], throttles)
    cores = len(os.sched_getaffinity(0))
    how = (f"sending held up by ferry, a delay of {options.delay} us" if throttles
           else "namespaces joined by veth, tc tbf, no delay")
    notes = [f"{options.ranks // options.ranks_per_host} hosts of {options.ranks_per_host} ranks on {cores} cores"
             f"{f', each rank bound to {options.bind}' if options.bind else ''}; {BLOCKS} blocks, {micro_batches} "
             f"micro-batches of one sequence; {how}"]
    if cores < options.ranks + (0 if throttles else 1):
        notes.append("fewer cores than ranks and network need: these are not figures of a network alone")
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

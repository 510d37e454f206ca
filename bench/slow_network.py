#!/usr/bin/env python3
"""Ranks on hosts joined by a slow network: a step and the bytes sent with each codec, beside uncoded ones.

The hosts are network namespaces of this machine on one bridge, each behind a veth pair that tc holds to the rate in
both directions; MPI goes over TCP. Every host has one rank. The script makes the namespaces and removes them, which
takes root, `ip` and `tc`. There is no delay but that of the queues. Give each rank a core of its own: with fewer cores
than ranks the figures are of processors that take turns.

    bench/slow_network.py --ranks 2 --mbit 100 1000
"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import common
from common import compared, plain
from training import NEVER_CLIPPED, TINY, train

CONFIG = common.ROOT / "examples/quickstart.json"
NETWORK = "10.77.0"
# By name: the settings of zero.compress. The first is what the others stand beside.
CODECS = {"uncoded": {}, "int8 gradients": {"gradients": "int8"}, "int4 gradients": {"gradients": "int4"},
          "int4 gradients, int8 weights": {"gradients": "int4", "weights": "int8"}}
# 1-bit Adam after its warm-up, which is the first step: what travels then instead of gradients.
ONEBIT, FREEZE_STEP = "1-bit Adam", 1
OF_MOMENTUM = ("exchange momentum", "gather momentum")
OF_GRADIENTS = ("exchange gradients", "gather gradients")
# The agent by which mpirun starts its daemon on a host: HOST COMMAND...; its last number is that of the namespace.
AGENT = """#!/bin/sh
host=$1
shift
exec ip netns exec "{prefix}$((${{host##*.}} - 1))" sh -c "$*"
"""


def run(*words, check=True):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.returncode == 0


def why_not():
    """Empty where this machine lets the script make its hosts."""
    for name in ("ip", "tc", "mpirun"):
        if not shutil.which(name):
            return f"{name} is not here"
    probe = f"ferryprobe{os.getpid()}"
    if os.geteuid() != 0 or not run("ip", "netns", "add", probe, check=False):
        return "network namespaces cannot be made here: that takes root and CAP_SYS_ADMIN"
    can_shape = run("ip", "netns", "exec", probe, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit",
                    "burst", "32kb", "latency", "100ms", check=False)
    run("ip", "netns", "del", probe)
    return "" if can_shape else "this kernel's tc has no tbf"


class Hosts:
    """Namespaces of so many ranks each, as long as the block."""

    def __init__(self, hosts, directory, ranks_per_host=1):
        self._hosts, self._slots = hosts, ranks_per_host
        self._prefix, self._veth = f"ferry{os.getpid()}h", f"fv{os.getpid()}"
        self._bridge = f"fb{os.getpid()}"
        self._agent = directory / "agent.sh"
        self._agent.write_text(AGENT.format(prefix=self._prefix), encoding="utf-8")
        self._agent.chmod(0o755)

    def __enter__(self):
        try:
            run("ip", "link", "add", self._bridge, "type", "bridge")
            run("ip", "link", "set", self._bridge, "up")
            for i in range(self._hosts):
                host, outside = f"{self._prefix}{i}", f"{self._veth}{i}"
                run("ip", "netns", "add", host)
                run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", host)
                run("ip", "link", "set", outside, "master", self._bridge, "up")
                run("ip", "-n", host, "addr", "add", f"{NETWORK}.{i + 1}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    run("ip", "-n", host, "link", "set", device, "up")
                # BBR, the default here and there, mistakes a queue that tc has filled for a slower network.
                run("ip", "-n", host, "route", "replace", f"{NETWORK}.0/24", "dev", "eth0", "congctl", "cubic")
        except BaseException:
            self.__exit__()
            raise
        return self

    def set_rate(self, mbit):
        """Of each host, each way: what leaves its own end, and what the bridge lets in."""
        burst = max(128 << 10, int(mbit * 1e6 / 8 / 100))
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms")
        for i in range(self._hosts):
            run("ip", "netns", "exec", f"{self._prefix}{i}", "tc", "qdisc", "replace", "dev", "eth0", *shape)
            run("tc", "qdisc", "replace", "dev", f"{self._veth}{i}", *shape)

    def launcher(self):
        """The words that start the ranks, the first host's first. mpirun itself is there."""
        hosts = ",".join(f"{NETWORK}.{i + 1}:{self._slots}" for i in range(self._hosts))
        words = ["ip", "netns", "exec", f"{self._prefix}0", "mpirun", "-n", str(self._hosts * self._slots), "--host", hosts,
                 "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        for key, value in (("plm_rsh_agent", self._agent), ("btl", "tcp,self"), ("pml", "ob1"),
                           ("btl_tcp_if_include", f"{NETWORK}.0/24"), ("oob_tcp_if_include", f"{NETWORK}.0/24")):
            words += ["--mca", key, str(value)]
        return words

    def arrived(self):
        """Bytes that came from the first host, by the counter of the interface."""
        counter = Path(f"/sys/class/net/{self._veth}0/statistics/rx_bytes")
        return int(counter.read_text(encoding="ascii"))

    def __exit__(self, *_):
        for i in range(self._hosts):
            run("ip", "netns", "del", f"{self._prefix}{i}", check=False)
            run("ip", "link", "del", f"{self._veth}{i}", check=False)
        run("ip", "link", "del", self._bridge, check=False)


def sent(one):
    """Bytes that the first rank sent a step: as they went, and as they would have gone uncoded."""
    steps = one.summary["steps"]
    return [sum(of[key] for of in one.summary["collectives"]) / steps for key in ("sent_bytes", "raw_bytes")]


def exchanged(one, collectives, steps):
    """Of these collectives, which so many steps had."""
    return sum(of["sent_bytes"] for of in one.summary["collectives"] if of["collective"] in collectives) / steps


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--ranks", type=common.at_least(2), default=2, help="hosts, of one rank each")
    parser.add_argument("--mbit", type=common.at_least(1), nargs="+", default=[100, 1000], help="rates to go through")
    parser.add_argument("--stage", type=common.at_least(0), default=3, help="zero.stage; below 3 weights stay uncoded")
    parser.add_argument("--steps", type=common.at_least(1), default=6, help="of each run")
    parser.add_argument("--warmup", type=common.at_least(0), default=2, help="first steps left out")
    parser.add_argument("--block", type=common.at_least(64), default=256, help="elements that share a scale, 1-bit Adam's")
    options = parser.parse_args()
    common.check_steps(parser, options)
    if options.warmup <= FREEZE_STEP:
        parser.error(f"1-bit Adam's warm-up is {FREEZE_STEP} step: leave out more than that (--warmup)")
    if reason := why_not():
        sys.exit(reason)
    codecs = {name: codec for name, codec in CODECS.items() if options.stage == 3 or "weights" not in codec}
    with common.scratch() as directory, Hosts(options.ranks, directory) as hosts:
        config = common.config_of(CONFIG)
        settings = {"steps": options.steps, "data.tokens": common.tokens_for(options, config, directory),
                    "evaluate.every": 0, "evaluate.micro_batches": 0, "zero.stage": options.stage, "budgets.nvme": [],
                    "budgets.device": "unlimited", "budgets.host": "unlimited", **NEVER_CLIPPED, "batch.micro_batch": 1,
                    "batch.micro_batches": options.ranks, "threads": options.ranks, **(TINY if options.tiny else {})}
        runs = {}
        for mbit in options.mbit:
            hosts.set_rate(mbit)

            def ferry(codec, more=()):
                compressed = {**{f"zero.compress.{key}": value for key, value in codec.items()}, **dict(more)}
                before = hosts.arrived()
                found = train(options, CONFIG, {**settings, **compressed}, warmup=options.warmup, bound=False,
                              launcher=hosts.launcher())
                found.on_the_wire = hosts.arrived() - before
                return found
            sides = {name: lambda codec=codec: ferry(codec) for name, codec in codecs.items()}
            sides[ONEBIT] = lambda: ferry({}, {"optimizer.method": "onebit_adam", "optimizer.freeze_step": FREEZE_STEP,
                                               "zero.compress.block": options.block})
            runs[mbit] = common.turns(sides, options.rounds, options.seconds)
    report(options, runs)


def beside_the_wire(mbit, name, runs):
    """What ferry counts, of what the interface does with its headers and the start."""
    counted = [sent(one)[0] * one.summary["steps"] for one in runs]
    return compared(f"{mbit} Mbit/s: {name}, the interface's count", [one.on_the_wire for one in runs], counted, "B",
                    0.95, target_high=1)


def report(options, runs):
    rows = []
    for mbit, by_codec in runs.items():
        if "uncoded" not in by_codec:
            sys.exit(f"{mbit} Mbit/s: the uncoded side could not be measured")
        uncoded = by_codec.pop("uncoded")
        rows.append(plain(f"{mbit} Mbit/s: uncoded, a step", [one.step_seconds for one in uncoded], "s"))
        rows.append(beside_the_wire(mbit, "uncoded", uncoded))
        for name, coded in by_codec.items():
            rows.append(compared(f"{mbit} Mbit/s: {name}, a step", [one.step_seconds for one in coded],
                                 [one.step_seconds for one in uncoded], "s"))
            if name == ONEBIT:
                rows.append(compared(f"{mbit} Mbit/s: {name}, momentum beside gradients, sent by a rank a step",
                                     [exchanged(one, OF_MOMENTUM, one.summary["steps"] - FREEZE_STEP) for one in coded],
                                     [exchanged(one, OF_GRADIENTS, one.summary["steps"]) for one in uncoded], "B"))
            else:
                rows.append(compared(f"{mbit} Mbit/s: {name}, sent by a rank a step", [sent(one)[0] for one in coded],
                                     [sent(one)[1] for one in coded], "B"))
            rows.append(beside_the_wire(mbit, name, coded))
    cores = len(os.sched_getaffinity(0))
    notes = [f"{options.ranks} ranks on {cores} cores, stage {options.stage}; namespaces joined by veth, tc tbf, no delay"]
    if cores < options.ranks + 1:
        notes.append("fewer cores than ranks and network need: these are not figures of a network alone")
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Ranks on hosts joined by a slow network: a step and the bytes sent with each codec, beside uncoded ones.

The hosts are network namespaces of this machine on one bridge, each behind a veth pair that tc holds to the rate in
both directions; MPI goes over TCP. Every host has --ranks-per-host ranks, one unless said. The script makes the
namespaces and removes them, which takes root, `ip` and `tc`. There is no delay but that of the queues. Where that
cannot be had, or with --emulate throttle, ferry itself holds up what its ranks send other hosts
(FERRY_EMULATED_NETWORK): by rate and --delay, on the thread that sends. Give each rank a core of its own: with fewer
cores than ranks the figures are of processors that take turns.

    bench/slow_network.py --ranks 2 --mbit 100 1000 --picture step.svg
    bench/slow_network.py --ranks 4 --ranks-per-host 2 --mbit 100 300      # gradients in two levels, a second shard

Of each rate the script first measures what an exchange of nothing takes and the bytes a second (`ferry bench comm`).
What `ferry plan --network` predicts from these stands beside each measured step.
"""
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import common
from common import SideFailed, compared, plain
from step_picture import STYLE
from training import NEVER_CLIPPED, TINY, given, train, words_of
from weak_scaling import mpirun

CONFIG = common.ROOT / "examples/quickstart.json"
NETWORK = "10.77.0"
# By name: the settings of zero.compress. The first is what the others stand beside.
CODECS = {"uncoded": {}, "int8 gradients": {"gradients": "int8"}, "int4 gradients": {"gradients": "int4"},
          "int4 gradients, int8 weights": {"gradients": "int4", "weights": "int8"}}
# Where hosts have several ranks: what these do among themselves first, with all that is coded.
IN_HOSTS = {"combined in hosts": {"gradients": "int4"},
            "ZeRO++": {"gradients": "int4", "weights": "int8"}}
# 1-bit Adam after its warm-up, which is the first step: what travels then instead of gradients.
ONEBIT, FREEZE_STEP = "1-bit Adam", 1
# 0/1 Adam, whose ranks go on alone between exchanges: at stage 0 alone. After STEADY steps exchanges are
# LOCAL_STEPS apart.
ZEROONE, LOCAL_STEPS, STEADY = "0/1 Adam", 4, 4
PREDICTED_WITHIN = 0.15  # of the measured step
OF_MOMENTUM = ("exchange momentum", "gather momentum")
OF_GRADIENTS = ("exchange gradients", "gather gradients")
IN_HOST_GRADIENTS = "exchange gradients in host"
# The agent by which mpirun starts its daemon on a host: HOST COMMAND...; its last number is that of the namespace. All
# have this machine's name, and daemons of the same name that make their directories at once end each other.
AGENT = """#!/bin/sh
number=$((${{1##*.}} - 1))
shift
export TMPDIR="{directory}/$number"
mkdir -p "$TMPDIR"
exec ip netns exec "{prefix}$number" sh -c "$*"
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


def holds_up(options):
    """Whether ferry emulates the network. Ends where nothing can."""
    throttles = options.emulate == "throttle" or (options.emulate is None and why_not() != "" and shutil.which("mpirun"))
    if not throttles and (reason := why_not()):
        sys.exit(reason)
    return throttles


class Hosts:
    """Namespaces of so many ranks each, as long as the block."""

    def __init__(self, hosts, directory, ranks_per_host=1):
        self._hosts, self._slots = hosts, ranks_per_host
        self._prefix, self._veth = f"ferry{os.getpid()}h", f"fv{os.getpid()}"
        self._bridge = f"fb{os.getpid()}"
        self._agent = directory / "agent.sh"
        self._agent.write_text(AGENT.format(prefix=self._prefix, directory=directory), encoding="utf-8")
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


class Held:
    """Ranks of this machine, whose sending ferry holds up."""

    def __init__(self, ranks, delay_us, ranks_per_host=1, cores=0):
        """`cores`: that each rank is bound to; 0: none."""
        self._ranks, self._network, self._cores = ranks, "", cores
        hosts = f",{ranks_per_host}" if ranks_per_host > 1 else ""
        self._more = f",{delay_us}us{hosts}" if delay_us > 0 or hosts else ""

    def __enter__(self):
        return self

    def set_rate(self, mbit):
        self._network = f"{mbit}Mbit{self._more}"

    def launcher(self):
        return ["env", f"FERRY_EMULATED_NETWORK={self._network}", *mpirun(self._ranks, self._cores)]

    def arrived(self):
        """There is no interface to count."""
        return 0

    def __exit__(self, *_):
        pass


class Link:
    """What `ferry bench comm` finds between the hosts."""

    def __init__(self, options, hosts, mbit, directory):
        file = directory / f"link-{mbit}.json"
        # A fraction of a second at this rate, and little beside it.
        large = min(64 << 20, max(1 << 20, int(mbit * 1e6 / 8 * 0.1)))
        words = [*hosts.launcher(), options.ferry, "bench", "comm", "--sizes", f"{large // 64},{large}", "--rounds", "4",
                 "--repeats", "3", "--save", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SideFailed(done.stderr.strip()[-500:])
        found = json.loads(file.read_text(encoding="utf-8"))["ranks"][0]
        # A rank takes in as much as it sends. Of what its ranks get a host's link carries what is from other hosts.
        here = options.ranks_per_host
        away = (options.ranks - here) / (options.ranks - 1)
        self.mbit, self.latency = found["bytes_per_s"] * 8e-6 * here * away, found["overhead_s"]


def threads_of_host(options, settings):
    """Of the run's threads those of a host's ranks. The run's hosts are one machine, whose threads all ranks share; a plan's
    host has its own."""
    return max(1, int(given(options, settings)["threads"]) * options.ranks_per_host // options.ranks)


def planned(options, settings, link):
    """What `ferry plan` says of these settings over such a link. All ranks compute on this machine, which stands for their
    hosts, so the plan times so many at once."""
    threads = threads_of_host(options, settings)
    words = [options.ferry, "plan", str(CONFIG), "--json", "--ranks", str(options.ranks),
             "--ranks-per-host", str(options.ranks_per_host), "--ranks-here", str(options.ranks),
             "--network", f"{link.mbit:.3f}Mbit", "--network-latency", f"{link.latency * 1e6:.3f}us",
             *words_of(settings, [*options.settings, f"threads={threads}"])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SideFailed(done.stderr.strip()[-500:])
    return json.loads(done.stdout)


def predicted(plan):
    """Seconds of a step by codec, and by whether ranks exchange within their hosts first."""
    return {(step["gradients"], step["weights"], step["ranks_per_host"] > 1): step["seconds"]
            for step in plan["network"]["steps"]}


def steady(plan):
    """Seconds of a step of 0/1 Adam once its intervals have stopped growing: the mean of an exchange and of the local steps up to the next."""
    seconds = {phase["exchanges"]: phase["seconds"] for phase in plan["phases"]}
    return (seconds["momentum"] + (LOCAL_STEPS - 1) * seconds["nothing"]) / LOCAL_STEPS


def sent(one):
    """Bytes that the first rank sent a step: as they went, and as they would have gone uncoded."""
    steps = one.summary["steps"]
    return [sum(of[key] for of in one.summary["collectives"]) / steps for key in ("sent_bytes", "raw_bytes")]


def between_hosts(one, options):
    """Of these, what went to other hosts a step. What hosts have combined goes to no rank of the same."""
    ranks, here = options.ranks, options.ranks_per_host
    combines = any(of["collective"] == IN_HOST_GRADIENTS for of in one.summary["collectives"])
    total = 0
    for of in one.summary["collectives"]:
        away = (ranks - here) / (ranks - 1)
        if of["collective"].endswith("in host"):
            away = 0
        elif of["collective"] == "exchange gradients" and combines:
            away = 1
        total += of["sent_bytes"] * away
    return total / one.summary["steps"]


def exchanged(one, collectives, steps):
    """Of these collectives, which so many steps had."""
    return sum(of["sent_bytes"] for of in one.summary["collectives"] if of["collective"] in collectives) / steps


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--ranks", type=common.at_least(2), default=2, help="in all")
    parser.add_argument("--ranks-per-host", type=common.at_least(1), default=1, help="a divisor of the ranks")
    parser.add_argument("--mbit", type=common.at_least(1), nargs="+", default=[100, 1000], help="rates to go through")
    parser.add_argument("--stage", type=common.at_least(0), default=3, help="zero.stage; below 3 weights stay uncoded")
    parser.add_argument("--steps", type=common.at_least(1), default=6, help="of each run")
    parser.add_argument("--warmup", type=common.at_least(0), default=2, help="first steps left out")
    parser.add_argument("--emulate", choices=("namespaces", "throttle"), help="default: namespaces where they can be had")
    parser.add_argument("--delay", type=common.at_least(0), default=0, metavar="US", help="of each exchange, with throttle")
    parser.add_argument("--picture", type=common.output_file, metavar="FILE", help="step over rate, of each codec, as SVG")
    parser.add_argument("--block", type=common.at_least(64), default=256, help="elements that share a scale, 1-bit Adam's")
    options = parser.parse_args()
    common.check_steps(parser, options)
    if options.warmup <= FREEZE_STEP:
        parser.error(f"1-bit Adam's warm-up is {FREEZE_STEP} step: leave out more than that (--warmup)")
    if options.ranks % options.ranks_per_host or options.ranks == options.ranks_per_host:
        parser.error("--ranks-per-host must leave several hosts of as many ranks each")
    throttles = holds_up(options)
    codecs = {name: codec for name, codec in CODECS.items() if options.stage == 3 or "weights" not in codec}
    in_hosts = {name: codec for name, codec in IN_HOSTS.items()
                if options.ranks_per_host > 1 and (options.stage == 3) == ("weights" in codec)}
    of_hosts = {"zero.ranks_per_host": options.ranks_per_host,
                **({"zero.second_shard": "host"} if options.stage == 3 else {})}
    here = options.ranks_per_host
    with common.scratch() as directory, (Held(options.ranks, options.delay, here) if throttles
                                         else Hosts(options.ranks // here, directory, here)) as hosts:
        config = common.config_of(CONFIG)
        settings = {"steps": options.steps, "data.tokens": common.tokens_for(options, config, directory),
                    "evaluate.every": 0, "evaluate.micro_batches": 0, "zero.stage": options.stage, "budgets.nvme": [],
                    "budgets.device": "unlimited", "budgets.host": "unlimited", **NEVER_CLIPPED, "batch.micro_batch": 1,
                    "batch.micro_batches": options.ranks, "threads": options.ranks, **(TINY if options.tiny else {})}
        of_momentum = {"optimizer.method": "onebit_adam", "optimizer.freeze_step": FREEZE_STEP,
                       "zero.compress.block": options.block}
        of_local_steps = {"optimizer.method": "zeroone_adam", "optimizer.var_freeze_step": FREEZE_STEP,
                          "optimizer.local_step_scaler": 1, "optimizer.local_step_clipper": LOCAL_STEPS,
                          "zero.compress.block": options.block, "steps": whole_rounds(options)}
        runs, links, plans = {}, {}, {}
        for mbit in options.mbit:
            hosts.set_rate(mbit)

            def ferry(codec, more=(), warmup=options.warmup):
                compressed = {**{f"zero.compress.{key}": value for key, value in codec.items()}, **dict(more)}
                before = hosts.arrived()
                found = train(options, CONFIG, {**settings, **compressed}, warmup=warmup, bound=False,
                              launcher=hosts.launcher())
                found.on_the_wire = hosts.arrived() - before
                return found
            try:
                links[mbit] = Link(options, hosts, mbit, directory)
                # A plan of momentum has steps of gradients too: those of its warm-up, which no side here is.
                plans[mbit] = {**predicted(planned(options, {**settings, **of_momentum}, links[mbit])),
                               **predicted(planned(options, settings, links[mbit]))}
                if options.stage == 0:
                    plans[mbit][ZEROONE] = steady(planned(options, {**settings, **of_local_steps}, links[mbit]))
            except SideFailed as failure:
                sys.exit(f"{mbit} Mbit/s: {failure}")
            sides = {name: lambda codec=codec: ferry(codec) for name, codec in codecs.items()}
            for name, codec in in_hosts.items():
                sides[name] = lambda codec=codec: ferry(codec, of_hosts)
            sides[ONEBIT] = lambda: ferry({}, of_momentum)
            if options.stage == 0:
                sides[ZEROONE] = lambda: ferry({}, of_local_steps, STEADY)
            runs[mbit] = common.turns(sides, options.rounds, options.seconds)
    if options.picture:
        Path(options.picture).write_text(picture(runs, options, throttles), encoding="utf-8")
    report(options, runs, links, plans, throttles)


def whole_rounds(options):
    """Steps of a run whose measured ones hold as many local steps as they should beside each exchange."""
    return STEADY + -(-(options.steps - options.warmup) // LOCAL_STEPS) * LOCAL_STEPS


def beside_the_wire(mbit, name, runs):
    """What ferry counts, of what the interface does with its headers and the start."""
    counted = [sent(one)[0] * one.summary["steps"] for one in runs]
    return compared(f"{mbit} Mbit/s: {name}, the interface's count", [one.on_the_wire for one in runs], counted, "B",
                    0.95, target_high=1)


def codes_of(name):
    """As `ferry plan` names them."""
    codec = {**CODECS, **IN_HOSTS}.get(name, {"gradients": "signs"})
    return codec.get("gradients", "none"), codec.get("weights", "none"), name in IN_HOSTS


def report(options, runs, links, plans, throttles):
    rows = []
    for mbit, by_codec in runs.items():
        if "uncoded" not in by_codec:
            sys.exit(f"{mbit} Mbit/s: the uncoded side could not be measured")
        uncoded = by_codec["uncoded"]
        ends = "ranks" if options.ranks_per_host == 1 else "hosts"
        rows.append(plain(f"{mbit} Mbit/s: between two {ends}", links[mbit].mbit, "Mbit/s"))
        rows.append(plain(f"{mbit} Mbit/s: an exchange of nothing", links[mbit].latency * 1e6, "us"))
        rows.append(plain(f"{mbit} Mbit/s: uncoded, a step", [one.step_seconds for one in uncoded], "s"))
        for name, coded in by_codec.items():
            steps = [one.step_seconds for one in coded]
            plan = plans[mbit][ZEROONE if name == ZEROONE else codes_of(name)]
            rows.append(compared(f"{mbit} Mbit/s: {name}, predicted", steps, [plan] * len(steps), "s",
                                 1 - PREDICTED_WITHIN, target_high=1 + PREDICTED_WITHIN))
            if not throttles and options.ranks_per_host == 1:
                rows.append(beside_the_wire(mbit, name, coded))
            if coded is uncoded:
                continue
            rows.append(compared(f"{mbit} Mbit/s: {name}, a step", steps, [one.step_seconds for one in uncoded], "s"))
            if options.ranks_per_host > 1:
                rows.append(compared(f"{mbit} Mbit/s: {name}, sent between hosts by a rank a step",
                                     [between_hosts(one, options) for one in coded],
                                     [between_hosts(one, options) for one in uncoded], "B"))
            if name in (ONEBIT, ZEROONE):
                rows.append(compared(f"{mbit} Mbit/s: {name}, momentum beside gradients, sent by a rank a step",
                                     [exchanged(one, OF_MOMENTUM, one.summary["steps"] - FREEZE_STEP) for one in coded],
                                     [exchanged(one, OF_GRADIENTS, one.summary["steps"]) for one in uncoded], "B"))
            else:
                rows.append(compared(f"{mbit} Mbit/s: {name}, sent by a rank a step", [sent(one)[0] for one in coded],
                                     [sent(one)[1] for one in coded], "B"))
    cores = len(os.sched_getaffinity(0))
    how = (f"sending held up by ferry, a delay of {options.delay} us" if throttles
           else "namespaces joined by veth, tc tbf, no delay")
    notes = [f"{options.ranks} ranks, {options.ranks_per_host} a host, on {cores} cores, stage {options.stage}; {how}"]
    if cores < options.ranks + 1:
        notes.append("fewer cores than ranks and network need: these are not figures of a network alone")
    if options.stage == 0:
        notes.append(f"bytes of {ZEROONE} a step are of all updates after the first, with those before it is steady; "
                     "its prediction is of steady ones")
    common.report(options, rows, notes)


WIDTH, HEIGHT, LEFT, TOP = 560, 340, 80, 50
COLOURS = ("#6a737d", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#d55e00")  # of any colour vision (Okabe and Ito)


def picture(runs, options, throttles):
    """Both axes are logarithms."""
    network = "a network that ferry emulates" if throttles else "namespaces joined by veth"
    names = list(next(iter(runs.values())))
    points = {name: [(mbit, min(one.step_seconds for one in by_codec[name])) for mbit, by_codec in sorted(runs.items())
                     if name in by_codec] for name in names}
    seconds = [second for line in points.values() for _, second in line]
    across, up = scale(list(runs), WIDTH), scale(seconds, HEIGHT)
    lines = [f'<text class="title" x="{LEFT}" y="28">{options.ranks} ranks, stage {options.stage}, {network}: '
             'seconds a step over Mbit/s</text>']
    for mbit in sorted(runs):
        lines.append(f'<text x="{LEFT + across(mbit):.0f}" y="{TOP + HEIGHT + 22}" text-anchor="middle">{mbit}</text>')
    for second in ticks(seconds):
        y = TOP + HEIGHT - up(second)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{second:g}</text>')
    for number, (name, line) in enumerate(points.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{LEFT + across(mbit):.1f},{TOP + HEIGHT - up(second):.1f}" for mbit, second in line)
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        lines += [f'<circle r="3" fill="{colour}" cx="{x}" cy="{y}"/>' for x, y in
                  (point.split(",") for point in path.split())]
        y = TOP + 20 * number + 6
        lines.append(f'<rect x="{LEFT + WIDTH + 16}" y="{y - 8}" width="14" height="4" fill="{colour}"/>'
                     f'<text x="{LEFT + WIDTH + 38}" y="{y}">{name}</text>')
    size = (LEFT + WIDTH + 230, TOP + HEIGHT + 40)
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" '
                      f'height="{size[1]}">', STYLE, '<rect class="ground" width="100%" height="100%"/>', *lines, "</svg>\n"])


def scale(values, length):
    """From a value to its place, on a logarithmic axis of this length."""
    low, high = math.log(min(values)), math.log(max(values))
    return lambda value: length * ((math.log(value) - low) / (high - low) if high > low else 0.5)


def ticks(values):
    """1, 2 and 5 of each power of ten that the values span."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in powers for tick in (10.0 ** power, 2 * 10.0 ** power, 5 * 10.0 ** power) if low <= tick <= high]


if __name__ == "__main__":
    main()

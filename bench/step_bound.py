#!/usr/bin/env python3
"""A training step beside its lower bound: optimizer state in memory, on a disk, and on tmpfs as a fast NVMe.

Each case runs four variants in turns: with a limit of the gradient's norm that never binds (speculative updates are committed), the same
where the configuration says so (swap.expect_clipped), with limit 1.0 from random initialisation (every early
step is clipped), and that with speculation off, which the third must not be slower than. The bound and the prediction
are those of `ferry train`, whose kernels and links are measured around the run, or with --machine by
`ferry bench --all` before the first.

In memory: the 3 B model under 20 GiB of GPU and 100 GiB of host memory. On a disk and on tmpfs: 8 of its 28
layers under 9 and 4 GiB. The bound knows budgets only, so these alone push the state out: of 10.1 GiB some 7
fit into neither, and a step reads and writes them, 15 GB in all. fio's mixed bandwidth is taken before and
after each run, and the step compared with its bytes at that, too.

    bench/step_bound.py --case memory --json build/t5_memory.json --traces build
    bench/step_bound.py --case disk --path /var/tmp
    bench/step_bound.py --case tmpfs --path /dev/shm
"""
import gzip
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import common
import needs
from common import compared, plain
from step_picture import picture
from step_trace import LANES, Trace
from training import NEVER_CLIPPED, TINY, WARMUP, Storage, bench_machine, bound_at_peaks_rows, bound_row, prediction_row, train

CONFIG = common.ROOT / "examples/3b_gpu.json"
TARGET = 1 / 1.10  # of the bound over the step
VARIANTS = {
    "never clipped": NEVER_CLIPPED,
    "never clipped, as expected": {**NEVER_CLIPPED, "swap.expect_clipped": 0},
    "clipped": {"clip_norm": 1.0},
    "clipped, speculation off": {"clip_norm": 1.0, "swap.speculate": "off"},
}


class Case(NamedTuple):
    path: str | None  # where the volume is, unless --path says so
    layers: int
    device: str  # budgets
    host: str


CASES = {"memory": Case(None, 28, "20GiB", "100GiB"),
         "disk": Case("/var/tmp", 8, "9GiB", "4GiB"),
         "tmpfs": Case("/dev/shm", 8, "9GiB", "4GiB")}


def settings_of(options, tokens, volume):
    """What all variants of the case have in common."""
    case = CASES[options.case]
    found = {"steps": options.steps, "data.tokens": tokens, "evaluate.micro_batches": 0, "model.layers": case.layers,
             "budgets.device": case.device, "budgets.host": case.host, **(TINY if options.tiny else {})}
    if case.path:
        found.update({"budgets.nvme": [str(volume)], **({"budgets.host": "600KiB"} if options.tiny else {})})
    asked = {"model.layers": options.layers, "budgets.device": options.gpu_memory, "budgets.host": options.host}
    return {**found, **{key: value for key, value in asked.items() if value}}


def check(options, settings):
    """Ends here what would end in minutes, or measure something else than it says."""
    plan = needs.plan(options, CONFIG, settings)
    if CASES[options.case].path:
        if plan["nvme_bytes"] == 0:
            sys.exit("all state fits into memory, so that nothing of it is on the drive: smaller --gpu-memory or --host")
        needs.room(options.path, plan["nvme_bytes"])


def measure(options, settings, directory, volume):
    storage = Storage(options, volume, "mixed") if CASES[options.case].path else None
    rounds = dict.fromkeys(VARIANTS, 0)

    def once(variant):
        file = directory / "trace.json"

        def work():
            return train(options, CONFIG, {**settings, **VARIANTS[variant]}, warmup=options.warmup, trace=file,
                         machine=options.machine)
        run, run.bandwidth = storage.around(work) if storage else (work(), None)
        run.trace = Trace(file, options.warmup + 1)
        rounds[variant] += 1
        if options.traces:
            keep(options, variant, rounds[variant], run.trace, file)
        return run
    sides = {variant: lambda variant=variant: once(variant) for variant in VARIANTS}
    return common.turns(sides, options.rounds, options.seconds), storage


def keep(options, variant, number, trace, file):
    """A run's trace, packed (ui.perfetto.dev takes it so), and a picture of one of its steps."""
    name = f"{options.case} {variant} {number}".replace(",", "").replace(" ", "_")
    common.write_whole(options.traces / f"{name}.json.gz", gzip.compress(file.read_bytes()))
    common.write_whole(options.traces / f"{name}.svg", picture(trace, f"{options.case}, {variant}: one step"))


def rows_of(case, variant, runs):
    seconds, name = [run.step_seconds for run in runs], f"{case}, {variant}"
    last = runs[-1]
    rows = [bound_row(name, runs, TARGET if variant != "clipped, speculation off" else None,
                      note=f"bound by {last.summary['binding']}; {last.speculation}; {last.clipped} of "
                           f"{len(last.steps) - last.warmup} clipped"),
            *bound_at_peaks_rows(name, runs), prediction_row(name, runs),
            plain(f"{name}: tokens a second", [run.tokens_per_second for run in runs], "1/s"),
            plain(f"{name}: compute busy", [run.trace.busy("compute") for run in runs], "share")]
    moved = [run.lane_bytes("nvme read", "nvme write") for run in runs]
    if all(run.bandwidth for run in runs):
        rate = statistics.median(run.bandwidth for run in runs)
        least = [b / run.bandwidth for b, run in zip(moved, runs)]
        rows.append(compared(f"{name}: step beside its bytes at fio's mixed bandwidth", seconds, least, "s",
                             note=f"{statistics.median(moved) / 1e9:.4g} GB a step at {rate / 1e9:.3g} GB/s"))
    if last.summary.get("mfu"):
        rows.append(plain(f"{name}: MFU", [run.summary["mfu"] for run in runs], "share"))
    return rows


def waits_of(variant, run):
    busy = ", ".join(f"{lane} {100 * run.trace.busy(lane):.0f} %" for lane in LANES if run.trace.of(lane))
    yield f"{variant}: {busy}"
    for wait in run.trace.waits("compute"):
        yield f"  compute stood still {wait.seconds * 1e3:.3g} ms between {wait.after} and {wait.before}; " \
              f"busiest meanwhile: {wait.meanwhile}"


def options_of(words=None):
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--case", choices=tuple(CASES), default="memory", help="where the optimizer's state is")
    parser.add_argument("--path", type=needs.directory,
                        help="directory for the volume; default: /var/tmp on a disk, /dev/shm on tmpfs")
    parser.add_argument("--gpu-memory", help="device budget; default: the case's")
    parser.add_argument("--host", help="host budget; default: the case's")
    parser.add_argument("--layers", type=common.at_least(1),
                        help="of the model; default: the case's; budgets stay as they are")
    parser.add_argument("--steps", type=common.at_least(1), default=7, help="of each run")
    parser.add_argument("--warmup", type=common.at_least(0), default=WARMUP, help="first steps left out")
    parser.add_argument("--machine", help="go by this machine file; measured by `ferry bench --all` if not there")
    parser.add_argument("--traces", metavar="DIR", type=Path,
                        help="keep of every run its trace, for ui.perfetto.dev, and a picture of one step (SVG) in this "
                             "directory, made if it is not there; without it nothing is kept")
    needs.add_fio_option(parser)
    options = parser.parse_args(words)
    path = CASES[options.case].path
    if path:
        options.path = options.path or path
        kind = needs.file_system(options.path)
        if not kind or (kind == "tmpfs") != (options.case == "tmpfs"):
            parser.error(f"--case {options.case}: {options.path} is {'on ' + kind if kind else 'not there'}")
        needs.fio(options)
    common.check_steps(parser, options, steady=2)  # for a whole one in the trace
    return options


def main():
    options = options_of()
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    with common.scratch() as directory, common.scratch(options.path) as volume:
        settings = settings_of(options, common.tokens_for(options, common.config_of(CONFIG), directory), volume)
        check(options, settings)
        if options.machine and not Path(options.machine).exists():
            bench_machine(options, CONFIG, settings)
        runs, storage = measure(options, settings, directory, volume)
    if not runs:
        sys.exit("nothing could be measured")
    rows = [row for variant, of_variant in runs.items() for row in rows_of(options.case, variant, of_variant)]
    if "clipped" in runs and "clipped, speculation off" in runs:
        rows.append(compared(f"{options.case}, clipped: beside speculation off",
                             [run.step_seconds for run in runs["clipped"]],
                             [run.step_seconds for run in runs["clipped, speculation off"]], "s", 1.0))
    notes = [line for variant, of_variant in runs.items() for line in waits_of(variant, of_variant[-1])]
    if storage and storage.missing:
        notes.append(storage.missing)
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

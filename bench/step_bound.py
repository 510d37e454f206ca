#!/usr/bin/env python3
"""A training step beside its lower bound: optimizer state in memory, on a disk, and on tmpfs as a fast NVMe.

Each case runs three ways in turns: with a limit of the gradient's norm that never binds (bets are won),
with limit 1.0 from random initialisation (every early step is clipped), and the same with bets off, which
the second must not be slower than. The bound and the prediction are those of `ferry train`, whose kernels
and links are measured around the run, or with --machine by `ferry bench --all` before the first. Where
state is on drives, fio's mixed bandwidth is taken before and after each run. A trace is kept of each way.

    bench/step_bound.py --case memory --json build/t5_memory.json --traces build
    bench/step_bound.py --case disk --path /var/tmp
    bench/step_bound.py --case tmpfs --path /dev/shm
"""
import gzip
import sys
from pathlib import Path

import common
from common import compared, plain
from step_trace import LANES, Trace
from training import TINY, Storage, bench_machine, train

CONFIG = common.ROOT / "examples/3b_gpu.json"
TARGET = 1 / 1.10  # of the bound over the step
WAYS = {
    "never clipped": {"clip_norm": 1e6, "optimizer.lr": 1e-5},
    "clipped": {"clip_norm": 1.0},
    "clipped, bets off": {"clip_norm": 1.0, "swap.bets": "off"},
}


def file_name(case, way):
    return f"{case}_{way.replace(', ', '_').replace(' ', '_')}"


def settings_of(options, tokens):
    """What all ways of the case have in common."""
    found = {"steps": options.steps, "data.tokens": tokens, "evaluate.micro_batches": 0,
             "budgets.host": options.host, "model.layers": options.layers}
    if options.case != "memory":
        found["budgets.nvme"] = [str(options.volume)]
        found["swap.state_on_nvme"] = 1
    return {**found, **(TINY if options.tiny else {})}


def measure(options, settings, directory):
    storage = None if options.case == "memory" else Storage(options, options.volume, "mixed")

    def once(way):
        trace = directory / f"{file_name(options.case, way)}.json"

        def work():
            return train(options, CONFIG, {**settings, **WAYS[way]}, warmup=options.warmup, trace=trace,
                         machine=options.machine)
        run, run.bandwidth = storage.around(work) if storage else (work(), None)
        run.trace = Trace(trace, options.warmup + 1)
        return run
    return common.turns({way: lambda way=way: once(way) for way in WAYS}, options.rounds, options.seconds), storage


def rows_of(case, way, runs):
    seconds, name = [run.step_seconds for run in runs], f"{case}, {way}"
    target = TARGET if way != "clipped, bets off" else None
    last = runs[-1]
    rows = [compared(f"{name}: step beside lower bound", seconds, [run.bound for run in runs], "s", target,
                     note=f"bound by {last.summary['binding']}; {last.bets}; {last.clipped} of "
                          f"{len(last.steps) - last.warmup} clipped"),
            compared(f"{name}: step beside prediction", seconds, [run.predicted for run in runs], "s"),
            plain(f"{name}: tokens a second", [run.tokens_per_second for run in runs], "1/s"),
            plain(f"{name}: compute busy", [run.trace.busy("compute") for run in runs], "share")]
    moved = [run.lane_bytes("nvme read", "nvme write") for run in runs]
    if all(run.bandwidth for run in runs):
        least = [b / run.bandwidth for b, run in zip(moved, runs)]
        rows.append(compared(f"{name}: step beside its bytes at fio's mixed bandwidth", seconds, least, "s",
                             note=f"{moved[-1] / 1e9:.4g} GB a step at {last.bandwidth / 1e9:.3g} GB/s"))
    if last.summary.get("mfu"):
        rows.append(plain(f"{name}: MFU", [run.summary["mfu"] for run in runs], "share"))
    return rows


def waits_of(way, run):
    busy = ", ".join(f"{lane} {100 * run.trace.busy(lane):.0f} %" for lane in LANES if run.trace.of(lane))
    yield f"{way}: {busy}"
    for wait in run.trace.waits("compute"):
        yield f"  compute stood still {wait.seconds * 1e3:.3g} ms between {wait.after} and {wait.before}; " \
              f"busiest meanwhile: {wait.meanwhile}"


def keep_traces(options, runs, directory):
    """The last trace of each way, packed (ui.perfetto.dev takes it so), and a picture of a step of it."""
    for way, of_way in runs.items():
        name, kept = file_name(options.case, way), Path(options.traces)
        with gzip.open(kept / f"{name}.json.gz", "wb") as packed:
            packed.write((directory / f"{name}.json").read_bytes())
        picture = of_way[-1].trace.picture(f"{options.case}, {way}: one step as it went")
        (kept / f"{name}.svg").write_text(picture, encoding="utf-8")


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--case", choices=("memory", "disk", "tmpfs"), default="memory")
    parser.add_argument("--path", help="directory for the volume; default: /var/tmp, for tmpfs /dev/shm")
    parser.add_argument("--host", help="host budget; default: 100GiB in memory, else 31GiB")
    parser.add_argument("--layers", type=int, help="of the model; default 28, on a disk 8: a step is seconds there")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2, help="first steps left out")
    parser.add_argument("--machine", help="go by this machine file; measured by `ferry bench --all` if not there")
    parser.add_argument("--traces", help="directory to keep the traces and pictures in; default: not kept")
    options = parser.parse_args()
    options.path = options.path or ("/dev/shm" if options.case == "tmpfs" else "/var/tmp")
    options.layers = options.layers or (8 if options.case == "disk" else 28)
    options.host = options.host or ("100GiB" if options.case == "memory" else "31GiB")
    with common.scratch() as directory, common.scratch(options.path) as options.volume:
        settings = settings_of(options, common.tokens_for(options, common.config_of(CONFIG), directory))
        if options.machine and not Path(options.machine).exists():
            bench_machine(options, CONFIG, settings)
        runs, storage = measure(options, settings, directory)
        if options.traces:
            keep_traces(options, runs, directory)
    if not runs:
        sys.exit("nothing could be measured")
    rows = [row for way, of_way in runs.items() for row in rows_of(options.case, way, of_way)]
    if "clipped" in runs and "clipped, bets off" in runs:
        rows.append(compared(f"{options.case}, clipped: beside bets off",
                             [run.step_seconds for run in runs["clipped"]],
                             [run.step_seconds for run in runs["clipped, bets off"]], "s", 1.0))
    notes = [line for way, of_way in runs.items() for line in waits_of(way, of_way[-1])]
    if storage and storage.missing:
        notes.append(storage.missing)
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Training the 3 B model without optimizer state on the GPU, beside DeepSpeed's NVMe mode: seconds a step.

--case nvme: all of it on the drive, host budget 12 GiB. The step is compared with its bytes at fio's mixed
bandwidth, taken before and after each run, and with DeepSpeed's step. Where DeepSpeed's own bytes at that
bandwidth explain 95 % of its step, the drive leaves little to gain and 1.25 times is asked for, else 1.5.
--case memory: the host memory that DeepSpeed took in its NVMe mode, 55.5 GiB, as ferry's budget.

A step of DeepSpeed's takes half a minute on a drive of 4 GB/s. --layers makes the model smaller on both sides;
ferry's host budget then has as much for each parameter.

    bench/nvme_step.py --case nvme --path /var/tmp --rounds 1
    bench/nvme_step.py --case memory --path /var/tmp --rounds 1
    bench/nvme_step.py --case memory --path /var/tmp --layers 8
"""
import statistics
import sys

import common
import needs
import peers
from common import compared, plain
from training import GIB, NEVER_CLIPPED, TINY, Storage, given, prediction_row, train

CONFIG = common.ROOT / "examples/3b_gpu.json"
MIB = 1 << 20
HOST = {"nvme": 12 * GIB, "memory": 55.5 * GIB}  # of all layers
OPTIMIZER_PASS = 1 / 1.05  # of the bytes' time over the step
DEEPSPEED_FILES = 16  # bytes a parameter
EXPLAINED = 0.95  # of DeepSpeed's step, by its bytes
TARGETS = {"nvme": 1.5, "nvme, explained": 1.25, "memory": 10.0}


def host_of(options, model):
    """ferry's host budget: the case's, with other layers as much for each parameter."""
    part = peers.parameters_of(model, options.layers) / peers.parameters_of(model, model["layers"])
    return options.host or f"{HOST[options.case] * part / MIB:.0f}MiB"


def settings_of(options, config, tokens, volume):
    """ferry's: state on the drive, or in host memory."""
    found = {"steps": options.steps, "data.tokens": tokens, "evaluate.micro_batches": 0, **NEVER_CLIPPED,
             "model.layers": options.layers, "swap.state_on_device": 0,
             "budgets.host": host_of(options, config["model"])}
    if options.case == "nvme":
        found.update({"budgets.nvme": [str(volume)], "swap.state_on_nvme": 1})
    return {**found, **(TINY if options.tiny else {})}


def sides_of(options, directory, volume):
    config = common.config_of(CONFIG)
    tokens = common.tokens_for(options, config, directory)
    settings = settings_of(options, config, tokens, volume)
    why_not = peers.why_no_deepspeed(options)
    theirs = 0 if why_not else DEEPSPEED_FILES * peers.parameters_of(config["model"], options.layers)
    needs.room(options.path, max(needs.plan(options, CONFIG, settings)["nvme_bytes"], theirs))
    storage = Storage(options, volume, "mixed")

    def side(work):
        def measured():
            run, run_bandwidth = storage.around(work)
            run.bandwidth = run_bandwidth
            return run
        return measured
    workload = peers.workload_of(config, tokens, options.layers)
    sides = {"ferry": side(lambda: train(options, CONFIG, settings, warmup=options.warmup))}

    def deepspeed():
        with common.scratch(volume) as own:  # it leaves its files behind
            return peers.deepspeed(workload, options.peer_steps, directory, "nvme", own)
    if not why_not:
        sides["DeepSpeed"] = side(deepspeed)
    asked = given(options, settings)
    notes = [f"{asked['model.layers']} layers, host budget {asked['budgets.host']}", why_not]
    return sides, storage, [note for note in notes if note]


def rows_of(name, runs, moved, target):
    """A side alone: its step, its bytes, and the step beside those at fio's bandwidth."""
    rows = [plain(f"{name}: step", [run.step_seconds for run in runs], "s"),
            plain(f"{name}: host peak", [run.host_peak / GIB for run in runs], "GiB")]
    if not all(moved):
        return rows
    rows.append(plain(f"{name}: moved a step, read and written", [one / 1e9 for one in moved], "GB"))
    if all(run.bandwidth for run in runs):
        rows.append(compared(f"{name}: step beside its bytes at fio's mixed bandwidth",
                             [run.step_seconds for run in runs],
                             [one / run.bandwidth for one, run in zip(moved, runs)], "s", target,
                             note=f"fio {statistics.median(run.bandwidth for run in runs) / 1e9:.3g} GB/s"))
    return rows


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--case", choices=tuple(HOST), default="nvme", help="where the optimizer's state is")
    parser.add_argument("--path", type=needs.directory, default="/var/tmp", help="directory on the drive, or on tmpfs")
    parser.add_argument("--host", help="ferry's host budget; default: the case's, for each parameter as much")
    parser.add_argument("--layers", type=common.at_least(1), default=28, help="of the model, on both sides")
    parser.add_argument("--steps", type=common.at_least(1), default=3, help="of each run of ferry's")
    parser.add_argument("--warmup", type=common.at_least(0), default=1, help="first steps left out")
    parser.add_argument("--peer-steps", type=common.at_least(2), default=3, help="of DeepSpeed, the first one left out")
    needs.add_fio_option(parser)
    options = parser.parse_args()
    common.check_steps(parser, options)
    needs.fio(options)
    with common.scratch() as directory, common.scratch(options.path) as volume:
        sides, storage, notes = sides_of(options, directory, volume)
        runs = common.turns(sides, options.rounds, options.seconds)
    if "ferry" not in runs:
        sys.exit("nothing could be measured")
    ours, theirs = runs["ferry"], runs.get("DeepSpeed", [])
    rows = rows_of("ferry", ours, [run.lane_bytes("nvme read", "nvme write") for run in ours],
                   OPTIMIZER_PASS if options.case == "nvme" else None)
    rows.insert(1, prediction_row("ferry", ours))
    kind = options.case
    if theirs:
        rows += rows_of("DeepSpeed", theirs, [run.bytes_moved for run in theirs], None)
        explained = rows[-1]["ratio"]
        if kind == "nvme" and explained is not None and explained >= EXPLAINED:
            kind = "nvme, explained"
        rows.append(compared(f"ferry, {options.case}: step beside DeepSpeed's on NVMe",
                             [run.step_seconds for run in ours], [run.step_seconds for run in theirs], "s",
                             TARGETS[kind]))
    common.report(options, rows, [*notes, *([storage.missing] if storage.missing else [])])


if __name__ == "__main__":
    main()

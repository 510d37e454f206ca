#!/usr/bin/env python3
"""Does it fit? Trains models of 10 B parameters and more under hard limits of GPU and host memory.

Every configuration trains its steps on real text. The loss must fall; the most GPU memory in use, as
nvidia-smi sees it, must stay under the cap; the most host memory within 1 GiB of the budget. That is what was
resident, or with --cgroup the peak of a control group of memory, made for the run with the limit that is named:
a run that wants more, files' pages that cannot be given back included, is killed and said to be. What is asked is
whether, not how fast: one round unless --rounds says more.

    bench/fits.py examples/solar_10b.json --path /var/tmp
    bench/fits.py examples/qwen14b.json examples/llama2_13b.json --path /var/tmp --cgroup 128GiB
"""
import argparse
import contextlib
import json
import math
import sys
from pathlib import Path

import common
import needs
from common import compared, plain
from training import GIB, TINY, ControlGroup, bound_at_peaks_rows, bound_row, given, prediction_row, train

LEAST_STEPS = 5  # that were not skipped for an overflow
SLACK = GIB  # of the process over its host budget


def configuration(text):
    """The type of an option that names a configuration."""
    try:
        common.config_of(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no configuration: {error}") from error
    return text


def tiny_of(config, directory):
    """The same family in the size of TINY."""
    changes = {**TINY, "budgets.host": "600KiB", "optimizer.lr": 3e-3}
    if "path" not in config["model"]:
        return changes
    shape = json.loads((common.ROOT / config["model"]["path"] / "config.json").read_text())
    shape.update(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=160, vocab_size=256)
    (directory / "config.json").write_text(json.dumps(shape))
    return {**{key: value for key, value in changes.items() if not key.startswith("model.")},
            "model.path": str(directory)}


def settings_of(options, config, directory, volume):
    found = {"data.tokens": common.tokens_for(options, config, directory), "evaluate.micro_batches": 0}
    nvme = config["budgets"].get("nvme", [])
    if nvme:
        size = {"size": "64MiB"} if options.tiny else {}
        found["budgets.nvme"] = [{**nvme[0], "path": str(volume), **size}]
    for key in ("host", "steps"):
        if getattr(options, key):
            found["budgets.host" if key == "host" else key] = getattr(options, key)
    return {**found, **(tiny_of(config, directory) if options.tiny else {})}


def beside_limit(name, peaks, limit, **more):
    if limit == math.inf:
        return plain(name, [peak / GIB for peak in peaks], "GiB", **more)
    return compared(name, [peak / GIB for peak in peaks], [limit / GIB] * len(peaks), "GiB", 1, **more)


def rows_of(name, runs, budgets):
    trained = [[step for step in run.steps if not step["skipped"]] for run in runs]
    last, losses = runs[-1], [step["loss"] for step in trained[-1]]
    moved = last.lane_bytes("nvme read", "nvme write")
    rows = [compared(f"{name}: steps trained", [len(steps) for steps in trained], [LEAST_STEPS] * len(runs), "steps", 1,
                     less_is_better=False, note=f"{len(last.steps) - len(losses)} skipped, last loss scale "
                                                f"{last.steps[-1]['loss_scale']:g}"),
            compared(f"{name}: last loss beside first", [steps[-1]["loss"] for steps in trained],
                     [steps[0]["loss"] for steps in trained], "nats", 1,
                     note=" ".join(f"{loss:.4f}" for loss in losses)),
            plain(f"{name}: step", [run.step_seconds for run in runs], "s"),
            plain(f"{name}: tokens a second", [run.tokens_per_second for run in runs], "1/s"),
            plain(f"{name}: start-up", [run.startup_seconds for run in runs], "s"),
            plain(f"{name}: on NVMe", last.summary["nvme_bytes"] / GIB, "GiB",
                  note=f"{moved / 1e9:.4g} GB moved a step")]
    if all(run.predicted for run in runs):
        clipped = sum(step["clip_factor"] < 1 for step in trained[-1])
        rows += [bound_row(name, runs, note=f"bound by {last.summary['binding']}; {clipped} of {len(losses)} clipped"),
                 *bound_at_peaks_rows(name, runs), prediction_row(name, runs)]
    if all(run.gpu_peak for run in runs):
        rows.append(beside_limit(f"{name}: GPU peak beside cap", [run.gpu_peak for run in runs], budgets["device"]))
    rows.append(beside_limit(f"{name}: host peak beside budget and 1 GiB", [run.host_peak for run in runs],
                             budgets["host"] + SLACK, note=f"{last.summary['host_bytes'] / GIB:.4g} GiB planned"))
    return rows


class Model:
    """A configuration, and what its runs gave."""

    def __init__(self, options, file, directory, volume):
        config = common.config_of(file)
        self.file, self.volume = file, volume
        self.settings = settings_of(options, config, directory, volume)
        needs.room(options.path, needs.plan(options, file, self.settings)["nvme_bytes"])
        asked = given(options, self.settings)
        self.budgets = {tier: common.bytes_of(asked.get(f"budgets.{tier}", config["budgets"][tier]))
                        for tier in ("device", "host")}

    def run(self, options):
        try:
            with ControlGroup(options.cgroup) if options.cgroup else contextlib.nullcontext() as group:
                run = train(options, self.file, self.settings, bound=options.predict, group=group)
        finally:
            for file in self.volume.iterdir():  # a run that was killed leaves some, in the way of the next
                file.unlink(missing_ok=True)
        if all(step["skipped"] for step in run.steps):
            raise common.SideFailed(f"all {len(run.steps)} steps were skipped for an overflow")
        return run


def models_of(options, directory, volume):
    """By the names of their files."""
    found = {}
    for file in map(Path, options.configs):
        own, drive = directory / file.stem, volume / file.stem
        own.mkdir()
        drive.mkdir()
        found[file.stem] = Model(options, file, own, drive)
    return found


def main():
    parser = common.arguments_parser(__doc__, rounds=1)
    parser.add_argument("configs", nargs="*", type=configuration, default=[str(common.ROOT / "examples/solar_10b.json")],
                        help="configurations, each file of another name; default: examples/solar_10b.json")
    parser.add_argument("--path", type=needs.directory, default="/var/tmp", help="directory for the volume")
    parser.add_argument("--host", help="host budget instead of the configuration's")
    parser.add_argument("--steps", type=common.at_least(2), help="instead of the configuration's")
    parser.add_argument("--cgroup", metavar="SIZE", type=lambda text: int(common.bytes_of(text)),
                        help="run in a control group with this limit of memory, 128GiB; needs the right to make one")
    parser.add_argument("--predict", action="store_true",
                        help="measure kernels and links first, and compare the step with its prediction and its bound")
    options = parser.parse_args()
    names = [Path(file).stem for file in options.configs]
    if len(set(names)) < len(names):
        parser.error(f"two configurations of one name, which is all that their rows have: {' '.join(names)}")
    if options.cgroup:
        needs.control_group(options.cgroup)
    failed = []

    def measured(name, model):
        try:
            return model.run(options)
        except common.SideFailed as failure:
            failed.append(f"{name}: {failure}")
            raise
    with common.scratch() as directory, common.scratch(options.path) as volume:
        models = models_of(options, directory, volume)
        runs = common.turns({name: lambda name=name, model=model: measured(name, model)
                             for name, model in models.items()}, options.rounds, options.seconds)
    if not runs:
        sys.exit("nothing could be measured")
    common.report(options, [row for name, of_model in runs.items() for row in
                            rows_of(name, of_model, models[name].budgets)], failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Does it fit? Trains models of 10 B parameters and more under hard limits of GPU and host memory.

Every configuration trains its steps on real text. The loss must fall; the most GPU memory in use, as
nvidia-smi sees it, must stay under the cap; the most host memory, of the run's control group or else
resident, within 1 GiB of the budget. One run each: what is asked is whether, not how fast.

    bench/fits.py examples/solar_10b.json --path /var/tmp
    bench/fits.py examples/qwen14b.json examples/llama2_13b.json --path /var/tmp --cgroup 128GiB
"""
import json
import re
import sys
from pathlib import Path

import common
from common import compared, plain
from training import GIB, TINY, ControlGroup, train

LEAST_STEPS = 5  # that were not skipped for an overflow
SLACK = GIB  # of the process over its host budget
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def bytes_of(text):
    number, unit = re.fullmatch(r"([0-9.]+) ?([KMGT]iB|B|)", text).groups()
    return float(number) * UNITS[unit]


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


def budget_of(options, settings, config, tier):
    """What the run was given, an override first."""
    key = f"budgets.{tier}"
    asked = dict(setting.split("=", 1) for setting in options.settings)
    return bytes_of(asked.get(key) or settings.get(key) or config["budgets"][tier])


def rows_of(name, run, options, settings, config):
    trained = [step for step in run.steps if not step["skipped"]]
    losses = [step["loss"] for step in trained]
    rows = [compared(f"{name}: steps trained", [len(trained)], [LEAST_STEPS], "", 1, less_is_better=False,
                     note=f"{len(run.steps) - len(trained)} skipped, last loss scale "
                          f"{run.steps[-1]['loss_scale']:g}"),
            compared(f"{name}: last loss beside first", losses[-1:], losses[:1], "nats", 1,
                     note=" ".join(f"{loss:.4f}" for loss in losses)),
            plain(f"{name}: step", run.step_seconds, "s"),
            plain(f"{name}: tokens a second", run.tokens_per_second, "1/s"),
            plain(f"{name}: start-up", run.startup_seconds, "s"),
            plain(f"{name}: on NVMe", run.summary["nvme_bytes"] / GIB, "GiB",
                  note=f"{run.lane_bytes('nvme read', 'nvme write') / 1e9:.4g} GB moved a step")]
    if run.gpu_peak:
        rows.append(compared(f"{name}: GPU peak beside cap", [run.gpu_peak / GIB],
                             [budget_of(options, settings, config, "device") / GIB], "GiB", 1))
    limit = budget_of(options, settings, config, "host")
    rows.append(compared(f"{name}: host peak beside budget and 1 GiB", [run.host_peak / GIB],
                         [(limit + SLACK) / GIB], "GiB", 1, note=f"{run.summary['host_bytes'] / GIB:.4g} GiB planned"))
    return rows


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("configs", nargs="*", default=[str(common.ROOT / "examples/solar_10b.json")],
                        help="configurations; default: examples/solar_10b.json")
    parser.add_argument("--path", default="/var/tmp", help="directory for the volume")
    parser.add_argument("--host", help="host budget instead of the configuration's")
    parser.add_argument("--steps", type=int, help="instead of the configuration's")
    parser.add_argument("--cgroup", help="size: run in a control group with this limit of memory")
    options = parser.parse_args()
    rows, notes = [], []
    for file in map(Path, options.configs):
        config = common.config_of(file)
        with common.scratch() as directory, common.scratch(options.path) as volume:
            settings = settings_of(options, config, directory, volume)
            group = ControlGroup(int(bytes_of(options.cgroup))) if options.cgroup else None
            try:
                run = train(options, file, settings, bound=False, group=group)
            except common.SideFailed as failure:
                notes.append(f"{file.stem}: {failure}")
                continue
            finally:
                if group:
                    group.remove()
            rows += rows_of(file.stem, run, options, settings, config)
            if group and group.why_not:
                notes.append(f"{file.stem}: {group.why_not}; the host peak is what was resident")
    if not rows:
        sys.exit("\n".join(notes))
    common.report(options, rows, notes)


if __name__ == "__main__":
    main()

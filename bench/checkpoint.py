#!/usr/bin/env python3
"""Checkpoints beside the drive they lie on: writing, what training waits, going on, exporting.

A round trains --steps steps of a model with fp32 state in host memory and checkpoints every --every of them. Then it goes on
from the newest with the files out of the page cache, and exports it in bf16. fio's bandwidth is taken around each part.

- written: the checkpoint's seconds beside its bytes at fio's write bandwidth x 1.1 + 1 s
- waited: what training waited for it, beside what `ferry plan` predicted (within a fifth)
- steps meanwhile: beside steps with no checkpoint on its way (0.97)
- first step: from the start of `ferry train --resume` beside its bytes at fio's read bandwidth x 1.2 + 5 s
- restored, loaded: the state of `--resume`, and the exported weights by `ferry eval`, a second, beside fio's read bandwidth (0.9)
- export: bytes read and written a second, beside fio's mixed bandwidth (0.9)

With --cgroup the export has so much memory, the page cache included, as a rank of a job would have it.

    bench/checkpoint.py --path /var/tmp --layers 4 --cgroup 4GiB --rounds 1
"""
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import common
import needs
from common import SideFailed, compared, plain
from training import GIB, ControlGroup, Storage

MODEL = {"hidden": 2048, "heads": 16, "kv_heads": 4, "intermediate": 5632, "vocab": 32000, "tie_embeddings": True}
TINY = {"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 160, "vocab": 256, "tie_embeddings": True}
BATCH = {"sequence": 64, "micro_batch": 1, "micro_batches": 1}


def config_of(options, directory, tokens, where):
    model = {**(TINY if options.tiny else MODEL), "layers": options.layers}
    config = {"model": model, "data": {"tokens": str(tokens), "held_back": 0, "small_vocabulary": "ignore"}, "batch": BATCH,
              "precision": "bf16", "steps": options.steps, "evaluate": {"micro_batches": 0}, "optimizer": {"lr": 1e-4},
              "checkpoint": {"dir": str(where), "every": options.every, "keep": {"last": 1}, "memory": options.memory}}
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    return file


def ran(command, group=None):
    """What a command printed as JSON lines, each with the seconds after its start, how long it took, and its log."""
    start, lines = time.monotonic(), []
    words = [str(word) for word in command]
    with subprocess.Popen(group.around(words) if group else words, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        for text in process.stdout:
            if text.startswith("{"):
                lines.append({**json.loads(text), "at": time.monotonic() - start})
        error = process.stderr.read()
    if process.returncode != 0:
        raise SideFailed(f"{' '.join(words)}: exit code {process.returncode}\n{error[-2000:]}")
    return lines, time.monotonic() - start, error


def rate_in(log, stage):
    """Bytes a second that a stage of the start says it came to; none where it took too short to be said."""
    found = re.search(rf"{stage}.* in [0-9.]+ s, ([0-9.]+) GB/s", log)
    return float(found.group(1)) * 1e9 if found else None


def forget(directory):
    """Takes the files out of the page cache, where the system does as it is asked."""
    subprocess.run(["sync", "--file-system", str(directory)], check=True)
    for path in directory.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def trained(options, file):
    """Of each checkpoint: its seconds, what training waited; and steps while one was on its way, and while none was."""
    lines, _, _ = ran([options.ferry, "train", file, "--json", "--no-bound"])
    saved = [line for line in lines if "checkpoint" in line]
    steps = {line["step"]: line["seconds"] for line in lines if "loss" in line}
    ends = {line["step"]: line["at"] for line in lines if "loss" in line}
    beside, alone = [], []
    for step, seconds in steps.items():
        if step == 1:
            continue  # memory is touched
        under_way = any(one["step"] < step and ends[one["step"]] + one["seconds"] > ends[step] for one in saved)
        before = any(one["step"] < step and ends[one["step"]] + one["seconds"] > ends[step] - seconds for one in saved)
        if under_way:
            beside.append(seconds)
        elif not before:
            alone.append(seconds)
    return saved[0]["bytes"], saved, beside, alone


def resumed(options, file):
    lines, _, log = ran([options.ferry, "train", file, "--json", "--no-bound", "--resume", "latest", "--set",
                    f"steps={options.steps + 1}", "--set", "checkpoint.every=1000000"])
    first = next(line for line in lines if line.get("step") == options.steps + 1 and "loss" in line)
    return first["at"] - first["seconds"], rate_in(log, "restored state:")


def loaded(options, model, tokens):
    words = ["--set", "batch.sequence=64", "--set", "precision=bf16", "--set", "data.small_vocabulary=ignore"]
    return rate_in(ran([options.ferry, "eval", model, tokens, *words])[2], "of weights were read to their tiers")


def exported(options, where, out):
    if not options.cgroup:
        lines, seconds, _ = ran([options.ferry, "ckpt", "export", where, out, "--export-type", "bf16", "--json"])
    else:
        with ControlGroup(options.cgroup) as group:
            lines, seconds, _ = ran([options.ferry, "ckpt", "export", where, out, "--export-type", "bf16", "--json"], group)
    return lines[0]["bytes"], seconds


def measured(options, directory, tokens, storages):
    where, out = directory / "saved", directory / "out"
    file = config_of(options, directory, tokens, where)
    where.mkdir(exist_ok=True)  # plan measures what is there
    plan = json.loads(subprocess.run([options.ferry, "plan", file, "--json"], stdout=subprocess.PIPE, check=True).stdout)
    planned = plan["checkpoint"]["waited_seconds"]
    (size, saved, beside, alone), write = storages["write"].around(lambda: trained(options, file))
    print(f"{size / GIB:.2f} GiB; written in {[round(one['seconds'], 2) for one in saved]} s, waited "
          f"{[round(one['waited_seconds'], 2) for one in saved]}", file=sys.stderr)
    forget(where)
    (copied, export_seconds), mixed = storages["mixed"].around(lambda: exported(options, where, out))
    forget(where)
    (first, restored), read = storages["read"].around(lambda: resumed(options, file))
    forget(out)
    load, load_read = storages["read"].around(lambda: loaded(options, out, tokens))
    later = saved[1:-1] or saved  # the first touches its memory, and nothing runs beside the last
    return {"bytes": size, "written": statistics.median(one["seconds"] for one in later), "write": write,
            "waited": statistics.median(one["waited_seconds"] for one in later), "planned": planned,
            "beside": statistics.median(beside) if beside else None, "alone": statistics.median(alone) if alone else None,
            "first": first, "read": read, "restored": restored, "loaded": load, "load_read": load_read, "export": 2 * copied / export_seconds, "mixed": mixed}


def rows_of(rounds):
    def of(key):
        return [one[key] for one in rounds]

    rows = [plain("checkpoint", [size / GIB for size in of("bytes")], "GiB")]
    known = all(value is not None for key in ("read", "write", "mixed") for value in of(key))
    if not known:
        rows += [plain("checkpoint: written", of("written"), "s"), plain("resumed: first step", of("first"), "s"),
                 plain("export: read and written", [rate / 1e9 for rate in of("export")], "GB/s")]
    else:
        rows += [compared("checkpoint: written", of("written"), [1.1 * one["bytes"] / one["write"] + 1 for one in rounds], "s", 1),
                 compared("resumed: first step", of("first"), [1.2 * one["bytes"] / one["read"] + 5 for one in rounds], "s", 1),
                 compared("export: read and written beside fio", [rate / 1e9 for rate in of("export")],
                          [rate / 1e9 for rate in of("mixed")], "GB/s", 0.9, less_is_better=False)]
        for what, rate, disk in (("resumed: state restored", "restored", "read"), ("eval: weights loaded", "loaded", "load_read")):
            if all(of(rate)):
                rows.append(compared(f"{what}, beside fio", [value / 1e9 for value in of(rate)], [value / 1e9 for value in of(disk)],
                                     "GB/s", 0.9, less_is_better=False))
    rows.append(compared("checkpoint: training waited, beside the plan", of("waited"), of("planned"), "s", 0.8, target_high=1.25))
    if all(of("beside")) and all(of("alone")):
        rows.append(compared("checkpoint: steps meanwhile", of("beside"), of("alone"), "s", 0.97))
    return rows


def main():
    parser = common.parser_of(__doc__, rounds=1)
    parser.add_argument("--path", default="/var/tmp", type=needs.directory, help="a directory on the drive")
    parser.add_argument("--layers", type=common.at_least(1), default=4, help="of the model")
    parser.add_argument("--steps", type=common.at_least(2), default=12)
    parser.add_argument("--every", type=common.at_least(1), default=4, help="steps from checkpoint to checkpoint")
    parser.add_argument("--memory", default="auto", help="checkpoint.memory")
    parser.add_argument("--cgroup", metavar="SIZE", type=lambda text: int(common.bytes_of(text)),
                        help="export in a control group with this limit of memory, 4GiB; needs the right to make one")
    needs.add_fio_option(parser)
    options = parser.parse_args()
    needs.fio(options)
    if options.cgroup:
        needs.control_group(options.cgroup)
    storages = {mode: Storage(options, options.path, mode) for mode in ("read", "write", "mixed")}
    with common.scratch() as own:
        tokens = own / "tokens.bin"
        texts = sorted(str(path) for path in common.ROOT.glob("docs/*.md"))
        subprocess.run([options.ferry, "data", *texts, "-o", tokens], check=True, stdout=subprocess.DEVNULL)

        def one_round():
            with common.scratch(options.path) as directory:
                return measured(options, Path(directory), tokens, storages)
        rounds = common.turns({"ferry": one_round}, options.rounds, options.seconds).get("ferry")
    if not rounds:
        return 1
    memory = f"the export in {options.cgroup / GIB:.3g} GiB, page cache included" if options.cgroup else "the export with all memory"
    load = Path("/proc/loadavg").read_text().split()[0]
    common.report(options, rows_of(rounds), [f"{needs.file_system(options.path)}; checkpoint.memory {options.memory}; {memory}; "
                                             f"load of the machine at the end {load}"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

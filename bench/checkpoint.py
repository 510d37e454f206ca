#!/usr/bin/env python3
"""Checkpoints beside the drive they lie on: writing, what training waits, going on, exporting.

A round trains --steps steps of a model with fp32 state and checkpoints every --every of them. Then it exports the newest,
goes on from it, and evaluates the exported weights, each with the files out of the page cache. fio's bandwidth is
taken around each part, with transfers of 1 MiB, 32 in flight, and so is the plan's prediction around training.

- written: the checkpoint's seconds beside its bytes at fio's write bandwidth x 1.1 + 1 s. fio overwrites a file of its own; a
  checkpoint's files are new ones, whose space the file system has yet to give them: a second row has fio write such a file
- slowed: how much later the steps meanwhile ended than without it, beside what `ferry plan` predicted (a fifth)
- steps meanwhile: beside steps with no checkpoint on its way (0.97)
- first step: from the start of `ferry train --resume` beside its bytes at fio's read bandwidth x 1.2 + 5 s
- restored, loaded: the state of `--resume`, and the exported weights by `ferry eval`, a second, beside fio's read bandwidth (0.9)
- export: bytes read and written a second, beside fio's mixed bandwidth of one file (0.9); and beside fio reading one file and
  writing another, new one, which is what an export does

With --cgroup export and evaluation have so much memory, the page cache included, as a rank of a job would have it.

    bench/checkpoint.py --path /var/tmp --layers 4 --cgroup 4GiB --rounds 1
    bench/checkpoint.py --memory 0 --parts written         no room for a second version
    bench/checkpoint.py --on-nvme 1 --parts written        state on the drive that the checkpoint is written to
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
from common import SideFailed, compared, judged, plain
from training import GIB, ControlGroup, words_of

MODEL = {"hidden": 2048, "heads": 16, "kv_heads": 4, "intermediate": 5632, "vocab": 32000, "tie_embeddings": True}
TINY = {"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 160, "vocab": 256, "tie_embeddings": True}
BATCH = {"sequence": 64, "micro_batch": 1, "micro_batches": 1}
PARTS = ("written", "exported", "resumed", "evaluated")
WITHIN = 0.2  # of what the plan says
TOLD_APART = 0.05  # seconds: steps differ by as much


class Fio:
    """fio's bandwidth of a file beside the checkpoints, before and after each part: drives swing within minutes."""

    WORDS = ("--bs=1M", "--iodepth=32", "--direct=1", "--ioengine=io_uring", "--thread", "--fixedbufs",
             "--eta=never", "--output-format=json")

    def __init__(self, options, directory):
        self.missing = options.without_fio
        self._file = directory / "fio"
        self._size, self._milliseconds = ("16MiB", 200) if options.tiny else ("2GiB", options.slice)
        self._last = {}

    def new_file(self):
        """Bytes a second, written once to a file that gets its space before."""
        return self._with_new_file(lambda file: ["--name=new", "--rw=write", "--fallocate=native", f"--filename={file}"])

    def copy(self):
        """Bytes a second, read from a file while as many are written to a new one."""
        return self._with_new_file(lambda file: ["--name=read", "--rw=read", f"--filename={self._file}",
                                                 "--name=new", "--rw=write", "--fallocate=native", f"--filename={file}"])

    def slice(self, mode):
        """Bytes a second, of both directions together."""
        return self._run("--name=slice", f"--rw={mode}", "--overwrite=1", "--time_based", f"--runtime={self._milliseconds}ms",
                         f"--filename={self._file}")

    def _with_new_file(self, words):
        new = Path(f"{self._file}-new")
        rate = self._run(*words(new))
        new.unlink(missing_ok=True)
        return rate

    def _run(self, *words):
        if self.missing:
            return None
        command = ["fio", *self.WORDS, f"--size={self._size}", *words]
        # Without huge pages fio's transfers reach a device in small pieces.
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
                              env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
        if done.returncode != 0 or "{" not in done.stdout:
            self.missing = True
            print(f"fio gave no figure: {done.stderr.strip()[-500:]}", file=sys.stderr)
            return None
        sides = [job[side] for job in json.loads(done.stdout[done.stdout.index("{"):])["jobs"] for side in ("read", "write")]
        return sum(side["io_bytes"] for side in sides) / max(side["runtime"] for side in sides) * 1000

    def around(self, mode, work):
        """What `work` gives, and the mean of a slice before it and one behind it."""
        before = self._last.pop(mode, None) or self.slice(mode)
        result = work()
        after = self._last[mode] = self.slice(mode)
        return result, None if before is None or after is None else (before + after) / 2


def config_of(options, directory, tokens, where):
    model = {**(TINY if options.tiny else MODEL), "layers": options.layers}
    config = {"model": model, "data": {"tokens": str(tokens), "held_back": 0, "small_vocabulary": "ignore"}, "batch": BATCH,
              "precision": "bf16", "steps": options.steps, "evaluate": {"micro_batches": 0}, "optimizer": {"lr": 1e-4},
              "checkpoint": {"dir": str(where), "every": options.every, "keep": {"last": 1}, "memory": options.memory}}
    if options.on_nvme:
        drive = directory / "nvme"
        drive.mkdir(exist_ok=True)
        config.update(budgets={"nvme": [str(drive)]}, swap={"state_on_nvme": options.on_nvme})
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


def bounded(options, command):
    """The same in a control group, where one is asked for."""
    if not options.cgroup:
        return ran(command)
    with ControlGroup(options.cgroup) as group:
        return ran(command, group)


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
    """The run's checkpoints; steps while one was on its way, and while none was."""
    lines, seconds, _ = ran([options.ferry, "train", file, *words_of({}, options.settings), "--json", "--no-bound"])
    saved = [line for line in lines if "checkpoint" in line]
    steps = {line["step"]: line["seconds"] for line in lines if "loss" in line}
    ends = {line["step"]: line["at"] for line in lines if "loss" in line}
    beside, windows = [], []
    for one in saved:
        begun = ends[one["step"]]
        window = [step for step in steps if step > one["step"] and (step == one["step"] + 1 or ends[step] - steps[step] < begun + one["seconds"])]
        windows.append(window)
        beside += [steps[step] for step in window if ends[step] < begun + one["seconds"]]
    meanwhile = {step for window in windows for step in window}
    alone = [took for step, took in steps.items() if step > 1 and step not in meanwhile]  # the first touches memory
    usual = statistics.median(alone) if alone else 0
    for one, window in zip(saved, windows):
        # By the clock: updates that were finished before it are no part of the step behind it.
        one["slowed_seconds"] = (ends[window[-1]] - ends[one["step"]] - len(window) * usual) if window and usual else one["waited_seconds"]
    print(f"trained for {seconds:.0f} s: {saved[0]['bytes'] / GIB:.2f} GiB; written in {[round(one['seconds'], 2) for one in saved]} s, "
          f"waited {[round(one['waited_seconds'], 2) for one in saved]} s, slowed {[round(one['slowed_seconds'], 2) for one in saved]} s; "
          f"steps meanwhile {[round(one, 3) for one in beside]}, alone {[round(one, 3) for one in alone]} s", file=sys.stderr)
    return saved, beside, alone


def resumed(options, file, where):
    """By a run that saves nothing: its own checkpoint would want as much of the drive again."""
    config = json.loads(file.read_text())
    del config["checkpoint"]
    without = file.with_name("resumed.json")
    without.write_text(json.dumps(config))
    lines, _, log = ran([options.ferry, "train", without, *words_of({"steps": options.steps + 1}, options.settings),
                         "--json", "--no-bound", "--resume", where])
    first = next(line for line in lines if line.get("step") == options.steps + 1 and "loss" in line)
    return first["at"] - first["seconds"], rate_in(log, "restored state:")


def evaluated(options, model, tokens):
    words = ["--set", "batch.sequence=64", "--set", "precision=bf16", "--set", "data.small_vocabulary=ignore"]
    words += [word for one in options.settings if one.startswith("device=") for word in ("--set", one)]
    return rate_in(bounded(options, [options.ferry, "eval", model, tokens, *words])[2], "of weights were read to their tiers")


def exported(options, where, out):
    lines, seconds, _ = bounded(options, [options.ferry, "ckpt", "export", where, out, "--export-type", options.export_type, "--json"])
    return 2 * lines[0]["bytes"] / seconds


def planned(options, file):
    return json.loads(subprocess.run([options.ferry, "plan", file, *words_of({}, options.settings), "--json"],
                                     stdout=subprocess.PIPE, check=True).stdout)["checkpoint"]


def mean_of(one, other):
    """Of two predictions: the plan writes to the drive for a moment, and drives swing."""
    return {key: (one[key] + other[key]) / 2 if isinstance(one[key], float) and isinstance(other[key], float) else one[key]
            for key in one}


def measured(options, directory, tokens):
    where, out = directory / "saved", directory / "out"
    file = config_of(options, directory, tokens, where)
    where.mkdir(exist_ok=True)  # plan measures what is there
    fio = Fio(options, directory)
    found = {"plan": planned(options, file)}
    print(f"plan: {json.dumps(found['plan'])}", file=sys.stderr)

    def part(name, mode, work):
        if name not in options.parts:
            return
        forget(directory)
        found[name], found[f"fio {name}"] = fio.around(mode, work)
        if name != "written":
            print(f"{name}: {found[name]}", file=sys.stderr)
        print(f"fio, {mode}: {found[f'fio {name}']}", file=sys.stderr)
    part("written", "write", lambda: trained(options, file))
    again = planned(options, file)
    print(f"plan, afterwards: {json.dumps(again)}", file=sys.stderr)
    found["plan"] = mean_of(found["plan"], again)
    found["fio new"] = fio.new_file()
    print(f"fio, a new file: {found['fio new']}", file=sys.stderr)
    part("exported", "rw", lambda: exported(options, where, out))
    found["fio copy"] = fio.copy() if "exported" in options.parts else None
    print(f"fio, a copy: {found['fio copy']}", file=sys.stderr)
    part("resumed", "read", lambda: resumed(options, file, where))
    part("evaluated", "read", lambda: evaluated(options, out, tokens))
    saved, beside, alone = found["written"]
    later = saved[1:-1] or saved  # the first touches its memory, and nothing runs beside the last
    found.update(bytes=saved[0]["bytes"], beside=statistics.median(beside) if beside else None,
                 alone=statistics.median(alone) if alone else None,
                 **{key: statistics.median(one[key] for one in later) for key in ("seconds", "waited_seconds", "slowed_seconds")})
    return found


def of_fio(name, rounds, key, reference, unit, target, less_is_better=True):
    """A row beside fio's bandwidth, or without it."""
    values = [one[key] if isinstance(key, str) else key(one) for one in rounds]
    if not all(values):
        return []
    if all(one[f"fio {reference[0]}"] for one in rounds):
        return [compared(name, values, [reference[1](one) for one in rounds], unit, target, less_is_better=less_is_better)]
    return [plain(name, values, unit)]


def as_planned(name, rounds, key):
    """Beside the plan's, where that is more than what a clock and a step's noise tell apart."""
    values, plans = [one[key] for one in rounds], [one["plan"].get(key) for one in rounds]
    if None in plans or not any(plans):
        return [plain(name, values, "s")]
    ratios = [(plan + TOLD_APART) / (max(value, 0) + TOLD_APART) for value, plan in zip(values, plans)]
    return [judged(f"{name}, beside the plan", statistics.median(values), "s", statistics.median(plans), ratios,
                   1 / (1 + WITHIN), target_high=1 / (1 - WITHIN))]


def rows_of(rounds):
    def rate(part):
        return lambda one: one[f"fio {part}"] / 1e9

    rows = [plain("checkpoint", [one["bytes"] / GIB for one in rounds], "GiB")]
    rows += of_fio("checkpoint: written", rounds, "seconds", ("written", lambda one: 1.1 * one["bytes"] / one["fio written"] + 1), "s", 1)
    if all(one["fio new"] for one in rounds):
        rows += of_fio("checkpoint: beside fio's new files", rounds, "seconds",
                       ("new", lambda one: 1.1 * one["bytes"] / one["fio new"] + 1), "s", 1)
    rows += as_planned("checkpoint: training waited", rounds, "waited_seconds")
    rows += as_planned("checkpoint: training slowed", rounds, "slowed_seconds")
    if all(one["beside"] and one["alone"] for one in rounds):
        rows.append(compared("checkpoint: steps meanwhile", [one["beside"] for one in rounds], [one["alone"] for one in rounds], "s", 0.97))
    if "resumed" in rounds[0]:
        rows += of_fio("resumed: first step", rounds, lambda one: one["resumed"][0],
                       ("resumed", lambda one: 1.2 * one["bytes"] / one["fio resumed"] + 5), "s", 1)
        rows += of_fio("resumed: state restored", rounds, lambda one: (one["resumed"][1] or 0) / 1e9, ("resumed", rate("resumed")),
                       "GB/s", 0.9, less_is_better=False)
    for part, fio, name in (("evaluated", "evaluated", "eval: weights loaded"), ("exported", "exported", "export: read and written"),
                            ("exported", "copy", "export: beside fio's copy")):
        if part in rounds[0] and (fio == part or all(one[f"fio {fio}"] for one in rounds)):
            rows += of_fio(name, rounds, lambda one, part=part: (one[part] or 0) / 1e9, (fio, rate(fio)), "GB/s", 0.9,
                           less_is_better=False)
    return rows


def parts_of(text):
    parts = text.split(",")
    for part in parts:
        if part not in PARTS:
            raise ValueError(part)
    return ["written", *parts]


def main():
    parser = common.arguments_parser(__doc__, rounds=1)
    parser.add_argument("--path", default="/var/tmp", type=needs.directory, help="a directory on the drive")
    parser.add_argument("--layers", type=common.at_least(1), default=4, help="of the model")
    parser.add_argument("--steps", type=common.at_least(2), default=12)
    parser.add_argument("--every", type=common.at_least(1), default=4, help="steps from checkpoint to checkpoint")
    parser.add_argument("--memory", default="auto", help="checkpoint.memory")
    parser.add_argument("--on-nvme", type=float, default=0, help="part of the state that lies on the drive as well")
    parser.add_argument("--parts", type=parts_of, default=list(PARTS), help=f"of {','.join(PARTS)}; the first always")
    parser.add_argument("--export-type", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--slice", type=common.at_least(100), default=1500, help="milliseconds of fio")
    parser.add_argument("--cgroup", metavar="SIZE", type=lambda text: int(common.bytes_of(text)),
                        help="export and evaluate in a control group with this limit of memory, 4GiB; needs the right to make one")
    needs.add_fio_option(parser)
    options = parser.parse_args()
    needs.fio(options)
    if options.cgroup:
        needs.control_group(options.cgroup)
    with common.scratch() as own:
        tokens = options.tokens
        if not tokens:
            tokens = own / "tokens.bin"
            texts = sorted(str(path) for path in common.ROOT.glob("docs/*.md"))
            subprocess.run([options.ferry, "data", *texts, "-o", tokens], check=True, stdout=subprocess.DEVNULL)

        def one_round():
            with common.scratch(options.path) as directory:
                return measured(options, Path(directory), tokens)
        rounds = common.turns({"ferry": one_round}, options.rounds, options.seconds).get("ferry")
    if not rounds:
        return 1
    memory = f"export and evaluation in {options.cgroup / GIB:.3g} GiB, page cache included" if options.cgroup else "export with all memory"
    load = Path("/proc/loadavg").read_text().split()[0]
    common.report(options, rows_of(rounds), [f"{needs.file_system(options.path)}; checkpoint.memory {options.memory}; {memory}; "
                                             f"load of the machine at the end {load}"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

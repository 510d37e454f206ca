"""A training run as the scripts see it: the program started, its JSON read, its memory watched from outside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import SideFailed, compared, output_of

GIB = 1 << 30
PREDICTED_WITHIN = 0.10  # of the measured step
# With --tiny, over any configuration: seconds of one thread.
TINY = {"device": "cpu", "threads": 1, "model.hidden": 64, "model.layers": 3, "model.heads": 4, "model.kv_heads": 2,
        "model.head_dim": 16, "model.intermediate": 160, "model.vocab": 256, "batch.sequence": 32,
        "batch.micro_batch": 2, "budgets.device": "unlimited", "budgets.host": "1GiB"}
NEVER_CLIPPED = {"clip_norm": 1e6, "optimizer.lr": 1e-5}  # a limit that never binds, and small steps so that it stays so
WARMUP = 3  # steps: speculative updates begin with the third, which still waits for the updates of the second


@dataclass
class Timing:
    """What any side's run is judged by. The first steps are slower for all and are left out of the rest."""
    tokens_a_step: int
    seconds: list = field(default_factory=list)  # of every step
    losses: list = field(default_factory=list)
    warmup: int = 1
    startup_seconds: float = 0  # until its first step began
    gpu_peak: int = 0  # bytes over what was in use before, as nvidia-smi sees them; 0: not to be had
    host_peak: int = 0  # bytes: of its control group if it has one, else resident at most

    @property
    def step_seconds(self):
        """Mean, not median: a step's work may run into the next."""
        steady = self.seconds[self.warmup:]
        return sum(steady) / len(steady)

    @property
    def tokens_per_second(self):
        return self.tokens_a_step / self.step_seconds


@dataclass
class Run(Timing):
    """A run of ferry's."""
    steps: list = field(default_factory=list)  # lines that `ferry train --json` printed
    evaluations: list = field(default_factory=list)  # and those of held-back text
    summary: dict = field(default_factory=dict)
    state_hash: str = ""

    @property
    def bound(self):
        """The lower bound of a step, in seconds."""
        return self.summary["bound_seconds"]

    @property
    def predicted(self):
        """What the schedule that most steps replayed was predicted to take, as `ferry train` chooses it."""
        speculative = 2 * self.summary["steps_committed"] > self.summary["steps"]
        return self.summary["predicted_speculative_seconds" if speculative else "predicted_seconds"]

    @property
    def speculation(self):
        """The outcome of the steady steps' speculative updates, in words."""
        steady = self.steps[self.warmup:]
        speculative = sum(step["speculative"] for step in steady)
        if speculative == 0:
            return "no speculative updates"
        return f"speculative updates: {sum(step['committed'] for step in steady)} of {speculative} committed"

    @property
    def clipped(self):
        return sum(step["clip_factor"] < 1 for step in self.steps[self.warmup:])

    def lane_bytes(self, *names):
        """Bytes a step on these lanes."""
        return sum(lane["bytes"] for lane in self.summary["lanes"] if lane["lane"] in names) / self.summary["steps"]


def memory_query():
    """The words that ask nvidia-smi for the MiB in use on the first GPU that CUDA would see here."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    return ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]


def memory_of_gpu():
    """Bytes in use on that GPU, by anybody; None without one."""
    text = output_of(memory_query())
    return int(text) << 20 if text.isdigit() else None


class GpuWatch:
    """The most that that GPU's memory held while the block ran, over what it held before."""

    def __init__(self, period_ms=100):
        self.peak = 0
        self._before = memory_of_gpu()
        self._period_ms = period_ms

    def __enter__(self):
        if self._before is not None:
            command = [*memory_query(), "-lms", str(self._period_ms)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._thread = threading.Thread(target=self._read)
            self._thread.start()
        return self

    def _read(self):
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.peak = max(self.peak, (int(line) << 20) - self._before)

    def __exit__(self, *_):
        if self._before is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()


class ControlGroup:
    """A memory control group of version 2 or 1 with a limit, for one run; gone with the block. Entering throws
    OSError where none can be made."""

    V2, V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")

    def __init__(self, limit):
        self._limit = limit
        self._v2 = (self.V2 / "cgroup.controllers").exists()
        self._directory = (self.V2 if self._v2 else self.V1) / f"ferry-bench-{os.getpid()}"

    def __enter__(self):
        if self._v2:
            (self.V2 / "cgroup.subtree_control").write_text("+memory")
        self._directory.mkdir()
        try:
            self._file("memory.max", "memory.limit_in_bytes").write_text(str(self._limit))
            self.peak()  # kernels before 5.19 have none in version 2
            with contextlib.suppress(OSError):  # not there without swap
                self._file("memory.swap.max", "memory.memsw.limit_in_bytes").write_text(
                    "0" if self._v2 else str(self._limit))
        except OSError:
            self._directory.rmdir()
            raise
        return self

    def _file(self, v2, v1):
        return self._directory / (v2 if self._v2 else v1)

    def around(self, command):
        return ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self._directory), *command]

    def peak(self):
        return int(self._file("memory.peak", "memory.max_usage_in_bytes").read_text())

    def killed(self):
        """Whether the limit ended a process."""
        counts = self._file("memory.events", "memory.oom_control").read_text().splitlines()
        return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in counts)

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._directory.rmdir()


class Child:
    """A process whose output is read line by line and whose memory is watched; ended with the block."""

    def __init__(self, command, group=None, **options):
        self._name = command[0]
        self._command = group.around(command) if group else command
        self._group = group
        self.gpu_peak = self.host_peak = 0
        self._options = options

    def __enter__(self):
        self._said = tempfile.TemporaryFile("w+", errors="replace")
        self._watch = GpuWatch().__enter__()
        self.started = time.monotonic()
        try:
            self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self._said, text=True,
                                            **self._options)
        except OSError as error:
            self._watch.__exit__()
            raise SideFailed(f"{self._name} cannot be run: {error}") from error
        return self

    def lines(self):
        """Lines of its output, each with the seconds since its start."""
        for line in self.process.stdout:
            yield line, time.monotonic() - self.started

    def end(self, kill=False):
        """Waits for its end, or brings it about, and takes the peaks. Throws SideFailed."""
        if kill:
            os.kill(self.process.pid, signal.SIGKILL)  # Popen.kill() would take the status that is waited for
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self._watch.__exit__()
        self.gpu_peak = self._watch.peak
        self.host_peak = self._group.peak() if self._group else usage.ru_maxrss * 1024
        if self._group and self._group.killed():
            raise SideFailed(f"{self._name} was killed at its control group's limit of memory")
        if self.process.returncode != 0 and not kill:
            raise SideFailed(f"{self._name} ended with {self.process.returncode}: {self.said()}")

    def said(self, most=2000):
        """The end of what it wrote to standard error."""
        self._said.seek(0)
        return self._said.read()[-most:].strip()

    def __exit__(self, *_):
        if self.process.returncode is None:
            self.end(kill=True)
        self.process.stdout.close()
        self._said.close()


def words_of(settings, overrides=()):
    """The words of a command line that set these keys, {key: value}. Of overrides, "key=value", the last of a key stands."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    texts.update(override.split("=", 1) for override in overrides)
    return [word for key, text in texts.items() for word in ("--set", f"{key}={text}")]


def given(options, settings):
    """The settings as the run gets them: --set stands above."""
    return {**settings, **dict(setting.split("=", 1) for setting in options.settings)}


def bench_machine(options, config, settings):
    """Has `ferry bench` measure kernels and links of this configuration, into options.machine."""
    done = subprocess.run([options.ferry, "bench", "--all", "--save", options.machine, "--config", str(config),
                           *words_of(settings, options.settings)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"ferry bench --all failed: {done.stderr[-2000:]}")


def train(options, config, settings, warmup=1, trace=None, machine=None, bound=True, group=None, launcher=()):
    """Runs `ferry train`, by way of `launcher` if given, and returns its Run. Throws SideFailed."""
    command = [*launcher, options.ferry, "train", str(config), "--json", *words_of(settings, options.settings)]
    command += ["--trace", str(trace)] if trace else []
    command += ["--machine", str(machine)] if machine else []
    command += [] if bound else ["--no-bound"]
    run = Run(tokens_a_step=0, warmup=warmup)
    with Child(command, group) as child:
        for text, at in child.lines():
            if not text.startswith("{"):
                continue  # a launcher's or a library's
            line = json.loads(text)
            if "loss" in line:
                run.steps.append(line)
                print(f"step {line['step']}: {line['seconds']:.3g} s, loss {line['loss']}", file=sys.stderr, flush=True)
                if len(run.steps) == 1:
                    run.startup_seconds = at - line["seconds"]
            if "evaluation_loss" in line:
                run.evaluations.append(line)
            run.summary = line.get("summary", run.summary)
            run.state_hash = line.get("state_hash", run.state_hash)
        child.end()
        run.gpu_peak, run.host_peak = child.gpu_peak, child.host_peak
    if len(run.steps) <= warmup:
        raise SideFailed(f"{len(run.steps)} steps are too few to leave {warmup} out")
    run.tokens_a_step = run.steps[-1]["tokens"]
    run.seconds = [step["seconds"] for step in run.steps]
    run.losses = [step["loss"] for step in run.steps]
    return run


def bound_row(name, runs, target=None, **more):
    return compared(f"{name}: step beside lower bound", [run.step_seconds for run in runs],
                    [run.bound for run in runs], "s", target, **more)


def bound_at_peaks_rows(name, runs):
    """For information, without a target: of the bound whose kernels cost FLOPs at the product rate and bytes at copy
    bandwidth. No row where the program knew no peaks."""
    peaks = [run.summary.get("peak_bound_seconds", 0) for run in runs]
    if not all(peaks):
        return []
    return [compared(f"{name}: step beside bound at peaks", [run.step_seconds for run in runs], peaks, "s")]


def prediction_row(name, runs):
    """The ratio, predicted over measured, is asked to be within a tenth of 1 on either side."""
    return compared(f"{name}: step beside prediction", [run.step_seconds for run in runs],
                    [run.predicted for run in runs], "s", 1 - PREDICTED_WITHIN, target_high=1 + PREDICTED_WITHIN)


class Storage:
    """fio's bandwidth at a path, taken before and after each run: drives swing within minutes.

    around() runs something between two slices and gives the mean of both beside its result. `mode`:
    of `ferry bench io`, which lays the files out and runs fio.
    """

    def __init__(self, options, path, mode):
        self.missing = "fio is left out with --without-fio" if options.without_fio else ""
        self._command = [options.ferry, "bench", "io", str(path), "--compare-fio", "--modes", mode, "--pairs", "1",
                         "--json"]
        small = ["--blocks", "64KiB", "--depths", "4", "--size", "16MiB", "--seconds", "0.2"]
        self._command += small if options.tiny else ["--blocks", "1MiB", "--seconds", "1.5"]
        self._last = None

    def slice(self):
        """Bytes a second, of both directions together where the mode has both."""
        if self.missing:
            return None
        done = subprocess.run(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            self.missing = f"fio gave no figure: {done.stderr.strip()[-500:]}"
            print(self.missing, file=sys.stderr)
            return None
        rows = json.loads(done.stdout)["rows"]
        return next(row["reference"] for row in rows if row["unit"] == "GB/s") * 1e9

    def around(self, work):
        before = self.slice() if self._last is None else self._last
        result = work()
        self._last = self.slice()
        return result, None if before is None or self._last is None else (before + self._last) / 2

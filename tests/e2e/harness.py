"""What the end-to-end tests share: a text, a tiny model, and the built program run on them as a user
runs it. The program is named by the environment variable FERRY."""

import atexit
import copy
import glob
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

FERRY = os.environ.get("FERRY", "")
# tools/test.sh --quick sets it: CI has two cores and 25 minutes. Of a long list it then takes a case of each kind.
QUICK = bool(os.environ.get("FERRY_QUICK_TESTS"))

# mpirun removes the directory of all its user's runs when it ends, and one that begins meanwhile fails. So every script has
# its own, whatever runs beside it; what the tests make themselves stays where it would be.
tempfile.gettempdir()  # remembers it
os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="ferry-mpi-")
atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)

USAGE, DOES_NOT_FIT, IO, DIVERGED = 2, 3, 4, 5  # exit codes

MODEL = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 160, "vocab": 256}
CONFIG = {
    "model": MODEL,
    "data": {"held_back": 0.1},
    "batch": {"sequence": 32, "micro_batch": 2, "micro_batches": 4},
    "optimizer": {"lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "schedule": {"kind": "cosine", "warmup_steps": 2, "final_fraction": 0.1},
    "threads": 1, "seed": 7, "steps": 8,
}


class Run:
    """A finished run: its exit code, its JSON lines by kind, and what it said on standard error."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err
        self.lines = []
        for line in out.splitlines():
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.lines.append({"text": line})
        self.steps = [line for line in self.lines if "loss" in line]
        self.evaluations = [line for line in self.lines if "evaluation_loss" in line]
        self.hashes = [line["state_hash"] for line in self.lines if "state_hash" in line]
        summaries = [line["summary"] for line in self.lines if "summary" in line]
        self.summary = summaries[-1] if summaries else None

    def lane(self, name):
        return next(lane["bytes"] for lane in self.summary["lanes"] if lane["lane"] == name)

    def bytes_of(self, tier, what):
        """Planned bytes: a line of the plan's table."""
        return sum(row["bytes"] for row in self.summary["tiers"]
                   if row["tier"] == tier and row["what"] == what)

    def said(self):
        """For the message of what fails: several ranks' runs say there what each of them did."""
        return f"exit code {self.code}, steps {self.steps}, on standard error:\n{self.err}"

    def numbers(self):
        """Everything that a placement must not change."""
        kept = ("step", "loss", "gradient_norm", "clip_factor", "lr", "targets", "skipped")
        return [{key: step[key] for key in kept} for step in self.steps], self.hashes


class Lines:
    """The end of a pipe, read line by line without a buffer: what a buffer holds communicate() would not see."""

    encoding, errors = "utf-8", "strict"

    def __init__(self, file):
        self._file = file  # which owns the descriptor, and is never read from

    def fileno(self):
        return self._file.fileno()

    def close(self):
        self._file.close()

    @property
    def closed(self):
        return self._file.closed

    def readline(self):
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self.fileno(), 1)
            if not byte:
                break
            line += byte
        return line.decode()

    def read(self):
        return "".join(self)

    def __iter__(self):
        return iter(self.readline, "")


def start(words, **options):
    """A process beside the test, which reads some of its lines and communicate()s later."""
    process = subprocess.Popen(words, text=True, stdout=subprocess.PIPE,
                               **{"stderr": subprocess.PIPE, **options})
    process.stdout = Lines(process.stdout)
    return process


def in_quick(cases, few):
    """All of the cases; in the quick run those that `few` names: by their names, or by their places in the list."""
    if not QUICK:
        return cases
    if isinstance(cases, dict):
        return {name: cases[name] for name in few}
    return [cases[place] for place in few]


def write_text(path, count):
    """Words with a skewed distribution: a loss that falls, gradients that vary."""
    rng = random.Random(5)
    words = ["".join(rng.choice("abcdefghij klmnop") for _ in range(rng.randint(2, 7)))
             for _ in range(60)]
    text = ""
    while len(text) < count:
        text += words[min(int(rng.expovariate(0.1)), 59)] + rng.choice([" ", " ", ", ", ".\n"])
    with open(path, "w", encoding="ascii") as file:
        file.write(text[:count])


def write_tensors(path, tensors):
    """A safetensors file: dtype, shape and bytes by name."""
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


class FerryTest(unittest.TestCase):
    """A temporary directory with tokens in it, and ways to run the program there."""

    def on_tmpfs(self, directory, options):
        """To run something through: it alone sees a file system of its own at `directory`, which is there. Skips where
        that cannot be had."""
        through = ["unshare", "--map-root-user", "--mount", "sh", "-ec",
                   'mount -t tmpfs -o "$1" ferry-test "$2"; shift 2; exec "$@"', "sh", options, directory]
        if subprocess.run([*through, "true"], capture_output=True, check=False).returncode:
            self.skipTest("nothing can be mounted here")
        return through

    @classmethod
    def setUpClass(cls):
        if not FERRY:
            raise unittest.SkipTest("FERRY names no program")
        cls.dir = tempfile.mkdtemp(prefix="ferry-e2e-")
        cls.addClassCleanup(shutil.rmtree, cls.dir, ignore_errors=True)
        write_text(cls.path("text.txt"), 40000)
        made = cls.ferry("data", cls.path("text.txt"), "-o", cls.path("tokens.bin"))
        assert made.code == 0, made.err
        os.mkdir(cls.path("nvme"))
        os.mkdir(cls.path("nvme2"))

    def run(self, result=None):
        """Says of a slow test how long it took: CI has two cores and 25 minutes."""
        begin = time.monotonic()
        done = super().run(result)
        seconds = time.monotonic() - begin
        if seconds > 5:
            print(f"slow: {self.id()} {seconds:.1f} s", flush=True)
        return done

    @classmethod
    def path(cls, name):
        return os.path.join(cls.dir, name)

    @classmethod
    def ferry(cls, *arguments, through=(), **options):
        """Runs the program, if asked for by way of another command."""
        try:
            done = subprocess.run([*through, FERRY, *arguments], capture_output=True, text=True, timeout=300,
                                  check=False, **options)
        except subprocess.TimeoutExpired as late:  # which has what was said until then as bytes, and shows none of it
            said = "\n".join((text or b"").decode(errors="replace") for text in (late.stdout, late.stderr))
            raise AssertionError(f"{' '.join(arguments)} did not end within {late.timeout:.0f} s:\n{said}") from None
        return Run(done.returncode, done.stdout, done.stderr)

    @classmethod
    def config(cls, **changes):
        """CONFIG with changes: dots are written as two underscores, budgets__host="1MiB"."""
        config = copy.deepcopy(CONFIG)
        config["data"]["tokens"] = cls.path("tokens.bin")
        for key, value in changes.items():
            *parents, last = key.split("__")
            place = config
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        return config

    @classmethod
    def command(cls, config, *arguments):
        """The command line that trains by this configuration, and writes its file."""
        number = len(os.listdir(cls.dir))
        name = cls.path(f"config{number}.json")
        with open(name, "w", encoding="utf-8") as file:
            json.dump(config, file)
        return ["train", name, "--json", "--no-bound", *arguments]

    @classmethod
    def train(cls, config, *arguments, **options):
        return cls.ferry(*cls.command(config, *arguments), **options)

    @staticmethod
    def flip(path, at):
        """One bit of the byte there."""
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))

    def killed(self, config, *arguments, steps, seconds=0.0, signal_=signal.SIGKILL, through=(), env=None):
        """Starts a run and kills it, or sends it another signal, so many seconds after so many of its steps."""
        process = start([*through, FERRY, *self.command(config, *arguments)], env=env)
        out = ""
        while out.count('"loss"') < steps:
            line = process.stdout.readline()
            self.assertTrue(line, "it ended before: " + process.stderr.read() if not line else "")
            out += line
        time.sleep(seconds)
        if through and signal_ == signal.SIGKILL:
            self.kill_all_ranks()  # they outlive an mpirun that is killed
        process.send_signal(signal_)
        rest, err = process.communicate(timeout=60)
        text = out + rest
        # The last line of a killed run may have been cut.
        return Run(process.returncode, text if process.returncode == 0 else text.rpartition("\n")[0], err)

    def kill_all_ranks(self):
        """Every process that has a file of this test in its command."""
        for entry in os.listdir("/proc"):
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if self.path("").encode() in file.read():
                        os.kill(int(entry), signal.SIGKILL)
            except (OSError, ValueError):
                pass  # it has ended, or is no process

    @classmethod
    def nvme(cls, size="64MiB", name="nvme"):
        return {"path": cls.path(name), "size": size}

    @staticmethod
    def ranks_of(config):
        """The ranks' processes, by rank."""
        found = {}
        for name in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                with open(name, "rb") as file:
                    words = file.read().split(b"\0")
                if config.encode() not in words or b"mpirun" in words[0]:
                    continue
                with open(name.replace("cmdline", "environ"), "rb") as file:
                    environment = dict(v.partition(b"=")[::2] for v in file.read().split(b"\0"))
            except OSError:
                continue
            rank = environment.get(b"OMPI_COMM_WORLD_RANK")
            if rank is not None:
                found[int(rank)] = int(name.split("/")[2])
        return found

    def assert_trained(self, run):
        self.assertEqual(run.code, 0, run.err)
        self.assertIsNotNone(run.summary, run.out)


class DriveTest(FerryTest):
    """A directory that stands for a drive, with a file in it that nobody may touch."""

    def setUp(self):
        self.drive = self.path("drive-" + self.id().rpartition(".")[2])
        os.mkdir(self.drive)
        with open(os.path.join(self.drive, "mine.txt"), "w", encoding="ascii") as file:
            file.write("not ferry's")

    def tearDown(self):
        """Whatever happened: the stranger's file is as it was."""
        with open(os.path.join(self.drive, "mine.txt"), encoding="ascii") as file:
            self.assertEqual(file.read(), "not ferry's")

    def assert_clean(self):
        self.assertEqual(os.listdir(self.drive), ["mine.txt"])

    def assert_refused(self, run, code, *texts):
        self.assertEqual(run.code, code, run.err)
        self.assertEqual(run.out, "")
        for text in texts:
            self.assertIn(text, run.err)

    def start_ferry(self, *words, through=()):
        """Runs beside the test, which may send it a signal."""
        process = start([*through, FERRY, *words])
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def wait_for_files(self, directory, size):
        """Until a benchmark's volume is laid out, in so many bytes; one file or several."""
        for _ in range(1000):
            files = glob.glob(os.path.join(self.drive, directory, "ferry.slots*"))
            try:
                if sum(os.path.getsize(name) for name in files) >= size:
                    return
            except FileNotFoundError:
                pass  # one that was there to be probed
            time.sleep(0.02)
        self.fail("no file appeared")

    def wait_until_clean(self):
        """After a kill: somebody removes the files."""
        for _ in range(1000):
            if os.listdir(self.drive) == ["mine.txt"]:
                return
            time.sleep(0.02)
        self.assert_clean()

    @staticmethod
    def caretakers(process):
        """Those who would remove the files after a kill."""
        with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]

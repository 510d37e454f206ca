"""What the tests of checkpoints share: runs that save, and ways to look at what they saved."""

import ctypes
import json
import os
import pathlib
import re
import shutil
import struct
import tempfile

from harness import IO, FerryTest

STEPS = 12
RAM = {}
MIXED = {"swap__state_on_nvme": 0.5, "swap__chunk_elements": 8192}
NVME = {"swap__state_on_nvme": 1.0, "swap__chunk_elements": 4096}
BF16 = {"precision": "bf16"}
SGD = {"optimizer__method": "sgd", "optimizer__momentum": 0.9, "optimizer__betas": None}


def xxh3(data):
    xxhash = ctypes.CDLL("libxxhash.so.0")
    xxhash.XXH3_64bits.restype = ctypes.c_uint64
    xxhash.XXH3_64bits.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    return f"{xxhash.XXH3_64bits(data, len(data)):016x}"


class Saving(FerryTest):
    """Runs that save, and ways to look at what they saved."""

    def setUp(self):
        self.name = self.id().rpartition(".")[2]
        # In memory where that can be had: what flushing costs is not what is tested.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else self.dir
        self.dir_ = os.path.join(tempfile.mkdtemp(prefix="ferry-e2e-", dir=memory), "saved")
        self.addCleanup(shutil.rmtree, os.path.dirname(self.dir_), ignore_errors=True)

    def run_config(self, placement=None, **changes):
        placement = dict(placement or RAM)
        if placement:
            os.makedirs(self.path(f"nvme-{self.name}"), exist_ok=True)
            placement["budgets__nvme"] = [self.nvme(name=f"nvme-{self.name}")]
        given = {"steps": STEPS, "clip_norm": 1.0, **placement, **changes}
        config = self.config(**{key: value for key, value in given.items() if value is not None})
        for key, value in given.items():
            if value is None:
                section, name = key.split("__")
                config[section].pop(name)
        return config

    def saving(self, placement=None, **changes):
        return self.run_config(placement, **{"checkpoint__dir": self.dir_, "checkpoint__every": 2, **changes})

    def step(self, step, directory=None):
        return os.path.join(directory or self.dir_, f"step-{step:08}")

    def steps(self):
        return sorted(name for name in os.listdir(self.dir_)) if os.path.isdir(self.dir_) else []

    def ok(self, run):
        self.assertEqual(run.code, 0, run.err)
        return run

    def whole(self, **changes):
        return self.ok(self.train(self.run_config(**changes)))

    def losses(self, *runs):
        """By step; one that was said twice was said alike."""
        found = {}
        for run in runs:
            for step in run.steps:
                kept = {key: step[key] for key in ("loss", "gradient_norm", "lr", "skipped", "loss_scale")}
                self.assertEqual(found.setdefault(step["step"], kept), kept)
        return found

    def same_as(self, whole, *runs):
        self.assertEqual(self.losses(*runs), self.losses(whole))
        self.assertEqual(runs[-1].hashes[-1], whole.hashes[-1])

    def latest(self):
        """After a kill: there may be nothing yet."""
        there = any(re.fullmatch(r"step-\d{8}", name) for name in self.steps())
        return ("--resume", "latest") if there else ()

    def mpi(self, ranks):
        if not shutil.which("mpirun"):
            self.skipTest("there is no mpirun")
        return ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks))

    def diff(self, one, other):
        run = self.ferry("ckpt", "diff", one, other, "--json")
        self.assertIn(run.code, (0, IO), run.err)
        return run.lines[0]

    def refused(self, code, texts, *words, **options):
        run = self.ferry(*words, **options)
        self.assertEqual(run.code, code, run.err)
        for text in texts:
            self.assertIn(text, run.err)
        return run

    def header(self, path):
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            return json.loads(file.read(length)), 8 + length

    def tensors(self, path):
        """By name: type, shape and bytes."""
        entries, at = self.header(path)
        with open(path, "rb") as file:
            data = file.read()
        return {name: (entry["dtype"], entry["shape"], data[at + entry["data_offsets"][0]:at + entry["data_offsets"][1]])
                for name, entry in entries.items() if name != "__metadata__"}

    @staticmethod
    def newer(manifest):
        """The same manifest as a later ferry would write it: with its own version, and a checksum that holds."""
        digits, end = 16, '"\n}\n'
        text = manifest.read_text(encoding="utf-8").replace('"version": 2', '"version": 3')
        body = text[:-digits - len(end)]
        manifest.write_text(f"{body}{xxh3(body.encode())}{end}", encoding="utf-8")

    @staticmethod
    def forge(path, change):
        """A manifest that says something else, with its own checksum right."""
        file = pathlib.Path(path, "manifest.json")
        manifest = json.loads(file.read_text(encoding="utf-8"))
        change(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        body = text[:-16 - len('"\n}\n')]
        file.write_text(f'{body}{xxh3(body.encode())}"\n}}\n', encoding="utf-8")

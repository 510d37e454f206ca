"""Checkpoints: a run that was stopped or killed and goes on has the bits of one that never was, elsewhere too;
what is damaged is named, and the tool says what is there."""

import ctypes
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
import unittest

from harness import DOES_NOT_FIT, FERRY, IO, USAGE, FerryTest, Run, write_tensors

STEPS = 12
RAM = {}
MIXED = {"swap__state_on_nvme": 0.5, "swap__chunk_elements": 8192}
NVME = {"swap__state_on_nvme": 1.0, "swap__chunk_elements": 4096}
BF16 = {"precision": "bf16"}
SGD = {"optimizer__method": "sgd", "optimizer__momentum": 0.9, "optimizer__betas": None}


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


def xxh3(data):
    xxhash = ctypes.CDLL("libxxhash.so.0")
    xxhash.XXH3_64bits.restype = ctypes.c_uint64
    xxhash.XXH3_64bits.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    return f"{xxhash.XXH3_64bits(data, len(data)):016x}"


class CheckpointTest(Saving):
    # ------------------------------------------------------------ the same bits

    def test_killed_anywhere(self):
        rng = random.Random(3)
        fp16 = {"precision": "fp16", "evaluate__every": 3, "evaluate__micro_batches": 2}
        for placement, changes in (
                (RAM, {}), (MIXED, fp16), (NVME, {"precision": "bf16", "swap__speculate": "all"}),
                (NVME, {"precision": "bf16", "optimizer__master": "split", "optimizer__moments": "bf16"}),
                (MIXED, {**SGD, "precision": "bf16"}), (RAM, {"optimizer__method": "lion"}),
                (MIXED, {"optimizer__method": "adagrad", "optimizer__betas": None, "optimizer__moments": "bf16",
                         "optimizer__initial_accumulator": 0.1}),
                (RAM, {"optimizer__method": "adam", "freeze": ["model.layers.1.*"], "model__tie_embeddings": True})):
            with self.subTest(placement=placement, **changes):
                whole = self.whole(**{key: value for key, value in changes.items() if not key.startswith("swap")})
                config = self.saving(placement, checkpoint__every=rng.choice([1, 2, 3]), **changes)
                runs = [self.killed(config, steps=rng.randint(2, STEPS - 2)),
                        self.killed(config, *self.latest(), steps=2), self.ok(self.train(config, *self.latest()))]
                self.same_as(whole, *runs)
                shutil.rmtree(self.dir_)

    def test_stopped_by_a_signal(self):
        whole = self.whole()
        config = self.saving(checkpoint__every=100)
        first = self.ok(self.killed(config, steps=3, signal_=signal.SIGTERM))
        at = first.summary["steps"]
        self.assertLess(at, STEPS)
        self.assertEqual(self.steps(), [os.path.basename(self.step(at))])
        second = self.ok(self.killed(config, "--resume", steps=2, signal_=signal.SIGUSR1))
        last = self.ok(self.train(config, "--resume", self.dir_))
        self.same_as(whole, first, second, last)

    def test_by_time_and_what_is_kept(self):
        self.ok(self.train(self.saving(checkpoint__every="1h")))
        self.assertEqual(self.steps(), ["step-00000012"])
        shutil.rmtree(self.dir_)
        config = self.saving(checkpoint__every=1, checkpoint__keep={"last": 1, "every": 5, "best": 1},
                             evaluate__every=4, evaluate__micro_batches=2)
        run = self.ok(self.train(config))
        best = min((e for e in run.evaluations if e["step"] > 0), key=lambda e: e["evaluation_loss"])["step"]
        self.assertEqual(self.steps(), sorted(os.path.basename(self.step(s)) for s in {5, 10, 12, best}))

    def test_training_goes_on_meanwhile(self):
        """With memory for what is not written yet; without it, or with too little, it waits. The bits are the same."""
        self.dir_ = self.path(f"{self.name}-saved")  # where writing takes its time
        whole = self.whole()
        for memory, overlaps in (("auto", True), ("100kB", None), (0, False)):
            with self.subTest(memory=memory):
                run = self.ok(self.train(self.saving(checkpoint__every=1, checkpoint__memory=memory)))
                self.same_as(whole, run)
                saved = [line for line in run.lines if "checkpoint" in line]
                self.assertEqual([line["step"] for line in saved], list(range(1, STEPS + 1)))
                self.assertEqual({line["bytes"] for line in saved}, {saved[0]["bytes"]})
                self.assertTrue(all(line["waited_seconds"] <= line["seconds"] for line in saved))
                late = [line["step"] for line in saved
                        if run.lines[run.lines.index(line) - 1].get("step") != line["step"]]
                if overlaps is not None:
                    self.assertEqual(bool(late), overlaps)
                self.ok(self.ferry("ckpt", "verify", self.dir_))
                shutil.rmtree(self.dir_)
        for memory, held in (("auto", saved[0]["bytes"]), ("100kB", 100000), (0, 0)):
            words = self.command(self.saving(checkpoint__memory=memory))
            planned = self.ok(self.ferry("plan", words[1], "--json", "--no-prediction")).lines[0]["checkpoint"]
            self.assertEqual(planned["bytes"], saved[0]["bytes"])
            self.assertEqual(planned["held_bytes"], held)
        self.assertIn("training waits until the other", self.ferry("plan", words[1], "--no-prediction").out)
        run = self.train(self.saving(budgets__host="3MiB", checkpoint__memory="64MiB"))
        self.assertEqual(run.code, DOES_NOT_FIT, run.err)
        self.assertIn("checkpoint.memory", run.err)

    def test_int8_moments(self):
        """Also where a tensor is written in several pieces."""
        self.comes_back({"optimizer__moments": "int8", "precision": "bf16"})

    def test_muon(self):
        """A matrix has one moment, and is one chunk."""
        self.comes_back({"optimizer__method": "muon", "precision": "bf16"})

    def comes_back(self, state):
        whole = self.whole(**state)
        saved = []
        for placement in (RAM, NVME):
            self.ok(self.killed(self.saving(placement, **state), steps=4, signal_=signal.SIGTERM))
            step = int(self.steps()[-1][-8:])
            for other in (RAM, MIXED, NVME):
                resumed = self.ok(self.train(self.run_config(other, **state), "--resume", self.step(step)))
                self.assertEqual(resumed.hashes, whole.hashes, (placement, other))
            first = self.run_config(MIXED if placement else NVME, steps=step, schedule__total_steps=STEPS,
                                    checkpoint__dir=self.path(f"{self.name}-other"), **state)
            self.ok(self.train(first))
            saved.append(self.diff(self.step(step), self.step(step, self.path(f"{self.name}-other"))))
            shutil.rmtree(self.path(f"{self.name}-other"))
            shutil.rmtree(self.dir_)
        self.assertTrue(all(one["equal"] for one in saved), saved)

    # ------------------------------------------------------------ elsewhere

    def test_elsewhere(self):
        """Its arrays are the same, bit for bit, and so is what follows on as many ranks."""
        for state in ({"precision": "bf16"},
                      {"precision": "bf16", "optimizer__master": "split", "optimizer__moments": "bf16"},
                      {"precision": "fp16", "optimizer__master": "split", "optimizer__moments": "int8"}):
            with self.subTest(**state):
                whole = self.whole(**state)
                self.ok(self.killed(self.saving(**state), steps=4, signal_=signal.SIGTERM))
                start = os.path.join(self.dir_, self.steps()[-1])
                first = int(start[-8:])
                for placement in (MIXED, NVME):
                    run = self.ok(self.train(self.run_config(placement, **state), "--resume", start))
                    self.assertEqual(run.hashes, whole.hashes)
                for stage in (1, 3):
                    other = self.path(f"{self.name}-ranks")
                    config = self.run_config(NVME if stage == 3 else RAM, zero__stage=stage, steps=first,
                                             schedule__total_steps=STEPS, checkpoint__dir=other, **state)
                    self.ok(self.train(config, "--resume", start, through=self.mpi(2)))
                    self.assertTrue(self.diff(start, self.step(first, other))["equal"])
                    shutil.rmtree(other)
                shutil.rmtree(self.dir_)

    def test_ranks(self):
        """Killed on two ranks, it has the bits of two; one rank goes on from what two wrote."""
        mpi = self.mpi(2)
        muon = {"optimizer__method": "muon", "optimizer__moments": "int8"}
        for stage, placement, codecs, state in (
                (3, NVME, {}, {}), (1, RAM, {}, {}), (1, NVME, {"gradients": "int8"}, {}),
                (3, RAM, {"gradients": "int4", "weights": "int8"}, {}), (3, NVME, {}, muon), (2, RAM, {}, muon)):
            with self.subTest(stage=stage, codecs=codecs, **state):
                state = {"precision": "bf16", **state}
                ranks = {"zero__stage": stage, "zero__compress": codecs, **state}
                whole = self.ok(self.train(self.run_config(**ranks), through=mpi))
                config = self.saving(placement, **ranks)
                self.killed(config, steps=5, through=mpi)
                last = self.ok(self.train(config, *self.latest(), through=mpi))
                self.assertEqual(last.hashes, whole.hashes)
                there = self.step(STEPS)
                other = self.path(f"{self.name}-one")
                one = self.run_config(checkpoint__dir=other, **state)
                self.ok(self.train(one, "--resume", there))
                self.assertTrue(self.diff(there, self.step(STEPS, other))["equal"])
                shutil.rmtree(other)
                shutil.rmtree(self.dir_)

    def test_onebit_adam(self):
        """Killed before its second moment stays, at the border and after it; and what another number of ranks may do."""
        mpi = self.mpi(2)
        onebit = {"optimizer__method": "onebit_adam", "optimizer__freeze_step": 5, "precision": "bf16",
                  "batch__micro_batches": 6}
        for stage, placement, kills in ((0, RAM, (4, 2, 2)), (3, NVME, (5,)), (1, MIXED, (7,))):
            with self.subTest(stage=stage):
                ranks = {"zero__stage": stage, **onebit}
                whole = self.ok(self.train(self.run_config(**ranks), through=mpi))
                config = self.saving(placement, checkpoint__every=1, checkpoint__keep={"last": STEPS}, **ranks)
                for steps in kills:
                    self.killed(config, *self.latest(), steps=steps, through=mpi)
                last = self.ok(self.train(config, *self.latest(), through=mpi))
                self.assertEqual(last.hashes, whole.hashes)
                if stage != 0:
                    shutil.rmtree(self.dir_)
                    continue
                self.ok(self.ferry("ckpt", "verify", self.step(STEPS)))
                elsewhere = self.run_config(NVME, **{**ranks, "zero__stage": 3})
                self.assertEqual(self.ok(self.train(elsewhere, "--resume", self.step(8), through=mpi)).hashes, whole.hashes)
                for name in ("error_of_rank_0", "error_of_rank_1", "owner_error", "exp_avg", "exp_avg_sq"):
                    path = os.path.join(self.step(8), name + ".safetensors")
                    self.flip(path, os.path.getsize(path) - 5)
                    self.refused(IO, [f"{name}.safetensors: ", "not those that were written", f"--resume {self.step(7)}"],
                                 *self.command(config), "--resume", self.step(8), through=mpi)
                    self.flip(path, os.path.getsize(path) - 5)
                # The errors of ranks are of so many ranks; before, any number may go on.
                self.refused(USAGE, ["another number of ranks", "3 ranks", "2 ranks"],
                             *self.command(config), "--resume", self.step(STEPS), through=self.mpi(3))
                self.refused(USAGE, ["onebit_adam is about what ranks send each other", "2 ranks or more"],
                             *self.command(config))
                early = self.run_config(zero__stage=stage, checkpoint__dir=self.dir_, **onebit)
                self.ok(self.train(early, "--resume", self.step(5), through=self.mpi(3)))
                shutil.rmtree(self.dir_)

    def test_zeroone_adam(self):
        """Killed about every sort of step: gradients in full, signs, and local steps, of which ranks keep their own."""
        mpi = self.mpi(2)
        zeroone = {"optimizer__method": "zeroone_adam", "optimizer__var_freeze_step": 5, "optimizer__var_update_scaler": 2,
                   "precision": "bf16", "batch__micro_batches": 6}
        local = {"optimizer__var_freeze_step": 3, "optimizer__local_step_scaler": 1, "optimizer__local_step_clipper": 4}
        # Gradients travel at steps 1, 2, 3 and 5; with `local` at 1 to 3, and momentum at 4, 5, 9 and 13.
        for stage, placement, more, kills in ((3, NVME, {}, (4, 1)), (0, MIXED, local, (6, 1)), (0, RAM, local, (7, 2, 2))):
            with self.subTest(stage=stage, kills=kills):
                ranks = {"zero__stage": stage, **zeroone, **more}
                whole = self.ok(self.train(self.run_config(**ranks), through=mpi))
                config = self.saving(placement, checkpoint__every=1, checkpoint__keep={"last": STEPS}, **ranks)
                for steps in kills:
                    self.killed(config, *self.latest(), steps=steps, through=mpi)
                last = self.ok(self.train(config, *self.latest(), through=mpi))
                self.assertEqual(last.hashes, whole.hashes)
                for step in (3, 4, 5, 7, 8):
                    elsewhere = self.run_config(MIXED if placement == RAM else RAM, **ranks)
                    again = self.ok(self.train(elsewhere, "--resume", self.step(step), through=mpi))
                    self.assertEqual(again.hashes, whole.hashes, step)
                    losses = [[one["loss"] for one in run.steps if one["step"] > step] for run in (again, whole)]
                    self.assertEqual(*losses)
                self.refused(USAGE, ["another number of ranks", "3 ranks", "2 ranks"],
                             *self.command(config), "--resume", self.step(STEPS), through=self.mpi(3))
                shutil.rmtree(self.dir_)

    def test_onebit_adam_whose_first_step_by_momentum_is_skipped(self):
        """No code was off by anything yet: such a checkpoint has no errors, and nobody misses them."""
        mpi = self.mpi(2)
        steep = {"precision": "fp16", "batch__sequence": 1, "batch__micro_batches": 2, "steps": 5, "seed": 8,
                 "model__norm_eps": 1e-30, "clip_norm": 1e6, "optimizer__lr": 1e-6}
        config = self.saving(**steep, optimizer__method="onebit_adam", optimizer__freeze_step=2, checkpoint__every=1,
                             checkpoint__keep={"last": 5})
        whole = self.ok(self.train(config, through=mpi))
        self.assertEqual([step["skipped"] for step in whole.steps], [False, False, True, False, False])
        for step, has_errors in ((3, False), (4, True)):
            path = self.step(step)
            self.assertEqual("owner_error.safetensors" in os.listdir(path), has_errors)
            shutil.rmtree(self.step(5), ignore_errors=True)
            self.assertEqual(self.ok(self.train(config, "--resume", path, through=mpi)).hashes, whole.hashes)

    # ------------------------------------------------------------ refused

    @staticmethod
    def newer(manifest):
        """The same manifest as a later ferry would write it: with its own version, and a checksum that holds."""
        digits, end = 16, '"\n}\n'
        text = manifest.read_text(encoding="utf-8").replace('"version": 2', '"version": 3')
        body = text[:-digits - len(end)]
        manifest.write_text(f"{body}{xxh3(body.encode())}{end}", encoding="utf-8")

    def test_a_checkpoint_of_version_1(self):
        """Its arrays and files were summed whole: all of it is proved first."""
        whole = self.whole(precision="bf16")
        self.ok(self.killed(self.saving(precision="bf16", checkpoint__every=4), steps=8, signal_=signal.SIGTERM))
        path = pathlib.Path(self.dir_, self.steps()[-1])
        file = path / "manifest.json"
        manifest = json.loads(file.read_text(encoding="utf-8"))
        manifest["version"] = 1
        for shard in manifest["shards"]:
            data = (path / shard["file"]).read_bytes()
            shard["checksum"], at = xxh3(data), len(data) - sum(array["bytes"] for array in shard["arrays"])
            for array in shard["arrays"]:
                del array["pieces"]
                array["checksum"], at = xxh3(data[at:at + array["bytes"]]), at + array["bytes"]
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        body = text[:-16 - len('"\n}\n')]
        file.write_text(f'{body}{xxh3(body.encode())}"\n}}\n', encoding="utf-8")
        self.ok(self.ferry("ckpt", "verify", path))
        words = self.command(self.saving(precision="bf16", checkpoint__every=4), "--resume", path)
        name = os.path.join(path, "exp_avg.safetensors")
        self.flip(name, os.path.getsize(name) - 5)
        self.refused(IO, ["exp_avg.safetensors"], *words)
        self.flip(name, os.path.getsize(name) - 5)
        self.assertEqual(self.ok(self.ferry(*words)).hashes, whole.hashes)

    def test_damage_is_named(self):
        config = self.saving(precision="bf16", checkpoint__keep={"last": 3})
        self.ok(self.train(config))
        newest, before = self.step(12), self.step(10)
        words = self.command(config, "--resume", "latest")
        self.ok(self.ferry("ckpt", "verify", self.dir_))
        for name in sorted(os.listdir(newest)):
            path = os.path.join(newest, name)
            size = os.path.getsize(path)
            at, tensor = size // 2, ""
            if name.endswith(".safetensors"):
                entries, data = self.header(path)
                tensor, entry = sorted((k, v) for k, v in entries.items() if k != "__metadata__")[5]
                at = data + entry["data_offsets"][0] + 5
            with self.subTest(name):
                self.flip(path, at)
                found = self.ferry("ckpt", "verify", newest, "--json")
                self.assertEqual(found.code, IO)
                self.assertIn(f"{name}" + (f": {tensor}" if tensor else ""), found.lines[0]["faults"][0])
                self.refused(IO, [name, tensor, f"--resume {before}"], *words)
                self.flip(path, at)
                with open(path, "rb") as file:
                    contents = file.read()
                os.truncate(path, size - 3)
                self.refused(IO, [name, f"--resume {before}"], *words)
                if name != "manifest.json":
                    os.remove(path)
                    self.refused(IO, [name, "missing", f"--resume {before}"], *words)
                with open(path, "wb") as file:
                    file.write(contents)
        self.ok(self.ferry("ckpt", "verify", self.dir_))

    def test_what_may_not_be_read_is_no_damage(self):
        """Neither a right that is missing nor a limit of the process says anything about the bytes."""
        self.ok(self.train(self.saving(precision="bf16")))
        there = self.step(STEPS)
        through = ()
        if os.geteuid() == 0:  # root without what makes it read everything
            through = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
            if not shutil.which(through[0]) or subprocess.run([*through, "true"], check=False).returncode:
                self.skipTest("root cannot give up its rights here")
        for name in ("manifest.json", "model.safetensors", "exp_avg.safetensors", "config.json"):
            path = os.path.join(there, name)
            os.chmod(path, 0)
            with self.subTest(name):
                for words in (("verify", there), ("verify", self.dir_), ("diff", self.step(10), there)):
                    run = self.refused(USAGE, [path, "Permission denied"], "ckpt", *words, through=through)
                    self.assertNotIn("damaged", run.out + run.err)
            os.chmod(path, 0o644)
        os.chmod(there, 0)
        run = self.refused(USAGE, [there, "Permission denied"], "ckpt", "verify", there, through=through)
        self.assertNotIn("damaged", run.out + run.err)
        os.chmod(there, 0o755)
        self.ok(self.ferry("ckpt", "verify", self.dir_, through=through))

    def test_too_few_descriptors_for_its_directory(self):
        """Are no word against it, and leave nothing behind."""
        self.ok(self.train(self.saving()))
        config = self.saving(placement=NVME)
        refused = 0
        for most in range(4, 60):
            def limit(most=most):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            run = self.train(config, "--resume", "latest", preexec_fn=limit)
            if run.code == 0:
                break
            refused += 1
            self.assertEqual(run.code, DOES_NOT_FIT, run.err)
            self.assertIn(f"{most} open files of the process (ulimit -n)", run.err)
            self.assertEqual(self.steps(), [f"step-{step:08}" for step in (10, 12)])
        self.assertEqual(run.code, 0, run.err)
        self.assertGreater(refused, 5)
        self.ok(self.ferry("ckpt", "verify", self.dir_))

    def test_a_model_is_proved_too(self):
        """Where `model.path` names a checkpoint, no wrong byte is trained on, evaluated or exported."""
        config = self.saving(precision="bf16")
        self.ok(self.train(config))
        there = self.step(STEPS)
        weights, manifest = os.path.join(there, "model.safetensors"), pathlib.Path(there, "manifest.json")
        entries, data = self.header(weights)
        tensor, entry = sorted((k, v) for k, v in entries.items() if k != "__metadata__")[3]
        tuning = self.run_config(steps=2, precision="bf16", model={"path": there})
        training = self.command(tuning)
        evaluating = ("eval", there, self.path("tokens.bin"), "--set", "batch.sequence=32", "--set", "precision=bf16")
        exporting = ("export", training[1], weights, self.path(f"{self.name}-exported"))
        self.ok(self.ferry(*training))
        value = data + entry["data_offsets"][0] + 6
        for path, at, named in ((weights, value, tensor), (str(manifest), 40, "manifest.json")):
            with self.subTest(path):
                self.flip(path, at)
                for words in (training, evaluating, exporting):
                    self.refused(IO, [path, named], *words)
                self.refused(IO, [path, named], *training, through=self.mpi(2))
                self.flip(path, at)
        with self.subTest("another file of the same length"):
            whole = pathlib.Path(weights).read_bytes()
            one, other = sorted(k for k in entries if k.endswith("layernorm.weight"))[:2]
            self.assertEqual(entries[one]["shape"], entries[other]["shape"])
            swapped = {**entries, one: entries[other], other: entries[one]}
            header = json.dumps(swapped, separators=(",", ":")).encode().ljust(data - 8)
            self.assertEqual(len(header), data - 8)
            pathlib.Path(weights).write_bytes(whole[:8] + header + whole[data:])
            for words in (training, evaluating, exporting):
                self.refused(IO, [weights, "its header", "manifest.json"], *words)
            pathlib.Path(weights).write_bytes(whole)
        description = pathlib.Path(there, "config.json")
        text = description.read_text(encoding="utf-8")
        changed = text.replace('"hidden_act": "silu"', '"hidden_act" : "silu"')
        self.assertNotEqual(changed, text)
        for wrong in (changed, text[:214], "", text.replace("hidden_size", "hidden_sizf")):
            description.write_text(wrong, encoding="utf-8")
            for words in (training, evaluating):
                self.refused(IO, [str(description), "manifest.json"], *words)
        description.write_text(text, encoding="utf-8")
        self.flip(os.path.join(there, "exp_avg.safetensors"), 5000)  # no part of the model
        self.ok(self.ferry(*training))
        # A change that was meant, and a manifest of another program.
        self.flip(weights, value)
        moved = self.path(f"{self.name}-moved")
        shutil.copytree(there, moved)
        for text in (None, "{}", '{"name": "a model of another program"}'):
            os.remove(os.path.join(moved, "manifest.json"))
            if text is None:
                self.ok(self.ferry("eval", moved, *evaluating[2:]))
            pathlib.Path(moved, "manifest.json").write_text(text or "[]", encoding="utf-8")
            self.ok(self.ferry("eval", moved, *evaluating[2:]))

    def test_an_export_checks_what_it_copies(self):
        self.ok(self.train(self.saving(precision="bf16")))
        there, out = self.step(STEPS), self.path(f"{self.name}-out")
        for name, type_ in (("model", "bf16"), ("master", "fp32")):
            path = os.path.join(there, f"{name}.safetensors")
            entries, data = self.header(path)
            tensor, entry = sorted((k, v) for k, v in entries.items() if k != "__metadata__")[3]
            at = data + entry["data_offsets"][0] + 6
            self.flip(path, at)
            self.refused(IO, [path, tensor, "ferry ckpt verify"], "ckpt", "export", there, out, "--export-type", type_)
            self.assertFalse(os.path.exists(out))
            self.flip(path, at)
        description = os.path.join(there, "config.json")
        self.flip(description, 40)
        self.refused(IO, [description], "ckpt", "export", there, out)
        self.flip(description, 40)
        self.flip(os.path.join(there, "exp_avg.safetensors"), 5000)  # not copied
        self.ok(self.ferry("ckpt", "export", there, out))

    def test_what_is_no_whole_checkpoint(self):
        config = self.saving()
        self.ok(self.train(config))
        manifest = pathlib.Path(self.step(12), "manifest.json")
        text = manifest.read_text(encoding="utf-8")
        self.newer(manifest)
        for path in (self.step(12), self.dir_):
            run = self.refused(USAGE, ["version 2"], "ckpt", "verify", path)
            self.assertNotIn("damaged", run.out + run.err)
            self.assertNotIn("ckpt rm", run.err)
        # One wrong digit is damage, and so is what is no file.
        resuming = self.command(config, "--resume", "latest")
        whole = f"--resume {self.step(10)}"
        manifest.write_text(text.replace('"version": 2', '"version": 3'), encoding="utf-8")
        self.refused(IO, ["damaged", whole], *resuming)
        manifest.unlink()
        for make, undo in ((lambda: None, lambda: None), (manifest.mkdir, manifest.rmdir),
                           (lambda: os.mkfifo(manifest), manifest.unlink)):
            make()
            for words in (("ckpt", "verify", self.step(12)), ("ckpt", "verify", self.dir_),
                          ("ckpt", "export", self.dir_, self.path(f"{self.name}-exported"))):
                self.refused(IO, [], *words)
            self.refused(IO, [self.step(12), whole], *resuming)
            # The remedy is one that works.
            run = self.ferry("ckpt", "verify", self.step(12))
            if os.path.lexists(manifest):
                self.assertIn(f"remove {self.step(12)} by hand", run.err)
                self.refused(USAGE, ["manifest.json"], "ckpt", "rm", self.step(12))
            else:
                self.assertIn("ckpt rm removes", run.err)
            # A new run is offered what is whole.
            self.refused(USAGE, ["cannot be read", whole], *self.command(config))
            undo()
        empty = self.path(f"{self.name}-empty/step-00000001")
        os.makedirs(empty)
        self.refused(USAGE, ["manifest"], "ckpt", "verify", empty)
        manifest.write_text(text, encoding="utf-8")
        shard = pathlib.Path(self.step(12), "exp_avg.safetensors")
        shard.unlink()
        os.mkfifo(shard)
        run = self.ferry("ckpt", "verify", self.step(12))
        self.assertEqual(run.code, IO)
        self.assertIn("no regular file", run.out)

    @staticmethod
    def forge(path, change):
        """A manifest that says something else, with its own checksum right."""
        file = pathlib.Path(path, "manifest.json")
        manifest = json.loads(file.read_text(encoding="utf-8"))
        change(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        body = text[:-16 - len('"\n}\n')]
        file.write_text(f'{body}{xxh3(body.encode())}"\n}}\n', encoding="utf-8")

    def append(self, path, name, dtype, shape, data):
        """One more array in exp_avg.safetensors, of at most a piece, and in the manifest."""
        file = pathlib.Path(path, "exp_avg.safetensors")
        entries, at = self.header(file)
        old = file.read_bytes()[at:]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(old), len(old) + len(data)]}
        header = json.dumps(entries).encode()
        before = struct.pack("<Q", len(header)) + header
        file.write_bytes(before + old + data)
        piece = xxh3(data) if data else ""

        def change(manifest):
            shard = next(one for one in manifest["shards"] if one["file"] == file.name)
            shard.update(bytes=len(before + old + data), checksum=xxh3(before))
            shard["arrays"].append({"name": name, "bytes": len(data), "pieces": piece,
                                    "checksum": xxh3(bytes.fromhex(piece)[::-1])})
        self.forge(path, change)

    def test_sizes_that_are_not_the_headers(self):
        """A manifest with other sizes than its shards is damage, whoever reads it."""
        source = self.path(f"{self.name}-source")
        config = self.saving(precision="bf16", checkpoint__dir=source)
        self.ok(self.train(config))
        there, text = self.step(12, source), pathlib.Path(self.step(12, source), "manifest.json").read_text(encoding="utf-8")

        def swap(manifest, file):
            arrays = next(one for one in manifest["shards"] if one["file"] == file)["arrays"]
            other = next(one for one in arrays if one["bytes"] != arrays[0]["bytes"])
            arrays[0]["name"], other["name"] = other["name"], arrays[0]["name"]

        out = self.path(f"{self.name}-exported")
        for file in ("model.safetensors", "exp_avg.safetensors"):
            self.forge(there, lambda manifest, file=file: swap(manifest, file))
            for words in (("ckpt", "diff", there, there), ("ckpt", "export", there, out), ("ckpt", "inspect", there),
                          ["ckpt", "import", self.command(self.saving(precision="bf16"))[1], there],
                          self.command(config, "--resume", "latest")):
                with self.subTest(file=file, words=words[:2]):
                    self.refused(IO, [file, "elsewhere in its shard"], *words)
            run = self.ferry("ckpt", "verify", there)
            self.assertEqual(run.code, IO)
            self.assertIn("elsewhere in its shard", run.out)
            pathlib.Path(there, "manifest.json").write_text(text, encoding="utf-8")

    def test_arrays_of_odd_types_are_compared(self):
        self.ok(self.train(self.saving()))
        one = self.step(12)
        other = self.path(f"{self.name}-other")
        shutil.copytree(one, other)
        for path, last in ((one, b"\1"), (other, b"\2")):
            self.append(path, "none", "F32", [0], b"")
            self.append(path, "odd", "FOO", [1], bytes(1 << 20))
            self.append(path, "vast", "FOO", [1 << 61, 1 << 61], bytes(64) + last)
            self.append(path, "longs", "I64", [2], bytes(15) + last)
        self.ok(self.ferry("ckpt", "verify", one))
        self.assertIn("equal", self.ok(self.ferry("ckpt", "diff", one, one)).out)
        run = self.ferry("ckpt", "diff", one, other)
        self.assertEqual(run.code, IO)
        self.assertEqual(run.out.splitlines(), ["longs: 1 of 2 elements differ", "vast: 1 of 65 bytes differ"])

    def test_a_checkpoint_under_another_steps_name(self):
        config = self.saving()
        self.ok(self.train(config))
        there, other = self.step(12), self.step(99)
        os.rename(there, other)
        for words in (self.command(config, "--resume", "latest"), ("ckpt", "inspect", other + "/")):
            self.refused(USAGE, ["is of step 12", "step 99", f"mv {other} {there}"], *words)
        run = self.ferry("ckpt", "verify", self.dir_)
        self.assertEqual(run.code, IO)
        self.assertIn("is of step 12", run.out)
        self.assertIn(f"{self.step(10)}: whole", run.out)
        self.assertNotIn("ckpt rm", run.err)
        self.assertIn("another step", self.ok(self.ferry("ckpt", "ls", self.dir_)).out)
        lines = self.ok(self.ferry("ckpt", "ls", self.dir_, "--json")).lines
        self.assertEqual(["error" in line for line in lines], [False, True])
        os.rename(other, there)
        self.ok(self.ferry("ckpt", "verify", self.dir_))

    def test_what_is_not_its_own_stays(self):
        """A user's files in a checkpoint, or under its name, survive retention, saving and `ckpt rm`."""
        config = self.saving(checkpoint__keep={"last": 1})
        self.ok(self.killed(self.saving(checkpoint__every=100), steps=3, signal_=signal.SIGTERM))
        first = pathlib.Path(self.dir_, self.steps()[-1])
        own = first / "tokenizer.json"
        own.write_text("{}", encoding="utf-8")
        named = pathlib.Path(self.step(8))
        named.write_text("a thesis", encoding="utf-8")
        directory = pathlib.Path(self.step(10))
        directory.mkdir()
        (directory / "notes.txt").write_text("mine", encoding="utf-8")
        run = self.train(config, "--resume", str(first))
        self.ok(run)
        for name in ("tokenizer.json", "step-00000008", "notes.txt"):
            self.assertIn(name, run.err)
        self.assertEqual(own.read_text(encoding="utf-8"), "{}")
        self.assertEqual(named.read_text(encoding="utf-8"), "a thesis")
        self.assertEqual(os.listdir(directory), ["notes.txt"])
        self.refused(USAGE, ["tokenizer.json"], "ckpt", "rm", str(first))
        own.unlink()
        self.ok(self.ferry("ckpt", "rm", str(first), f"{first}/", str(first)))
        self.assertFalse(first.exists())

    def test_a_refused_start_moves_nothing(self):
        config = self.saving()
        self.ok(self.train(config))
        before = self.steps()
        for code, changes in ((USAGE, {"data__tokens": self.path("nothing.bin")}), (DOES_NOT_FIT, {"budgets__host": "4KiB"})):
            self.assertEqual(self.train(self.saving(**changes)).code, code)
            self.assertEqual(self.steps(), before)
        os.makedirs(os.path.join(self.dir_, "before-1"))
        for name in before:
            os.rename(os.path.join(self.dir_, name), os.path.join(self.dir_, "before-1", name))
        for words in (("ckpt", "ls", self.dir_), self.command(config, "--resume", "latest")):
            self.refused(USAGE, [os.path.join(self.dir_, "before-1")], *words)

    def test_drafts_of_a_killed_export_are_no_model(self):
        self.ok(self.train(self.saving()))
        there = self.path(f"{self.name}-exported")
        os.makedirs(there)
        pathlib.Path(there, "model.safetensors.154afaa8dc478d6b.part").write_text("half", encoding="utf-8")
        self.ok(self.ferry("ckpt", "export", self.dir_, there))
        self.assertEqual(sorted(os.listdir(there)), ["config.json", "model.safetensors"])

    def test_what_cannot_be_resumed(self):
        config = self.saving()
        self.refused(USAGE, ["nothing to resume", self.dir_], *self.command(config, "--resume", "latest"))
        self.killed(config, steps=5)
        at = [name for name in self.steps() if not name.endswith(".part")][-1]  # the kill may leave a draft
        self.refused(USAGE, ["another configuration", "optimizer.lr = 0.01", "optimizer.lr = 0.003"],
                     *self.command(self.saving(optimizer__lr=0.01), "--resume"))
        self.refused(USAGE, [f"--set schedule.total_steps={STEPS}"], *self.command(self.saving(steps=40), "--resume"))
        self.refused(USAGE, ["--resume", "empty"], *self.command(config, "--resume", ""))
        self.refused(USAGE, ["steps = 1", at], *self.command(self.saving(steps=1, schedule__total_steps=STEPS), "--resume"))
        self.refused(USAGE, ["no such directory"], *self.command(config, "--resume", self.path("nowhere")))
        manifest = os.path.join(self.dir_, at, "manifest.json")
        self.newer(pathlib.Path(manifest))
        self.refused(USAGE, ["version 3", "version 2", manifest], *self.command(config, "--resume"))
        self.refused(USAGE, ["checkpoint.dir is not given"], *self.command(self.run_config(checkpoint__every=3)))
        for wrong in ("-1", "1.5", "10 apples", "0s", "0.1s", "minutes"):
            self.refused(USAGE, ["checkpoint.every"], *self.command(config, "--set", f"checkpoint.every={wrong}"))

    def test_started_again(self):
        """After a crash it says what goes on; what a finished run left is never in the way."""
        config = self.saving()
        self.killed(config, steps=5)
        run = self.refused(USAGE, ["did not come to its end", "--resume latest", self.dir_], *self.command(config))
        self.assertEqual(run.out, "")
        self.ok(self.train(config, "--resume", "latest"))
        again = self.ok(self.train(config))
        self.assertIn("before-1", again.err)
        self.assertEqual(self.steps(), ["before-1", "step-00000010", "step-00000012"])
        self.assertTrue(self.diff(self.step(12), self.step(12, os.path.join(self.dir_, "before-1")))["equal"])

    def test_a_clock_that_goes_backwards(self):
        """Names go by the step: the newest of them counts, and stays, whatever its files' times say."""
        config = self.saving(checkpoint__every=3)
        self.killed(config, steps=7)
        saved = [name for name in self.steps() if re.fullmatch(r"step-\d{8}", name)]
        newest = int(saved[-1][-8:])
        for age, name in enumerate(reversed(saved)):
            for place, _, files in os.walk(os.path.join(self.dir_, name)):
                for path in (place, *(os.path.join(place, file) for file in files)):
                    os.utime(path, (2e9 + 1e9 * age, 2e9 + 1e9 * age))
        last = self.ok(self.train(config, "--resume", "latest"))
        self.assertEqual(last.steps[0]["step"], newest)
        self.assertEqual(self.steps(), ["step-00000009", "step-00000012"])

    def test_durable_steps_become_a_checkpoint(self):
        """Of a run that died and of one that ended; both go on as they would have."""
        whole = self.whole(**BF16)
        config = self.run_config(NVME, checkpoint__durable_steps=True, **BF16)
        self.killed(config, steps=5)
        drive = config["budgets"]["nvme"][0]["path"]
        self.refused(USAGE, ["durable steps are there", "ferry ckpt import"], "ckpt", "export", drive, self.path("exported"))
        words = [*self.command(config)[1:2], drive, "--set", f"checkpoint.dir={self.dir_}"]
        self.refused(USAGE, ["--step"], "ckpt", "import", *words, "--step", "3")
        other = self.command({**config, "checkpoint": {"dir": self.dir_}})[1]
        self.refused(USAGE, ["not of this configuration", "checkpoint.durable_steps"], "ckpt", "import", other, drive)
        made = self.ok(self.ferry("ckpt", "import", *words, "--json")).lines[0]
        self.assertGreaterEqual(made["step"], 3)
        self.ok(self.ferry("ckpt", "verify", self.dir_))
        resumed = self.ok(self.train(self.run_config(**BF16), "--resume", self.dir_))
        self.assertEqual(resumed.hashes, whole.hashes)
        self.assertEqual(self.ok(self.train(config, "--resume")).hashes, whole.hashes)
        # At its end, too.
        made = self.ok(self.ferry("ckpt", "import", *words, "--json")).lines[0]
        self.assertEqual((made["step"], self.steps()[-1]), (STEPS, "step-00000012"))
        exported, out = self.path(f"{self.name}-exported"), self.path(f"{self.name}-trained")
        self.ok(self.ferry("ckpt", "export", self.dir_, exported))
        self.ok(self.train(self.run_config(**BF16), "--export", out))
        self.assertEqual(*(self.tensors(os.path.join(place, "model.safetensors")) for place in (exported, out)))

    def test_what_it_costs_is_planned_and_traced(self):
        """The plan says what training waits for; the trace has each piece, read, copied aside and written."""
        trace = self.path(f"{self.name}.json")
        run = self.ok(self.train(self.saving(MIXED, checkpoint__every=4), "--trace", trace))
        saved = [line for line in run.lines if "checkpoint" in line]
        with open(trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "thread_name"}
        groups = {e["pid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "process_name"}
        found = {}
        for e in events:
            if e.get("ph") == "X" and groups.get(e["pid"]) == "checkpoint":
                key = names[e["pid"], e["tid"]], e["name"], e["args"]["step"]
                found[key] = found.get(key, 0) + e["args"].get("bytes", 0)
        for line in saved:
            bytes_ = [found[key, what, line["step"]] for key, what in (("read", "read"), ("read", "copy"), ("write", "write"))]
            self.assertEqual(len(set(bytes_)), 1, bytes_)
            self.assertTrue(0.9 * line["bytes"] < bytes_[0] < line["bytes"], (bytes_, line))
            self.assertEqual(found["write", "flush", line["step"]], 0)
        words = self.command(self.saving(MIXED, checkpoint__every=4))
        planned = self.ok(self.ferry("plan", words[1], "--json")).lines[0]["checkpoint"]
        self.assertEqual(planned["bytes"], saved[0]["bytes"])
        self.assertTrue(0 < planned["stored_bytes"] < planned["bytes"])
        self.assertGreater(planned["write_seconds"], 0)
        self.assertGreater(planned["waited_seconds"], 0)
        self.assertEqual(len(self.steps()), 2)  # nothing is left of what was measured
        self.assertIn("of which training waits", self.ok(self.ferry("plan", words[1])).out)
        unmeasured = self.ok(self.ferry("plan", words[1], "--json", "--no-prediction")).lines[0]["checkpoint"]
        self.assertEqual((unmeasured["write_seconds"], unmeasured["waited_seconds"]), (None, None))

    def test_two_runs_in_one_directory(self):
        config = self.saving(steps=2000, checkpoint__every=2000)
        process = subprocess.Popen([FERRY, *self.command(config)], text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        process.stdout.readline()
        self.refused(USAGE, ["another run writes its checkpoints there", self.dir_], *self.command(config))

    # ------------------------------------------------------------ what fails

    def test_what_cannot_be_written(self):
        """The run goes on or stops as it was told; what was there before stays."""
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        whole = self.whole()
        for word, steps in (("go_on", STEPS), ("stop", 6)):
            with self.subTest(word):
                config = self.saving(checkpoint__every=6, checkpoint__on_failure=word, checkpoint__memory=0)
                self.ok(self.killed(self.saving(checkpoint__every=100), steps=1, signal_=signal.SIGTERM))
                before = self.steps()
                run = self.train(config, "--resume", "latest", preexec_fn=limit)
                self.assertEqual(run.code, IO, run.err)
                self.assertIn("File too large", run.err)
                self.assertEqual(run.steps[-1]["step"], steps)
                self.assertEqual(self.steps(), before)
                if word == "go_on":
                    self.assertEqual(run.hashes, whole.hashes)
                shutil.rmtree(self.dir_)

    def test_a_full_disk(self):
        os.makedirs(self.dir_)
        mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=2M none "$0" && exec "$@"', self.dir_]
        if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode != 0:
            self.skipTest("nothing can be mounted here")
        run = self.train(self.saving(), through=mount)
        self.assertEqual(run.code, IO, run.err)
        self.assertRegex(run.err, r"(?s)no room for the checkpoint of step \d+.*\d+ bytes missing")
        self.assertEqual(run.steps[-1]["step"], STEPS)

    def test_directory_removed_meanwhile(self):
        config = self.saving(steps=300, checkpoint__every=200)
        process = subprocess.Popen([FERRY, *self.command(config)], text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        process.stdout.readline()
        shutil.rmtree(self.dir_)
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, IO, err)
        self.assertIn("was removed or replaced during the run", err)
        self.assertEqual(Run(0, out, err).steps[-1]["step"], 300)
        self.assertFalse(os.path.exists(self.dir_))

    # ------------------------------------------------------------ the tool

    def test_tool(self):
        self.ok(self.train(self.saving(precision="bf16"), "--weights-out", self.path("w.safetensors")))
        there = self.step(STEPS)
        listed = self.ok(self.ferry("ckpt", "ls", self.dir_, "--json")).lines
        self.assertEqual([line["step"] for line in listed], [10, 12])
        self.assertTrue(listed[-1]["finished"])
        self.assertIn(there, self.ok(self.ferry("ckpt", "ls", self.dir_)).out)
        inspected = self.ok(self.ferry("ckpt", "inspect", there, "--json")).lines[0]
        kinds = {a["name"].replace("model.norm.weight", ""): a["dtype"] for a in inspected["arrays"]
                 if a["name"].startswith("model.norm.weight")}
        self.assertEqual(kinds, {"": "BF16", ".master": "F32", ".exp_avg": "F32", ".exp_avg_sq": "F32"})
        self.assertEqual(inspected["tokens"], STEPS * 4 * 2 * 32)
        found = self.ferry("ckpt", "diff", self.step(10), there, "--json")
        self.assertEqual(found.code, IO)
        self.assertFalse(found.lines[0]["equal"])
        with open("/dev/full", "w", encoding="utf-8") as full:
            lost = subprocess.run([FERRY, "ckpt", "diff", self.step(10), there], stdout=full, text=True,
                                  stderr=subprocess.PIPE, check=False)
        self.assertEqual(lost.returncode, IO)
        self.assertRegex(lost.stderr, r"(?s)standard output.*the checkpoints differ")
        for end in ("/", "/.", "//"):
            self.ok(self.ferry("ckpt", "inspect", there + end))
        # The master of the checkpoint is the weight that the run wrote; any dtype comes from it.
        self.ok(self.ferry("ckpt", "export", there, self.path("out32"), "--export-type", "fp32"))
        mine, at = self.header(self.path("out32/model.safetensors"))
        theirs, there_at = self.header(self.path("w.safetensors"))
        with open(self.path("out32/model.safetensors"), "rb") as one, open(self.path("w.safetensors"), "rb") as other:
            for name, entry in theirs.items():
                if name == "__metadata__":
                    continue
                self.assertEqual(mine[name]["shape"], entry["shape"])
                begin, end = mine[name]["data_offsets"]
                one.seek(at + begin)
                other.seek(there_at + entry["data_offsets"][0])
                self.assertEqual(one.read(end - begin), other.read(end - begin), name)
        self.ok(self.ferry("ckpt", "export", self.dir_, self.path("out16"), "--shard-size", "100kB"))
        self.assertIn("model.safetensors.index.json", os.listdir(self.path("out16")))
        # The export and the checkpoint itself are models to start from.
        for model in (self.path("out16"), there):
            self.ok(self.ferry("eval", model, self.path("tokens.bin"), "--set", "batch.sequence=32",
                               "--set", "precision=bf16"))
        self.refused(USAGE, ["--all"], "ckpt", "rm", self.dir_)
        self.ok(self.ferry("ckpt", "rm", self.step(10)))
        own = os.path.join(self.step(11), "thesis.txt")
        os.makedirs(os.path.dirname(own))
        pathlib.Path(own).write_text("mine", encoding="utf-8")
        os.symlink("/etc", self.step(9))
        for _ in range(2):
            self.refused(USAGE, ["no checkpoint"], "ckpt", "rm", self.dir_, "--all")
            self.assertTrue(os.path.exists(own) and os.path.exists(self.step(12)))
            if os.path.islink(self.step(9)):
                os.unlink(self.step(9))
        shutil.rmtree(os.path.dirname(own))
        self.ok(self.ferry("ckpt", "rm", self.dir_, "--all", "--json"))
        self.assertEqual(self.steps(), [])
        self.assertEqual(self.refused(USAGE, ["no checkpoint is there"], "ckpt", "ls", self.dir_).out, "")


class ImportTest(Saving):
    """ferry ckpt import: of checkpoints whose settings change, and of a directory of safetensors."""

    AT = 6  # the step that is imported

    def source(self, **state):
        """A checkpoint in the middle of a run that comes to its end."""
        there = self.path(f"{self.name}-source")
        shutil.rmtree(there, ignore_errors=True)
        config = self.run_config(steps=self.AT, schedule__total_steps=STEPS, checkpoint__dir=there, **state)
        self.ok(self.train(config))
        return self.step(self.AT, there)

    def plain(self, source, *without, step=AT):
        """The same as another program would leave it: no manifest, a trainer's state."""
        there = self.path(f"{self.name}-plain")
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(source, there)
        for name in ("manifest.json", *without):
            os.remove(os.path.join(there, name))
        if step is not None:
            with open(os.path.join(there, "trainer_state.json"), "w", encoding="utf-8") as file:
                json.dump({"global_step": step, "log_history": []}, file)
        return there

    def importing(self, config, source, *words):
        _, name, *_ = self.command(config)
        return ["ckpt", "import", name, source, *words]

    def imported(self, config, source, *words):
        run = self.ok(self.ferry(*self.importing(config, source, "--json", *words)))
        return run.lines[0]["checkpoint"]

    def change(self, path, change):
        tensors = self.tensors(path)
        change(tensors)
        write_tensors(path, tensors)

    def arrays(self, step):
        """Of a checkpoint, all of its files."""
        return {name: array for file in sorted(os.listdir(step)) if file.endswith(".safetensors")
                for name, array in self.tensors(os.path.join(step, file)).items()}

    # ------------------------------------------------------------ the same bits

    def test_under_its_own_configuration(self):
        for placement, state in ((RAM, {}), (NVME, BF16), (MIXED, {"precision": "bf16", "optimizer__master": "split",
                                                                  "optimizer__moments": "bf16"}),
                                 (RAM, {**SGD, **BF16}), (RAM, {"optimizer__method": "lion", "model__tie_embeddings": True}),
                                 (NVME, {"optimizer__moments": "int8", **BF16}), (RAM, {"precision": "fp16"}),
                                 (MIXED, {"freeze": ["model.layers.1.*"], **BF16})):
            with self.subTest(placement=placement, **state):
                whole = self.whole(**state)
                source = self.source(**state)
                config = self.saving(placement, **state)
                there = self.imported(config, source)
                self.assertEqual(there, self.step(self.AT))
                self.ok(self.ferry("ckpt", "verify", there))
                self.assertEqual(self.arrays(there), self.arrays(source))
                resumed = self.ok(self.train(config, "--resume", "latest"))
                self.assertEqual(resumed.hashes, whole.hashes)
                self.assertEqual(resumed.steps[0]["step"], self.AT + 1)
                shutil.rmtree(self.dir_)

    def test_another_programs_directory(self):
        """Without a manifest, its moments in several files, some tensors without the base model's prefix."""
        whole, source = self.whole(**BF16), self.source(**BF16)
        there = self.plain(source)
        for kind in ("exp_avg", "master"):
            path = os.path.join(there, f"{kind}.safetensors")
            tensors = list(self.tensors(path).items())
            half = len(tensors) // 2
            for number, part in enumerate((tensors[:half], tensors[half:]), start=1):
                bare = {name.removeprefix("model."): array for name, array in part}
                write_tensors(os.path.join(there, f"{kind}-{number:05}-of-00002.safetensors"), bare)
            os.remove(path)
        config = self.saving(**BF16)
        self.assertEqual(self.arrays(self.imported(config, there)), self.arrays(source))
        listed = self.ok(self.ferry("ckpt", "ls", self.dir_, "--json")).lines[0]
        self.assertEqual((listed["step"], listed["loss"]), (self.AT, None))
        self.assertEqual(self.ok(self.train(config, "--resume", "latest")).hashes, whole.hashes)

    def test_another_learning_rate(self):
        source = self.source()
        config = self.saving(optimizer__lr=0.001)
        self.refused(USAGE, ["another configuration"], *self.command(config, "--resume", source))
        there = self.imported(config, source)
        self.assertEqual(self.arrays(there), self.arrays(source))
        resumed = self.ok(self.train(config, "--resume", "latest"))
        other = self.whole()
        lr = {step["step"]: step["lr"] for step in other.steps}
        for step in resumed.steps:
            self.assertAlmostEqual(step["lr"], lr[step["step"]] / 3, places=9)
        self.assertNotEqual(resumed.hashes, other.hashes)

    def test_another_optimizer(self):
        """Adam's moments are AdamW's. Others mean something else, and SGD without momentum has none."""
        source = self.source(**BF16)
        for method in ({"optimizer__method": "lion"}, SGD, {"optimizer__method": "adagrad", "optimizer__betas": None}):
            self.refused(USAGE, ["another optimizer's", "adamw", method["optimizer__method"], "--step 0"],
                         *self.importing(self.saving(**BF16, **method), source))
        for method in ({"optimizer__method": "adam"}, {**SGD, "optimizer__momentum": 0}):
            config = self.saving(**BF16, **method)
            self.imported(config, source)
            self.assertEqual(self.ok(self.train(config, "--resume", "latest")).steps[0]["step"], self.AT + 1)
            shutil.rmtree(self.dir_)

    def test_moments_of_another_type(self):
        source = self.source(**BF16)
        before = self.arrays(source)
        rounded = lambda bits: (bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff
        after = self.arrays(self.imported(self.saving(optimizer__moments="bf16", **BF16), source))
        for name, (dtype, shape, values) in before.items():
            if not name.endswith((".exp_avg", ".exp_avg_sq")):
                self.assertEqual(after[name], (dtype, shape, values))
                continue
            self.assertEqual(after[name][:2], ("BF16", shape))
            count = len(values) // 4
            self.assertEqual(list(struct.unpack(f"<{count}H", after[name][2])),
                             [rounded(bits) for bits in struct.unpack(f"<{count}I", values)], name)
        shutil.rmtree(self.dir_)
        config = self.saving(optimizer__moments="int8", **BF16)
        after = self.arrays(self.imported(config, source))
        coded = [name for name, array in after.items() if array[0] == "U8"]
        self.assertTrue(coded)
        for name in coded:
            values = struct.unpack(f"<{len(before[name][2]) // 4}f", before[name][2])
            largest = [max(map(abs, values[at:at + 256])) for at in range(0, len(values), 256)]
            scales = after[name.replace(".exp_avg", ".exp_avg_scales") if name.endswith(".exp_avg")
                           else name.replace(".exp_avg_sq", ".exp_avg_sq_scales")][2]
            self.assertEqual(list(struct.unpack(f"<{len(scales) // 4}f", scales)), largest, name)
        self.ok(self.train(config, "--resume", "latest"))

    def test_without_moments(self):
        """Weights alone, of an export: moments begin at zero, and the master is the weight."""
        source = self.source(**BF16)
        self.ok(self.ferry("ckpt", "export", source, self.path(f"{self.name}-tuned"), "--export-type", "fp32"))
        config = self.saving(**BF16)
        there = self.imported(config, self.path(f"{self.name}-tuned"), "--step", "0")
        self.assertEqual(there, self.step(0))
        before, after = self.arrays(source), self.arrays(there)
        for name, (_, _, values) in after.items():
            if name.endswith((".exp_avg", ".exp_avg_sq")):
                self.assertEqual(values, bytes(len(values)), name)
            else:
                self.assertEqual(after[name], before[name], name)
        self.assertEqual(self.ok(self.train(config, "--resume", "latest")).steps[0]["step"], 1)

    def test_without_moments_in_the_middle(self):
        """The schedule goes on, and bias correction begins: the first update is Adam's first, one learning rate an element."""
        source = self.source()
        there = self.plain(source, "exp_avg.safetensors", "exp_avg_sq.safetensors")
        free = {"clip_norm": 0, "optimizer__weight_decay": 0, "optimizer__betas": [0.9, 0.999]}
        config = self.saving(checkpoint__every=1, checkpoint__keep={"last": 20}, **free)
        self.imported(config, there)
        said = self.ok(self.ferry("ckpt", "inspect", self.step(self.AT), "--json")).lines[0]
        self.assertEqual((said["updates"], said["moment_updates"]), (self.AT, 0))
        self.assertIn(f"{self.AT} updates (0 of moments)", self.ok(self.ferry("ckpt", "inspect", self.step(self.AT))).out)
        whole = self.ok(self.train(config, "--resume", "latest"))
        lr = whole.steps[0]["lr"]
        schedule = self.ok(self.train(self.run_config(**free)))
        self.assertEqual([step["lr"] for step in whole.steps], [step["lr"] for step in schedule.steps[self.AT:]])
        before, after = self.arrays(self.step(self.AT)), self.arrays(self.step(self.AT + 1))
        for name in [name for name in before if name.endswith("_proj.weight")]:
            was, now = (struct.unpack(f"<{len(one[name][2]) // 4}f", one[name][2]) for one in (before, after))
            moved = sorted(abs(a - b) for a, b in zip(was, now))
            self.assertLessEqual(moved[-1], lr * 1.01, name)
            self.assertGreater(moved[len(moved) // 2], lr * 0.98, name)
        # Both counts outlive a kill, of a checkpoint and of durable steps.
        for placement, words in ((RAM, {}), (NVME, {"checkpoint__durable_steps": True})):
            shutil.rmtree(self.dir_)
            config = self.saving(placement, **free, **words)
            self.imported(config, there)
            self.killed(config, "--resume", "latest", steps=3)
            last = self.ok(self.train(config, *(("--resume",) if words else self.latest())))
            self.assertEqual(last.hashes, whole.hashes)

    def test_another_step_leaves_moments_as_they_are(self):
        there = self.imported(self.saving(), self.source(), "--step", "3")
        said = self.ok(self.ferry("ckpt", "inspect", there, "--json")).lines[0]
        self.assertEqual((said["step"], said["updates"], said["moment_updates"]), (3, 3, self.AT))

    def test_int8_moments(self):
        """Codes stay codes, and become numbers where the run keeps those."""
        source = self.source(optimizer__moments="int8", **BF16)
        before = self.arrays(source)
        shares = {}
        for name, first in ((".exp_avg", 1), (".exp_avg_sq", 2)):
            above = [10.0 ** (decade - 6) * (0.1 + 0.9 * (2 * i + 1) / (2 * (first << decade)))
                     for decade in range(7) for i in range(first << decade)]
            shares[name] = ([-share for share in reversed(above)] if first == 1 else []) + [0, *above, 1]
        after = self.arrays(self.imported(self.saving(**BF16), self.plain(source)))
        coded = [name for name, array in before.items() if array[0] == "U8"]
        self.assertTrue(coded)
        for name in coded:
            self.assertEqual(after[name][:2], ("F32", before[name][1]))
            scales = before[name.replace(".exp_avg_sq", ".exp_avg_sq_scales") if name.endswith("_sq") else name + "_scales"][2]
            scales = struct.unpack(f"<{len(scales) // 4}f", scales)
            values = struct.unpack(f"<{len(before[name][2])}f", after[name][2])
            for i, (code, value) in enumerate(zip(before[name][2], values)):
                wanted = shares[name[name.rindex("."):]][code] * scales[i // 256]
                self.assertLessEqual(abs(value - wanted), 3e-7 * abs(wanted), (name, i))
        # Of one tensor numbers, of the others codes: all are codes again.
        shutil.rmtree(self.dir_)
        there = self.plain(source)
        name = next(name for name in coded if name.endswith(".exp_avg"))
        self.change(os.path.join(there, "exp_avg.safetensors"), lambda tensors: tensors.update({name: after[name]}))
        self.change(os.path.join(there, "exp_avg_scales.safetensors"), lambda tensors: tensors.pop(name + "_scales"))
        again = self.arrays(self.imported(self.saving(optimizer__moments="int8", **BF16), there))
        for other in before:
            if other not in (name, name + "_scales"):
                self.assertEqual(again[other], before[other], other)
        self.assertEqual(again[name][:2], before[name][:2])

    def test_a_loss_scale(self):
        fp16 = {"precision": "fp16"}
        source = self.source(**fp16)
        config = self.saving(optimizer__lr=0.001, **fp16)
        said = self.ok(self.ferry("ckpt", "inspect", self.imported(config, source), "--json")).lines[0]
        self.assertEqual(said["loss_scale"], {"value": 65536, "good": self.AT, "skipped": 0})
        shutil.rmtree(self.dir_)
        there = self.plain(source)
        state = {"global_step": self.AT, "loss_scale": 1024}
        pathlib.Path(there, "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
        self.imported(config, there)
        self.assertEqual({step["loss_scale"] for step in self.ok(self.train(config, "--resume", "latest")).steps}, {1024})
        # Another type has none.
        shutil.rmtree(self.dir_)
        self.imported(self.saving(**BF16), source)
        self.assertEqual({s["loss_scale"] for s in self.ok(self.train(self.saving(**BF16), "--resume", "latest")).steps}, {1})
        for wrong in (0.5, 3, -2, "high", 0):
            pathlib.Path(there, "trainer_state.json").write_text(json.dumps({**state, "loss_scale": wrong}), encoding="utf-8")
            self.refused(USAGE, ["power of two", "loss_scale"], *self.importing(config, there))

    # ------------------------------------------------------------ refused

    def test_bad_state(self):
        source = self.source(**BF16)
        name = "model.layers.1.mlp.up_proj.weight"

        def to(path, change):
            return lambda there: self.change(os.path.join(there, path), change)

        def renamed(tensors):
            tensors["model.layers.9.mlp.up_proj.weight.exp_avg"] = tensors.pop(name + ".exp_avg")

        def transposed(tensors):
            dtype, shape, values = tensors[name + ".exp_avg_sq"]
            tensors[name + ".exp_avg_sq"] = (dtype, shape[::-1], values)

        def master_transposed(tensors):
            dtype, shape, values = tensors[name + ".master"]
            tensors[name + ".master"] = (dtype, shape[::-1], values)

        def twice(there):
            shutil.copy(os.path.join(there, "exp_avg.safetensors"), os.path.join(there, "exp_avg_too.safetensors"))

        def shorter(there):
            path = os.path.join(there, "exp_avg.safetensors")
            os.truncate(path, os.path.getsize(path) - 100)

        def of_integers(tensors):
            dtype, shape, values = tensors[name + ".exp_avg"]
            tensors[name + ".exp_avg"] = ("I32", shape, values)

        for change, code, texts in (
                (to("exp_avg.safetensors", lambda t: t.pop(name + ".exp_avg")), USAGE,
                 ["lacks an array", name + ".exp_avg", "missing"]),
                (lambda there: os.remove(os.path.join(there, "exp_avg_sq.safetensors")), USAGE, ["lacks an array", ".exp_avg_sq"]),
                (to("master.safetensors", lambda t: t.pop(name + ".master")), USAGE, ["lacks an array", name + ".master"]),
                (to("exp_avg.safetensors", renamed), USAGE, ["a tensor that the model does not have", "layers.9"]),
                (to("exp_avg_sq.safetensors", transposed), USAGE, ["another shape", name, "[64, 160]", "[160, 64]"]),
                (to("master.safetensors", master_transposed), USAGE, ["another shape", name, "[64, 160]", "[160, 64]"]),
                (to("exp_avg.safetensors", of_integers), USAGE, ["of a type that is not read", name, "I32"]),
                (twice, USAGE, ["in two files"]),
                (shorter, IO, ["exp_avg.safetensors"])):
            for precision in ("bf16", "fp32"):
                with self.subTest(texts=texts, precision=precision):
                    shutil.rmtree(self.dir_, ignore_errors=True)
                    there = self.plain(source)
                    change(there)
                    self.refused(code, texts, *self.importing(self.saving(precision=precision), there))
                    self.assertEqual([step for step in self.steps() if step.startswith("step")], [])
        there = self.plain(source)
        self.ok(self.ferry(*self.importing(self.saving(**BF16), there)))

    def test_which_step(self):
        source = self.source(**BF16)
        config = self.saving(**BF16)
        there = self.plain(source, step=None)
        self.refused(USAGE, ["not known which step", "--step"], *self.importing(config, there))
        self.refused(USAGE, ["beyond the run's last", "step 13", "steps 12"], *self.importing(config, there, "--step", "13"))
        run = self.refused(USAGE, ["--step", "0 to 1000000000000000"], *self.importing(config, there, "--step", "-1"))
        self.assertLess(len(run.err), 400)
        for text, said in (('{"global_step": -3}', "whole number"), ('{"global_step": "7"}', "whole number"), ("[6]", "no object"),
                           ("{", "trainer_state.json")):
            pathlib.Path(there, "trainer_state.json").write_text(text, encoding="utf-8")
            self.refused(USAGE, [said], *self.importing(config, there))
        pathlib.Path(there, "trainer_state.json").write_text('{"global_step": 6, "optimizer_step": 5}', encoding="utf-8")
        said = self.ok(self.ferry(*self.importing(config, there, "--json"))).lines[0]
        self.assertEqual((said["step"], said["updates"]), (6, 5))

    def test_what_is_not_imported(self):
        source = self.source(**BF16)
        config = self.saving(**BF16)
        for pickle, made in (("optimizer.pt", pathlib.Path.touch), ("global_step6", pathlib.Path.mkdir),
                             ("mp_rank_00_model_states.pt", pathlib.Path.touch)):
            there = self.plain(source)
            made(pathlib.Path(there, pickle))
            self.refused(USAGE, ["pickles", pickle, "python3 -m ferry_offload.convert", there], *self.importing(config, there))
        self.refused(USAGE, ["no such directory"], *self.importing(config, self.path("nowhere")))
        self.refused(USAGE, ["no place for the checkpoint", "checkpoint.dir"], *self.importing(self.run_config(**BF16), source))
        self.flip(os.path.join(source, "exp_avg.safetensors"), os.path.getsize(os.path.join(source, "exp_avg.safetensors")) - 9)
        self.refused(IO, ["exp_avg.safetensors"], *self.importing(config, source))
        self.assertEqual([step for step in self.steps() if step.startswith("step")], [])

    def test_into_a_directory_of_another_run(self):
        source = self.source(**BF16)
        config = self.saving(**BF16)
        self.killed(config, steps=5)
        before = self.steps()
        self.refused(USAGE, ["did not come to its end", self.dir_], *self.importing(config, source))
        self.assertEqual(self.steps(), before)

    def test_codes_that_say_nothing(self):
        source = self.source(optimizer__moments="int8", **BF16)
        there = self.plain(source, "exp_avg_scales.safetensors")
        self.refused(USAGE, ["codes of moments have no scales", ".exp_avg_scales"], *self.importing(self.saving(**BF16), there))
        there = self.plain(source)
        path = os.path.join(there, "exp_avg_scales.safetensors")
        name = sorted(self.tensors(path))[0]
        self.change(path, lambda tensors: tensors.update({name: ("F32", [1], tensors[name][2][:4])}))
        self.refused(USAGE, ["another shape", name], *self.importing(self.saving(**BF16), there))


if __name__ == "__main__":
    unittest.main()

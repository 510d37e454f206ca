"""Checkpoints: a run that was stopped or killed and goes on has the bits of one that never was, elsewhere too;
what is damaged is named, and the tool says what is there."""

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

from harness import FERRY, IO, USAGE, FerryTest, Run

STEPS = 12
RAM = {}
MIXED = {"swap__state_on_nvme": 0.5, "swap__chunk_elements": 8192}
NVME = {"swap__state_on_nvme": 1.0, "swap__chunk_elements": 4096}
SGD = {"optimizer__method": "sgd", "optimizer__momentum": 0.9, "optimizer__betas": None}


class CheckpointTest(FerryTest):
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

    def killed(self, config, *arguments, steps, signal_=signal.SIGKILL, through=()):
        process = subprocess.Popen([*through, FERRY, *self.command(config, *arguments)], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out = ""
        while out.count('"loss"') < steps:
            line = process.stdout.readline()
            self.assertTrue(line, "it ended before")
            out += line
        if through and signal_ == signal.SIGKILL:
            self.kill_ranks()  # they outlive an mpirun that is killed
        process.send_signal(signal_)
        rest, err = process.communicate(timeout=60)
        text = out + rest
        return Run(process.returncode, text if process.returncode == 0 else text.rpartition("\n")[0], err)

    def kill_ranks(self):
        """Every process that has a file of this test in its command."""
        for entry in os.listdir("/proc"):
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if self.path("").encode() in file.read():
                        os.kill(int(entry), signal.SIGKILL)
            except (OSError, ValueError):
                pass  # it has ended, or is no process

    def same_as(self, whole, *runs):
        self.assertEqual(self.losses(*runs), self.losses(whole))
        self.assertEqual(runs[-1].hashes[-1], whole.hashes[-1])

    def latest(self):
        """After a kill: there may be nothing yet."""
        there = any(re.fullmatch(r"step-\d{8}", name) for name in self.steps())
        return ("--resume", "latest") if there else ()

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

    def test_int8_moments(self):
        """Also where a tensor is written in several pieces."""
        state = {"optimizer__moments": "int8", "precision": "bf16"}
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

    def mpi(self, ranks):
        if not shutil.which("mpirun"):
            self.skipTest("there is no mpirun")
        return ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks))

    def diff(self, one, other):
        run = self.ferry("ckpt", "diff", one, other, "--json")
        self.assertIn(run.code, (0, IO), run.err)
        return run.lines[0]

    def test_elsewhere(self):
        """Its arrays are the same, bit for bit, and so is what follows on as many ranks."""
        for state in ({"precision": "bf16"},
                      {"precision": "bf16", "optimizer__master": "split", "optimizer__moments": "bf16"}):
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
        for stage, placement in ((3, NVME), (1, RAM)):
            with self.subTest(stage=stage):
                whole = self.ok(self.train(self.run_config(zero__stage=stage, precision="bf16"), through=mpi))
                config = self.saving(placement, zero__stage=stage, precision="bf16")
                self.killed(config, steps=5, through=mpi)
                last = self.ok(self.train(config, *self.latest(), through=mpi))
                self.assertEqual(last.hashes, whole.hashes)
                there = self.step(STEPS)
                other = self.path(f"{self.name}-one")
                one = self.run_config(precision="bf16", checkpoint__dir=other)
                self.ok(self.train(one, "--resume", there))
                self.assertTrue(self.diff(there, self.step(STEPS, other))["equal"])
                shutil.rmtree(other)
                shutil.rmtree(self.dir_)

    # ------------------------------------------------------------ refused

    def refused(self, code, texts, *words, **options):
        run = self.ferry(*words, **options)
        self.assertEqual(run.code, code, run.err)
        for text in texts:
            self.assertIn(text, run.err)
        return run

    @staticmethod
    def flip(path, at):
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))

    def header(self, path):
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            return json.loads(file.read(length)), 8 + length

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
        description = pathlib.Path(there, "config.json")
        text = description.read_text(encoding="utf-8")
        changed = text.replace('"hidden_act": "silu"', '"hidden_act" : "silu"')
        self.assertNotEqual(changed, text)
        description.write_text(changed[:-1] if changed.endswith("\n") else changed, encoding="utf-8")
        self.refused(IO, [str(description)], *training)
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

    def test_what_is_no_whole_checkpoint(self):
        config = self.saving()
        self.ok(self.train(config))
        manifest = pathlib.Path(self.step(12), "manifest.json")
        text = manifest.read_text(encoding="utf-8")
        manifest.write_text(text.replace('"version": 1', '"version": 2'), encoding="utf-8")
        for path in (self.step(12), self.dir_):
            run = self.refused(USAGE, ["version 2"], "ckpt", "verify", path)
            self.assertNotIn("damaged", run.out + run.err)
            self.assertNotIn("ckpt rm", run.err)
        manifest.unlink()
        self.refused(USAGE, ["manifest"], "ckpt", "verify", self.step(12))
        self.refused(IO, [self.step(12), "has no manifest", f"--resume {self.step(10)}"],
                     *self.command(config, "--resume", "latest"))
        manifest.write_text(text, encoding="utf-8")
        shard = pathlib.Path(self.step(12), "exp_avg.safetensors")
        shard.unlink()
        os.mkfifo(shard)
        run = self.ferry("ckpt", "verify", self.step(12))
        self.assertEqual(run.code, IO)
        self.assertIn("no regular file", run.out)

    def test_what_cannot_be_resumed(self):
        config = self.saving()
        self.refused(USAGE, ["nothing to resume", self.dir_], *self.command(config, "--resume", "latest"))
        self.killed(config, steps=5)
        at = self.steps()[-1]
        self.refused(USAGE, ["another configuration", "optimizer.lr = 0.01", "optimizer.lr = 0.003"],
                     *self.command(self.saving(optimizer__lr=0.01), "--resume"))
        self.refused(USAGE, ["steps = 1", at], *self.command(self.saving(steps=1, schedule__total_steps=STEPS), "--resume"))
        self.refused(USAGE, ["no such directory"], *self.command(config, "--resume", self.path("nowhere")))
        manifest = os.path.join(self.dir_, at, "manifest.json")
        with open(manifest, encoding="utf-8") as file:
            text = file.read()
        with open(manifest, "w", encoding="utf-8") as file:
            file.write(text.replace('"version": 1', '"version": 2'))
        self.refused(USAGE, ["version 2", "version 1", manifest], *self.command(config, "--resume"))
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
                config = self.saving(checkpoint__every=6, checkpoint__on_failure=word)
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
        # What is exported, and the checkpoint itself, are models to start from.
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


if __name__ == "__main__":
    unittest.main()

"""Checkpoints are saved, and runs go on from them: one that was stopped or killed has the bits of one that never was,
elsewhere too; what cannot be saved or resumed is said."""

import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import unittest

from checkpoints import BF16, MIXED, NVME, RAM, SGD, STEPS, Saving
from harness import DOES_NOT_FIT, FERRY, IO, USAGE, Run, in_quick, start


class SavingTest(Saving):
    # ------------------------------------------------------------ the same bits

    def test_killed_anywhere(self):
        rng = random.Random(3)
        fp16 = {"precision": "fp16", "evaluate__every": 3, "evaluate__micro_batches": 2}
        runs = (
            (RAM, {}), (MIXED, fp16), (NVME, {"precision": "bf16", "swap__speculate": "all"}),
            (NVME, {"precision": "bf16", "optimizer__master": "split", "optimizer__moments": "bf16"}),
            (MIXED, {**SGD, "precision": "bf16"}), (RAM, {"optimizer__method": "lion"}),
            (MIXED, {"optimizer__method": "adagrad", "optimizer__betas": None, "optimizer__moments": "bf16",
                     "optimizer__initial_accumulator": 0.1}),
            (RAM, {"optimizer__method": "adam", "freeze": ["model.layers.1.*"], "model__tie_embeddings": True}))
        for placement, changes in in_quick(runs, (1, 3, 7)):
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
        for placement, memory in ((MIXED, "100kB"), (NVME, "auto"), (NVME, 0)):  # updates hand it over, and wait for room
            with self.subTest(placement=placement, memory=memory):
                run = self.ok(self.train(self.saving(placement, checkpoint__every=1, checkpoint__memory=memory)))
                self.same_as(whole, run)
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

    def test_each_rank_copies_its_part(self):
        """By updates that hand it over, or while the next step is taken; without room it waits. The bits are the same."""
        mpi, trace = self.mpi(2), self.path(f"{self.name}.json")
        whole = self.ok(self.train(self.run_config(), through=mpi))
        runs = ((3, RAM, "auto"), (0, RAM, "auto"), (1, MIXED, "auto"), (3, NVME, "auto"), (2, NVME, "auto"),
                (3, NVME, "100kB"), (1, RAM, "100kB"), (3, MIXED, 0))
        for stage, placement, memory in in_quick(runs, (0, 2, 5)):
            with self.subTest(stage=stage, placement=placement, memory=memory):
                config = self.saving(placement, checkpoint__every=1, checkpoint__memory=memory, zero__stage=stage)
                run = self.ok(self.train(config, "--trace", trace, through=mpi))
                self.same_as(whole, run)
                self.ok(self.ferry("ckpt", "verify", self.dir_))
                moved = self.moved(trace)
                ours, all_ = moved["read", "copy", STEPS // 2], moved["write", "write", STEPS // 2]
                self.assertTrue(0.3 * all_ < ours < 0.7 * all_, moved)  # the other rank has the rest
                shutil.rmtree(self.dir_)
        words = self.command(self.saving(checkpoint__memory="auto"))
        planned = self.ok(self.ferry("plan", words[1], "--ranks", "2", "--json", "--no-prediction")).lines[0]["checkpoint"]
        self.assertEqual(planned["held_bytes"], planned["bytes"])

    def test_one_rank_is_killed_while_all_send(self):
        """The others end too, and what has a checkpoint's name is whole."""
        mpi, long = self.mpi(2), {"steps": 60, "zero__stage": 3}
        whole = self.ok(self.train(self.run_config(**long), through=mpi))
        for placement, rank in in_quick(((RAM, 0), (RAM, 1), (NVME, 0), (NVME, 1)), [3]):
            with self.subTest(placement=placement, rank=rank):
                words = self.command(self.saving(placement, checkpoint__every=1, **long))
                process = start([*mpi, FERRY, *words])
                for line in iter(process.stdout.readline, ""):
                    if '"loss"' in line and json.loads(line)["step"] == 5:
                        break
                os.kill(self.ranks_of(words[1])[rank], signal.SIGKILL)
                _, err = process.communicate(timeout=90)
                self.assertNotEqual(process.returncode, 0, err)
                self.assertTrue(self.latest())
                for step in self.steps():
                    if re.fullmatch(r"step-\d{8}", step):
                        self.ok(self.ferry("ckpt", "verify", os.path.join(self.dir_, step)))
                last = self.ok(self.train(self.saving(placement, checkpoint__every=30, **long), *self.latest(), through=mpi))
                self.assertEqual(last.hashes, whole.hashes)
                shutil.rmtree(self.dir_)

    def test_int8_moments(self):
        """Also where a tensor is written in several stripes."""
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
        states = ({"precision": "bf16"},
                  {"precision": "bf16", "optimizer__master": "split", "optimizer__moments": "bf16"},
                  {"precision": "fp16", "optimizer__master": "split", "optimizer__moments": "int8"})
        for state in in_quick(states, [2]):
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
        runs = ((3, NVME, {}, {}), (1, RAM, {}, {}), (1, NVME, {"gradients": "int8"}, {}),
                (3, RAM, {"gradients": "int4", "weights": "int8"}, {}), (3, NVME, {}, muon), (2, RAM, {}, muon))
        for stage, placement, codecs, state in in_quick(runs, (3, 5)):
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

    def test_hosts(self):
        """Four ranks that combine gradients in hosts of two, killed; what they keep in the host is made anew."""
        mpi = self.mpi(4)
        hosts = {"zero__stage": 3, "zero__compress": {"gradients": "int4", "weights": "int8", "block": 64}, "precision": "bf16",
                 "zero__ranks_per_host": 2, "zero__second_shard": "host", "batch__micro_batches": 4}
        whole = self.ok(self.train(self.run_config(**hosts), through=mpi))
        kept, not_kept = (self.saving(RAM, **{**hosts, "zero__second_shard": shard}) for shard in ("host", "none"))
        self.killed(kept, steps=4, through=mpi)
        self.killed(not_kept, *self.latest(), steps=2, through=mpi)
        last = self.ok(self.train(kept, *self.latest(), through=mpi))
        self.assertEqual(last.hashes, whole.hashes)

    def test_onebit_adam(self):
        """Killed before its second moment stays, at the border and after it; and what another number of ranks may do."""
        mpi = self.mpi(2)
        onebit = {"optimizer__method": "onebit_adam", "optimizer__freeze_step": 5, "precision": "bf16",
                  "batch__micro_batches": 6}
        for stage, placement, kills in in_quick(((0, RAM, (4, 2, 2)), (3, NVME, (5,)), (1, MIXED, (7,))), [0]):
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
                files = ("error_of_rank_0", "error_of_rank_1", "owner_error", "exp_avg", "exp_avg_sq")
                for name in in_quick(files, (1, 2)):
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
        cases = ((3, NVME, {}, (4, 1)), (0, MIXED, local, (6, 1)), (0, RAM, local, (7, 2, 2)))
        for stage, placement, more, kills in in_quick(cases, [1]):
            with self.subTest(stage=stage, kills=kills):
                ranks = {"zero__stage": stage, **zeroone, **more}
                whole = self.ok(self.train(self.run_config(**ranks), through=mpi))
                config = self.saving(placement, checkpoint__every=1, checkpoint__keep={"last": STEPS}, **ranks)
                for steps in kills:
                    self.killed(config, *self.latest(), steps=steps, through=mpi)
                last = self.ok(self.train(config, *self.latest(), through=mpi))
                self.assertEqual(last.hashes, whole.hashes)
                for step in in_quick((3, 4, 5, 7, 8), (1, 3)):
                    elsewhere = self.run_config(MIXED if placement == RAM else RAM, **ranks)
                    again = self.ok(self.train(elsewhere, "--resume", self.step(step), through=mpi))
                    self.assertEqual(again.hashes, whole.hashes, step)
                    losses = [[one["loss"] for one in run.steps if one["step"] > step] for run in (again, whole)]
                    self.assertEqual(*losses)
                self.refused(USAGE, ["another number of ranks", "3 ranks", "2 ranks"],
                             *self.command(config), "--resume", self.step(STEPS), through=self.mpi(3))
                shutil.rmtree(self.dir_)

    def test_checkpoints_of_local_steps_are_removed(self):
        """All that ranks keep of their own is ferry's: the next one takes its place, and `ckpt rm` the last."""
        mpi = self.mpi(2)
        config = self.saving(checkpoint__every=1, checkpoint__keep={"last": 2}, precision="bf16", batch__micro_batches=6,
                             optimizer__method="zeroone_adam", optimizer__var_freeze_step=3, optimizer__var_update_scaler=2,
                             optimizer__local_step_scaler=1, optimizer__local_step_clipper=4, zero__stage=0, steps=8)
        self.ok(self.train(config, through=mpi))
        self.assertEqual(self.steps(), ["step-00000007", "step-00000008"])
        self.assertIn("moved_of_rank_1.safetensors", os.listdir(self.step(7)))
        again = self.ok(self.train(config, "--resume", self.step(7), through=mpi))  # saves step 8 once more
        self.assertNotIn("not only one", again.err)
        self.assertEqual(self.ferry("ckpt", "rm", self.step(8)).code, 0)
        self.assertEqual(self.steps(), ["step-00000007"])

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

    # ------------------------------------------------------------ what is refused

    def test_what_cannot_be_resumed(self):
        config = self.saving()
        self.refused(USAGE, ["nothing to resume", self.dir_], *self.command(config, "--resume", "latest"))
        self.killed(config, steps=5)
        at = [name for name in self.steps() if not name.endswith(".part")][-1]  # the kill may leave a draft
        self.refused(USAGE, ["another configuration", "optimizer.lr = 0.01", "optimizer.lr = 0.003"],
                     *self.command(self.saving(optimizer__lr=0.01), "--resume"))
        for key, was, now in (("moments", "fp32", "int8"), ("moments", "fp32", "bf16"), ("method", "adamw", "muon")):
            self.refused(USAGE, ["another configuration", f"optimizer.{key} = {now}", f"optimizer.{key} = {was}"],
                         *self.command(self.saving(**{f"optimizer__{key}": now}), "--resume"))
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

    def moved(self, trace):
        """Bytes in a trace's rows of checkpoints, by row, what was done, and step."""
        with open(trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "thread_name"}
        groups = {e["pid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "process_name"}
        found = {}
        for e in events:
            if e.get("ph") == "X" and groups.get(e["pid"]) == "checkpoint":
                key = names[e["pid"], e["tid"]], e["name"], e["args"]["step"]
                found[key] = found.get(key, 0) + e["args"].get("bytes", 0)
        return found

    def test_what_it_costs_is_planned_and_traced(self):
        """The plan says what training waits for; the trace has each stripe, read, copied aside and written."""
        trace = self.path(f"{self.name}.json")
        run = self.ok(self.train(self.saving(MIXED, checkpoint__every=4), "--trace", trace))
        saved = [line for line in run.lines if "checkpoint" in line]
        found = self.moved(trace)
        for line in saved:
            bytes_ = [found[key, what, line["step"]] for key, what in (("read", "read"), ("read", "copy"), ("write", "write"))]
            self.assertEqual(len(set(bytes_)), 1, bytes_)
            self.assertTrue(0.9 * line["bytes"] < bytes_[0] < line["bytes"], (bytes_, line))
            self.assertEqual(found["write", "flush", line["step"]], 0)
        words = self.command(self.saving(MIXED, checkpoint__every=4))
        planned = self.ok(self.ferry("plan", words[1], "--json")).lines[0]["checkpoint"]
        self.assertEqual(planned["bytes"], saved[0]["bytes"])
        self.assertEqual(planned["stored_bytes"], 0)  # updates hand it over
        self.assertGreater(planned["write_seconds"], 0)
        self.assertGreater(planned["waited_seconds"], 0)  # updates wait while it is copied
        self.assertGreaterEqual(planned["slowed_seconds"], 0)
        self.assertEqual(len(self.steps()), 2)  # nothing is left of what was measured
        self.assertIn("of which training waits", self.ok(self.ferry("plan", words[1])).out)
        no_room = self.command(self.saving(checkpoint__every=4, checkpoint__memory=0))
        planned = self.ok(self.ferry("plan", no_room[1], "--json")).lines[0]["checkpoint"]
        self.assertGreater(planned["waited_seconds"], 0)
        self.assertGreaterEqual(planned["slowed_seconds"], planned["waited_seconds"])
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
        mount = self.on_tmpfs(self.dir_, "size=2M")
        run = self.train(self.saving(), through=mount)
        self.assertEqual(run.code, IO, run.err)
        self.assertRegex(run.err, r"(?s)no room for the checkpoint of step \d+.*\d+ bytes missing")
        self.assertEqual(run.steps[-1]["step"], STEPS)

    def test_a_full_disk_under_ranks(self):
        """The first rank cannot write what the others send: they send it all the same, and training goes on."""
        mpi = self.mpi(2)
        os.makedirs(self.dir_)
        mount = self.on_tmpfs(self.dir_, "size=2M")
        for placement in (RAM, NVME):
            run = self.train(self.saving(placement, zero__stage=3), through=(*mount, *mpi))
            self.assertEqual(run.code, IO, run.err)
            self.assertRegex(run.err, r"(?s)no room for the checkpoint of step \d+.*\d+ bytes missing")
            self.assertEqual(run.steps[-1]["step"], STEPS)
            self.assertEqual(run.hashes, self.ok(self.train(self.run_config(zero__stage=3), through=mpi)).hashes)

    def test_a_file_system_without_inodes(self):
        """There are bytes, and no file can be made."""
        os.makedirs(self.dir_)
        mount = self.on_tmpfs(self.dir_, "size=64M,nr_inodes=4")
        run = self.train(self.saving(), through=mount)
        self.assertEqual(run.code, IO, run.err)
        self.assertIn("No space left on device", run.err)
        self.assertEqual(run.steps[-1]["step"], STEPS)

    def test_a_failure_behind_the_step(self):
        """Training has gone on when it is known, with memory for what was not written."""
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        run = self.train(self.saving(RAM, checkpoint__every=3, checkpoint__memory="4MiB"), preexec_fn=limit)
        self.assertEqual(run.code, IO, run.err)
        self.assertGreaterEqual(run.err.count("the run goes on"), 3)
        self.assertEqual(run.hashes, self.whole().hashes)
        self.assertEqual(os.listdir(self.dir_), [])

    def test_files_of_two_checkpoints(self):
        """As a copy leaves them that was stopped, or a disk that lost its power: whole files of another step, and zeros."""
        self.ok(self.train(self.saving(checkpoint__every=6)))
        older, newer = self.step(6), self.step(STEPS)
        kept = self.path("kept-newer")
        shutil.copytree(newer, kept)
        for name in ("master.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors"):
            if not os.path.exists(os.path.join(newer, name)):
                continue
            for damage in ("of another step", "zeros"):
                with self.subTest(name, damage=damage):
                    file = os.path.join(newer, name)
                    if damage == "zeros":
                        size = os.path.getsize(file)
                        os.truncate(file, size // 2)
                        os.truncate(file, size)
                    else:
                        shutil.copyfile(os.path.join(older, name), file)
                    run = self.train(self.saving(checkpoint__every=6), "--resume", "latest")
                    self.assertEqual(run.code, IO, run.err)
                    for text in (name, older):
                        self.assertIn(text, run.err)
                    verified = self.ferry("ckpt", "verify", newer)
                    self.assertEqual(verified.code, IO, verified.err)
                    self.assertIn(name, verified.out + verified.err)
                    shutil.copyfile(os.path.join(kept, name), file)
        self.ok(self.ferry("ckpt", "verify", newer))

    def test_directory_removed_meanwhile(self):
        config = self.saving(steps=300, checkpoint__every=200, batch__micro_batches=1)
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


if __name__ == "__main__":
    unittest.main()

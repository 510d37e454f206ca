"""Durable steps of several ranks: what is left of a run that ended, and what goes on from it."""

import collections
import json
import os
import random
import re
import shutil
import signal
import time
import unittest

from harness import FERRY, IO, USAGE, in_quick, start
from ranks import ENVIRONMENT, MPIRUN, Ranks


class DurableTest(Ranks):
    def killed_ranks(self, number, config, *arguments, steps, which=None, seconds=0.0):
        """Starts a run, and kills all of its ranks so many seconds after so many steps, or one of them. With ("apart", rank)
        all are killed a while after that one was stopped: the others may have come a durable step further."""
        words = self.command(config, *arguments)
        process = start([*MPIRUN, "-n", str(number), FERRY, *words], env=ENVIRONMENT)
        out = ""
        while out.count('"loss"') < steps:
            line = process.stdout.readline()
            self.assertTrue(line, "it ended before: " + process.stderr.read() if not line else "")
            out += line
        time.sleep(seconds)
        if isinstance(which, tuple):
            os.kill(self.ranks_of(words[1])[which[1]], signal.SIGSTOP)
            time.sleep(0.3)
        if which is None or isinstance(which, tuple):
            self.kill_all_ranks()
        else:
            os.kill(self.ranks_of(words[1])[which], signal.SIGKILL)
        rest, _ = process.communicate(timeout=120)
        self.assertNotEqual(process.returncode, 0)
        return [json.loads(line) for line in (out + rest).rpartition("\n")[0].splitlines() if '"loss"' in line]

    def empty_drive(self):
        """Of durable steps alone: what a run keeps there refuses the next one."""
        shutil.rmtree(self.path("durable"), ignore_errors=True)
        os.mkdir(self.path("durable"))

    def test_durable_steps_survive_kills(self):
        rng = random.Random(7)
        runs = ((2, (None, 1, ("apart", 0), 0, ("apart", 1)), {"zero__stage": 3}),
                (2, (0, None), {"zero__stage": 0, "precision": "bf16", "optimizer__master": "split"}),
                # A rank's weights of the others' shards come from their owners' state again.
                (2, (None, ("apart", 1), 0), {"zero__stage": 1, "freeze": ["model.layers.1.*"], "precision": "bf16"}),
                (3, (2, ("apart", 0), None), {"zero__stage": 2, "precision": "bf16", "optimizer__master": "split"}),
                (4, (3, ("apart", 2), None), {"zero__stage": 3, "precision": "fp16"}))
        for number, kills, changes in in_quick(runs, (1, 2)):
            with self.subTest(ranks=number, **changes):
                whole = self.ranks(number, self.config(steps=16, **changes))
                self.assert_trained(whole)
                losses = {line["step"]: line["loss"] for line in whole.steps}
                self.empty_drive()
                config = self.config(steps=16, checkpoint__durable_steps=True, budgets__nvme=[self.nvme(name="durable")],
                                     budgets__host=f"{number * 600}KiB", swap__chunk_elements=8192, **changes)
                for turn, which in enumerate(kills):
                    resume = ["--resume"] if turn > 0 else []
                    for line in self.killed_ranks(number, config, *resume, steps=3, which=which,
                                                  seconds=rng.uniform(0, 0.05)):
                        self.assertEqual(line["loss"], losses[line["step"]], line)
                run = self.ranks(number, config, "--resume")
                self.assert_trained(run)
                self.assertEqual(run.hashes, whole.hashes)
                for line in run.steps:
                    self.assertEqual(line["loss"], losses[line["step"]], line)

    def test_durable_steps_of_ranks_are_found(self):
        """By the name of their path, and by what they were kept in."""
        self.empty_drive()
        config = self.config(steps=8, zero__stage=3, checkpoint__durable_steps=True, budgets__nvme=[self.nvme(name="durable")],
                             budgets__host="1200KiB", swap__chunk_elements=8192, swap__speculate="all")
        self.killed_ranks(2, config, steps=3)
        drive = config["budgets"]["nvme"][0]["path"]
        refused = self.ranks(2, {**config, "optimizer": {**config["optimizer"], "moments": "bf16"}}, "--resume", drive)
        self.assertEqual(refused.code, USAGE, refused.err)
        for text in ("its state is kept in other formats", "the run has optimizer.moments = fp32"):
            self.assertIn(text, refused.err)
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            has_two = " avx512vl " in file.read()  # sets of kernels, of which ferry takes the newer by itself
        other = {"OPENBLAS_CORETYPE": "Haswell"} if has_two and "OPENBLAS_CORETYPE" not in os.environ else {}
        run = self.train(config, "--resume", drive, through=[*MPIRUN, "-n", "2"], env={**ENVIRONMENT, **other})
        self.assert_trained(run)
        self.assertEqual("goes on with them" in run.err, bool(other), run.err)
        self.assertEqual(run.err.count('swap.speculate = "all" does nothing'), 1, run.err)
        self.assertIn("resumed after step", run.err)

    def test_a_rank_that_lost_a_slot_takes_the_others_back(self):
        """Blocks of one rank's state are damaged. All ranks go on from a step that is whole everywhere, or none does; frozen
        weights, which lie in slots of their own, come from the model again."""
        self.empty_drive()
        changes = {"zero__stage": 3, "freeze": ["model.layers.1.*"], "precision": "bf16", "optimizer__master": "split"}
        whole = self.ranks(2, self.config(steps=16, **changes))
        config = self.config(steps=16, checkpoint__durable_steps=True, budgets__nvme=[self.nvme(name="durable")],
                             budgets__host="1200KiB", swap__chunk_elements=8192, **changes)
        self.killed_ranks(2, config, steps=4, which=("apart", 0))
        drive, kept = self.path("durable"), self.path("durable-kept")
        os.rename(drive, kept)
        slots = os.path.join("rank-1", "ferry.slots0")
        size, block = os.path.getsize(os.path.join(kept, slots)), 1 << 12
        ends = collections.Counter()
        for part in range(12):
            shutil.rmtree(drive, ignore_errors=True)
            shutil.copytree(kept, drive)
            with open(os.path.join(drive, slots), "r+b") as file:
                file.seek(size * part // 12 // block * block)
                file.write(b"\xa5" * block)
            run = self.ranks(2, config, "--resume")
            if run.code == 0:
                self.assertEqual(run.hashes, whole.hashes)
                ends["older" if "cannot be used" in run.err else "newest"] += 1
            else:
                self.assertEqual(run.code, IO, run.err)
                self.assertIn(os.path.join("rank-1", "ferry.slots0"), run.err)
                ends["refused"] += 1
        self.assertGreater(ends["older"] + ends["refused"], 0, ends)  # which of them, the moment of the kill decides

    def test_what_a_run_of_more_ranks_left_is_told(self):
        config = self.config(budgets__nvme=[self.nvme(name="shared")], swap__state_on_nvme=1, io__direct=False)
        left = self.path("shared/rank-7")
        os.makedirs(left)
        with open(os.path.join(left, "ferry.slots0"), "wb") as file:
            file.truncate(3 << 20)
        os.makedirs(self.path("shared/rank-of-somebody"))
        for run in (self.ranks(2, config), self.train(config)):
            self.assertEqual(run.code, 0, run.err)
            told = re.findall("(/rank-.*) holds (.*) of a run of more ranks", run.err)
            self.assertEqual(told, [("/rank-7", "3.00 MiB")], run.err)
        self.assertEqual(sorted(os.listdir(self.path("shared"))), ["rank-7", "rank-of-somebody"])


if __name__ == "__main__":
    unittest.main()

"""Several ranks, as a user starts them: mpirun -n N ferry train CONFIG."""

import os
import re
import subprocess
import unittest

from harness import IO, in_quick
from ranks import ENVIRONMENT, MPIRUN, Ranks


class RanksTest(Ranks):
    def test_stages_and_tiers_give_the_same_bits(self):
        for number in in_quick((2, 3), [1]):
            runs = []
            for stage in (0, 1, 2, 3):
                for name, tiers in (("memory", {}), ("tight", self.tight(number)),
                                    ("device", {"swap__state_on_device": 0.6,
                                                "swap__chunk_elements": 8192})):
                    with self.subTest(ranks=number, stage=stage, tiers=name):
                        run = self.ranks(number, self.config(zero__stage=stage, **tiers))
                        self.assert_trained(run)
                        runs.append(run.numbers())
                        self.assertEqual(runs[-1], runs[0])
                        self.assertEqual(run.summary["ranks"], number)
                        self.assertGreater(run.lane("comm"), 0)
                        self.assertEqual(run.lane("nvme read") > 0, name == "tight")
                        on_device, in_host = (run.bytes_of(tier, "optimizer state") for tier in ("device", "host"))
                        # Replicated state is updated by all ranks, from what the host has gathered.
                        self.assertEqual(on_device > 0, name == "device" and stage > 0)
                        self.assertEqual(in_host > 0, name != "tight")  # device: what is left
                        self.assert_left_nothing()

    def test_all_ranks_skip_a_step_whose_gradient_overflows(self):
        """One token a sequence and hardly an epsilon: fp16 overflows until the loss scale has fallen."""
        steep = {"precision": "fp16", "batch__sequence": 1, "batch__micro_batches": 2, "steps": 12,
                 "model__norm_eps": 1e-30, "clip_norm": 1e6}
        runs = []
        for stage in in_quick((0, 1, 2, 3), (0, 3)):
            for tiers in ({}, self.tight(2), {"swap__state_on_device": 0.6}):
                with self.subTest(stage=stage, tiers=tiers):
                    run = self.ranks(2, self.config(zero__stage=stage, **steep, **tiers))
                    self.assert_trained(run)
                    runs.append(run.numbers())
                    self.assertEqual(runs[-1][1], runs[0][1])
                    self.assertEqual([step["skipped"] for step in run.steps],
                                     [step["skipped"] for step in runs[0][0]])
        skipped = [step["skipped"] for step in runs[0][0]]
        self.assertIn(True, skipped)
        self.assertIn(False, skipped)

    def test_what_no_kernel_ran_beside_is_told(self):
        one, two = self.train(self.config()), self.ranks(2, self.config())
        self.assertEqual(one.summary["exposed_comm_seconds"], 0)
        comm = next(lane for lane in two.summary["lanes"] if lane["lane"] == "comm")
        self.assertGreater(comm["exposed_seconds"], 0)  # the outcome, if nothing else
        self.assertLessEqual(comm["exposed_seconds"], comm["busy_seconds"])
        self.assertAlmostEqual(two.summary["exposed_comm_seconds"],
                               comm["exposed_seconds"] / two.summary["steps"])
        for run in (one, two):
            compute = next(lane for lane in run.summary["lanes"] if lane["lane"] == "compute")
            self.assertEqual(compute["exposed_seconds"], 0)
        command = [word for word in self.command(self.config()) if word != "--json"]
        table = self.ferry(*command, through=[*MPIRUN, "-n", "2"], env=ENVIRONMENT)
        self.assertRegex(table.out, r"lane .* exposed s/step")
        self.assertRegex(table.out, r"\n  comm  ")

    def test_each_rank_labels_its_log_lines(self):
        run = self.ranks(2, self.config(steps=1))
        self.assert_trained(run)
        said = [line for line in run.err.splitlines() if "planned by" in line]
        self.assertEqual(sorted(line.split(" info ")[1].split(":")[0] for line in said),
                         ["rank 0", "rank 1"], run.err)
        self.assertNotIn("rank", self.train(self.config(steps=1)).err)

    def test_ranks_that_are_bound_share_the_hosts_memory(self):
        """As mpirun binds them where it is not told otherwise; and all to one core, which is less than
        their part of any host."""
        def said(*through):
            run = self.train(self.config(steps=1), through=through, env=ENVIRONMENT)
            self.assert_trained(run)
            return run.err, re.findall(r"memory limit ([0-9.]+) (\w+),", run.err)
        text, ((whole, unit),) = said()
        cores = sum(map(int, re.findall(r"(\d+) cores, ", text)))  # not their threads
        if cores < 2:
            self.skipTest("one core")
        mpirun = MPIRUN[:-2]
        for name, through, warned in (
                ("unbound", [*MPIRUN, "-n", "2"], False),
                # With two cores that is a rank's part of them; with more, the quota says whether.
                ("core", [*mpirun, "--bind-to", "core", "-n", "2"], False if cores == 2 else None),
                ("one core", [*MPIRUN, "-n", "2", "taskset", "-c", str(min(os.sched_getaffinity(0)))], True)):
            with self.subTest(bound=name):
                text, limits = said(*through)
                self.assertEqual(len(limits), 2, text)
                for limit in limits:
                    self.assertEqual(limit[1], unit)
                    self.assertAlmostEqual(float(limit[0]), float(whole) / 2, delta=0.02)
                if warned is not None:
                    self.assertEqual("start them with mpirun --bind-to none" in text, warned, text)

    def test_cores_are_reserved_before_ranks_share_the_others(self):
        said = self.train(self.config(reserved_cores=[65535])).err
        cores = [int(core) for core in re.search(r"may run on ([0-9, ]+)", said)[1].split(", ")]
        if len(cores) < 2:
            self.skipTest("one core")
        for core in cores[:2]:  # whichever rank's it would be
            with self.subTest(core=core):
                self.assert_trained(self.ranks(2, self.config(steps=1, threads="auto", reserved_cores=[core])))
        run = self.ranks(2, self.config(reserved_cores=cores))
        self.assertNotEqual(run.code, 0)
        self.assertIn("every core is reserved", run.err)

    def test_more_ranks_follow_one(self):
        one = self.train(self.config())
        self.assert_trained(one)
        for number in (2, 4):
            several = self.ranks(number, self.config())
            self.assert_trained(several)
            self.assertEqual(len(several.steps), 4)  # the first rank alone prints
            self.assertEqual(len(several.hashes), 1)
            self.assertAlmostEqual(several.steps[0]["loss"], one.steps[0]["loss"], delta=1e-12)
            for mine, theirs in zip(several.steps, one.steps):
                self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
                self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"], delta=1e-4)
                self.assertEqual(mine["tokens"], theirs["tokens"])
                self.assertEqual(mine["targets"], theirs["targets"])

    def test_evaluation_and_weights_come_from_all_ranks(self):
        changes = {"evaluate__micro_batches": 5, "steps": 2}
        first = self.path("first.safetensors")
        one = self.train(self.config(optimizer__lr=0, **changes), "--weights-out", first)
        self.assert_trained(one)
        for stage in (0, 1, 3):
            mine = self.path(f"stage{stage}.safetensors")
            run = self.ranks(3, self.config(optimizer__lr=0, zero__stage=stage, **changes),
                             "--weights-out", mine)
            self.assert_trained(run)
            self.assertEqual(len(run.evaluations), len(one.evaluations))
            for here, there in zip(run.evaluations, one.evaluations):
                self.assertAlmostEqual(here["evaluation_loss"], there["evaluation_loss"], delta=1e-12)
            with open(first, "rb") as a, open(mine, "rb") as b:
                self.assertEqual(a.read(), b.read())

    def test_weights_that_cannot_be_written_cost_nothing_else(self):
        small = self.path("small")
        os.mkdir(small)
        mounted = ["unshare", "--map-root-user", "--mount", "sh", "-ec",
                   'mount -t tmpfs -o size=8k ferry-test "$1"; shift; exec "$@"', "sh", small]
        if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
            self.skipTest("cannot mount tmpfs here")
        for stage in (0, 3):
            with self.subTest(stage=stage):
                exported, trace = self.path(f"exported{stage}"), self.path(f"trace{stage}.json")
                run = self.train(self.config(zero__stage=stage), "--weights-out", os.path.join(small, "w.st"),
                                 "--export", exported, "--trace", trace,
                                 through=[*mounted, *MPIRUN, "-n", "2"], env=ENVIRONMENT)
                self.assertEqual(run.code, IO, run.err)
                self.assertIn("No space left", run.err)
                self.assertNotIn("lost rank 0: it ended without", run.err)
                self.assertIn("model.safetensors", os.listdir(exported))
                self.assertTrue(os.path.exists(trace))
                self.assertIsNotNone(run.summary)
                self.assertEqual(len(run.hashes), 1)

    def test_an_export_that_cannot_be_written_costs_nothing_else(self):
        small = self.path("small-export")
        os.mkdir(small)
        # Room for the first shard: the second one fails in the midst of what the ranks give.
        mounted = ["unshare", "--map-root-user", "--mount", "sh", "-ec",
                   'mount -t tmpfs -o size=160k ferry-test "$1"; shift; exec "$@"', "sh", small]
        if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
            self.skipTest("cannot mount tmpfs here")
        for stage in (0, 3):
            with self.subTest(stage=stage):
                weights, trace = self.path(f"beside{stage}.safetensors"), self.path(f"beside{stage}.json")
                run = self.train(self.config(zero__stage=stage), "--export", os.path.join(small, "model"),
                                 "--shard-size", "100KB", "--weights-out", weights, "--trace", trace,
                                 through=[*mounted, *MPIRUN, "-n", "2"], env=ENVIRONMENT)
                self.assertEqual(run.code, IO, run.err)
                for text in ("No space left", "model-00002", "checkpoint.durable_steps"):
                    self.assertIn(text, run.err)
                self.assertNotIn("lost rank 0: it ended without", run.err)
                self.assertTrue(os.path.exists(weights))
                self.assertTrue(os.path.exists(trace))
                self.assertIsNotNone(run.summary)
                self.assertEqual(len(run.hashes), 1)


if __name__ == "__main__":
    unittest.main()

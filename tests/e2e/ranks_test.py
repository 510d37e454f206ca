"""Several ranks, as a user starts them: mpirun -n N ferry train CONFIG."""

import unittest

from harness import in_quick
from ranks import ENVIRONMENT, MPIRUN, Ranks


class RanksTest(Ranks):
    def test_what_all_ranks_would_warn_of_is_said_once(self):
        """Each times updates in the little memory that it has left."""
        words = [word for word in self.command(self.config(**self.tight(2))) if word != "--no-bound"]
        run = self.ferry(*words, through=[*MPIRUN, "-n", "2"], env=ENVIRONMENT)
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(run.err.count("updates are timed in"), 1, run.err)

    def test_stages_and_tiers_give_the_same_bits(self):
        for number in in_quick((2, 3), [1]):
            runs = []
            every = [(stage, name, tiers) for stage in (0, 1, 2, 3)
                     for name, tiers in (("memory", {}), ("tight", self.tight(number)),
                                         ("device", {"swap__state_on_device": 0.6, "swap__chunk_elements": 8192}))]
            # The quick run has each stage and each tier.
            for stage, name, tiers in in_quick(every, (0, 4, 8, 9, 10)):
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

    def test_ranks_measure_at_the_same_time(self):
        for number, stages in ((2, 1), (4, 1), (4, 2)):
            with self.subTest(ranks=number, stages=stages):
                config = self.config(parallel__pipeline=stages)
                words = [word for word in self.command(config) if word != "--no-bound"]
                run = self.ferry(*words, through=[*MPIRUN, "-n", str(number)], env=ENVIRONMENT)
                self.assert_trained(run)
                self.assertGreater(run.summary["predicted_seconds"], 0)

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


if __name__ == "__main__":
    unittest.main()

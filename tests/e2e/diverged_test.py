"""Losses and gradients that are not finite: a run stops and says where, or skips the step."""

import os
import unittest

from harness import DIVERGED
from refusals import Refusals


class DivergedTest(Refusals):
    # The second update is large enough for the third step's numbers to overflow.
    BLOWN = {"optimizer__lr": 1e6, "optimizer__weight_decay": 1e6, "steps": 20,
             "schedule__warmup_steps": 0}
    PLACES = ({}, {"budgets__host": "200KiB", "swap__speculate": "all"})

    def places(self):
        for place in self.PLACES:
            nvme = {"budgets__nvme": [self.nvme()]} if "budgets__host" in place else {}
            yield {**place, **nvme}

    def test_stops_with_step_layer_and_last_good_step(self):
        messages = []
        for place in self.places():
            run = self.train(self.config(**self.BLOWN, **place))
            self.assertEqual(run.code, DIVERGED, run.err)
            good = len(run.steps)
            self.assertGreater(good, 0)
            message = run.err[run.err.index("ferry: "):]
            self.assertRegex(message, f"where:    step {good + 1}, (block|the head|the embedding)")
            self.assertIn(f"the last good step is {good}", message)
            self.assertRegex(message, "measured: loss .*nan|measured: loss .*inf")
            self.assertIn("optimizer.lr", message)
            self.assertIn("on_nonfinite", message)
            self.assertEqual(os.listdir(self.path("nvme")), [])
            messages.append(message)
        self.assertEqual(messages[0], messages[1])

    def test_skips_by_configuration(self):
        runs = [self.train(self.config(**self.BLOWN, on_nonfinite="skip", **place))
                for place in self.places()]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(len(run.steps), 20)
            skipped = [step["skipped"] for step in run.steps]
            self.assertGreater(sum(skipped), 0)
            self.assertEqual(run.summary["skipped_steps"], sum(skipped))
        self.assertEqual(runs[0].numbers(), runs[1].numbers())

    def test_skips_for_ever_are_an_error(self):
        run = self.train(self.config(**{**self.BLOWN, "steps": 60}, on_nonfinite="skip"))
        self.assertEqual(run.code, DIVERGED, run.err)
        self.assertIn("20 steps in a row were skipped", run.err)
        self.assertTrue(all(step["skipped"] for step in run.steps[-19:]))
        good = max(step["step"] for step in run.steps if not step["skipped"])
        self.assertIn(f"the last good step is {good}", run.err)

    def test_a_skipped_step_changes_nothing_but_the_data(self):
        run = self.train(self.config(**self.BLOWN, on_nonfinite="skip", hash_every="step"))
        first = next(i for i, step in enumerate(run.steps) if step["skipped"])
        self.assertEqual(len(set(run.hashes[first - 1:])), 1)
        self.assertEqual(len(set(run.hashes[:first])), first)


if __name__ == "__main__":
    unittest.main()

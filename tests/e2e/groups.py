"""What tests of ranks that share sequences, tensors or layers have in common."""

import pathlib

from harness import USAGE
from ranks import Ranks

MODELS = pathlib.Path(__file__).resolve().parents[1] / "golden" / "hf"


def of_family(family, **changes):
    """Three steps of one of the families' tiny models, and evaluations."""
    return {"model": {"path": str(MODELS / family), "dropout": "ignore"}, "steps": 3,
            "data__tokens": str(MODELS.parent / "train" / "tokens.bin"), "batch__sequence": 24,
            "batch__micro_batch": 2, "batch__micro_batches": 4, "evaluate__micro_batches": 2,
            "data__held_back": 0.2, **changes}


class Groups(Ranks):
    def assert_steps_follow(self, several, one):
        """But for the rounding of sums."""
        for mine, theirs in zip(several.steps, one.steps):
            self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
            self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"], delta=1e-4 * theirs["gradient_norm"])
            self.assertEqual((mine["tokens"], mine["targets"]), (theirs["tokens"], theirs["targets"]))

    def assert_follows(self, several, one):
        self.assert_trained(one)
        self.assert_trained(several)
        self.assertAlmostEqual(several.steps[0]["loss"], one.steps[0]["loss"], delta=1e-6)
        self.assert_steps_follow(several, one)
        for here, there in zip(several.evaluations, one.evaluations):
            self.assertAlmostEqual(here["evaluation_loss"], there["evaluation_loss"], delta=1e-5)

    def assert_refused(self, number, changes, words):
        """What so many ranks are told of these keys has the words."""
        with self.subTest(ranks=number, **changes):
            config = self.config(**changes)
            run = self.ranks(number, config) if number > 1 else self.train(config)
            self.assertEqual(run.code, USAGE, run.err)
            for word in words:
                self.assertIn(word, run.err)

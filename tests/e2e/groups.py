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
    def assert_refused(self, number, changes, words):
        """What so many ranks are told of these keys has the words."""
        with self.subTest(ranks=number, **changes):
            config = self.config(**changes)
            run = self.ranks(number, config) if number > 1 else self.train(config)
            self.assertEqual(run.code, USAGE, run.err)
            for word in words:
                self.assertIn(word, run.err)

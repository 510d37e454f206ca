"""Ranks that share sequences, tensors or layers."""

import unittest

from harness import USAGE
from groups import Groups


class GroupsTest(Groups):
    def test_groups_that_cannot_be_planned_are_refused(self):
        """As `train` refuses them, before anything is measured."""
        heads = {"model__heads": 4, "model__kv_heads": 2}
        for ranks, changes, words in (
                (3, {"parallel__pipeline": 2}, ("parallel.pipeline", "groups of 2, 3 ranks", "start 4 ranks")),
                (4, {"parallel__pipeline": 3}, ("parallel.pipeline", "groups of 3, 4 ranks")),
                (6, {"parallel__tensor": 4}, ("parallel.tensor", "groups of 4, 6 ranks")),
                (8, {"parallel__tensor": 8, **heads}, ("more ranks share a block's tensors than it has heads",
                                                       "set parallel.tensor to 4")),
                (3, {"parallel__pipeline": 3, "model__layers": 2}, ("3 stages", "2 blocks", "set it to 2 or less")),
                (6, {"parallel__pipeline": 2, "parallel__tensor": 2}, ("groups of 4, 6 ranks", "start 8 ranks")),
                (16, {"parallel__pipeline": 2, "parallel__tensor": 8, **heads},
                 ("parallel.tensor", "set parallel.tensor to 4"))):
            with self.subTest(ranks=ranks, **changes):
                planned = self.ferry("plan", self.command(self.config(**changes))[1], "--ranks", str(ranks))
                self.assertEqual(planned.code, USAGE, planned.err)
                self.assertEqual(planned.out, "")
                for word in words:
                    self.assertIn(word, planned.err)


if __name__ == "__main__":
    unittest.main()

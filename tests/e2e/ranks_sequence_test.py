"""Ranks that share sequences: parallel.sequence."""

import json
import unittest

from groups import Groups, of_family
from harness import in_quick


class SequenceTest(Groups):
    def test_ranks_that_share_sequences_follow_one(self):
        """Every family: windows, learned positions, norms and biases of heads; some ranks have fewer heads."""
        cases = ((2, 2, "llama", "auto"), (4, 2, "mistral", "heads"), (2, 2, "qwen2", "auto"), (3, 3, "qwen3", "heads"),
                 (4, 4, "gpt2", "heads"), (2, 2, "gpt2", "auto"), (3, 3, "llama", "ring"), (4, 2, "mistral", "ring"),
                 (4, 4, "qwen2", "ring"), (3, 3, "qwen3", "auto"), (4, 4, "gpt2", "ring"), (2, 2, "gpt2", "ring"))
        for number, shared, family, order in in_quick(cases, (1, 3, 5, 6, 8)):
            with self.subTest(ranks=number, shared=shared, family=family, order=order):
                changes = of_family(family, parallel__sequence_order=order)
                if number == 3:
                    changes["batch__micro_batches"] = 3
                one = self.train(self.config(**changes))
                several = self.ranks(number, self.config(parallel__sequence=shared, **changes))
                self.assert_follows(several, one)

    def test_the_start_and_the_tables_say_who_shares_sequences(self):
        """By heads, which two ranks divide unevenly, and in a ring; the plan's table and JSON say it too."""
        shared = {"parallel__sequence": 2, "batch__sequence": 32, "batch__micro_batches": 2, "steps": 1, "zero__stage": 1}
        for changes, said in (({"parallel__sequence_order": "heads", "model__heads": 3, "model__kv_heads": 3,
                                "model__head_dim": 16}, "all tokens of 2 of 3 heads of keys, and some have one less"),
                              ({"parallel__sequence_order": "ring"}, "their keys and queries go round")):
            with self.subTest(**changes):
                config = self.config(**shared, **changes)
                run = self.ranks(2, config)
                self.assert_trained(run)
                self.assertEqual(run.err.count("2 ranks share each sequence: 16 of its 32 tokens on each; for attention "
                                               + said), 1, run.err)
                self.assertEqual([run.summary[key] for key in ("ranks", "tensor", "sequence", "stages")], [2, 1, 2, 1])
        name = self.command(config)[1]
        plan = ("plan", name, "--ranks", "2", "--no-prediction")
        self.assertIn("on each of 2 ranks, stage 1, 2 with parts of the same sequences (", self.ferry(*plan).out)
        self.assertEqual(json.loads(self.ferry(*plan, "--json").out)["sequence"], 2)

    def test_what_ranks_of_a_sequence_send_is_counted_and_changes_no_bit(self):
        shared = {"parallel__sequence": 2, "batch__sequence": 32}
        every = ({}, {}, self.tight(2), {"swap__groups": 3}, {"swap__save_attention": 1})
        runs = [self.ranks(2, self.config(**shared, **tiers)) for tiers in in_quick(every, (0, 2, 3))]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        sent = {one["collective"]: one for one in runs[0].summary["collectives"]}["exchange heads"]
        # A micro-batch passes each block forward, with two exchanges, and backward, with four.
        self.assertEqual(sent["calls"], 6 * runs[0].summary["steps"] * 12 * self.config()["model"]["layers"])
        self.assertEqual(sent["sent_bytes"], sent["raw_bytes"])
        apart = self.ranks(2, self.config(batch__sequence=32))
        self.assertNotIn("exchange heads", [one["collective"] for one in apart.summary["collectives"]])

    def test_a_ring_is_taken_where_ranks_do_not_divide_heads(self):
        """Two heads of keys on three and four ranks: heads by name, a ring by itself, and the same losses."""
        for number in in_quick((3, 4), [0]):
            changes = {"batch__sequence": 36, "batch__micro_batches": 12, "model__heads": 4, "model__kv_heads": 2,
                       "model__head_dim": 16, "steps": 3}
            one = self.train(self.config(**changes))
            shared = {**changes, "parallel__sequence": number}
            every = ({}, {"parallel__sequence_order": "ring"}, {"zero__stage": 0}, self.tight(number))
            ring = [self.ranks(number, self.config(**shared, **more)) for more in in_quick(every, (0, 1, 3))]
            heads = self.ranks(number, self.config(**shared, parallel__sequence_order="heads"))
            for run in (one, *ring, heads):
                self.assert_trained(run)
            for run in ring:
                self.assertEqual(run.numbers(), ring[0].numbers())
            for run in (ring[0], heads):
                for mine, theirs in zip(run.steps, one.steps):
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
            sent = {call["collective"]: call for call in ring[0].summary["collectives"]}
            self.assertNotIn("exchange heads", sent)
            self.assertIn("exchange heads", [call["collective"] for call in heads.summary["collectives"]])
            # There and back, in each step of the circle: forward, again in backward, and backward's own.
            calls = 6 * (number // 2) * 12 * ring[0].summary["steps"] * self.config()["model"]["layers"]
            self.assertEqual(sent["shift heads"]["calls"], calls)
            # Where all blocks save attention's results, backward does not go round for them again.
            saved = self.ranks(number, self.config(**shared, swap__save_attention=8))
            self.assert_trained(saved)
            self.assertEqual(saved.numbers(), ring[0].numbers())
            sent = {one["collective"]: one for one in saved.summary["collectives"]}
            self.assertEqual(sent["shift heads"]["calls"], calls * 2 // 3)

    def test_ranks_that_cannot_share_sequences_are_refused(self):
        for number, changes, words in (
                (3, {"parallel__sequence": 2}, ("parallel.sequence", "groups of 2, 3 ranks", "start 4 ranks")),
                (1, {"parallel__sequence": 2}, ("parallel.sequence", "groups of 2, 1 rank", "start 2 ranks")),
                (2, {"parallel__sequence": 2, "batch__sequence": 25}, ("equal parts", "set batch.sequence to 26")),
                (2, {"parallel__sequence": 0}, ("parallel.sequence", "at least 1, at most 4096")),
                (2, {"parallel__sequence": 2, "parallel__sequence_order": "zigzag"}, ("sequence_order", "ring")),
                (2, {"parallel__sequence": 2, "parallel__sequence_order": "ring", "device": "cuda", "precision": "fp32"},
                 ("parallel.sequence_order", "in 16 bits alone", "precision is fp32")),
                (4, {"parallel__sequence": 2, "batch__micro_batches": 3},
                 ("batch.micro_batches", "3 micro-batches, 4 ranks in groups of 2", "set batch.micro_batches to 4"))):
            self.assert_refused(number, changes, words)


if __name__ == "__main__":
    unittest.main()

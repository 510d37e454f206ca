"""Ranks that share tensors: parallel.tensor."""

import os
import pathlib
import unittest

from groups import Groups, of_family
from harness import in_quick


class TensorTest(Groups):
    def test_ranks_that_share_tensors_follow_one(self):
        """Norms and biases of heads, fused and input-major matrices, ZeRO beside; some ranks hold the same heads."""
        for number, shared, family, stage in ((2, 2, "qwen3", 1), (4, 4, "gpt2", 0), (4, 2, "qwen2", 3)):
            with self.subTest(ranks=number, shared=shared, family=family):
                changes = of_family(family, zero__stage=stage)
                exports = [self.path(f"{name}-{family}") for name in ("one", "several")]
                weights = [self.path(f"{name}-{family}.safetensors") for name in ("one", "several")]
                one = self.train(self.config(**changes), "--export", exports[0], "--weights-out", weights[0])
                several = self.ranks(number, self.config(parallel__tensor=shared, **changes), "--export", exports[1],
                                     "--weights-out", weights[1])
                self.assert_follows(several, one)
                self.assertEqual(*map(os.path.getsize, weights))  # whole tensors
                self.assertEqual(several.summary["ranks"], number)
                sizes = [os.path.getsize(pathlib.Path(export) / "model.safetensors") for export in exports]
                self.assertEqual(sizes[0], sizes[1])

    def test_what_ranks_of_a_tensor_send_is_planned_and_changes_no_bit(self):
        shared = {"parallel__tensor": 2, "model__kv_heads": 1, "model__vocab": 257}
        every = ({}, {}, self.tight(2), {"swap__groups": 3}, {"swap__save_attention": 1})
        runs = [self.ranks(2, self.config(**shared, **tiers)) for tiers in in_quick(every, (0, 2, 3))]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        self.assertIn("129 rows of the vocabulary's tables on each", runs[0].err)
        self.assertIn("some have a row less, as 2 do not divide 257 tokens", runs[0].err)
        sent = {one["collective"]: one for one in runs[0].summary["collectives"]}
        self.assertEqual(sorted(sent), ["agree", "exchange sums", "gather sums"])
        plan = self.ferry("plan", self.command(self.config(**shared))[1], "--ranks", "2", "--no-prediction", "--json")
        planned, steps = plan.lines[0]["kernel_exchanges"], runs[0].summary["steps"]
        self.assertEqual(planned["calls"] * steps, sent["exchange sums"]["calls"] + sent["gather sums"]["calls"])
        self.assertEqual(planned["bytes"] * steps, sent["exchange sums"]["sent_bytes"] + sent["gather sums"]["sent_bytes"])
        for tier in ("device", "host"):
            self.assertEqual(runs[0].bytes_of(tier, "optimizer state"),
                             sum(one["bytes"] for one in plan.lines[0]["tiers"]
                                 if one["tier"] == tier and one["what"] == "optimizer state"))

    def test_block_inputs_are_divided_and_uneven_rows_are_said(self):
        """A rank has its rows of each; three do not divide 64 tokens."""
        changes = {"model__heads": 12, "model__kv_heads": 6, "model__hidden": 96, "model__vocab": 258, "batch__sequence": 64}
        kept = {}
        for number in (1, 2, 3):
            config = self.config(parallel__tensor=number, **changes)
            plan = self.ferry("plan", self.command(config)[1], "--ranks", str(number), "--no-prediction", "--json")
            self.assertEqual(plan.code, 0, plan.err)
            kept[number] = sum(one["bytes"] for one in plan.lines[0]["tiers"] if one["what"] == "block inputs")
            self.assertEqual(plan.lines[0]["inputs_saved"], config["model"]["layers"])
        self.assertEqual(kept[1], 2 * kept[2])
        self.assertEqual(kept[1] // kept[3], 2)  # 24 KiB are 22 rows of 384 B and the rest of a page
        run = self.ranks(3, config)
        self.assert_trained(run)
        self.assertIn("the last have fewer rows of a micro-batch, as 3 do not divide 64 tokens", run.err)

    def test_checkpoints_of_ranks_that_share_tensors_go_on_with_another_number(self):
        """Bits of the same ranks are kept; others follow on, and so does one."""
        changes = {"parallel__tensor": 2, "model__heads": 4, "model__kv_heads": 4, "precision": "bf16", "steps": 4}
        whole = self.ranks(2, self.config(**changes))
        self.assert_trained(whole)
        there = self.path("saved")
        saving = {**changes, "checkpoint__dir": there, "checkpoint__every": 2, "checkpoint__keep": {"last": 9}}
        self.assert_trained(self.ranks(2, self.config(**saving)))
        for number, tensor in in_quick(((2, 2), (4, 4), (1, 1)), (0, 1)):
            with self.subTest(ranks=number):
                config = self.config(**{**changes, "parallel__tensor": tensor})
                resume = ("--resume", os.path.join(there, "step-00000002"))
                run = self.ranks(number, config, *resume) if number > 1 else self.train(config, *resume)
                self.assert_trained(run)
                if number == 2:
                    self.assertEqual(run.hashes[-1], whole.hashes[-1])
                for mine, theirs in zip(run.steps, whole.steps[1:]):  # the first is the one that was saved
                    self.assertEqual(mine["step"], theirs["step"])
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=0 if number == 2 else 2e-2)

    def test_ranks_that_cannot_share_tensors_are_refused(self):
        heads = {"model__heads": 4, "model__kv_heads": 2}
        for number, changes, words in (
                (3, {"parallel__tensor": 2}, ("parallel.tensor", "groups of 2, 3 ranks", "start 4 ranks")),
                (1, {"parallel__tensor": 2}, ("parallel.tensor", "groups of 2, 1 rank", "start 2 ranks")),
                (3, {"parallel__tensor": 3, **heads}, ("parallel.tensor", "divide the heads", "set parallel.tensor to 2")),
                (2, {"parallel__tensor": 0}, ("parallel.tensor", "at least 1, at most 4096")),
                (2, {"parallel__tensor": 2, "optimizer__method": "muon"}, ("optimizer.method", "whole matrices")),
                (2, {"parallel__tensor": 2, "checkpoint__durable_steps": True, "budgets__nvme": [self.nvme()]},
                 ("checkpoint.durable_steps", "slices of tensors"))):
            self.assert_refused(number, changes, words)


if __name__ == "__main__":
    unittest.main()

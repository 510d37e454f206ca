"""Ranks that share sequences, tensors or layers."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

from harness import USAGE, in_quick
from ranks import Ranks

MODELS = pathlib.Path(__file__).resolve().parents[1] / "golden" / "hf"


def of_family(family, **changes):
    """Three steps of one of the families' tiny models, and evaluations."""
    return {"model": {"path": str(MODELS / family), "dropout": "ignore"}, "steps": 3,
            "data__tokens": str(MODELS.parent / "train" / "tokens.bin"), "batch__sequence": 24,
            "batch__micro_batch": 2, "batch__micro_batches": 4, "evaluate__micro_batches": 2,
            "data__held_back": 0.2, **changes}


class GroupsTest(Ranks):
    def assert_refused(self, number, changes, words):
        """What so many ranks are told of these keys has the words."""
        with self.subTest(ranks=number, **changes):
            config = self.config(**changes)
            run = self.ranks(number, config) if number > 1 else self.train(config)
            self.assertEqual(run.code, USAGE, run.err)
            for word in words:
                self.assertIn(word, run.err)

    def test_ranks_that_share_sequences_follow_one(self):
        """Every family: windows, learned positions, norms and biases of heads; some ranks have fewer heads."""
        for number, shared, family, order in (
                (2, 2, "llama", "auto"), (4, 2, "mistral", "heads"), (2, 2, "qwen2", "auto"), (3, 3, "qwen3", "heads"),
                (4, 4, "gpt2", "heads"), (2, 2, "gpt2", "auto"), (3, 3, "llama", "ring"), (4, 2, "mistral", "ring"),
                (4, 4, "qwen2", "ring"), (3, 3, "qwen3", "auto"), (4, 4, "gpt2", "ring"), (2, 2, "gpt2", "ring")):
            with self.subTest(ranks=number, shared=shared, family=family, order=order):
                changes = {"parallel__sequence_order": order, "model": {"path": str(MODELS / family), "dropout": "ignore"}, "steps": 3,
                           "data__tokens": str(MODELS.parent / "train" / "tokens.bin"), "batch__sequence": 24,
                           "batch__micro_batch": 2, "batch__micro_batches": 4, "evaluate__micro_batches": 2,
                           "data__held_back": 0.2}
                if number == 3:
                    changes["batch__micro_batches"] = 3
                one = self.train(self.config(**changes))
                several = self.ranks(number, self.config(parallel__sequence=shared, **changes))
                self.assert_trained(one)
                self.assert_trained(several)
                self.assertAlmostEqual(several.steps[0]["loss"], one.steps[0]["loss"], delta=1e-6)
                for mine, theirs in zip(several.steps, one.steps):
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
                    self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"],
                                           delta=1e-4 * theirs["gradient_norm"])
                    self.assertEqual((mine["tokens"], mine["targets"]), (theirs["tokens"], theirs["targets"]))
                for here, there in zip(several.evaluations, one.evaluations):
                    self.assertAlmostEqual(here["evaluation_loss"], there["evaluation_loss"], delta=1e-5)

    def test_what_ranks_of_a_sequence_send_is_counted_and_changes_no_bit(self):
        shared = {"parallel__sequence": 2, "batch__sequence": 32}
        runs = [self.ranks(2, self.config(**shared, **tiers))
                for tiers in ({}, {}, self.tight(2), {"swap__groups": 3}, {"swap__save_attention": 1})]
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
        for number in (3, 4):
            changes = {"batch__sequence": 36, "batch__micro_batches": 12, "model__heads": 4, "model__kv_heads": 2,
                       "model__head_dim": 16, "steps": 3}
            one = self.train(self.config(**changes))
            shared = {**changes, "parallel__sequence": number}
            ring = [self.ranks(number, self.config(**shared, **more))
                    for more in ({}, {"parallel__sequence_order": "ring"}, {"zero__stage": 0}, self.tight(number))]
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
                self.assert_trained(one)
                self.assert_trained(several)
                self.assertEqual(*map(os.path.getsize, weights))  # whole tensors
                self.assertEqual(several.summary["ranks"], number)
                self.assertAlmostEqual(several.steps[0]["loss"], one.steps[0]["loss"], delta=1e-6)
                for mine, theirs in zip(several.steps, one.steps):
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=1e-5)
                    self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"],
                                           delta=1e-4 * theirs["gradient_norm"])
                    self.assertEqual((mine["tokens"], mine["targets"]), (theirs["tokens"], theirs["targets"]))
                for here, there in zip(several.evaluations, one.evaluations):
                    self.assertAlmostEqual(here["evaluation_loss"], there["evaluation_loss"], delta=1e-5)
                sizes = [os.path.getsize(pathlib.Path(export) / "model.safetensors") for export in exports]
                self.assertEqual(sizes[0], sizes[1])

    def test_what_ranks_of_a_tensor_send_is_planned_and_changes_no_bit(self):
        shared = {"parallel__tensor": 2, "model__kv_heads": 1, "model__vocab": 257}
        runs = [self.ranks(2, self.config(**shared, **tiers))
                for tiers in ({}, {}, self.tight(2), {"swap__groups": 3}, {"swap__save_attention": 1})]
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

    def test_checkpoints_of_ranks_that_share_tensors_go_on_with_another_number(self):
        """Bits of the same ranks are kept; others follow on, and so does one."""
        changes = {"parallel__tensor": 2, "model__heads": 4, "model__kv_heads": 4, "precision": "bf16", "steps": 4}
        whole = self.ranks(2, self.config(**changes))
        self.assert_trained(whole)
        there = self.path("saved")
        saving = {**changes, "checkpoint__dir": there, "checkpoint__every": 2, "checkpoint__keep": {"last": 9}}
        self.assert_trained(self.ranks(2, self.config(**saving)))
        for number, tensor in ((2, 2), (4, 4), (1, 1)):
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

    def test_stages_of_a_pipeline_follow_one(self):
        """Learned positions, tied tables and biases; some with ZeRO beside. Weights are those of one rank, bit by bit."""
        for number, stages, family, stage in ((2, 2, "qwen3", 1), (4, 2, "gpt2", 1), (2, 2, "qwen2", 3)):
            with self.subTest(ranks=number, stages=stages, family=family):
                changes = of_family(family, zero__stage=stage, clip_norm=0)
                exports = [self.path(f"{name}-staged-{family}") for name in ("one", "several")]
                one = (self.train(self.config(**changes), "--export", exports[0]) if number == stages else
                       self.ranks(number // stages, self.config(**changes), "--export", exports[0]))
                several = self.ranks(number, self.config(parallel__pipeline=stages, **changes), "--export", exports[1])
                self.assert_trained(one)
                self.assert_trained(several)
                self.assertEqual(several.summary["ranks"], number)
                self.assertIn(f"{stages} stages: embedding and block", several.err)
                for mine, theirs in zip(several.steps, one.steps):
                    for key in ("loss", "tokens", "targets"):
                        self.assertEqual(mine[key], theirs[key])
                    self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"],
                                           delta=1e-12 * theirs["gradient_norm"])
                for here, there in zip(several.evaluations, one.evaluations):
                    self.assertEqual(here["evaluation_loss"], there["evaluation_loss"])
                files = [pathlib.Path(export) / "model.safetensors" for export in exports]
                self.assertEqual(*(file.read_bytes() for file in files))

    def test_what_stages_pass_is_counted_and_changes_no_bit(self):
        staged = {"parallel__pipeline": 2, "model__layers": 3, "zero__stage": 1}
        tight = {**self.tight(4), "budgets__host": "8MiB"}
        runs = [self.ranks(4, self.config(**staged, **tiers))
                for tiers in ({}, {}, tight, {"swap__groups": 3}, {"swap__save_attention": 1},
                              {"parallel__schedule": "zero_bubble"},
                              {"parallel__schedule": "zero_bubble", "swap__groups": 3, "swap__save_mlp": 2, **tight})]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        sent = {one["collective"]: one for one in runs[0].summary["collectives"]}
        # What the first rank passes on: block inputs of its half of the micro-batches.
        config = self.config()
        calls = 6 * runs[0].summary["steps"]
        self.assertEqual(sent["pass on"]["calls"], calls)
        tokens = config["batch"]["micro_batch"] * config["batch"]["sequence"]
        self.assertEqual(sent["pass on"]["sent_bytes"], calls * tokens * config["model"]["hidden"] * 4)

    def test_pipelines_that_cannot_be_are_refused_and_short_ones_are_warned_of(self):
        for number, changes, words in (
                (3, {"parallel__pipeline": 2}, ("parallel.pipeline", "groups of 2, 3 ranks", "start 4 ranks")),
                (1, {"parallel__pipeline": 2}, ("parallel.pipeline", "groups of 2, 1 rank", "start 2 ranks")),
                (3, {"parallel__pipeline": 3, "model__layers": 2}, ("3 stages", "2 blocks", "set it to 2 or less")),
                (2, {"parallel__pipeline": 0}, ("parallel.pipeline", "at least 1, at most 4096")),
                (4, {"parallel__pipeline": 2, "parallel__tensor": 4},
                 ("parallel.pipeline", "groups of 8, 4 ranks", "start 8 ranks", "product divides 4")),
                (4, {"parallel__pipeline": 2, "batch__micro_batches": 3},
                 ("batch.micro_batches", "3 micro-batches, 4 ranks in groups of 2", "set batch.micro_batches to 4")),
                (2, {"parallel__pipeline": 2, "checkpoint__durable_steps": True, "budgets__nvme": [self.nvme()]},
                 ("checkpoint.durable_steps", "steps of a pipeline"))):
            self.assert_refused(number, changes, words)
        config = self.config(parallel__pipeline=2, batch__micro_batches=1, steps=1)
        run = self.ranks(2, config)
        self.assert_trained(run)
        self.assertIn("1 group of micro-batches for 2 stages: each stage waits 50 % of a step", run.err)
        planned = self.ferry("plan", self.command(config)[1], "--ranks", "2", "--no-prediction")
        self.assertEqual(planned.code, 0, planned.err)
        self.assertIn("1 group of 1 micro-batch for 2 stages: each stage waits 50 % of a step", planned.err)
        self.assertIn("a pipeline of 2 stages of 1 rank", planned.out)

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

    def test_tensors_stages_and_replicas_go_together(self):
        """Bits of ranks that have all layers each, as many as a stage has; and near one rank's. Tied tables and biases."""
        mixes = ((2, 2, 1, "qwen3", 0), (2, 2, 1, "qwen2", 1), (2, 2, 2, "gpt2", 3), (4, 2, 1, "llama", 0))
        for tensor, stages, replicas, family, stage in in_quick(mixes, [1, 2]):
            number = tensor * stages * replicas
            with self.subTest(tensor=tensor, stages=stages, replicas=replicas, family=family):
                changes = of_family(family, zero__stage=stage, clip_norm=0)
                exports = [self.path(f"{name}-mixed-{family}") for name in ("whole", "staged")]
                one = self.train(self.config(**changes))
                whole = self.ranks(number // stages, self.config(parallel__tensor=tensor, **changes), "--export", exports[0])
                staged = self.ranks(number, self.config(parallel__tensor=tensor, parallel__pipeline=stages, **changes),
                                    "--export", exports[1])
                for run in (one, whole, staged):
                    self.assert_trained(run)
                for mine, theirs, alone in zip(staged.steps, whole.steps, one.steps):
                    for key in ("loss", "tokens", "targets"):
                        self.assertEqual(mine[key], theirs[key])
                    self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"],
                                           delta=1e-12 * theirs["gradient_norm"])
                    self.assertAlmostEqual(mine["loss"], alone["loss"], delta=1e-5)
                    self.assertAlmostEqual(mine["gradient_norm"], alone["gradient_norm"], delta=1e-4 * alone["gradient_norm"])
                    self.assertEqual((mine["tokens"], mine["targets"]), (alone["tokens"], alone["targets"]))
                for here, there in zip(staged.evaluations, whole.evaluations):
                    self.assertEqual(here["evaluation_loss"], there["evaluation_loss"])
                files = [pathlib.Path(export) / "model.safetensors" for export in exports]
                self.assertEqual(*(file.read_bytes() for file in files))

    def test_a_mix_keeps_its_bits_on_every_tier_and_is_planned(self):
        """Clipped steps; a stage's weights gathered by each group are warned of."""
        mixed = {"parallel__tensor": 2, "parallel__pipeline": 2, "model__layers": 3, "model__kv_heads": 1,
                 "model__tie_embeddings": True, "batch__micro_batches": 4}
        tight = {**self.tight(8), "budgets__host": "16MiB"}
        runs = [self.ranks(8, self.config(**mixed, **tiers))
                for tiers in ({}, {}, {"zero__stage": 0, **tight}, {"zero__stage": 3, **tight},
                              {"zero__stage": 3, "swap__groups": 1})]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        self.assertLess(min(step["clip_factor"] for step in runs[0].steps), 1)
        config = self.config(**mixed, zero__stage=3)
        plan = self.ferry("plan", self.command(config)[1], "--ranks", "8", "--json")
        self.assertEqual(plan.code, 0, plan.err)
        warned = "each of 2 groups of micro-batches gathers its stage's weights again"
        self.assertIn(warned, plan.err)
        run = self.ranks(8, config)
        self.assertIn(warned, run.err)
        self.assertEqual(run.numbers(), runs[0].numbers())
        plan, steps = json.loads(plan.out), run.summary["steps"]
        sent = {one["collective"]: one for one in run.summary["collectives"]}
        for key in ("device_bytes", "host_bytes", "nvme_bytes", "groups", "chunk_elements"):
            self.assertEqual(plan[key], run.summary[key], key)
        first = plan["pipeline"]["stages"][0]
        self.assertEqual(sent["pass on"]["sent_bytes"], steps * (first["to_next_bytes"] + first["of_table_bytes"]))
        self.assertEqual(plan["kernel_exchanges"]["bytes"] * steps,
                         sent["exchange sums"]["sent_bytes"] + sent["gather sums"]["sent_bytes"])

    def test_the_plan_of_a_pipeline_is_that_of_training(self):
        tight = {**self.tight(4), "budgets__host": "8MiB"}
        config = self.config(parallel__pipeline=2, model__layers=5, zero__stage=1, **tight)
        run = self.ranks(4, config)
        self.assert_trained(run)
        picture = self.path("step.svg")
        planned = self.ferry("plan", self.command(config)[1], "--ranks", "4", "--json", "--svg", picture)
        self.assertEqual(planned.code, 0, planned.err)
        plan = json.loads(planned.out)
        drawn = pathlib.Path(picture).read_text()
        for row in ("0 compute", "0 comm", "1 compute", "1 comm", "take over"):
            self.assertIn(row, drawn)
        split = self.ferry("plan", self.command({**config, "parallel": {"pipeline": 2, "schedule": "zero_bubble"}})[1],
                           "--ranks", "4", "--json")
        self.assertEqual(split.code, 0, split.err)
        bubbles = plan["pipeline"]["bubbles"]
        self.assertEqual(plan["pipeline"]["bubble"], bubbles["1f1b"])
        self.assertEqual(json.loads(split.out)["pipeline"]["bubble"], bubbles["zero_bubble"])
        self.assertLess(bubbles["zero_bubble"], bubbles["1f1b"])
        for key in ("device_bytes", "host_bytes", "nvme_bytes", "groups", "chunk_elements"):
            self.assertEqual(plan[key], run.summary[key], key)
        stages, steps = plan["pipeline"]["stages"], run.summary["steps"]
        self.assertEqual(sum(stage["blocks"] for stage in stages), 5)
        sent = {one["collective"]: one for one in run.summary["collectives"]}
        self.assertEqual(sent["pass on"]["sent_bytes"], steps * stages[0]["to_next_bytes"])
        for stage in stages:
            self.assertGreater(stage["compute_seconds"], 0)
            self.assertTrue(0 < stage["waits"] < 1)

    def test_every_stage_is_traced_and_drawn_beside_its_plan(self):
        config = self.config(parallel__pipeline=2, parallel__schedule="zero_bubble", steps=3)
        trace, plan, picture = (self.path(name) for name in ("trace.json", "plan.json", "stages.svg"))
        self.assert_trained(self.ranks(2, config, "--trace", trace))
        planned = self.ferry("plan", self.command(config)[1], "--ranks", "2", "--json")
        self.assertEqual(planned.code, 0, planned.err)
        pathlib.Path(plan).write_text(planned.out)
        script = pathlib.Path(__file__).resolve().parents[2] / "bench/pipeline_picture.py"
        done = subprocess.run([sys.executable, str(script), trace, f"{trace}.1", "--plan", plan, "--svg", picture],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        for rank in (0, 1):
            self.assertRegex(done.stdout, rf"rank {rank}: waits \d+\.\d % of ")
        drawn = pathlib.Path(picture).read_text()
        for text in ("rank 0", "rank 1", "weight gradients", "% measured", "% planned"):
            self.assertIn(text, drawn)

    def test_checkpoints_of_a_pipeline_go_on_with_other_stages(self):
        """The same ranks a stage keep every bit; also from one rank's, and to one."""
        changes = {"model__layers": 4, "precision": "bf16", "steps": 4, "clip_norm": 0}
        whole = self.train(self.config(**changes))
        self.assert_trained(whole)
        there = self.path("saved")
        saving = {**changes, "parallel__pipeline": 2, "checkpoint__dir": there, "checkpoint__every": 2,
                  "checkpoint__keep": {"last": 9}}
        self.assert_trained(self.ranks(2, self.config(**saving)))
        for stages in (1, 2, 3):
            with self.subTest(stages=stages):
                config = self.config(**{**changes, "parallel__pipeline": stages})
                resume = ("--resume", os.path.join(there, "step-00000002"))
                run = self.ranks(stages, config, *resume) if stages > 1 else self.train(config, *resume)
                self.assert_trained(run)
                for mine, theirs in zip(run.steps, whole.steps[1:]):  # the first is the one that was saved
                    self.assertEqual((mine["step"], mine["loss"]), (theirs["step"], theirs["loss"]))
        out = self.path("exported")
        exported = self.ferry("ckpt", "export", os.path.join(there, "step-00000004"), out)
        self.assertEqual(exported.code, 0, exported.err)

    def test_checkpoints_go_on_with_another_mix(self):
        """The same mix keeps every bit, and what it saves has one rank's shapes; others follow on, and export is whole."""
        changes = {"model__layers": 4, "model__heads": 4, "model__kv_heads": 4, "precision": "bf16", "steps": 4,
                   "model__tie_embeddings": True, "batch__micro_batches": 4}
        mix = {"parallel__tensor": 2, "parallel__pipeline": 2}
        whole = self.ranks(4, self.config(**changes, **mix))
        self.assert_trained(whole)
        there = self.path("saved-mixed")
        saving = {**changes, **mix, "checkpoint__dir": there, "checkpoint__every": 2, "checkpoint__keep": {"last": 9}}
        self.assert_trained(self.ranks(4, self.config(**saving)))
        mixes = ((2, 2, 4, 1), (2, 2, 8, 3), (1, 4, 4, 1), (1, 1, 1, 1), (4, 1, 4, 1), (2, 1, 4, 3))
        for tensor, stages, number, stage in in_quick(mixes, [0, 1, 2]):
            with self.subTest(tensor=tensor, stages=stages, ranks=number):
                config = self.config(**{**changes, "parallel__tensor": tensor, "parallel__pipeline": stages,
                                        "zero__stage": stage})
                resume = ("--resume", os.path.join(there, "step-00000002"))
                run = self.ranks(number, config, *resume) if number > 1 else self.train(config, *resume)
                self.assert_trained(run)
                same = (tensor, stages, number) == (2, 2, 4)
                if same:
                    self.assertEqual(run.hashes[-1], whole.hashes[-1])
                for mine, theirs in zip(run.steps, whole.steps[1:]):  # the first is the one that was saved
                    self.assertEqual(mine["step"], theirs["step"])
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=0 if same else 2e-2)
        out = self.path("exported-mixed")
        exported = self.ferry("ckpt", "export", os.path.join(there, "step-00000004"), out)
        self.assertEqual(exported.code, 0, exported.err)



if __name__ == "__main__":
    unittest.main()

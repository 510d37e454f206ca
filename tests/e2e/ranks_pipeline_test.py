"""Ranks that are stages of a pipeline: parallel.pipeline."""

import json
import os
import pathlib
import unittest

from groups import Groups, of_family
from harness import in_quick


class PipelineTest(Groups):
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
        every = ({}, {"parallel__schedule": "1f1b"}, {"parallel__schedule": "1f1b", **tight},
                 {"swap__groups": 3}, {"swap__save_attention": 1}, {"parallel__schedule": "zero_bubble"},
                 {"parallel__schedule": "zero_bubble", "swap__groups": 3, "swap__save_mlp": 2, **tight})
        runs = [self.ranks(4, self.config(**staged, **tiers)) for tiers in in_quick(every, (0, 1, 6))]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        whole = self.ranks(4, self.config(model__layers=4, parallel__pipeline=2, zero__stage=1, clip_norm=0))
        for schedule in ("interleaved", "round_robin"):
            several = {**staged, "model__layers": 4, "parallel__schedule": schedule, "parallel__virtual_stages": 2,
                       "clip_norm": 0}
            for tiers in in_quick(({}, tight), [1]):
                with self.subTest(schedule=schedule, tiers=tiers):
                    run = self.ranks(4, self.config(**several, **tiers))
                    self.assert_trained(run)
                    self.assertIn("2 stages: embedding and blocks 0, 2; blocks 1, 3 and head", run.err)
                    self.assertEqual([step["loss"] for step in run.steps], [step["loss"] for step in whole.steps])
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
                (2, {"parallel__pipeline": 2, "parallel__schedule": "1f1b", "parallel__virtual_stages": 2},
                 ("parallel.virtual_stages", "one run of blocks a stage", "interleaved")),
                (2, {"parallel__pipeline": 2, "parallel__schedule": "interleaved"},
                 ("parallel.virtual_stages", "several runs of blocks", 'set it to "auto" or to 2 or more')),
                (2, {"parallel__pipeline": 2, "parallel__schedule": "interleaved", "parallel__virtual_stages": 3,
                     "model__layers": 4}, ("parallel.virtual_stages", "2 stages with 3 each", "4 blocks")),
                (2, {"parallel__pipeline": 0}, ("parallel.pipeline", "at least 1, at most 4096")),
                (4, {"parallel__pipeline": 2, "parallel__tensor": 4},
                 ("parallel.pipeline", "groups of 8, 4 ranks", "start 8 ranks", "product divides 4")),
                (4, {"parallel__pipeline": 2, "batch__micro_batches": 3},
                 ("batch.micro_batches", "3 micro-batches, 4 ranks in groups of 2", "set batch.micro_batches to 4")),
                (2, {"parallel__pipeline": 2, "checkpoint__durable_steps": True, "budgets__nvme": [self.nvme()]},
                 ("checkpoint.durable_steps", "steps of a pipeline"))):
            self.assert_refused(number, changes, words)
        config = self.config(parallel__pipeline=2, parallel__schedule="1f1b", batch__micro_batches=1, steps=1)
        run = self.ranks(2, config)
        self.assert_trained(run)
        warned = "1 group of 1 micro-batch for 2 stages: by theory each waits 50 % of a step where all are as fast"
        self.assertIn(warned, run.err)
        planned = self.ferry("plan", self.command(config)[1], "--ranks", "2", "--no-prediction")
        self.assertEqual(planned.code, 0, planned.err)
        self.assertIn(warned, planned.err)
        # Round robin has one group whatever there is: its micro-batches are what passes.
        for micro_batches, changes in ((1, {}), (2, {}), (2, {"parallel__virtual_stages": 2, "model__layers": 4})):
            config = self.config(parallel__pipeline=2, parallel__schedule="round_robin", steps=1,
                                 batch__micro_batches=micro_batches, **changes)
            said = [self.ranks(2, config).err,
                    self.ferry("plan", self.command(config)[1], "--ranks", "2", "--no-prediction").err]
            for text in said:
                self.assertEqual("1 micro-batch in round robin for 2 stages: by theory each waits" in text,
                                 micro_batches == 1, text)
                self.assertNotIn("1 group of", text.replace("1 group of 1 micro-batch pass", "").replace(
                    "1 group of 2 micro-batches pass", ""))
        self.assertIn("a pipeline of 2 stages of 1 rank", planned.out)

    def test_the_plan_of_a_pipeline_is_that_of_training(self):
        tight = {**self.tight(4), "budgets__host": "8MiB"}
        config = self.config(parallel__pipeline=2, parallel__schedule="1f1b", model__layers=5, zero__stage=1, **tight)
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

    def test_plans_count_the_weights_that_stream(self):
        """Groups move them each, and their accumulators between; all micro-batches in one group move them once."""
        def plan(**changes):
            config = self.config(parallel__pipeline=2, model__layers=4, zero__stage=1, batch__micro_batches=4, **changes)
            planned = self.ferry("plan", self.command(config)[1], "--ranks", "2", "--json")
            self.assertEqual(planned.code, 0, planned.err)
            return json.loads(planned.out)["pipeline"]
        streams = {"budgets__device": "2MiB", "swap__save_inputs": 0}
        groups = plan(parallel__schedule="1f1b", **streams)
        turns = plan(parallel__schedule="round_robin", parallel__virtual_stages=2, **streams)
        self.assertEqual((groups["schedule"], turns["schedule"]), ("1f1b", "round_robin"))
        self.assertEqual(turns["virtual_stages"], 2)
        for one in turns["stages"]:
            self.assertEqual((one["accumulators_down_bytes"], one["accumulators_up_bytes"]), (0, 0))
        for one in groups["stages"]:
            self.assertGreater(one["accumulators_down_bytes"], 0)
            self.assertEqual(one["accumulators_down_bytes"], one["accumulators_up_bytes"])
        for one, other in zip(groups["stages"], turns["stages"]):
            self.assertLessEqual(other["weights_up_bytes"], one["weights_up_bytes"])
        self.assertEqual(set(groups["bubbles"]), {"1f1b", "zero_bubble", "interleaved", "round_robin"})
        self.assertLess(groups["bubbles"]["interleaved"], groups["bubbles"]["1f1b"])

    def test_the_schedule_is_chosen_by_the_plan_and_by_training_alike(self):
        """Left to ferry: a table of both, and the run takes the same one; where one does not fit it says what is missing."""
        config = self.config(parallel__pipeline=2, model__layers=4, zero__stage=1)

        def planned(config, *options):
            run = self.ferry("plan", self.command(config)[1], "--ranks", "2", *options)
            self.assertEqual(run.code, 0, run.err)
            return run

        found = json.loads(planned(config, "--json").out)["pipeline"]
        both = {one["schedule"]: one for one in found["schedules"]}
        self.assertEqual(list(both), ["1f1b", "zero_bubble", "round_robin"])
        for one in both.values():
            self.assertGreater(one["step_seconds"], 0)
            self.assertTrue(0 < one["waits"] < 1)
            self.assertGreaterEqual(one["weight_bytes"], 0)
        self.assertGreater(both["zero_bubble"]["device_bytes"], both["1f1b"]["device_bytes"])
        fastest = min(one["step_seconds"] for one in found["schedules"])
        self.assertLessEqual(both[found["schedule"]]["step_seconds"], 1.01 * fastest)
        text = planned(config, "--no-prediction").out
        self.assertRegex(text, r"parallel\.schedule auto")
        self.assertRegex(text, rf"  {found['schedule']} .*  taken\n")
        run = self.ranks(2, config)
        self.assert_trained(run)
        self.assertEqual(run.err.count("parallel.schedule auto takes"), 1)
        self.assertIn(f"parallel.schedule auto takes {found['schedule']}, ", run.err)
        # A machine file has the kernels of every schedule, so that a run that chooses can go by it.
        machine = self.path("chosen-by.json")
        saved = self.ferry("bench", "--all", "--config", self.command(config)[1], "--save", machine, "--ranks", "2")
        self.assertEqual(saved.code, 0, saved.err)
        again = json.loads(planned(config, "--json", "--machine", machine).out)
        self.assertFalse([what for what in again["prediction"]["measured"] if "kernels" in what])
        # All wait for a slow network, whatever fills their bubbles.
        slow = json.loads(planned(config, "--json", "--network", "1Kbit").out)["pipeline"]
        self.assertEqual(slow["schedule"], "1f1b")
        fixed = json.loads(planned({**config, "parallel": {"pipeline": 2, "schedule": "zero_bubble"}}, "--json",
                                   "--no-prediction").out)["pipeline"]
        self.assertEqual((fixed["schedule"], fixed["schedules"]), ("zero_bubble", []))
        # Between what one and the other need.
        bytes_between = (both["1f1b"]["device_bytes"] + both["zero_bubble"]["device_bytes"]) // 2
        tight = {**config, "budgets": {**config.get("budgets", {}), "device": bytes_between}}
        self.assert_trained(self.ranks(2, tight))
        small = self.ranks(2, {**config, "budgets": {**config.get("budgets", {}), "device": 4096}})
        self.assertNotEqual(small.code, 0)
        self.assertIn("(stage 0 of 2)", small.err)

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


if __name__ == "__main__":
    unittest.main()

"""Ranks that share tensors, stages and replicas at once."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

from harness import in_quick
from groups import Groups, of_family


class MixesTest(Groups):
    def test_tensors_stages_and_replicas_go_together(self):
        """Bits of ranks that have all layers each, as many as a stage has; and near one rank's. Tied tables and biases."""
        mixes = ((2, 2, 1, "qwen3", 0), (2, 2, 1, "qwen2", 1), (2, 2, 2, "gpt2", 3), (4, 2, 1, "llama", 0))
        for tensor, stages, replicas, family, stage in in_quick(mixes, [1]):
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
                self.assert_steps_follow(staged, one)
                for mine, theirs in zip(staged.steps, whole.steps):
                    for key in ("loss", "tokens", "targets"):
                        self.assertEqual(mine[key], theirs[key])
                    self.assertAlmostEqual(mine["gradient_norm"], theirs["gradient_norm"],
                                           delta=1e-12 * theirs["gradient_norm"])
                for here, there in zip(staged.evaluations, whole.evaluations):
                    self.assertEqual(here["evaluation_loss"], there["evaluation_loss"])
                files = [pathlib.Path(export) / "model.safetensors" for export in exports]
                self.assertEqual(*(file.read_bytes() for file in files))

    def test_a_mix_keeps_its_bits_on_every_tier_and_is_planned(self):
        """Clipped steps; a stage's weights gathered by each group are warned of."""
        mixed = {"parallel__tensor": 2, "parallel__pipeline": 2, "model__layers": 3, "model__kv_heads": 1,
                 "model__tie_embeddings": True, "batch__micro_batches": 4, "steps": 3}
        tight = {**self.tight(8), "budgets__host": "16MiB"}
        tiers = ({}, {}, {"zero__stage": 0, **tight}, {"zero__stage": 3, **tight}, {"zero__stage": 3, "swap__groups": 1})
        runs = [self.ranks(8, self.config(**mixed, **tier)) for tier in in_quick(tiers, [0, 3])]
        for run in runs:
            self.assert_trained(run)
            self.assertEqual(run.numbers(), runs[0].numbers())
        self.assertLess(min(step["clip_factor"] for step in runs[0].steps), 1)
        config = self.config(**mixed, zero__stage=3, parallel__schedule="1f1b")
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
        tokens = config["batch"]["micro_batch"] * config["batch"]["sequence"]
        # Of two micro-batches the rows that a rank has, which are half of them.
        self.assertEqual(first["to_next_bytes"], 2 * tokens // 2 * config["model"]["hidden"] * 4)
        self.assertEqual(plan["kernel_exchanges"]["bytes"] * steps,
                         sent["exchange sums"]["sent_bytes"] + sent["gather sums"]["sent_bytes"])

    def test_every_stage_is_traced_and_drawn_beside_its_plan(self):
        config = self.config(parallel__pipeline=2, parallel__schedule="zero_bubble", steps=3)
        trace, plan, picture = (self.path(name) for name in ("trace.json", "plan.json", "stages.svg"))
        self.assert_trained(self.ranks(2, config, "--trace", trace))
        planned = self.ferry("plan", self.command(config)[1], "--ranks", "2", "--json")
        self.assertEqual(planned.code, 0, planned.err)
        pathlib.Path(plan).write_text(planned.out)
        script = pathlib.Path(__file__).resolve().parents[2] / "bench/pipeline_picture.py"

        def drawn_of(*traces):
            done = subprocess.run([sys.executable, str(script), *traces, "--plan", plan, "--svg", picture],
                                  capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout, pathlib.Path(picture).read_text()
        said, drawn = drawn_of(trace, f"{trace}.1")
        # By the names' order: a shell gives rank 10 before rank 2.
        self.assertEqual(drawn_of(f"{trace}.1", trace), (said, drawn))
        for rank in (0, 1):
            self.assertRegex(said, rf"rank {rank}: waits \d+\.\d % of ")
        for text in ("rank 0", "rank 1", "weight gradients", "% measured", "% planned"):
            self.assertIn(text, drawn)

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
        for tensor, stages, number, stage in in_quick(mixes, [0, 4]):
            with self.subTest(tensor=tensor, stages=stages, ranks=number):
                config = self.config(**{**changes, "parallel__tensor": tensor, "parallel__pipeline": stages,
                                        "zero__stage": stage})
                resume = ("--resume", os.path.join(there, "step-00000002"))
                run = self.ranks(number, config, *resume) if number > 1 else self.train(config, *resume)
                self.assert_trained(run)
                same = (tensor, stages, number) == (2, 2, 4)
                if same:
                    self.assertEqual(run.hashes[-1], whole.hashes[-1], f"{whole.said()}\n{run.said()}")
                for mine, theirs in zip(run.steps, whole.steps[1:]):  # the first is the one that was saved
                    self.assertEqual(mine["step"], theirs["step"], run.said())
                    self.assertAlmostEqual(mine["loss"], theirs["loss"], delta=0 if same else 2e-2, msg=run.said())
        out = self.path("exported-mixed")
        exported = self.ferry("ckpt", "export", os.path.join(there, "step-00000004"), out)
        self.assertEqual(exported.code, 0, exported.err)


if __name__ == "__main__":
    unittest.main()

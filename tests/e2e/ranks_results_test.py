"""What several ranks leave together: evaluations, weights, exports and the summary."""

import os
import unittest

from harness import IO, USAGE
from ranks import ENVIRONMENT, MPIRUN, Ranks


class ResultsTest(Ranks):
    def test_what_no_kernel_ran_beside_is_told(self):
        one, two = self.train(self.config()), self.ranks(2, self.config())
        self.assertEqual(one.summary["exposed_comm_seconds"], 0)
        comm = next(lane for lane in two.summary["lanes"] if lane["lane"] == "comm")
        self.assertGreater(comm["exposed_seconds"], 0)  # the outcome, if nothing else
        self.assertLessEqual(comm["exposed_seconds"], comm["busy_seconds"])
        self.assertAlmostEqual(two.summary["exposed_comm_seconds"],
                               comm["exposed_seconds"] / two.summary["steps"])
        for run in (one, two):
            compute = next(lane for lane in run.summary["lanes"] if lane["lane"] == "compute")
            self.assertEqual(compute["exposed_seconds"], 0)
        command = [word for word in self.command(self.config()) if word != "--json"]
        table = self.ferry(*command, through=[*MPIRUN, "-n", "2"], env=ENVIRONMENT)
        self.assertRegex(table.out, r"lane .* exposed s/step")
        self.assertRegex(table.out, r"\n  comm  ")

    def test_evaluation_and_weights_come_from_all_ranks(self):
        changes = {"evaluate__micro_batches": 5, "steps": 2}
        first = self.path("first.safetensors")
        one = self.train(self.config(optimizer__lr=0, **changes), "--weights-out", first)
        self.assert_trained(one)
        for stage in (0, 1, 3):
            mine = self.path(f"stage{stage}.safetensors")
            run = self.ranks(3, self.config(optimizer__lr=0, zero__stage=stage, **changes),
                             "--weights-out", mine)
            self.assert_trained(run)
            self.assertEqual(len(run.evaluations), len(one.evaluations))
            for here, there in zip(run.evaluations, one.evaluations):
                self.assertAlmostEqual(here["evaluation_loss"], there["evaluation_loss"], delta=1e-12)
            with open(first, "rb") as a, open(mine, "rb") as b:
                self.assertEqual(a.read(), b.read())

    def test_a_rank_whose_trace_would_replace_something_else_is_named(self):
        trace, mine = self.path("trace.json"), self.path("trace.json.1")
        with open(mine, "w", encoding="utf-8") as file:
            file.write("my own")
        run = self.train(self.config(), "--trace", trace, through=[*MPIRUN, "-n", "2"], env=ENVIRONMENT)
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn(f"rank 1: --trace {mine}", run.err)
        self.assertEqual(run.out, "")
        with open(mine, encoding="utf-8") as file:
            self.assertEqual(file.read(), "my own")
        self.assertFalse(os.path.exists(trace))

    def test_weights_that_cannot_be_written_cost_nothing_else(self):
        small = self.path("small")
        os.mkdir(small)
        mounted = self.on_tmpfs(small, "size=8k")
        for stage in (0, 3):
            with self.subTest(stage=stage):
                exported, trace = self.path(f"exported{stage}"), self.path(f"trace{stage}.json")
                run = self.train(self.config(zero__stage=stage), "--weights-out", os.path.join(small, "w.st"),
                                 "--export", exported, "--trace", trace,
                                 through=[*mounted, *MPIRUN, "-n", "2"], env=ENVIRONMENT)
                self.assertEqual(run.code, IO, run.err)
                self.assertIn("No space left", run.err)
                self.assertNotIn("lost rank 0: it ended without", run.err)
                self.assertIn("model.safetensors", os.listdir(exported))
                self.assertTrue(os.path.exists(trace))
                self.assertIsNotNone(run.summary)
                self.assertEqual(len(run.hashes), 1)

    def test_an_export_that_cannot_be_written_costs_nothing_else(self):
        small = self.path("small-export")
        os.mkdir(small)
        # Room for the first shard: the second one fails in the midst of what the ranks give.
        mounted = self.on_tmpfs(small, "size=160k")
        for stage in (0, 3):
            with self.subTest(stage=stage):
                weights, trace = self.path(f"beside{stage}.safetensors"), self.path(f"beside{stage}.json")
                run = self.train(self.config(zero__stage=stage), "--export", os.path.join(small, "model"),
                                 "--shard-size", "100KB", "--weights-out", weights, "--trace", trace,
                                 through=[*mounted, *MPIRUN, "-n", "2"], env=ENVIRONMENT)
                self.assertEqual(run.code, IO, run.err)
                for text in ("No space left", "model-00002", "checkpoint.durable_steps"):
                    self.assertIn(text, run.err)
                self.assertNotIn("lost rank 0: it ended without", run.err)
                self.assertTrue(os.path.exists(weights))
                self.assertTrue(os.path.exists(trace))
                self.assertIsNotNone(run.summary)
                self.assertEqual(len(run.hashes), 1)


if __name__ == "__main__":
    unittest.main()

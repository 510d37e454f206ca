"""`ferry bench --all --save` measures a machine once; `ferry plan` and `ferry train` go by its file."""

import collections
import json
import os
import re
import unittest

from harness import USAGE
from predictions import EXAMPLE, PredictionTest


class MachineTest(PredictionTest):
    """One file for all of it, measured once."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tiny = cls.config(budgets__nvme=[cls.nvme()], swap__state_on_nvme=1)
        cls.machine = cls.path("machine.json")
        cls.saved = cls.ferry("bench", "--all", "--json", "--save", cls.machine, "--config",
                              cls.command(cls.tiny)[1])
        with open(cls.machine, encoding="utf-8") as file:
            cls.content = json.load(file)

    def with_content(self, content):
        name = self.path("changed.json")
        with open(name, "w", encoding="utf-8") as file:
            json.dump(content, file)
        return name

    def changed(self, change):
        content = json.loads(json.dumps(self.content))
        change(content)
        return self.with_content(content)

    def test_what_is_saved(self):
        self.assertEqual(self.saved.code, 0, self.saved.err)
        rows = [row["name"] for row in json.loads(self.saved.out)["rows"]]
        for part in ("update of the optimizer", "kernel: forward, block", "kernel: zero, embedding, ", "mixed"):
            self.assertTrue(any(part in row for row in rows), (part, rows))
        self.assertEqual(set(self.content),
                         {"ferry_machine", "paths", "memory", "devices", "kernels"})
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def test_nothing_is_measured_again(self):
        first, second = (json.loads(self.plan(self.tiny, "--machine", self.machine).out)["prediction"]
                         for _ in range(2))
        self.assertEqual(first["measured"], [])
        self.assertEqual(first, second)
        path = self.content["paths"][0]
        nvme = next(link for link in first["links"] if link["link"] == "nvme")
        rate = path["mixed_read_bytes_per_s"] + path["mixed_write_bytes_per_s"]
        self.assertAlmostEqual(nvme["bytes"] / nvme["seconds"] / rate, 1)

    def test_ranks_of_a_host_are_measured_at_once(self):
        """What one rank found alone says nothing of two at once, and the file keeps both."""
        file = self.with_content(self.content)
        two = self.config(budgets__nvme=[], batch__micro_batches=12)
        self.assertIn("this model's kernels",
                      json.loads(self.plan(two, "--ranks", "2", "--machine", file).out)["prediction"]["measured"])
        saved = self.ferry("bench", "--all", "--save", file, "--config", self.command(two)[1], "--ranks", "2")
        self.assertEqual(saved.code, 0, saved.err)
        with open(file, encoding="utf-8") as again:
            content = json.load(again)
        for part in ("memory", "devices", "kernels"):
            self.assertEqual(sorted(one["ranks_at_once"] for one in content[part]), [1, 2], part)
        prediction = json.loads(self.plan(two, "--ranks", "2", "--machine", file).out)["prediction"]
        self.assertEqual((prediction["measured"], prediction["ranks_at_once"]), ([], 2))

    def test_twice_the_drive_is_seen(self):
        def faster(content):
            for key in ("mixed_read_bytes_per_s", "mixed_write_bytes_per_s"):
                content["paths"][0][key] *= 2
        seconds = []
        for file in (self.machine, self.changed(faster)):
            prediction = json.loads(self.plan(self.tiny, "--machine", file).out)["prediction"]
            seconds.append(next(link["seconds"] for link in prediction["links"]
                                if link["link"] == "nvme"))
        self.assertAlmostEqual(seconds[0] / seconds[1], 2)

    def test_storage_that_takes_the_cores_makes_a_step_longer(self):
        def seconds(cpu_s_per_gb):
            def change(content):
                content["paths"][0]["mixed_cpu_s_per_gb"] = cpu_s_per_gb
                for one in content["kernels"][0]["times"]:  # as long as storage takes
                    one["seconds"] *= scale
            prediction = json.loads(self.plan(self.tiny, "--machine", self.changed(change)).out)["prediction"]
            return prediction["step_seconds"], {link["link"]: link["seconds"] for link in prediction["links"]}
        scale = 1
        _, alone = seconds(0)
        scale = alone["nvme"] / alone["compute"]
        idle, _ = seconds(0)
        busy, _ = seconds(1000)
        self.assertGreater(busy, 1.3 * idle)

    def test_measurements_change_the_plan_and_no_number(self):
        """What backward hides and forward cannot is done speculatively; what forward hides does not."""
        config = {**self.tiny, "clip_norm": 2.1}

        def scaled(factors):
            def change(content):
                for one in content["kernels"][0]["times"]:
                    one["seconds"] *= factors.get(one["kernel"], 1)
            return self.changed(change)
        reference = self.train(config)
        self.assert_trained(reference)
        self.assertIn("planned by the defaults", reference.err)
        speculative, slots = [], []
        for factors in ({"forward": 1e-6, "backward": 1e6}, {"forward": 1e6}):
            file = scaled(factors)
            run = self.ferry(*[word for word in self.command(config) if word != "--no-bound"],
                             "--machine", file)
            self.assert_trained(run)
            self.assertEqual(run.numbers(), reference.numbers())
            self.assertIn("measurements of this machine's file", run.err)
            speculative.append(run.summary["steps_committed"] + run.summary["steps_rolled_back"])
            planned = json.loads(self.plan(config, "--no-prediction", "--machine", file).out)
            self.assertEqual(planned["planned_by"], f"the measurements of {file}")
            self.assertEqual(planned["tiers"], run.summary["tiers"])
            slots.append(planned["nvme_bytes"])
        self.assertGreater(speculative[0], 0)
        self.assertEqual(speculative[1], 0)
        self.assertGreater(slots[0], slots[1])

    def test_what_it_buys_to_say_that_no_step_is_clipped(self):
        machine = self.path("h200.json")
        with open(machine, "w", encoding="utf-8") as file:
            json.dump({"ferry_machine": 1, "paths": [],
                       "memory": [{"threads": 16, "update_bytes_per_s": 1.9e11, "update_overhead_s": 1.1e-4,
                                   "out_of_place": 1.02, "check_bytes_per_s": 1.5e10, "measured": "2026-11-21"}],
                       "devices": [{"device": "cuda sm_90", "copy_bytes_per_s": 5.4e10, "update_bytes_per_s": 4.1e12,
                                    "memory_bytes": 150 * 10**9, "overhead_bytes": 690 * 10**6, "measured": "2026-11-21"}]}, file)

        def plan(*settings):
            done = self.ferry("plan", EXAMPLE, "--machine", machine, "--json", "--set",
                              f"data.tokens={self.path('tokens.bin')}", "--set", "budgets.host=100GiB", *settings)
            self.assertEqual(done.code, 0, done.err)
            found = json.loads(done.out)
            return found, {one["change"]: one["step_seconds"] for one in found["prediction"]["what_if"]}
        if self.ferry("plan", self.command(self.tiers(device="cuda"))[1], "--no-prediction").code == 0:
            self.skipTest("there is a GPU, which this would measure")
        unsaid, buys = plan()
        said, said_buys = plan("--set", "swap.expect_clipped=0")
        self.assertEqual(buys["swap.expect_clipped=0"], said["prediction"]["step_seconds"])
        self.assertLess(buys["swap.expect_clipped=0"], 0.97 * unsaid["prediction"]["step_seconds"])
        self.assertGreater(said["mlp_saved"], unsaid["mlp_saved"])
        self.assertNotIn("swap.expect_clipped=0", said_buys)
        self.assertNotIn("swap.expect_clipped=0", plan("--set", "swap.speculate=off")[1])

    def test_a_gpu_that_is_not_here(self):
        config = self.tiers(device="cuda")
        if self.plan(config, "--no-prediction").code == 0:
            self.skipTest("there is one")
        self.assertEqual(self.plan(config, "--machine", self.machine).code, USAGE, "none in the file")
        gpu = {"device": "cuda sm_90", "copy_bytes_per_s": 5e10, "update_bytes_per_s": 3e12,
               "measured": "2026-11-21"}

        def plan_by(change, config=config):
            def with_gpu(content):
                content["devices"].append(dict(gpu))
                change(content)
            done = self.plan(config, "--machine", self.changed(with_gpu))
            self.assertEqual(done.code, 0, done.err)
            self.assertIn("cuda sm_90", done.err)
            return json.loads(done.out)
        assumed = plan_by(lambda content: None)["prediction"]["assumed"]
        for text in ("kernels", "context and libraries", "scratch", "budgets.device"):
            self.assertTrue(any(text in line for line in assumed), (text, assumed))

        def complete(content):
            content["devices"][-1].update(memory_bytes=64 << 20, overhead_bytes=16 << 20)
            here = dict(content["kernels"][0])
            here.update(device="cuda sm_90", under_load=True,
                        model=here["model"].replace("head tile 1024", "head tile 4096"))
            content["kernels"].append(here)
        plan = plan_by(complete)
        self.assertEqual(plan["prediction"]["assumed"], [])
        self.assertGreater(plan["prediction"]["step_seconds"], 0)
        rows = {row["what"]: row["bytes"] for row in plan["tiers"] if row["tier"] == "device"}
        self.assertEqual(rows["the process on the device: context, libraries"], 16 << 20)
        unlimited = plan_by(complete, self.tiers(device="cuda", swap__state_on_nvme=0))
        self.assertLessEqual(unlimited["device_bytes"], 48 << 20)

    def test_counts_beyond_their_ends_are_refused(self):
        """None wraps to another count, and none makes a time of 0 or without end."""
        gpu = {"device": "cuda sm_90", "copy_bytes_per_s": 5e10, "update_bytes_per_s": 3e12}
        here, absent = self.tiny, self.tiers(device="cuda")
        counts = (2**63, 2**63 + 2**34, 2**64 - 1, 2**64, 1 << 60, -1, 1.5, 1e30, "8")
        figures = (1e-300, 1e30, 1e300, 2**64, -1, 0, "8")
        places = [(absent, "memory_bytes", counts, lambda content: content["devices"][-1]),
                  (absent, "overhead_bytes", counts, lambda content: content["devices"][-1]),
                  (absent, "threads", counts, lambda content: content["memory"][-1]),
                  (here, "size", counts, lambda content: content["kernels"][0]["times"][0]),
                  (here, "seconds", figures, lambda content: content["kernels"][0]["times"][0]),
                  (here, "mixed_read_bytes_per_s", figures, lambda content: content["paths"][0]),
                  (here, "update_bytes_per_s", figures, lambda content: content["memory"][0]),
                  (here, "ferry_machine", (2**63, 2**64 - 1, -1, 0, 1.5), lambda content: content)]
        for config, key, values, place in places:
            for value in values:
                def change(content, key=key, value=value, place=place):
                    content["devices"].append(dict(gpu))
                    content["memory"].append(dict(content["memory"][0], threads=1))
                    place(content)[key] = value
                with self.subTest(key=key, value=value):
                    run = self.plan(config, "--machine", self.changed(change))
                    self.assertEqual(run.code, USAGE, run.err)
                    self.assertIn("changed.json", run.err)
                    if key != "ferry_machine":
                        self.assertIn(f'"{key}" must be', run.err)

    def test_another_shape_is_measured(self):
        other = self.tiers(model__hidden=32)
        prediction = json.loads(self.plan(other, "--machine", self.machine).out)["prediction"]
        self.assertEqual(prediction["measured"], ["this model's kernels"])

    def test_training_goes_by_it(self):
        command = [word for word in self.command(self.tiny) if word != "--no-bound"]
        trace = self.path("trace.json")
        run = self.ferry(*command, "--machine", self.machine, "--trace", trace)
        self.assert_trained(run)
        prediction = json.loads(self.plan(self.tiny, "--machine", self.machine).out)["prediction"]
        key = "predicted_speculative_seconds" if prediction["speculative"] else "predicted_seconds"
        self.assertAlmostEqual(run.summary[key], prediction["step_seconds"])
        self.assertAlmostEqual(run.summary["bound_seconds"], prediction["bound_seconds"])
        with open(trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        groups = {event["pid"]: event["args"]["name"] for event in events
                  if event["name"] == "process_name"}
        slices = collections.Counter()
        for event in events:
            if event["ph"] == "X" and event["args"].get("step", 0) > 0:
                slices[groups[event["pid"]], event["name"]] += 1
        # A run of N steps ends with the drain of the last one, which has no plan.
        self.assertEqual(slices["planned", "forward"], slices["measured", "forward"])
        self.assertGreater(slices["planned", "write"], 0)

    def test_steps_are_held_against_the_bound_and_the_best_product(self):
        file = self.changed(lambda content: content["kernels"][0].update(gemm_flops_per_s=1e9))
        command = [word for word in self.command(self.tiny) if word != "--no-bound"]
        run = self.ferry(*command, "--machine", file)
        self.assert_trained(run)
        self.assertGreater(run.summary["model_flops"], 1e6)
        for step in run.steps:
            self.assertLessEqual({"loss", "gradient_norm", "clip_factor", "lr", "loss_scale", "tokens_per_second",
                                  "mfu", "bound_ratio"}, step.keys())
            rate = run.summary["model_flops"] / step["seconds"]
            self.assertAlmostEqual(step["mfu"] / (rate / 1e9), 1)
            ratio = run.summary["bound_seconds"] / step["seconds"]
            self.assertAlmostEqual(step["bound_ratio"] / ratio, 1)
        self.assertGreater(run.summary["mfu"], 0)
        table = self.ferry(*[word for word in command if word != "--json"], "--machine", file)
        for reference in ("lower bound of a step", "predicted by its schedule"):
            seconds, ratio = re.search(rf"{reference}: ([0-9.]+) s.* measured step at ([0-9.]+)x of it", table.out).groups()
            measured = float(re.search(r"([0-9.]+) s a step", table.out)[1])
            self.assertAlmostEqual(float(ratio), float(seconds) / measured, delta=0.006 + 2e-4 / measured)
        for step in self.train(self.tiny).steps:
            self.assertIsNone(step["mfu"])
            self.assertIsNone(step["bound_ratio"])

    def test_a_second_bound_goes_by_the_machines_peaks(self):
        def bounds(flops, within):
            def change(content):
                content["kernels"][0].update(gemm_flops_per_s=flops)
                for device in content["devices"]:
                    device.update(copy_within_bytes_per_s=within)
            command = [word for word in self.command(self.tiny) if word != "--no-bound"]
            summary = self.ferry(*command, "--machine", self.changed(change)).summary
            return summary["bound_seconds"], summary["peak_bound_seconds"], summary["model_flops"]

        bound, peak, _ = bounds(1e15, 1e15)
        self.assertTrue(0 < peak < bound, (peak, bound))
        _, peak, flops = bounds(1e9, 1e15)
        self.assertGreaterEqual(peak, 0.99 * flops / 1e9)
        _, slower, _ = bounds(1e9, 1e7)
        self.assertGreater(slower, peak)

    def test_training_says_what_the_file_lacks(self):
        for change, text in ((lambda c: c["kernels"].clear(), "kernels"),
                             (lambda c: c["memory"].clear(), "threads"),
                             (lambda c: c["paths"].clear(), self.path("nvme"))):
            file = self.changed(change)
            run = self.train(self.tiny, "--machine", file)
            self.assertEqual(run.code, USAGE, run.err)
            for word in (text, file, "ferry bench --all"):
                self.assertIn(word, run.err)

    def test_bad_files(self):
        def put(where, key, value):
            def change(content):
                place = content[where][0]
                if where == "kernels":
                    place = place["times"][0]
                if value is None:
                    del place[key]
                else:
                    place[key] = value
            return change
        for change, *texts in (
                (put("paths", "mixed_read_bytes_per_s", None), "mixed_read_bytes_per_s", "missing"),
                (put("paths", "mixed_write_bytes_per_s", -1), "mixed_write_bytes_per_s", "-1"),
                (put("paths", "mixed_cpu_s_per_gb", -2), "mixed_cpu_s_per_gb", "of 0 to", "-2"),
                (put("memory", "update_bytes_per_s", 0), "update_bytes_per_s", "above 0"),
                (put("memory", "check_bytes_per_s", "fast"), "check_bytes_per_s", "fast"),
                (put("memory", "update_overhead_s", None), "update_overhead_s", "missing"),
                (put("memory", "out_of_place", 0), "out_of_place", "above 0"),
                (put("devices", "update_bytes_per_s", -1), "update_bytes_per_s", "-1"),
                (put("devices", "copy_bytes_per_s", None), "copy_bytes_per_s", "missing"),
                (put("kernels", "seconds", -0.5), "seconds", "-0.5"),
                (put("kernels", "kernel", "warp"), "kernel", "warp"),
                (put("kernels", "layer", None), "layer", "none of those"),
                (put("kernels", "size", -1), "size", "-1"),
                (lambda c: c.update(ferry_machine=2), "newer ferry"),
                (lambda c: c.update(memroy=[]), 'call it "memory"'),
                (lambda c: c.update(ferry_machine=0), "no machine file"),
                (lambda c: c.update(memory=3), "memory", "no list")):
            file = self.changed(change)
            run = self.plan(self.tiny, "--machine", file)
            self.assertEqual(run.code, USAGE, (texts, run.err))
            for text in (*texts, file):
                self.assertIn(text, run.err)
        run = self.plan(self.tiny, "--machine", self.path("none.json"))
        self.assertEqual(run.code, USAGE)
        self.assertIn("No such file", run.err)

    def test_bench_wants_to_be_told_what(self):
        for words in ([], ["--save", self.path("m.json")], ["--all", "--save", "/none/m.json"]):
            self.assertEqual(self.ferry("bench", *words).code, USAGE, words)


if __name__ == "__main__":
    unittest.main()

"""`ferry plan` says what a step takes before it is run, and `ferry train` moves exactly the bytes that were planned."""

import collections
import json
import os
import re
import resource
import subprocess
import unittest
import xml.etree.ElementTree

from harness import DOES_NOT_FIT, FERRY, USAGE, start
from predictions import PredictionTest

LANES = ("compute", "h2d", "d2h", "team", "check", "nvme read", "nvme write")


class BytesTest(PredictionTest):
    def planned(self, config, steps):
        """What the schedules that these steps replayed move, by lane."""
        plan = self.plan(config, "--no-prediction")
        self.assertEqual(plan.code, 0, plan.err)
        schedules = {one["name"]: one["bytes"] for one in json.loads(plan.out)["schedules"]}
        total, previous = collections.Counter(), "first"
        for step in steps:
            total.update(schedules[previous + (", speculative" if step["speculative"] else "")])
            previous = ("after a step without speculation" if not step["speculative"] else
                        "after a commit" if step["committed"] else "after a rollback")
        total.update(schedules["end " + previous])
        return total

    def assert_exact(self, config):
        run = self.train(config)
        self.assert_trained(run)
        planned = self.planned(config, run.steps)
        for lane in LANES:
            self.assertEqual(planned[lane], run.lane(lane), lane)
        return run

    def test_planned_bytes_are_those_measured(self):
        run = self.assert_exact(self.tiers(swap__speculate="off"))
        # And those that the kernel says it moved: the state's first contents came before.
        self.assertEqual(sum(p["bytes_read"] for p in run.summary["paths"]), run.lane("nvme read"))

    def test_with_speculation_committed_and_rolled_back(self):
        run = self.assert_exact(self.tiers(swap__speculate="all", clip_norm=1.0, steps=12))
        self.assertGreater(run.summary["steps_committed"] + run.summary["steps_rolled_back"], 0)

    def test_with_groups_and_little_memory(self):
        self.assert_exact(self.tiers(swap__groups=2, budgets__host="700KiB", budgets__device="2MiB",
                                     swap__chunk_elements=8192))


class PlanTest(PredictionTest):
    def predict(self, config, *arguments):
        plan = self.plan(config, *arguments)
        self.assertEqual(plan.code, 0, plan.err)
        return json.loads(plan.out)

    def test_json(self):
        plan = self.predict(self.tiers())
        self.assertEqual(set(plan), {"device_bytes", "host_bytes", "nvme_bytes", "chunk_elements",
                                     "micro_batches", "groups", "attention_saved", "mlp_saved", "projections_saved",
                                     "phases", "mean_step_seconds", "inputs_saved", "ranks", "tensor", "sequence", "kernel_exchanges", "tiers", "schedules", "wear", "planned_by", "prediction", "slow_operations",
                                     "tokens_checked", "attention"})
        prediction = plan["prediction"]
        self.assertEqual(set(prediction), {"exchanges", "step_seconds", "simulated_groups", "speculative", "binding", "plan_bound_seconds",
                                         "bound_seconds", "bound_link", "peak_bound_seconds", "links", "timeline",
                                         "what_if", "measured", "assumed", "state",
                                         "bound_state", "attention", "bound_attention", "mlp", "bound_mlp",
                                         "projections", "bound_projections", "ranks_at_once", "timed_at_once"})
        self.assertEqual((prediction["ranks_at_once"], prediction["timed_at_once"]), (1, ""))
        step = prediction["step_seconds"]
        self.assertGreater(step, 0)
        [phase] = plan["phases"]
        self.assertEqual((phase["exchanges"], phase["steps"], phase["seconds"]), ("gradients", 8, step))
        self.assertEqual({one["exchanges"] for one in plan["schedules"]}, {"gradients"})
        self.assertGreaterEqual(step, prediction["plan_bound_seconds"] * 0.999)
        links = {link["link"]: link for link in prediction["links"]}
        self.assertEqual(set(links), {"compute", "host to device", "device to host", "nvme", "dram",
                                      "cores"})
        self.assertEqual(max(links.values(), key=lambda link: link["seconds"])["link"],
                         prediction["binding"])
        self.assertEqual(prediction["state"]["nvme"], 12 / 16)  # all of it; the gradients are not
        for shares in (prediction["state"], prediction["bound_state"]):
            self.assertAlmostEqual(sum(shares.values()), 1)
        self.assertEqual(prediction["bound_state"]["nvme"], 0, "memory is unlimited")
        steady = next(one["bytes"] for one in plan["schedules"]
                      if one["name"] == "after a step without speculation")
        self.assertEqual(links["nvme"]["bytes"], steady["nvme read"] + steady["nvme write"])
        self.assertEqual(links["host to device"]["bytes"], steady["h2d"])
        for bar in prediction["timeline"]:
            self.assertIn(bar["lane"], LANES)
            self.assertLessEqual(0, bar["begin_seconds"])
            self.assertLessEqual(bar["begin_seconds"], bar["end_seconds"])
            self.assertLessEqual(bar["end_seconds"], step * (1 + 1e-9))
        # Nobody checks but the update: only state is stored.
        self.assertEqual({bar["lane"] for bar in prediction["timeline"]}, set(LANES) - {"check"})
        changes = [one["change"] for one in prediction["what_if"]]
        self.assertIn("+10 % NVMe bandwidth", changes)
        self.assertIn("+1 core", changes)
        self.assertNotIn("+1 GiB of host memory", changes, "the budget is unlimited")
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def test_more_of_what_is_limited_is_asked_for(self):
        # A disk so slow that it sets the step, whatever this machine's kernels take.
        drive = {"path": self.path("nvme"), "mixed_read_bytes_per_s": 1e6, "mixed_write_bytes_per_s": 1e6}
        machine = self.path("slow_disk.json")
        with open(machine, "w", encoding="ascii") as file:
            json.dump({"ferry_machine": 1, "paths": [drive]}, file)
        plan = self.predict(self.config(budgets__nvme=[self.nvme()], budgets__host="2MiB",
                                         budgets__device="4MiB"), "--machine", machine)
        gains = {one["change"]: one["step_seconds"] for one in plan["prediction"]["what_if"]}
        self.assertLess(gains["+1 GiB of host memory"], 0.5 * plan["prediction"]["step_seconds"])
        self.assertIn("+1 GiB of device memory", gains)

    def test_each_row_of_the_table_has_its_reason(self):
        durable = {"checkpoint__durable_steps": True}
        for config in (self.tiers(), self.tiers(**durable), self.tiers(optimizer__method="muon"),
                       self.config(swap__groups=2, budgets__device="2MiB"), self.config(swap__save_mlp=3)):
            run = self.ferry("plan", self.command(config)[1], "--no-prediction")
            self.assertEqual(run.code, 0, run.err)
            table = run.out[run.out.index("  tier "):].split("\n\n")[0].splitlines()[1:]
            self.assertGreater(len(table), 8, run.out)
            for row in table:
                self.assertRegex(row, r" (B|[KMGT]iB) +\S", row)

    def test_a_state_that_needs_no_disk_is_asked_for(self):
        def host_bytes(**changes):
            return self.predict(self.config(**fixed, **changes), "--no-prediction")["host_bytes"]
        fixed = {"swap__speculate": "off", "swap__chunk_elements": 4096}
        small, large = host_bytes(optimizer__moments="int8"), host_bytes()
        self.assertLess(small, large)
        between = (small + large) // 2
        tight = {**fixed, "budgets__nvme": [self.nvme()], "budgets__host": between}
        plan = self.predict(self.config(**tight))
        self.assertGreater(plan["nvme_bytes"], 0, (small, large))
        answers = {one["change"]: one for one in plan["prediction"]["what_if"]}
        self.assertTrue(answers["optimizer.moments=int8"]["all_in_memory"])
        self.assertFalse(answers["+1 core"]["all_in_memory"])
        self.assertEqual(self.predict(self.config(**tight, optimizer__moments="int8"))["nvme_bytes"], 0)
        run = self.ferry("plan", self.command(self.config(**tight))[1])
        self.assertRegex(run.out, r"optimizer.moments=int8 .*all in memory, no disk")
        # State that is to be on the disk stays there, whatever it takes.
        plan = self.predict(self.tiers())
        self.assertNotIn("optimizer.moments=int8", [one["change"] for one in plan["prediction"]["what_if"]])

    def test_table_and_picture(self):
        picture = self.path("step.svg")
        run = self.ferry("plan", self.command(self.tiers())[1], "--svg", picture)
        self.assertEqual(run.code, 0, run.err)
        for text in ("measured now: ", "one step as planned", "compute  ", "binds",
                     "lower bound of any placement", "step, s      gain", "+10 % NVMe bandwidth",
                     "NVMe wear: "):
            self.assertIn(text, run.out)
        ratios = re.findall(r"bound.* ([0-9.]+) s \(.*predicted step at ([0-9.]+)x of it", run.out)
        step = float(re.search(r"one step as planned.*: ([0-9.]+) s", run.out)[1])
        self.assertEqual(len(ratios), 2, run.out)
        for bound, ratio in ratios:
            self.assertAlmostEqual(float(ratio), float(bound) / step, delta=0.02 + 1e-4 / step)
        root = xml.etree.ElementTree.parse(picture).getroot()
        space = "{http://www.w3.org/2000/svg}"
        texts = [text.text for text in root.iter(space + "text")]
        for lane in LANES:
            self.assertIn(lane, texts)
        self.assertGreater(len(list(root.iter(space + "rect"))), 20)
        with open(picture, "w", encoding="utf-8") as file:
            file.write('<svg xmlns="x">mine</svg>')
        run = self.ferry("plan", self.command(self.tiers())[1], "--svg", picture)
        self.assertEqual(run.code, USAGE, run.err)
        with open(picture, encoding="utf-8") as file:
            self.assertEqual(file.read(), '<svg xmlns="x">mine</svg>')

    def test_a_path_that_is_not_there_is_no_prediction(self):
        config = self.tiers(budgets__nvme=[{"path": self.path("none"), "size": "64MiB"}])
        plan = self.predict(config)
        self.assertIn("No such file", plan["prediction"]["missing"])
        self.assertFalse(os.path.exists(self.path("none")))
        picture = self.path("none.svg")
        run = self.ferry("plan", self.command(config)[1], "--svg", picture)
        self.assertEqual(run.code, USAGE, run.err)
        for text in ("no step to draw", "--svg", "No such file", self.path("none"), "--machine"):
            self.assertIn(text, run.err)
        self.assertEqual(run.out, "")
        self.assertFalse(os.path.exists(picture))

    def test_planning_writes_little(self):
        """To measure a path: within its size, and as much again; what trying it out takes comes on top."""
        for size in (64, 512):
            config = self.tiers(budgets__nvme=[self.nvme(f"{size}MiB")])
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock
            self.assertGreater(self.predict(config)["prediction"]["step_seconds"], 0)
            written = 512 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock - before)
            self.assertLessEqual(written, (2 * min(size, 256) + 96) << 20)

    def test_little_room_is_enough_to_measure(self):
        path = self.path("small")
        os.mkdir(path)
        inside = self.on_tmpfs(path, "size=40m")
        config = self.tiers(budgets__nvme=[{"path": path, "size": "24MiB"}])
        run = self.ferry("plan", self.command(config)[1], "--json", through=inside)
        self.assertEqual(run.code, 0, run.err)
        self.assertGreater(json.loads(run.out)["prediction"].get("step_seconds", 0), 0)

    def wear(self, config, *arguments):
        return self.predict(config, "--no-prediction", *arguments)["wear"]

    def followed(self, config, *arguments):
        """The advice by the keys it names; each comes out as it says, planned with --set."""
        wear = self.wear(config, *arguments)
        share = wear["paths"][0]["endurance_share"]
        self.assertGreater(share, 0.1)
        found = {}
        for advice in wear["advice"]:
            self.assertLess(advice["endurance_share"], share, advice)
            changes = [word for key, value in advice["set"].items()
                       for word in ("--set", f"{key}={value}")]
            if changes:
                again = self.wear(config, *arguments, *changes)
                came_out = max((p.get("endurance_share", 0) for p in again["paths"]), default=0)
                self.assertAlmostEqual(came_out, advice["endurance_share"], msg=advice)
            found[tuple(advice["set"])] = advice
        return found

    def test_wear(self):
        drive = {**self.nvme(), "endurance_tbw": 0.001}
        config = self.tiers(budgets__nvme=[drive], steps=1000)
        plan = self.predict(config, "--no-prediction")
        wear = plan["wear"]
        steady = next(one["bytes"] for one in plan["schedules"]
                      if one["name"] == "after a step without speculation")
        self.assertEqual(wear["step_bytes"], steady["nvme write"])
        self.assertEqual(wear["step_note_bytes"], 8192, "the header, twice")
        self.assertEqual(wear["run_bytes"], plan["nvme_bytes"] + 1000 * (steady["nvme write"] + 8192))
        self.assertAlmostEqual(wear["paths"][0]["endurance_share"], wear["run_bytes"] / 1e9)
        advice = self.followed(config)
        # There is no split master of fp32; unlimited memory cannot grow.
        self.assertEqual(set(advice), {("swap.state_on_nvme",), ("batch.micro_batches", "steps"),
                                       ("optimizer.moments",), ()})
        half = self.followed(config)[()]["endurance_share"]
        # A second path takes half of the state, and has a header of its own.
        self.assertAlmostEqual(half / ((wear["run_bytes"] + 1000 * 8192) / 2e9), 1, places=2, msg="a second path")
        config = self.tiers(budgets__nvme=[drive], steps=1000, precision="bf16",
                            optimizer__moments="bf16")
        advice = self.followed(config)
        self.assertIn(("optimizer.master",), advice)
        self.assertEqual(advice["optimizer.moments",]["set"], {"optimizer.moments": "int8"}, "bf16 it is already")
        config = self.tiers(budgets__nvme=[drive], steps=1000, precision="bf16", optimizer__moments="int8")
        self.assertTrue(all(one["set"] != {"optimizer.moments": "int8"} for one in self.followed(config).values()))
        drive["endurance_tbw"] = 600
        plan = self.predict(self.tiers(budgets__nvme=[drive], steps=1000), "--no-prediction")
        self.assertEqual(plan["wear"]["advice"], [])

    def test_wear_goes_by_the_sizes_of_paths(self):
        """One of two paths holds a part of its half only: the rest, and its wear, are the other's."""
        sizes = {"cramped": 64 << 10, "roomy": 64 << 20}
        for name in sizes:
            os.mkdir(self.path(name))
        drives = [{"path": self.path(name), "size": size, "endurance_tbw": 0.001} for name, size in sizes.items()]
        config = self.tiers(budgets__nvme=drives, steps=40, swap__speculate="off", swap__state_on_nvme=1,
                            swap__chunk_elements=4096)
        planned = [path["run_bytes"] for path in self.wear(config)["paths"]]
        self.assertGreater(planned[1], 2 * planned[0])
        run = self.train(config)
        self.assert_trained(run)
        written = [path["bytes_written"] for path in run.summary["paths"]]
        for plan, measured in zip(planned, written):
            self.assertGreater(measured, 0.7 * plan)
            self.assertLess(measured, 1.3 * plan)

    def test_rollbacks_wear_more(self):
        """A clip that rolls every speculative update back: what the run writes is within what the plan says, and near it."""
        drive = {**self.nvme(), "endurance_tbw": 0.0001}
        steps = 20
        config = self.config(budgets__nvme=[drive], swap__state_on_nvme=1, swap__speculate="all", steps=steps,
                             swap__chunk_elements=8192, clip_norm=1e-3)
        wear = self.wear(config)
        self.assertGreater(wear["step_bytes_rolled_back"], 1.3 * wear["step_bytes"])
        run = self.train(config)
        self.assert_trained(run)
        written = run.lane("nvme write")
        self.assertGreater(written, 1.2 * steps * wear["step_bytes"], "speculative updates were rolled back")
        self.assertLessEqual(written, steps * wear["step_bytes_rolled_back"])
        self.assertGreater(written, 0.8 * steps * wear["step_bytes_rolled_back"])
        path = wear["paths"][0]
        self.assertAlmostEqual(path["endurance_share_rolled_back"], wear["run_bytes_rolled_back"] / 1e8)
        self.assertIn({"swap.speculate": "auto"}, [advice["set"] for advice in wear["advice"]])
        text = self.ferry("plan", self.command(config)[1], "--no-prediction").out
        self.assertRegex(text, r"up to .* a step where speculative updates are rolled back")
        self.assertIn("warning", text)
        self.assertNotRegex(text, r"e\+\d\d %", "percentages are plain numbers")
        never = self.wear(self.config(budgets__nvme=[drive], swap__state_on_nvme=1, swap__speculate="off"))
        self.assertEqual(never["step_bytes_rolled_back"], 0)

    def test_more_host_memory_is_advised_where_it_helps(self):
        drive = {**self.nvme(), "endurance_tbw": 0.001}
        little = {"budgets__nvme": [drive], "budgets__host": "700KiB", "steps": 1000,
                  "swap__chunk_elements": 8192}
        for more in ({}, {"swap__groups": 2, "budgets__device": "2MiB"}):  # accumulators are stored
            advice = self.followed(self.config(**little, **more))
            self.assertLessEqual(advice["budgets.host",]["endurance_share"], 0.1)
        for key, forced in (("checkpoint.durable_steps", {"checkpoint__durable_steps": True}),
                            ("swap.state_on_nvme", {"swap__state_on_nvme": 1})):
            advice = self.followed(self.config(**{**little, **forced, "budgets__host": "64MiB"}))
            self.assertNotIn(("budgets.host",), advice, "however much there is")
            self.assertIn((key,), advice)

    def test_a_durable_run_is_predicted_too(self):
        config = self.tiers(checkpoint__durable_steps=True)
        self.assertGreater(self.predict(config)["prediction"]["step_seconds"], 0)

    def test_ranks_of_a_host_wear_its_drives_together(self):
        drive = {**self.nvme(), "endurance_tbw": 0.001}
        config = self.tiers(budgets__nvme=[drive], steps=1000)
        alone = self.wear(config)
        plan = self.predict(config, "--no-prediction", "--ranks", "2")
        steady = next(one["bytes"] for one in plan["schedules"]
                      if one["name"] == "after a step without speculation")
        self.assertEqual(plan["wear"]["step_bytes"], 2 * steady["nvme write"])
        self.assertGreater(plan["wear"]["run_bytes"], 0.95 * alone["run_bytes"])
        self.assertEqual(plan["wear"]["paths"][0]["run_bytes"], plan["wear"]["run_bytes"])
        self.followed(config, "--ranks", "2")
        apart = self.wear(config, "--ranks", "2", "--ranks-per-host", "1")
        self.assertLess(apart["run_bytes"], 0.6 * plan["wear"]["run_bytes"])

    def test_the_files_of_a_run_are_within_the_budget(self):
        """The smallest that a refusal names is enough, headers and all, and a byte less is not."""
        def with_size(size):
            return self.tiers(budgets__nvme=[{"path": self.path("exact"), "size": size}], steps=1000000)
        os.makedirs(self.path("exact"), exist_ok=True)
        refused = self.train(with_size("4KiB"))
        self.assertEqual(refused.code, DOES_NOT_FIT)
        enough = int(re.search(r"to ([0-9]+) in all", refused.err).group(1))
        self.assertEqual(self.train(with_size(enough - 1)).code, DOES_NOT_FIT)
        process = start([FERRY, *self.command(with_size(enough))], stderr=subprocess.DEVNULL)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.assertIn("loss", process.stdout.readline())
        files = [os.stat(os.path.join(self.path("exact"), name)) for name in
                 os.listdir(self.path("exact"))]
        self.assertLessEqual(sum(max(file.st_size, 512 * file.st_blocks) for file in files), enough)

    def test_it_says_by_which_measurements(self):
        plan = self.predict(self.tiers(), "--no-prediction")
        self.assertIn("defaults of a small machine", plan["planned_by"])
        self.assertIn("--machine", plan["planned_by"])
        table = self.ferry("plan", self.command(self.tiers())[1], "--no-prediction")
        self.assertIn(plan["planned_by"], table.out)

    def test_an_absurd_shape_is_refused_by_arithmetic(self):
        absurd = self.tiers(model__hidden=1 << 20, model__layers=65536, model__heads=1 << 13,
                            model__intermediate=1 << 20)
        run = self.plan(absurd, "--no-prediction")
        self.assertEqual(run.code, DOES_NOT_FIT, run.err)
        self.assertIn("more chunks than can be planned", run.err)
        self.assertIn("swap.chunk_elements", run.err)

    def test_memory_is_looked_at_before_a_schedule_is_chosen(self):
        """Simulations of many stages take seconds. What is measured for either schedule needs more than 1 TiB."""
        staged = {"parallel__pipeline": 2, "model__layers": 3, "parallel__virtual_stages": 1, "batch__micro_batches": 4}
        for micro_batch, sequence, code in ((1, 32, 0), (1 << 20, 1024, DOES_NOT_FIT)):
            config = self.config(**staged, batch__micro_batch=micro_batch, batch__sequence=sequence)
            with self.subTest(micro_batch=micro_batch):
                done = self.ferry("plan", self.command(config)[1], "--ranks", "2", env={**os.environ, "FERRY_LOG": "debug"})
                self.assertEqual(done.code, code, done.err)
                self.assertEqual("this machine has less memory than the budgets allow" in done.err, code != 0, done.err)
                self.assertEqual(re.search(r"simulates \d schedules of 2 stages", done.err) is None, code != 0, done.err)


if __name__ == "__main__":
    unittest.main()

"""`ferry plan` says what a step takes before it is run, from measurements or a machine file, and
`ferry train` moves exactly the bytes that were planned."""

import collections
import json
import os
import re
import resource
import subprocess
import unittest
import xml.etree.ElementTree

from harness import DOES_NOT_FIT, FERRY, USAGE, FerryTest, start, in_quick

EXAMPLE = os.path.join(os.path.dirname(__file__), "../../examples/3b_gpu.json")
SAVED = os.path.join(os.path.dirname(__file__), "machine_h100.json")
LANES = ("compute", "h2d", "d2h", "team", "check", "nvme read", "nvme write")


class PredictionTest(FerryTest):
    def plan(self, config, *arguments):
        return self.ferry("plan", self.command(config)[1], "--json", *arguments)

    def tiers(self, **changes):
        """Three tiers, all of the state stored."""
        return self.config(**{"budgets__nvme": [self.nvme()], "swap__state_on_nvme": 1, **changes})


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


class SavedByAGpuTest(PredictionTest):
    """Plans by measurements that a machine with an H100 saved (the 3 B example, of this theta and epsilon), where there
    is no GPU."""

    MODEL = ("--set", "model.rope_theta=500000", "--set", "model.norm_eps=1e-6")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if cls.ferry("plan", EXAMPLE, "--no-prediction").code == 0:
            raise unittest.SkipTest("there is a GPU, which this would measure")
        with open(SAVED, encoding="utf-8") as file:
            cls.saved = json.load(file)

    def plan_by(self, *arguments, change=lambda content: None, example=EXAMPLE):
        content = json.loads(json.dumps(self.saved))
        change(content)
        machine = self.path("saved.json")
        with open(machine, "w", encoding="utf-8") as file:
            json.dump(content, file)
        done = self.ferry("plan", example, "--json", "--machine", machine, *arguments)
        self.assertEqual(done.code, 0, done.err)
        plan = json.loads(done.out)
        return plan, plan["prediction"], {link["link"]: link for link in plan["prediction"]["links"]}

    @staticmethod
    def rate(link):
        return link["bytes"] / link["seconds"]

    def test_every_figure_is_found_again(self):
        """The kernels of 16 threads, and with them memory and copies beside the GPU."""
        plan, prediction, links = self.plan_by(*self.MODEL)
        self.assertEqual((prediction["assumed"], prediction["measured"]), ([], []))
        self.assertEqual(plan["planned_by"], f"the measurements of {self.path('saved.json')}")
        self.assertAlmostEqual(self.rate(links["dram"]) / self.saved["memory"][0]["update_bytes_per_s"], 1, places=6)
        self.assertAlmostEqual(self.rate(links["host to device"]) / self.saved["devices"][0]["copy_bytes_per_s"], 1)

    def test_the_rate_of_a_product_tells_the_times_of_another_model(self):
        def slower(content):
            content["kernels"][0]["gemm_flops_per_s"] /= 4
        _, _, fast = self.plan_by()
        _, prediction, slow = self.plan_by(change=slower)
        self.assertIn("this model's kernels, by their operations", prediction["assumed"])
        self.assertGreater(slow["compute"]["seconds"], 2 * fast["compute"]["seconds"])

    def test_gpus_send_codes_over_a_slow_network(self):
        """Each codec, alone and in groups of a host."""
        ranks = ("--ranks", "4", "--ranks-per-host", "2", "--set", "model.layers=4", "--set", "batch.micro_batches=4")
        for stage, weights in ((1, ["none"]), (3, ["none", "int8"])):
            with self.subTest(stage=stage):
                plan, _, _ = self.plan_by(*ranks, "--network", "1Gbit", "--set", f"zero.stage={stage}")
                every = plan["network"]["steps"]
                self.assertEqual(plan["network"]["best"], min(every, key=lambda one: one["seconds"]))
                steps = [one for one in every if one["ranks_per_host"] == 1]
                self.assertEqual([(one["gradients"], one["weights"]) for one in steps],
                                 [(gradients, of) for of in weights for gradients in ("none", "int8", "int4")])
                grouped = {(one["gradients"], one["weights"]) for one in every if one["ranks_per_host"] == 2}
                self.assertLessEqual({("int8", "none"), ("int4", "none")}, grouped)
                for before, one in zip(steps[:3], steps[1:3]):  # fewer bytes, and the network binds
                    self.assertLess(one["sent_bytes"], before["sent_bytes"])
                    self.assertLess(one["seconds"], before["seconds"])

    def test_what_other_optimizers_would_send(self):
        """AdamW's plan has rows of signs too, those of a plan with them, and says why it has none."""
        base = ("--ranks", "4", "--network", "1Gbit", "--set", "model.layers=4", "--set", "batch.micro_batches=4")
        words = ("plan", EXAMPLE, "--machine", SAVED, *base)
        long = ("--set", "steps=1000", "--set", "schedule.warmup_steps=100", "--set", "schedule.total_steps=1000")
        network = json.loads(self.ferry(*words, "--json", *long).out)["network"]
        self.assertEqual({one["gradients"] for one in network["steps"]}, {"none", "int8", "int4"})
        self.assertEqual([one["optimizer"] for one in network["other_optimizers"]], ["onebit_adam", "zeroone_adam"])
        key = {"onebit_adam": "freeze_step", "zeroone_adam": "var_freeze_step"}
        for other in network["other_optimizers"]:
            self.assertIsNone(other["refused"])
            own = json.loads(self.ferry(*words, "--json", *long, "--set", f"optimizer.method={other['optimizer']}",
                                        "--set", f"optimizer.{key[other['optimizer']]}=200").out)["network"]
            self.assertEqual(own["other_optimizers"], [])
            signs = [one for one in own["steps"] if one["gradients"] == "signs"]
            self.assertEqual([one["sent_bytes"] for one in other["steps"]], [one["sent_bytes"] for one in signs])
            for here, there in zip(other["steps"], signs):
                self.assertAlmostEqual(here["seconds"], there["seconds"], delta=0.01 * there["seconds"])
            self.assertGreater(other["mean_step_seconds"], min(one["seconds"] for one in signs))
        best = min(network["other_optimizers"], key=lambda one: one["mean_step_seconds"])
        faster = best["mean_step_seconds"] < network["best"]["seconds"]
        self.assertEqual(network["best_other_optimizer"], best["optimizer"] if faster else None)
        text = self.ferry(*words, *long).out
        self.assertEqual(text.count("another optimizer, zeroone_adam"), 2)
        self.assertIn("best of all: ", text)
        self.assertIn("; 0/1 Adam's local steps are left out\n", text)
        short = self.ferry(*words, "--set", "steps=1").out
        self.assertIn("another optimizer, onebit_adam: refused, the run ends before the second moment stays", short)
        self.assertIn("onebit_adam, 1 step in full\n", self.ferry(*words, "--set", "steps=2").out)

    def test_steps_in_full_of_another_optimizer_keep_what_its_others_keep(self):
        words = ("plan", EXAMPLE, "--machine", SAVED, "--ranks", "4", "--ranks-per-host", "2", "--network", "100Mbit", "--json",
                 "--set", "model.layers=4", "--set", "batch.micro_batches=4", "--set", "steps=100")
        hosts = ("--set", "zero.ranks_per_host=2", "--set", "zero.secondary_shard=node", "--set", "zero.compress.weights=int8")
        for more in ((), hosts):
            network = json.loads(self.ferry(*words, *more).out)["network"]
            other = network["other_optimizers"][0]
            self.assertEqual(other["optimizer"], "onebit_adam")
            own = json.loads(self.ferry(*words, *more, "--set", "optimizer.method=onebit_adam",
                                        "--set", "optimizer.freeze_step=20").out)["network"]["steps"]
            self.assertEqual(sum(one["second_shards"] for one in own), 4)
            full = {(one["weights"], one["second_shards"]): one["seconds"] for one in own if one["gradients"] == "none"}
            means = [0.2 * full[one["weights"], one["second_shards"]] + 0.8 * one["seconds"]
                     for one in own if one["gradients"] == "signs"]
            self.assertEqual(len(means), 4)
            self.assertAlmostEqual(other["mean_step_seconds"] / min(means), 1, delta=0.01)

    def test_a_gpu_that_is_not_here_is_said_once(self):
        done = self.ferry("plan", EXAMPLE, "--machine", SAVED, "--ranks", "2", "--network", "1Gbit", "--set", "model.layers=4",
                          "--set", "batch.micro_batches=2")
        self.assertEqual(done.code, 0, done.err)
        self.assertEqual(done.err.count("planning for the cuda"), 1, done.err)

    def test_hosts_of_the_configuration_that_are_not_the_plans(self):
        """What was to stay in a host crosses where it spans several: its bytes come at the network's rate, and the plan warns."""
        hosts = ("--ranks", "8", "--network", "1Gbit", "--set", "model.layers=4", "--set", "batch.micro_batches=8",
                 "--set", "zero.stage=1", "--set", "zero.ranks_per_host=2", "--set", "zero.compress.gradients=int8")

        def comm(on_a_host):
            _, _, links = self.plan_by(*hosts, "--ranks-per-host", str(on_a_host))
            said = self.ferry("plan", EXAMPLE, "--machine", self.path("saved.json"), *hosts, "--ranks-per-host", str(on_a_host)).err
            return links["comm"], [line for line in said.splitlines() if "zero.ranks_per_host is" in line]

        split, warned = comm(1)
        self.assertGreaterEqual(split["seconds"], 0.999 * split["bytes"] * 8 / 1e9)  # each rank has a link of its own
        self.assertEqual(len(warned), 1)
        for word in ("zero.ranks_per_host is 2, and this plan has 1 rank on a host", "crosses the network", "--ranks-per-host 2"):
            self.assertIn(word, warned[0])
        alike, warned = comm(2)
        self.assertEqual(warned, [])
        self.assertEqual(alike["bytes"], split["bytes"])
        # Two ranks share a link, which what stays in a host does not take.
        self.assertLess(alike["seconds"], 2 * alike["bytes"] * 8 / 1e9)
        whole, warned = comm(4)
        self.assertEqual(len(warned), 1)
        self.assertIn("a host sends 2 sums of its gradients where one would do", warned[0])

    GROUPS = ("--set", "model.layers=4", "--set", "parallel.sequence=2", "--set", "batch.micro_batches=2", "--ranks", "4")

    def of_groups(self, **rates):
        """Adds what four GPUs that share sequences by two would have saved."""
        def add(content):
            content["ranks"] = [{"ranks": 4, "on_a_host": 4, "by": "nccl", "sequence": 2, "bytes_per_s": 2e11,
                                 "overhead_s": 2e-5, **rates}]
        return add

    def test_rates_of_groups_are_their_own(self):
        known = {"sequence_bytes_per_s": 3e11, "sequence_overhead_s": 1e-5}
        slow = {**known, "sequence_bytes_per_s": 3e9}
        alike, fast, late = (self.plan_by(*self.GROUPS, change=self.of_groups(**rates))[1]["step_seconds"]
                             for rates in ({}, known, slow))
        self.assertLessEqual(fast, alike)
        self.assertGreater(late, 1.2 * fast)

    def test_a_path_says_how_many_chunks_it_takes_at_once(self):
        config = self.config(budgets__nvme=[self.nvme()], swap__state_on_nvme=1, swap__chunk_elements=4096)
        name = self.command(config)[1]

        def staged(**said):
            def add(content):
                content["paths"] = [{"path": self.path("nvme"), "drive": 1, "file_system": "ext4",
                                     "mixed_read_bytes_per_s": 1e9, "mixed_write_bytes_per_s": 1e9, **said}]
            plan, _, _ = self.plan_by(change=add, example=name)
            return plan["host_bytes"]
        one = staged()
        self.assertEqual(staged(chunks_at_once=1), one)
        self.assertGreater(staged(chunks_at_once=4), one)

    def test_copies_are_planned_by_without_memory(self):
        def no_memory(content):
            content["memory"].clear()
            content["devices"][0]["copy_bytes_per_s"] = 3e9
        plan, prediction, links = self.plan_by(*self.MODEL, change=no_memory)
        self.assertIn("memory beside cuda sm_90", prediction["assumed"])
        self.assertAlmostEqual(self.rate(links["host to device"]) / 3e9, 1)
        self.assertIn("but for memory: those by default", plan["planned_by"])

    def test_memory_of_a_host_is_divided_and_that_of_a_rank_is_not(self):
        def of_a_rank(content):
            alone = dict(content["memory"][0], of="rank", update_bytes_per_s=1e10)
            content["memory"].append(alone)
        ranks = ("--ranks", "8", "--set", "batch.micro_batches=8", "--set", "model.layers=4", *self.MODEL)
        whole = self.saved["memory"][0]["update_bytes_per_s"]
        _, _, host = self.plan_by(*ranks)
        _, _, rank = self.plan_by(*ranks, change=of_a_rank)
        self.assertAlmostEqual(self.rate(host["dram"]) / (whole / 8), 1, places=6)
        self.assertAlmostEqual(self.rate(rank["dram"]) / 1e10, 1, places=6)

        def fast_alone(content):
            content["memory"].append(dict(content["memory"][0], of="rank"))
        _, _, all_eight = self.plan_by(*ranks, change=fast_alone)
        self.assertAlmostEqual(self.rate(all_eight["dram"]) / (whole / 8), 1, places=6,
                               msg="eight of them have no more than the host")

    def test_paths_of_one_drive_are_one(self):
        def with_paths(drives):
            def change(content):
                content["paths"] = [{"path": f"/nvme{p}", "drive": drive, "file_system": "ext4",
                                     "mixed_read_bytes_per_s": 2e9, "mixed_write_bytes_per_s": 1e9}
                                    for p, drive in enumerate(drives)]
            return change
        paths = ("--set", 'budgets.nvme=[{"path": "/nvme0", "size": "1TB"}, {"path": "/nvme1", "size": "1TB"}]',
                 "--set", "swap.state_on_nvme=1", *self.MODEL)
        for drives, rate in (((7, 8), 6e9), ((7, 7), 3e9)):
            _, _, links = self.plan_by(*paths, change=with_paths(drives))
            self.assertAlmostEqual(self.rate(links["nvme"]) / rate, 1, msg=drives)

    def test_no_bound_is_above_its_prediction(self):
        """70 B parameters on 8 GPUs: a bound that counted other ranks' weights was 108 % of what was predicted."""
        large = self.path("70b.json")
        with open(large, "w", encoding="utf-8") as file:
            json.dump({"steps": 2, "device": "cuda", "precision": "bf16", "clip_norm": 1.0, "data": {"tokens": "none.bin"},
                       "model": {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128,
                                 "intermediate": 28672, "vocab": 32000},
                       "batch": {"sequence": 4096, "micro_batch": 1, "micro_batches": 8},
                       "budgets": {"device": "40GiB", "host": "600GiB",
                                   "nvme": [{"path": "/nvme0", "size": "4TB"}]}}, file)
        for stage in in_quick((1, 3), [1]):
            _, prediction, _ = self.plan_by("--ranks", "8", "--set", f"zero.stage={stage}", example=large)
            self.assertLessEqual(prediction["bound_seconds"], prediction["step_seconds"], stage)
            self.assertGreater(prediction["bound_seconds"], 0.5 * prediction["step_seconds"], stage)

    def test_no_link_works_longer_than_its_step(self):
        """A drive took 115 % of a step that two simulated ones gave: what it owes grows with each."""
        small = self.path("drive.json")
        with open(small, "w", encoding="utf-8") as file:
            json.dump({"steps": 2, "device": "cuda", "precision": "bf16", "clip_norm": 1.0, "data": {"tokens": "none.bin"},
                       "model": {"hidden": 1024, "layers": 4, "heads": 16, "kv_heads": 4, "intermediate": 8192, "vocab": 32000,
                                 "tie_embeddings": True},
                       "batch": {"sequence": 2048, "micro_batch": 1, "micro_batches": 8},
                       "optimizer": {"method": "sgd"}, "zero": {"stage": 3}, "swap": {"speculate": "all", "state_on_nvme": 0.3},
                       "budgets": {"device": "6000MiB", "host": "2000MiB", "nvme": [{"path": "/nvme0", "size": "2TB"},
                                                                                    {"path": "/nvme1", "size": "2TB"}]}}, file)
        _, prediction, _ = self.plan_by("--ranks", "4", "--ranks-per-host", "2", example=small)
        self.assertLessEqual(prediction["plan_bound_seconds"], prediction["step_seconds"] * (1 + 1e-6))


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

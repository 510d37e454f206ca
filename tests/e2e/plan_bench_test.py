"""`ferry plan` says what `ferry train` then does; `ferry bench adam` prints what it promises."""

import json
import re
import statistics
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

from harness import DOES_NOT_FIT, FERRY, USAGE, FerryTest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import layouts as stored_layouts  # noqa: E402


class PlanTest(FerryTest):
    def plan(self, command, *arguments):
        """`ferry plan` of the configuration that a `train` command line names."""
        return self.ferry("plan", command[1], "--json", "--no-prediction", *arguments)

    def test_the_plan_is_that_of_training(self):
        command = self.command(self.config(budgets__nvme=[self.nvme()], swap__state_on_nvme=0.5))
        planned = self.plan(command)
        self.assertEqual(planned.code, 0, planned.err)
        plan, summary = json.loads(planned.out), self.ferry(*command).summary
        for key in ("device_bytes", "host_bytes", "nvme_bytes", "groups", "chunk_elements", "tiers"):
            self.assertEqual(plan[key], summary[key], key)
        self.assertEqual(plan["slow_operations"], [], "the processors have one way only")
        self.assertEqual([row for row in plan["tiers"] if not row["why"]], [])
        table = self.ferry("plan", command[1], "--no-prediction").out
        for row in plan["tiers"]:
            self.assertRegex(table, f"{re.escape(row['what'])} .*{re.escape(row['why'])}")

    def test_a_slow_network_prefers_codes(self):
        """The slower it is, the more bytes decide; what is sent follows from the codecs alone."""
        command = self.command(self.config(batch__micro_batches=2))
        def over(rate, *more):
            done = self.ferry("plan", command[1], "--json", "--ranks", "2", "--network", rate, *more)
            self.assertEqual(done.code, 0, done.err)
            return json.loads(done.out)
        slow = over("1Mbit", "--network-latency", "1ms")
        network = slow["network"]
        self.assertEqual([(step["gradients"], step["weights"]) for step in network["steps"]],
                         [(gradients, weights) for weights in ("none", "int8")
                          for gradients in ("none", "int8", "int4")])
        self.assertEqual((network["best"]["gradients"], network["best"]["weights"]), ("int4", "int8"))
        sent = [step["sent_bytes"] for step in network["steps"]]
        self.assertEqual(sent, sorted(sent, reverse=True))
        for step in network["steps"]:  # it binds
            self.assertGreaterEqual(step["seconds"], step["sent_bytes"] * 8 / 1e6)
        self.assertLess(network["best"]["seconds"], network["steps"][0]["seconds"] / 2)
        self.assertAlmostEqual(slow["prediction"]["step_seconds"], network["steps"][0]["seconds"],
                               delta=0.1 * network["steps"][0]["seconds"])
        fast = over("1000Gbit")["network"]
        self.assertEqual([step["sent_bytes"] for step in fast["steps"]], sent)
        self.assertLess(fast["steps"][0]["seconds"], network["steps"][0]["seconds"] / 10)
        self.assertEqual([(step["gradients"], step["weights"])
                          for step in over("1Gbit", "--set", "zero.stage=1")["network"]["steps"]],
                         [("none", "none"), ("int8", "none"), ("int4", "none")])

    def test_the_best_layouts_of_many_ranks(self):
        """Nothing is measured, and there is neither such a GPU nor the tokens."""
        path = self.command(self.config(
            model={"hidden": 12288, "layers": 96, "heads": 96, "kv_heads": 96, "head_dim": 128, "intermediate": 32768,
                   "vocab": 51200},
            precision="bf16", batch={"sequence": 2048, "micro_batch": 1, "micro_batches": 1536},
            data__tokens=self.path("nowhere.bin")))[1]
        def layouts(*more):
            return self.ferry("plan", path, "--layouts", "--ranks", "1024", "--ranks-per-host", "8", *more)
        done = layouts("--network", "400Gbit", "--gpu", "h100", "--json")
        self.assertEqual(done.code, 0, done.err)
        report = json.loads(done.out)
        self.assertEqual((report["ranks"], len(report["layouts"])), (1024, 4))
        self.assertAlmostEqual(report["parameters"] / 175e9, 1, delta=0.15)
        seconds = [one["seconds"] for one in report["layouts"]]
        self.assertEqual(seconds, sorted(seconds))
        for one in report["layouts"]:
            self.assertEqual(one["tensor"] * one["sequence"] * one["pipeline"] * one["replicas"], 1024)
            self.assertEqual(one["micro_batches"] % one["groups"], 0)
            sent = one["tensor_bytes"] + one["sequence_bytes"] + one["pipeline_bytes"] + one["zero_bytes"]
            self.assertAlmostEqual(one["in_host_bytes"] + one["across_hosts_bytes"], sent, delta=sent * 1e-9)
            self.assertEqual(8 % one["tensor"], 0)
            self.assertLess(one["device_bytes"], 80e9)
        # What it takes where the arithmetic errs as it did for recorded steps.
        recorded = json.loads((ROOT / "bench/results/layouts.json").read_text())["rows"]
        ratios = [row["ratio"] for row in recorded if row["name"].startswith(("recorded: ", "divided: "))]
        for one in report["layouts"]:
            self.assertAlmostEqual(one["seconds"] / one["least_seconds"], max(ratios), delta=0.001)
            self.assertAlmostEqual(one["seconds"] / one["most_seconds"], min(ratios), delta=0.001)
        slower = json.loads(layouts("--network", "10Gbit", "--gpu", "h100", "--json").out)
        self.assertGreater(slower["layouts"][0]["seconds"], seconds[0])
        text = layouts("--network", "400Gbit", "--gpu", "h100")
        self.assertEqual(text.code, 0, text.err)
        self.assertIn("data sheet of an h100", text.out)
        divided = [row["ratio"] for row in recorded if row["name"].startswith("divided: ")]
        self.assertIn(f"Of {len(divided)} steps of CPU ranks that share these over a slow network it said {min(divided):.2f}x to {max(divided):.2f}x", text.out)
        # A key of the command line that the report sets too is the report's.
        given = layouts("--network", "400Gbit", "--gpu", "h100", "--set", "zero.stage=1", "--set", "parallel.schedule=1f1b")
        self.assertNotIn("does not run", given.out)
        best = report["layouts"][0]
        self.assertGreater(best["tensor"] * best["pipeline"], 1)
        self.assertIn("best: " + " ".join(best["keys"]) + "\n", text.out)
        for key in (f"parallel.tensor={best['tensor']}", f"parallel.schedule={best['schedule']}",
                    f"swap.groups={best['groups']}", f"batch.micro_batches={best['micro_batches'] * best['replicas']}"):
            self.assertEqual(key in best["keys"], best["pipeline"] > 1 or key[:5] in ("paral", "batch"), key)
        # The configuration's own checks say what refuses it, as they do when it is planned.
        for one in report["layouts"]:
            run = self.ferry("plan", path, "--layouts", "--set", "device=cuda", *(word for key in one["keys"] for word in ("--set", key)))
            self.assertEqual(one["refused"] != "", run.code == USAGE and "yet" in run.err, run.err)
        self.assertEqual("ferry does not run it yet: " in text.out, best["refused"] != "")
        for more, code, words in ((("--network", "400Gbit", "--gpu", "abacus"), USAGE, ("--gpu", "abacus")),
                                  (("--gpu", "h100"), USAGE, ("--layouts", "1024 ranks, 8 a host", "--network")),
                                  (("--network", "400Gbit", "--gpu", "h100", "--set", "batch.micro_batches=3",
                                    "--set", "parallel.sequence=1"), USAGE, ("batch.micro_batches", "3 sequences a step on 1024 ranks")),
                                  (("--network", "400Gbit", "--gpu", "h100", "--set", "zero.stage=0", "--set", "parallel.tensor=1",
                                    "--set", "parallel.sequence=1", "--set", "parallel.pipeline=1", "--set", "batch.micro_batches=1024",
                                    "--set", "budgets.host=1GiB"),
                                   DOES_NOT_FIT, ("no layout of these ranks fits", "of device memory a rank")),
                                  (("--network", "400Gbit", "--set", "parallel.virtual_stages=5"),
                                   USAGE, ("parallel.virtual_stages", "96 blocks")),
                                  (("--network", "400Gbit", "--machine", "some.json"), USAGE, ("--layouts", "--machine")),
                                  (("--network", "400Gbit", "--schedule"), USAGE, ("--layouts", "--schedule"))):
            refused = layouts(*more)
            self.assertEqual(refused.code, code, refused.err)
            for word in words:
                self.assertIn(word, refused.err)

    def test_stored_layouts_are_those_of_the_tool(self):
        """bench/results/layouts.json: what was weighed for it is weighed so still."""
        stored = json.loads((ROOT / "bench/results/layouts.json").read_text())
        seconds = {row["name"]: row["value"] for row in stored["rows"]}
        options = SimpleNamespace(ferry=FERRY, gpu="h100")
        for name, network in (("13B", "400Gbit"), ("30B", "400Gbit"), ("175B", "10Gbit"), ("1T", "400Gbit")):
            best = stored_layouts.layouts(options, Path(self.path(".")), name, network)[0]
            row = f"{name} on {stored_layouts.GPUS[name]} h100, {network}: a step"
            self.assertAlmostEqual(best["seconds"] / seconds[row], 1, delta=1e-6, msg=row)
            self.assertTrue(any(note.startswith(f"{name}, {network}: {stored_layouts.text_of(best)}, ") for note in stored["notes"]), row)
        # Runs of stage 3 are weighed as such.
        notes = [row["note"] for row in stored["rows"] if ", ZeRO 3, " in row["name"]]
        self.assertEqual([", ZeRO 3, " in note for note in notes], [True, True])

    def test_layouts_take_what_the_configuration_has_chosen(self):
        """Keys of `parallel` and zero.stage are kept; what is not used and what cannot be are named."""
        config = {"model": {"hidden": 4096, "layers": 32, "heads": 24, "kv_heads": 6, "head_dim": 128, "intermediate": 11008,
                            "vocab": 32000},
                  "precision": "bf16", "batch": {"sequence": 2048, "micro_batch": 1, "micro_batches": 512},
                  "data__tokens": self.path("nowhere.bin")}
        def layouts(ranks, *more, **changes):
            run = self.ferry("plan", self.command(self.config(**config, **changes))[1], "--layouts", "--ranks", str(ranks),
                             "--gpu", "h100", *more)
            return run, json.loads(run.out) if "--json" in more and run.code == 0 else None
        over = ("--network", "100Gbit", "--json")
        free = layouts(64, *over, budgets__ranks_per_host=8)[1]
        self.assertEqual((free["ranks_per_host"], free["fixed"], free["not_used"]), (8, [], []))
        # Six heads of keys: two and four ranks may share them, eight no.
        self.assertEqual([one["tensor"] for one in free["left_out"]], [8])
        self.assertIn("24 heads over 6 of keys", free["left_out"][0]["why"])
        best = free["layouts"][0]["seconds"]
        for key, value in (("tensor", 4), ("tensor", 1), ("pipeline", 8), ("pipeline", 1), ("sequence", 1),
                           ("schedule", "1f1b"), ("virtual_stages", 2)):
            changes = {f"parallel__{key}": value, **({"parallel__pipeline": 8} if key in ("schedule", "virtual_stages") else {})}
            found = layouts(64, *over, budgets__ranks_per_host=8, **changes)[1]
            self.assertIn(f"parallel.{key}={value}", found["fixed"])
            self.assertGreaterEqual(found["layouts"][0]["seconds"], best)
            for one in found["layouts"]:
                self.assertEqual(one[key], value)
        for stage in (0, 1, 2, 3):
            found = layouts(64, *over, budgets__ranks_per_host=8, zero__stage=stage)[1]
            self.assertEqual({one["zero_stage"] for one in found["layouts"]}, {stage})
        # Hosts: the command line, then budgets, then zero.
        self.assertEqual(layouts(64, *over, zero__ranks_per_host=4)[1]["ranks_per_host"], 4)
        self.assertEqual(layouts(64, *over, budgets__ranks_per_host=8, zero__ranks_per_host=4)[1]["ranks_per_host"], 8)
        self.assertEqual(layouts(64, *over, "--ranks-per-host", "16", budgets__ranks_per_host=8)[1]["ranks_per_host"], 16)
        # So many hosts: the same report as by their ranks. It may be said both ways, but not otherwise.
        of_hosts = layouts(64, *over, "--hosts", "4", budgets__ranks_per_host=8)[1]
        self.assertEqual(of_hosts, layouts(64, *over, "--ranks-per-host", "16")[1])
        self.assertEqual(of_hosts["ranks_per_host"], 16)
        self.assertEqual(layouts(64, *over, "--hosts", "4", "--ranks-per-host", "16")[1], of_hosts)
        for more, words in ((("--hosts", "5"), ("the hosts do not have as many ranks each", "64 ranks, 5 hosts", "change --ranks or --hosts")),
                            (("--hosts", "4", "--ranks-per-host", "8"), ("--hosts and --ranks-per-host disagree", "16 a host")),
                            (("--hosts", "65"), ("--hosts", "64 ranks, 65 hosts")), (("--hosts", "0"), ("--hosts",)),
                            (("--hosts", "-1"), ("--hosts",)), (("--hosts", "two"), ("--hosts",))):
            refused = layouts(64, *over, *more)[0]
            self.assertEqual((refused.code, refused.out), (USAGE, ""), refused.err)
            for word in words:
                self.assertIn(word, refused.err)
        text = layouts(64, "--network", "100Gbit", budgets__ranks_per_host=2, parallel__tensor=4, swap__groups=4)[0]
        self.assertEqual(text.code, 0, text.err)
        for words in ("as the configuration has them: parallel.tensor=4\n", "not used here: swap.groups\n",
                      "groups of 4 ranks that share tensors and span hosts of 2"):
            self.assertIn(words, text.out)
        self.assertIn("no 8 ranks share tensors: 24 heads over 6 of keys",
                      layouts(64, "--network", "100Gbit", budgets__ranks_per_host=8)[0].out)
        bound = layouts(64, "--network", "100Gbit", budgets__ranks_per_host=8, parallel__tensor=1, parallel__pipeline=1,
                        batch__micro_batches=64 * 512)[0]
        self.assertEqual(bound.code, 0, bound.err)
        # Hosts that ranks do not fill; keys that are left out; stages that are chosen here, so that no warning says there is one.
        told = layouts(64, "--network", "100Gbit", "--ranks-per-host", "7", zero__second_shard="host", zero__ranks_per_host=4, swap__groups=4,
                       parallel__virtual_stages=2)[0]
        self.assertEqual(told.code, 0, told.err)
        for words in ("64 ranks do not fill hosts of 7: 9 are full and one has 1", "not used here: swap.groups\n",
                      "not priced here: zero.second_shard\n"):
            self.assertIn(words, told.out)
        self.assertNotIn("one stage", told.err)
        self.assertIn("does nothing with one stage", layouts(64, "--network", "100Gbit", parallel__pipeline=1,
                                                              parallel__virtual_stages=2)[0].err)
        for changes, words in (({"parallel__tensor": 8}, ("parallel.tensor", "24 heads over 6 of keys")),
                               ({"parallel__sequence": 4}, ("parallel.sequence", "a divisor of 6 heads of keys")),
                               ({"parallel__pipeline": 8, "parallel__virtual_stages": 3},
                                ("parallel.virtual_stages", "a divisor of the 4 blocks of a stage")),
                               ({"model__layers": 40, "parallel__pipeline": 16, "parallel__schedule": "interleaved",
                                 "parallel__virtual_stages": 2}, ("parallel.pipeline", "a divisor of 40 blocks")),
                               ({"model__layers": 40, "parallel__pipeline": 16, "parallel__schedule": "round_robin"},
                                ("parallel.pipeline", "a divisor of 40 blocks")),
                               ({"model__layers": 40, "parallel__virtual_stages": 7}, ("parallel.virtual_stages", "40 blocks")),
                               ({"parallel__tensor": 3}, ("parallel.tensor", "64 ranks")),
                               ({"parallel__tensor": 4, "parallel__pipeline": 32}, ("parallel.pipeline", "a divisor of 16: 64 ranks over parallel.tensor 4"))):
            run = layouts(64, "--network", "100Gbit", budgets__ranks_per_host=8, **changes)[0]
            self.assertEqual(run.code, USAGE, run.err)
            for word in words:
                self.assertIn(word, run.err)

    def test_hosts_are_those_of_the_configuration(self):
        """budgets.ranks_per_host stands where the command line says nothing; and a network goes with a plan alone, too."""
        config = self.config(parallel__pipeline=2, model__layers=4, budgets__ranks_per_host=1)
        plain = self.command(config)[1]
        run = self.ferry("plan", plain, "--json", "--ranks", "2", "--network", "1Kbit", "--no-prediction")
        self.assertEqual(run.code, 0, run.err)
        found = json.loads(run.out)
        self.assertNotIn("prediction", found)
        self.assertNotIn("network", found)
        self.assertEqual(found["pipeline"]["schedule"], "1f1b")  # all wait for it
        self.assertGreater(found["pipeline"]["schedules"][0]["step_seconds"], 1)
        several = self.command(self.config(budgets__ranks_per_host=2, zero__stage=1))[1]
        run = self.ferry("plan", several, "--json", "--ranks", "4", "--network", "1Mbit")
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(json.loads(run.out)["network"]["ranks_per_host"], 2)

    def test_the_number_of_virtual_stages_is_chosen_too(self):
        """With auto: a row of each number, and the one that is taken."""
        config = self.config(parallel__pipeline=2, model__layers=8, parallel__virtual_stages="auto", batch__micro_batches=4)
        run = self.ferry("plan", self.command(config)[1], "--json", "--ranks", "2", "--no-prediction")
        self.assertEqual(run.code, 0, run.err)
        found = json.loads(run.out)["pipeline"]
        rows = [(one["schedule"], one["virtual_stages"]) for one in found["schedules"]]
        self.assertEqual(rows, [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4), ("round_robin", 1),
                                ("round_robin", 2), ("round_robin", 4)])
        self.assertIn((found["schedule"], found["virtual_stages"]), rows)
        taken = next(one for one in found["schedules"]
                     if (one["schedule"], one["virtual_stages"]) == (found["schedule"], found["virtual_stages"]))
        self.assertLessEqual(taken["step_seconds"], 1.01 * min(one["step_seconds"] for one in found["schedules"]))
        text = self.ferry("plan", self.command(config)[1], "--ranks", "2", "--no-prediction").out
        self.assertRegex(text, r"interleaved 4 +\d")

    def test_ranks_that_share_tensors_belong_on_one_host(self):
        command = self.command(self.config(parallel__tensor=2))
        def over(ranks_per_host):
            run = self.ferry("plan", command[1], "--json", "--ranks", "4", "--ranks-per-host", str(ranks_per_host),
                             "--network", "1Mbit")
            self.assertEqual(run.code, 0, run.err)
            return json.loads(run.out), run.err
        (inside, quiet), (apart, warned) = over(2), over(1)
        self.assertNotIn("span hosts", quiet)
        self.assertIn("parallel.tensor 2 does not divide the 1 rank of a host", warned)
        self.assertEqual(inside["kernel_exchanges"], apart["kernel_exchanges"])
        crossing = inside["kernel_exchanges"]["bytes"] * 8 / 1e6
        self.assertGreater(apart["prediction"]["step_seconds"], crossing)

    def test_groups_inside_a_host_do_not_take_the_network(self):
        """Where ranks share tensors and sequences, neighbours share tensors: of two ranks a host sequences alone cross."""
        model = {"model__heads": 4, "model__kv_heads": 2, "model__head_dim": 16, "batch__micro_batches": 32}
        def planned(ranks, **changes):
            run = self.ferry("plan", self.command(self.config(**{**model, **changes}))[1], "--json", "--ranks", str(ranks),
                             "--ranks-per-host", "2", "--network", "1Mbit")
            self.assertEqual(run.code, 0, run.err)
            return json.loads(run.out)
        both = planned(4, parallel__tensor=2, parallel__sequence=2, batch__sequence=64)
        tensors = planned(4, parallel__tensor=2, batch__sequence=32, batch__micro_batches=64)
        crossing = both["kernel_exchanges"]["bytes"] - tensors["kernel_exchanges"]["bytes"]
        seconds = 2 * crossing * 8 / 1e6  # both ranks of a host send
        self.assertGreater(both["prediction"]["step_seconds"], seconds)
        self.assertLess(both["prediction"]["step_seconds"], 1.2 * seconds)

    def test_a_network_chooses_one_schedule_for_the_whole_report(self):
        """The table of codecs goes by the schedule that the plan takes; and what does nothing is said."""
        config = self.config(parallel__pipeline=2, model__layers=4, batch__micro_batches=4)
        run = self.ferry("plan", self.command(config)[1], "--json", "--ranks", "4", "--network", "10Mbit")
        self.assertEqual(run.code, 0, run.err)
        found = json.loads(run.out)
        planned, uncoded = found["prediction"]["step_seconds"], found["network"]["steps"][0]["seconds"]
        self.assertAlmostEqual(uncoded, planned, delta=0.02 * planned)
        run = self.ferry("plan", self.command(self.config())[1], "--ranks", "2", "--network", "1Gbit", "--no-prediction")
        self.assertIn("--network does nothing here", run.err)

    def test_one_host_has_no_other_hosts_to_warn_of(self):
        hosts = {"zero__ranks_per_host": 2, "zero__compress": {"gradients": "int8"}}
        for ranks, network, warns in ((4, (), False), (4, ("--ranks-per-host", "1"), True)):
            run = self.ferry("plan", self.command(self.config(batch__micro_batches=4, **hosts))[1], "--ranks", str(ranks),
                             *network, "--no-prediction")
            self.assertEqual(run.code, 0, run.err)
            self.assertEqual("and this plan has" in run.err, warns, run.err)
        run = self.ferry("plan", self.command(self.config(**hosts))[1], "--ranks", "2", "--no-prediction")
        self.assertIn("zero.ranks_per_host does nothing here", run.err)

    def test_a_network_that_makes_no_sense_is_refused(self):
        command = self.command(self.config())
        for words, said in ((("--ranks", "2", "--network", "10"), "10Gbit"),
                            (("--ranks", "2", "--network", "-1Gbit"), "--network"),
                            (("--ranks", "2", "--network", "1Gbit", "--network-latency", "5"), "50us"),
                            (("--network", "1Gbit"), "--ranks"),
                            (("--ranks", "4", "--ranks-per-host", "4", "--network", "1Gbit"), "no network joins")):
            run = self.ferry("plan", command[1], *words)
            self.assertEqual(run.code, USAGE, run.err)
            self.assertIn(said, run.err)

    def test_the_schedule_is_that_of_training(self):
        for more in ({"kind": "cosine"}, {"kind": "wsd", "decay_steps": 2, "log_warmup": True},
                     {"kind": "one_cycle", "final_fraction": 0.2}, {"kind": "warmup_decay"}):
            schedule = {"warmup_steps": 2, **more}
            command = self.command(self.config(schedule=schedule, steps=5))
            planned = self.plan(command, "--schedule")
            self.assertEqual(planned.code, 0, planned.err)
            steps = self.ferry(*command).steps
            self.assertEqual(len(steps), 5)
            schedule = json.loads(planned.out)["schedule"]
            self.assertEqual(schedule["lr"], [s["lr"] for s in steps])
            self.assertEqual(schedule["step"], [1, 2, 3, 4, 5])
            self.assertGreater(steps[-1]["lr"], 0, "the last step moves the weights")

    def test_the_schedule_of_a_long_run_is_thinned(self):
        command = self.command(self.config(schedule={"kind": "linear"}))
        for steps in (9999, 10000, 10001, 19999, 9_000_000_000_000_000):
            planned = self.plan(command, "--schedule", "--set", f"steps={steps}")
            self.assertEqual(planned.code, 0, planned.err)
            schedule = json.loads(planned.out)["schedule"]
            shown = schedule["step"]
            self.assertEqual(len(shown), len(schedule["lr"]))
            self.assertGreater(len(shown), 5000)
            self.assertLessEqual(len(shown), 10000)
            self.assertEqual((shown[0], shown[-1]), (1, steps))
            self.assertEqual(len({b - a for a, b in zip(shown[:-1], shown[1:-1])}), 1)
            if steps <= 10000:
                self.assertEqual(len(shown), steps)
            self.assertEqual(schedule["lr"], sorted(schedule["lr"], reverse=True))

    def test_a_schedule_that_contradicts_itself_is_refused(self):
        schedule = {"kind": "wsd", "warmup_steps": 4, "decay_steps": 3}
        command = self.command(self.config(schedule=schedule, steps=5))
        for run in (self.plan(command), self.ferry(*command)):
            self.assertEqual(run.code, USAGE, run.err)
            self.assertIn("schedule.decay_steps", run.err)

    def test_tables(self):
        command = self.command(self.config(schedule={"kind": "linear"}, steps=7))
        run = self.ferry("plan", command[1], "--schedule")
        self.assertEqual(run.code, 0, run.err)
        lines = run.out.splitlines()
        self.assertTrue(any(line.split()[:1] == ["tier"] for line in lines), run.out)
        rates = lines[next(i for i, line in enumerate(lines) if line.split() == ["step", "lr"]) + 1:]
        self.assertEqual([line.split()[0] for line in rates], [str(i) for i in range(1, 8)])
        plot = [line.count("#") for line in rates]
        self.assertEqual(plot, sorted(plot, reverse=True))
        self.assertEqual(plot[0], 50)

    def test_needs_no_tokens(self):
        config = self.config()
        config["data"]["tokens"] = self.path("none.bin")
        self.assertEqual(self.plan(self.command(config)).code, 0)


class BenchTest(FerryTest):
    def kernels(self, *words):
        run = self.ferry("bench", "kernels", "--rounds", "2", "--json", *words)
        self.assertEqual(run.code, 0, run.err)
        return {row["name"]: row for row in json.loads(run.out)["rows"]}

    def test_kernels_are_those_of_a_step(self):
        config = self.config()
        batch, layers = config["batch"], config["model"]["layers"]
        rows = self.kernels("--config", self.command(config)[1])
        ops = {name: row for name, row in rows.items() if "calls" in row}
        forward = [row for name, row in ops.items() if "forward, block: attention forward" in name]
        self.assertEqual(sum(row["calls"] for row in forward), layers * batch["micro_batches"])
        for part in ("embed, embedding", "backward, block", "head and loss", "round and norm", "update: update"):
            self.assertTrue(any(name.startswith(part) for name in ops), part)
        total = rows["total: a step"]["value"]
        self.assertAlmostEqual(sum(row["value"] for row in ops.values()) / total, 1, delta=0.01)
        self.assertAlmostEqual(sum(row["% of step"] for row in ops.values()), 100, delta=1)

    def test_a_gradient_is_rounded_in_the_runs_that_the_device_updates(self):
        calls, elements = {}, {}
        for share in (0, 1):
            config = self.config(budgets__device="64MiB", swap__state_on_device=share, swap__chunk_elements=4096)
            rows = self.kernels("--config", self.command(config)[1])
            rounds = [(int(name.split("norm leaves, ")[1].split(",")[0]), row["calls"])
                      for name, row in rows.items() if "rounding and norm leaves" in name]
            calls[share] = sum(times for _, times in rounds)
            elements[share] = sum(each * times for each, times in rounds)
            self.assertEqual(max(each for each, _ in rounds) > 4096, share == 1, rounds)
        self.assertEqual(elements[0], elements[1])
        self.assertLess(calls[1], calls[0])

    def test_kernels_take_the_sequence_and_the_micro_batch(self):
        rows = self.kernels("--config", self.command(self.config())[1], "--sequence", "48", "--micro-batch", "3")
        self.assertTrue(any("attention forward, 3 x 48," in name for name in rows), rows.keys())

    def test_kernels_want_one_model(self):
        config = self.command(self.config())[1]
        for words in ((), ("--model", config, "--config", config)):
            run = self.ferry("bench", "kernels", *words)
            self.assertEqual(run.code, USAGE)
            self.assertIn("--model or --config", run.err)

    def test_products_of_a_gpu_alone_are_tuned_or_tabled(self):
        table = Path(self.path("products.txt"))
        run = self.ferry("bench", "kernels", "--config", self.command(self.config())[1], "--tune", str(table))
        self.assertEqual(run.code, USAGE)
        self.assertIn("no products to tune", run.err)
        self.assertFalse(table.exists())
        table.write_text("mine")
        run = self.ferry("bench", "kernels", "--config", self.command(self.config())[1], "--tune", str(table))
        self.assertEqual((run.code, table.read_text()), (USAGE, "mine"), run.err)
        run = self.ferry(*self.command(self.config(numerics__products=str(table))))
        self.assertEqual(run.code, USAGE)
        self.assertIn("numerics.products", run.err)

    def test_adam_prints_rows_and_the_command_that_made_them(self):
        words = ["bench", "adam", "--millions", "0.1", "--threads", "1", "--pairs", "1", "--method",
                 "all", "--gradient", "fp16", "--in-place", "--json"]
        run = self.ferry(*words)
        self.assertEqual(run.code, 0, run.err)
        table = json.loads(run.out)
        self.assertEqual(set(table), {"machine", "command", "rows"})
        again = self.ferry(*table["command"].split()[1:], "--json")
        names = [row["name"] for row in table["rows"]]
        self.assertEqual(names, [row["name"] for row in json.loads(again.out)["rows"]])
        for method in ("adamw", "adam", "sgd", "lion", "adagrad", "leaf norms"):
            self.assertTrue(any(name.startswith(method) for name in names), names)
        for row in table["rows"]:
            self.assertLessEqual({"name", "value", "unit", "reference", "ratio"}, set(row))
            self.assertGreater(row["value"], 0)
            self.assertEqual(row.get("ratios", []), [] if row["ratio"] is None else [row["ratio"]])
            if row["name"].startswith(("adam in", "sgd", "lion", "adagrad")):
                self.assertIsNone(row["reference"], row)
                self.assertIsNone(row["ratio"], row)

    def test_adam_gives_the_ratio_of_every_pair(self):
        run = self.ferry("bench", "adam", "--millions", "0.1", "--threads", "1", "--gradient",
                         "fp32", "--in-place", "--pairs", "6", "--json")
        self.assertEqual(run.code, 0, run.err)
        row = json.loads(run.out)["rows"][0]
        if row["reference"] is None:
            self.skipTest("no loop by hand for this processor")
        self.assertEqual(len(row["ratios"]), 6, row)
        self.assertAlmostEqual(statistics.median(row["ratios"]), row["ratio"], delta=0.001 * row["ratio"])

    def test_adam_beside_deepspeed(self):
        """DeepSpeed is pretended: a script that prints what bench/adam_deepspeed.py would."""
        script = self.path("theirs.py")
        words = ["bench", "adam", "--millions", "1", "--threads", "1", "--pairs", "1", "--in-place",
                 "--gradient", "fp32", f"--deepspeed={script}", "--json"]
        self.assertEqual(self.ferry(*words).code, USAGE)
        with open(script, "w", encoding="ascii") as file:
            file.write("print('hello'); print('{\"threads\": 1, \"update\": 3, \"unscale\": 2,"
                       " \"cast\": 1}')")
        row = json.loads(self.ferry(*words).out)["rows"][-1]
        self.assertTrue(row["name"].startswith("deepspeed"), row)
        self.assertEqual(row["reference"], 6)
        self.assertNotIn("ratios", row, "one figure of theirs")
        self.assertAlmostEqual(row["ratio"], 6 / row["value"], delta=0.01 * row["ratio"])
        with open(script, "w", encoding="ascii") as file:
            file.write("print('{\"missing\": \"there is none\"}')")
        run = self.ferry(*words)
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("there is none", run.err)
        self.assertFalse(any("deepspeed" in row["name"] for row in json.loads(run.out)["rows"]))

    def test_adam_that_does_not_fit_is_refused_before_memory_is_touched(self):
        run = self.ferry("bench", "adam", "--millions", "65536", "--threads", "1")
        self.assertEqual(run.code, DOES_NOT_FIT, run.err)
        self.assertIn("--millions", run.err)

    def test_adam_runs_on_no_more_threads_than_cores(self):
        run = self.ferry("bench", "adam", "--millions", "0.1", "--threads", "4096", "--pairs", "1",
                         "--gradient", "fp32", "--in-place", "--json")
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("4096", run.err)
        table = json.loads(run.out)
        cores = table["machine"]["cores"]
        for row in table["rows"]:
            self.assertTrue(row["name"].endswith(f", {cores} thread" + "s" * (cores > 1)), row)

    def test_bad_words_are_refused(self):
        for words in (["--target", "AVX9"], ["--method", "adamax"], ["--gradient", "int8"],
                      ["--weight", "fp32"], ["--pairs", "0"], ["--threads", "0"],
                      ["--millions", "-1"], ["--millions", "nan"], ["--millions", "inf"]):
            run = self.ferry("bench", "adam", *words)
            self.assertEqual(run.code, USAGE, (words, run.err))
        self.assertEqual(self.ferry("bench").code, USAGE)


if __name__ == "__main__":
    unittest.main()

"""`ferry bench comm` alone and on ranks that mpirun starts, and what it says where they are not
found."""

import json
import os
import shutil
import unittest

from harness import USAGE, FerryTest

MPIRUN = [shutil.which("mpirun") or "", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]
QUICK = ["bench", "comm", "--sizes", "1000,2MiB", "--rounds", "3", "--repeats", "2"]


class BenchCommTest(FerryTest):
    def rows(self, run, ranks, kind):
        self.assertEqual(run.code, 0, run.err)
        table = json.loads(run.out)  # one object: only the first rank prints
        self.assertEqual(set(table), {"machine", "command", "rows"})
        self.assertEqual(table["machine"]["ranks"], ranks)
        self.assertEqual(table["machine"]["ranks_on_this_machine"], ranks)
        self.assertEqual(table["machine"]["by"], kind)
        whole = 1000 // ranks * ranks
        self.assertEqual([row["name"] for row in table["rows"]],
                         [f"{name} {size}" for name in ("all-gather", "exchange", "exchange in a kernel")
                          for size in (f"{whole} B", "2.00 MiB")])
        for row in table["rows"]:
            self.assertEqual(row["unit"], "GB/s")
            self.assertGreater(row["us"], 0)
        return table

    def test_one_rank(self):
        table = self.rows(self.ferry(*QUICK, "--json"), 1, "solo")
        # One rank's gather is in its place already; an exchange is a copy.
        self.assertGreater(table["rows"][3]["value"], 0)
        run = self.ferry(*QUICK)
        self.assertIn("exchange 2.00 MiB", run.out)

    @unittest.skipUnless(MPIRUN[0], "no mpirun")
    def test_ranks_of_mpirun(self):
        for ranks in (2, 4):
            run = self.ferry(*QUICK, "--json", through=[*MPIRUN, str(ranks)])
            table = self.rows(run, ranks, "mpi")
            self.assertTrue(table["command"].startswith(f"mpirun -n {ranks} ferry bench comm"))
            # A rank takes the parts of the others: the bytes over the time, to the figures printed.
            row = table["rows"][1]
            taken = (2 << 20) // ranks * (ranks - 1)
            self.assertAlmostEqual(row["value"] * row["us"] / (taken * 1e-3), 1, places=2)

    @unittest.skipUnless(MPIRUN[0], "no mpirun")
    def test_what_ranks_give_each_other_is_kept_and_planned_by(self):
        machine, config = self.path("machine.json"), self.config()
        command = self.command(config)

        def prediction(*arguments):
            plan = self.ferry("plan", command[1], "--json", "--ranks", "2", "--machine", machine,
                              *arguments)
            self.assertEqual(plan.code, 0, plan.err)
            return json.loads(plan.out)["prediction"]

        def train():
            words = [word for word in command if word != "--no-bound"]
            return self.ferry(*words, "--machine", machine, through=[*MPIRUN, "2"])
        alone = self.ferry("bench", "--all", "--config", command[1], "--save", machine)
        self.assertEqual(alone.code, 0, alone.err)
        run = train()
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("--save " + machine + " --ranks 2", run.err)  # one rank has other kernels
        ranks = self.ferry("bench", "--all", "--config", command[1], "--save", machine,
                           "--ranks", "2")
        self.assertEqual(ranks.code, 0, ranks.err)
        run = train()
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("no measurements of 2 ranks, 2 on a host, by mpi", run.err)
        self.assertIn(f"mpirun -n 2 ferry bench comm --device cpu --save {machine}", run.err)
        self.assertTrue(any("2 ranks" in line for line in prediction()["assumed"]))
        saved = self.ferry(*QUICK, "--save", machine, "--json", through=[*MPIRUN, "2"])
        self.assertEqual(saved.code, 0, saved.err)
        with open(machine, encoding="utf-8") as file:
            content = json.load(file)
        (entry,) = content["ranks"]
        self.assertEqual((entry["ranks"], entry["on_a_host"], entry["by"]), (2, 2, "mpi"))
        self.assertEqual(sorted(one["of"] for one in content["memory"]), ["host", "rank"])
        # Through the longest of the all-gathers measured, however noisy the machine is.
        row = json.loads(saved.out)["rows"][1]
        seconds = row["us"] * 1e-6
        through = entry["overhead_s"] + row["value"] * 1e9 * seconds / entry["bytes_per_s"]
        self.assertAlmostEqual(through / seconds, 1, delta=0.05)
        by_file = prediction()
        self.assertEqual((by_file["assumed"], by_file["measured"]), ([], []))
        link = next(link for link in by_file["links"] if link["link"] == "comm")
        self.assertGreater(link["seconds"], link["bytes"] / entry["bytes_per_s"])
        changes = [one["change"] for one in by_file["what_if"]]
        self.assertIn("+10 % bandwidth between ranks", changes)
        run = train()
        self.assert_trained(run)
        self.assertAlmostEqual(run.summary["bound_seconds"], by_file["bound_seconds"])
        entry["bytes_per_s"] = 1e4  # modems
        with open(machine, "w", encoding="utf-8") as file:
            json.dump(content, file)
        by_modem = prediction()
        self.assertEqual((by_modem["binding"], by_modem["bound_link"]), ("comm", "comm"))
        self.assertGreater(by_modem["step_seconds"], link["bytes"] / 1e4)
        self.assertEqual(train().summary["binding"], "comm")
        entry["overhead_s"] = 0
        with open(machine, "w", encoding="utf-8") as file:
            json.dump(content, file)
        run = train()
        self.assertEqual(run.code, USAGE)
        self.assertIn('"overhead_s" must be a number above 0', run.err)

    def prediction_of_four(self, config, machine, content):
        """What `ferry plan` predicts for four ranks once the file has this content."""
        with open(machine, "w", encoding="utf-8") as file:
            json.dump(content, file)
        plan = self.ferry("plan", self.command(config)[1], "--json", "--ranks", "4", "--machine", machine)
        self.assertEqual(plan.code, 0, plan.err)
        return json.loads(plan.out)["prediction"]

    @unittest.skipUnless(MPIRUN[0], "no mpirun")
    def test_groups_are_measured_and_planned_by(self):
        machine = self.path("groups-are-measured.json")
        config = self.config(parallel__tensor=2, parallel__sequence=2, swap__speculate="off")
        run = self.ferry(*QUICK, "--json", "--tensor", "2", "--sequence", "2", "--save", machine,
                         through=[*MPIRUN, "4"])
        self.assertEqual(run.code, 0, run.err)
        table = json.loads(run.out)
        self.assertTrue(table["command"].endswith("--tensor 2 --sequence 2"), table["command"])
        self.assertEqual([row["name"] for row in table["rows"][6:]],
                         [f"{name} over 2: exchange {size}" for name in ("tensors", "sequences")
                          for size in ("1000 B", "2.00 MiB")])
        with open(machine, encoding="utf-8") as file:
            content = json.load(file)
        (entry,) = content["ranks"]
        self.assertEqual((entry["ranks"], entry["tensor"], entry["sequence"]), (4, 2, 2))

        def prediction():
            return self.prediction_of_four(config, machine, content)
        found = prediction()
        self.assertFalse(any("4 ranks" in line for line in found["assumed"]), found["assumed"])
        for group in ("tensor", "sequence"):
            with self.subTest(group):
                rate = entry[f"{group}_bytes_per_s"]
                entry[f"{group}_bytes_per_s"] = 1e4  # modems
                slow = prediction()
                self.assertGreater(slow["step_seconds"], 2 * found["step_seconds"])
                faster = next(one["step_seconds"] for one in slow["what_if"]
                              if one["change"] == "+10 % bandwidth between ranks")
                self.assertLess(faster, 0.97 * slow["step_seconds"])
                entry[f"{group}_bytes_per_s"] = rate
        entry["tensor"] = 4  # others' rates are none of these
        self.assertTrue(any("4 ranks, 4 on a host, tensors over 2, sequences over 2, by mpi" in line
                            for line in prediction()["assumed"]))

    @unittest.skipUnless(MPIRUN[0], "no mpirun")
    def test_hosts_of_ranks_are_measured_and_planned_by(self):
        machine = self.path("hosts-of-ranks.json")
        config = self.config(zero__ranks_per_host=2, zero__compress={"gradients": "int8"}, batch__micro_batches=4,
                             swap__speculate="off")
        run = self.ferry(*QUICK, "--json", "--ranks-per-host", "2", "--save", machine, through=[*MPIRUN, "4"])
        self.assertEqual(run.code, 0, run.err)
        table = json.loads(run.out)
        self.assertTrue(table["command"].endswith("--ranks-per-host 2"), table["command"])
        self.assertEqual([row["name"] for row in table["rows"][6:]],
                         [f"hosts of 2: exchange {where} {size}" for where in ("in a host", "between hosts")
                          for size in ("1000 B", "2.00 MiB")])
        with open(machine, encoding="utf-8") as file:
            content = json.load(file)
        (entry,) = content["ranks"]
        self.assertEqual((entry["ranks"], entry["ranks_per_host"]), (4, 2))

        def prediction():
            return self.prediction_of_four(config, machine, content)
        found = prediction()
        self.assertFalse(any("4 ranks" in line for line in found["assumed"]), found["assumed"])
        for key in ("in_host_bytes_per_s", "across_hosts_bytes_per_s"):
            with self.subTest(key):
                rate, entry[key] = entry[key], 1e4  # modems
                self.assertGreater(prediction()["step_seconds"], 2 * found["step_seconds"])
                entry[key] = rate
        entry["ranks_per_host"] = 4  # others' rates are none of these
        self.assertTrue(any("4 ranks, 4 on a host, hosts of 2, by mpi" in line for line in prediction()["assumed"]))

    def test_what_stages_pass_is_planned_by(self):
        machine = self.path("what-stages-pass.json")
        config = self.config(parallel__pipeline=2, model__layers=2, batch__micro_batches=4, zero__stage=1)

        def plan(**rates):
            ranks = {"ranks": 2, "on_a_host": 2, "by": "mpi", "bytes_per_s": 1e9, "overhead_s": 1e-6, **rates}
            with open(machine, "w", encoding="utf-8") as file:
                json.dump({"ferry_machine": 1, "ranks": [ranks]}, file)
            run = self.ferry("plan", self.command(config)[1], "--json", "--ranks", "2", "--machine", machine)
            self.assertEqual(run.code, 0, run.err)
            found = json.loads(run.out)
            return found["prediction"]["step_seconds"], found["pipeline"]["stages"][0]["to_next_bytes"]
        alike, passed = plan()
        late, _ = plan(between_stages_bytes_per_s=1e4, between_stages_overhead_s=1e-6)
        self.assertGreater(passed, 0)
        self.assertGreater(late, alike + passed / 1e4)

    def test_what_codes_momentum_is_kept_and_planned_by(self):
        machine = self.path("what-codes-momentum.json")
        command = self.command(self.config(optimizer__method="onebit_adam", optimizer__freeze_step=2, swap__speculate="off"))
        hosts = ("--ranks", "2", "--ranks-per-host", "1")
        saved = self.ferry("bench", "--all", "--config", command[1], "--save", machine, *hosts)
        self.assertEqual(saved.code, 0, saved.err)
        with open(machine, encoding="utf-8") as file:
            content = json.load(file)
        (kernels,) = content["kernels"]
        self.assertGreater(kernels["momentum_bytes_per_s"], 0)

        def by_momentum():
            with open(machine, "w", encoding="utf-8") as file:
                json.dump(content, file)
            run = self.ferry("plan", command[1], "--json", *hosts, "--network", "1000Gbit", "--machine", machine)
            self.assertEqual(run.code, 0, run.err)
            return next(step["seconds"] for step in json.loads(run.out)["network"]["steps"] if step["gradients"] == "signs")
        fast = by_momentum()
        kernels["momentum_bytes_per_s"] = 1e5
        self.assertGreater(by_momentum(), 2 * fast)

    @unittest.skipUnless(MPIRUN[0], "no mpirun")
    def test_what_cannot_be_kept(self):
        for words, ranks, said in (
                (QUICK, 1, "one rank has nobody"),
                (["bench", "comm", "--sizes", "1MiB", "--rounds", "1", "--repeats", "1"], 2,
                 "two sizes"),
                (QUICK, 2, "nothing can be written there")):
            run = self.ferry(*words, "--save", "/nowhere/machine.json",
                             through=[*MPIRUN, str(ranks)])
            self.assertNotEqual(run.code, 0)
            self.assertIn(said, run.err)

    def test_a_launcher_whose_ranks_do_not_find_each_other(self):
        run = self.ferry(*QUICK, env={**os.environ, "SLURM_STEP_NUM_TASKS": "3"})
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("1 of 3 ranks", run.err)
        self.assertIn("srun --mpi=list", run.err)

    def test_bad_input(self):
        for words, said in ((["--sizes", "0"], "nothing to measure"),
                            (["--sizes", "many"], "--sizes"), (["--rounds", "0"], "--rounds"),
                            (["--device", "tpu"], "--device"), (["--timeout", "nan"], "--timeout")):
            run = self.ferry("bench", "comm", *words)
            self.assertEqual(run.code, USAGE)
            self.assertIn(said, run.err)


if __name__ == "__main__":
    unittest.main()

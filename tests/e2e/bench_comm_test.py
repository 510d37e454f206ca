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
                         [f"{name} {size}" for name in ("all-gather", "exchange")
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

    def test_a_launcher_whose_ranks_do_not_find_each_other(self):
        run = self.ferry(*QUICK, env={**os.environ, "SLURM_STEP_NUM_TASKS": "3"})
        self.assertEqual(run.code, USAGE, run.err)
        self.assertIn("1 of 3 ranks", run.err)
        self.assertIn("srun --mpi=list", run.err)

    def test_bad_input(self):
        for words, said in ((["--sizes", "0"], "nothing to measure"),
                            (["--sizes", "many"], "--sizes"), (["--rounds", "0"], "--rounds"),
                            (["--device", "tpu"], "--device")):
            run = self.ferry("bench", "comm", *words)
            self.assertEqual(run.code, USAGE)
            self.assertIn(said, run.err)


if __name__ == "__main__":
    unittest.main()

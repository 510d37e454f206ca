"""`ferry bench swap` as a user runs it: its rows, its picture, and that it leaves no file behind."""

import json
import os
import shutil
import signal
import time
import unittest
import xml.etree.ElementTree

from harness import USAGE, DriveTest

MIB = 1 << 20
# 3 MiB of state in 24 chunks; what is printed is checked here, not how fast it is.
TINY = ["--millions", "0.25", "--layers", "4", "--chunk", "8192", "--pairs", "2", "--threads", "1"]
QUICK = [*TINY, "--seconds", "0.05"]


class BenchSwapTest(DriveTest):
    def bench(self, *words):
        return self.ferry("bench", "swap", *words)

    def rows(self, *words):
        run = self.bench(*words, "--json")
        self.assertEqual(run.code, 0, run.err)
        table = json.loads(run.out)
        self.assertFalse(table["interrupted"])
        return table, {row["name"]: row for row in table["rows"]}


class RowsTest(BenchSwapTest):
    def test_json(self):
        table, rows = self.rows(self.drive, *QUICK, "--compute-ms", "40")
        self.assertEqual(set(table), {"machine", "command", "rows", "interrupted"})
        self.assertEqual(list(rows), ["swap-out", "swap-in", "optimizer pass", "step"])
        for row in rows.values():
            self.assertEqual(row["unit"], "GB/s")
            self.assertGreater(row["ratio"], 0)
            self.assertGreater(row["% of bound"], 0)
            self.assertGreater(row["overlap"], 0)
            self.assertAlmostEqual(row["value"], row["nvme read"] + row["nvme write"],
                                   delta=0.9 * row["value"])  # medians, and the last pass
        self.assertEqual(rows["swap-out"]["nvme read"], 0)
        self.assertEqual(rows["swap-in"]["nvme write"], 0)
        self.assertGreater(rows["step"]["seconds"], 0.04)
        self.assertGreater(rows["step"]["h2d"], 0)
        _, again = self.rows(*table["command"].split()[3:])
        self.assertEqual(list(again), list(rows))
        self.assert_clean()

    def test_tiers(self):
        """Half of the state in memory: half of the bytes."""
        for more in ([], ["--on-nvme", "0.5"]):
            _, rows = self.rows(self.drive, *QUICK, *more)
            expected = 12 * (MIB / 4) * (0.5 if more else 1)  # of state, read and written
            moved = rows["optimizer pass"]["GB moved"] * 1e9
            self.assertAlmostEqual(moved / 2 / expected, 1, delta=0.05)
        self.assert_clean()

    def test_in_memory(self):
        _, rows = self.rows(*QUICK)
        self.assertEqual(list(rows), ["optimizer pass, in memory"])
        self.assertIsNone(rows["optimizer pass, in memory"]["reference"])

    def test_only_some_passes(self):
        _, rows = self.rows(self.drive, *QUICK, "--passes", "optimizer,in")
        self.assertEqual(list(rows), ["swap-in", "optimizer pass"])

    def test_several_paths_and_methods(self):
        other = self.path("other")
        os.makedirs(other, exist_ok=True)
        self.rows(self.drive, other, *QUICK, "--optimizer", "lion", "--precision", "fp32",
                  "--no-verify", "--backend", "posix")
        self.assertEqual(os.listdir(other), [])
        self.assert_clean()

    def test_table_and_picture(self):
        picture = self.path("pass.svg")
        run = self.bench(self.drive, *QUICK, "--svg", picture)
        self.assertEqual(run.code, 0, run.err)
        for text in ("optimizer pass", "overlap", "% of bound", "plain"):
            self.assertIn(text, run.out)
        root = xml.etree.ElementTree.parse(picture).getroot()
        space = "{http://www.w3.org/2000/svg}"
        texts = [text.text for text in root.iter(space + "text")]
        self.assertTrue(texts[0].startswith("optimizer pass, as it went"), texts)
        titles = [title.text.split(" ")[0].rstrip(":") for title in root.iter(space + "title")]
        self.assertLessEqual({"read", "write", "update"}, set(titles))

    @unittest.skipUnless(shutil.which("fio"), "fio is not installed")
    def test_beside_fio(self):
        table, rows = self.rows(self.drive, *TINY, "--seconds", "0.2", "--compare-fio")
        self.assertIn("fio-", table["machine"]["fio"])
        for row in rows.values():
            self.assertGreater(row["reference"], 0)
        self.assert_clean()

    def test_words_that_make_no_sense(self):
        for words in (["--millions", "0"], ["--millions", "nan"], ["--on-nvme", "2"],
                      ["--block", "3KiB"], ["--depth", "0"], ["--pairs", "0"],
                      ["--precision", "int8"], ["--optimizer", "adamax"], ["--host", "much"],
                      ["--backend", "dma"], ["--passes", "sideways"], ["--svg", "/none/a.svg"], ["--compute-ms", "-1"]):
            self.assertEqual(self.bench(self.drive, *words).code, USAGE, words)
        self.assert_refused(self.bench(self.path("absent")), USAGE, "No such file")
        self.assert_clean()


class EndTest(BenchSwapTest):
    LONG = ["--millions", "2", "--layers", "2", "--chunk", "65536", "--pairs", "1000", "--json"]

    def start(self):
        process = self.start_ferry("bench", "swap", self.drive, *self.LONG)
        self.wait_for_files("ferry-bench", 24 * MIB)
        self.wait_for_files("ferry-bench-plain", 24 * MIB)
        return process

    def test_ctrl_c(self):
        process = self.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, -signal.SIGINT, err)
        self.assertTrue(json.loads(out)["interrupted"])
        self.assert_clean()

    def test_after_a_kill_nothing_is_left(self):
        process = self.start()
        process.kill()
        process.communicate(timeout=60)
        self.wait_until_clean()

    def test_after_a_kill_of_everything_the_next_run_removes_what_is_left(self):
        process = self.start()
        for caretaker in self.caretakers(process):
            os.kill(caretaker, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=60)
        self.assertIn("ferry-bench-plain", os.listdir(self.drive))
        run = self.bench(self.drive, *QUICK)
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("was killed and left", run.err)
        self.assert_clean()

    def test_two_at_one_path(self):
        process = self.start()
        self.assert_refused(self.bench(self.drive, *QUICK), USAGE, "in use by another ferry")
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        self.assert_clean()


if __name__ == "__main__":
    unittest.main()

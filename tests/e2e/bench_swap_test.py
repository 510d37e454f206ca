"""`ferry bench swap` as a user runs it: its rows, its picture, and that it leaves no file behind."""

import json
import os
import re
import shutil
import signal
import time
import unittest
import xml.etree.ElementTree

from harness import DOES_NOT_FIT, IO, USAGE, DriveTest

MIB = 1 << 20
# 3 MiB of state in 24 chunks; what is printed is checked here, not how fast it is.
TINY = ["--millions", "0.25", "--layers", "4", "--chunk", "8192", "--threads", "1"]
ONCE = [*TINY, "--pairs", "1", "--seconds", "0.05"]  # a median is then the pass itself
QUICK = [*TINY, "--pairs", "2", "--seconds", "0.05"]
PARAMETERS = MIB // 4


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
        table, rows = self.rows(self.drive, *ONCE, "--compute-ms", "40")
        self.assertEqual(set(table), {"machine", "command", "rows", "interrupted"})
        self.assertEqual(list(rows), ["swap-out", "swap-in", "optimizer pass", "step"])
        for row in rows.values():
            self.assertEqual(row["unit"], "GB/s")
            self.assertGreater(row["ratio"], 0)
            self.assertGreater(row["x of bound"], 0)
            self.assertLess(row["x of bound"], 10, "a ratio, no percentage")
            self.assertGreater(row["overlap"], 0)
            # Printed figures have four digits.
            self.assertAlmostEqual((row["nvme read"] + row["nvme write"]) / row["value"], 1, delta=0.002)
            self.assertAlmostEqual(row["GB moved"] / row["seconds"] / row["value"], 1, delta=0.002)
            self.assertAlmostEqual(row["value"] / row["reference"] / row["ratio"], 1, delta=0.002)
        # p, m and v are read and written, the gradient read, the weight in bf16 written.
        row = rows["optimizer pass"]
        self.assertAlmostEqual(row["dram"] * row["seconds"] * 1e9 / (28 * PARAMETERS), 1, delta=0.05)
        self.assertEqual(rows["swap-out"]["dram"], 0)
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
        _, rows = self.rows(*ONCE)
        self.assertEqual(list(rows), ["optimizer pass, in memory"])
        row = rows["optimizer pass, in memory"]
        self.assertIsNone(row["reference"])
        self.assertGreater(row["dram"], 0)
        self.assertEqual(row["dram"], row["value"])

    def test_state_on_the_device(self):
        """Half of it there, the rest on the drive: half of the bytes, and copies of what is not."""
        words = ["--device", "cpu", "--on-device", "0.5", "--gpu-memory", "4MiB"]
        table, rows = self.rows(self.drive, *QUICK, *words, "--compute-ms", "20")
        self.assertIn("--gpu-memory 4MiB --on-device 0.5", table["command"])
        for row in rows.values():
            # By whole chunks, of which the blocks have eight each.
            self.assertAlmostEqual(row["% on device"], 50, delta=3)
        moved = rows["optimizer pass"]["GB moved"] * 1e9
        self.assertAlmostEqual(moved / 2 / (6 * MIB / 4), 1, delta=0.1)
        self.assertGreater(rows["optimizer pass"]["device busy %"], 0)
        self.assertEqual(rows["swap-in"]["device busy %"], 0)
        self.assertGreater(rows["step"]["d2h"], 0)
        _, again = self.rows(*table["command"].split()[3:])
        self.assertEqual(again["step"]["% on device"], rows["step"]["% on device"])
        _, whole = self.rows(*QUICK, "--on-device", "1")
        row = whole["optimizer pass, in memory"]
        self.assertEqual((row["% on device"], row["team busy %"], row["h2d"]), (100, 0, 0))
        self.assertGreater(row["value"], 0)
        self.assert_clean()

    def test_a_device_with_too_little_memory(self):
        """One error in this command's words, and the budget that it names works."""
        for words, what in ((["--gpu-memory", "64KiB"], "too small for one layer"),
                            (["--gpu-memory", "1MiB", "--on-device", "0.9"], "no room for so much")):
            run = self.bench(self.drive, *QUICK, *words)
            self.assert_refused(run, DOES_NOT_FIT, what, "--gpu-memory", "measured:", "limit:", "do:")
            self.assertNotIn("batch.", run.err)
            self.assertNotIn("budgets.device", run.err)
            words[1] = re.search(r"set --gpu-memory to (\d+)", run.err).group(1)
            _, rows = self.rows(self.drive, *QUICK, *words)
            self.assertGreaterEqual(rows["swap-in"]["% on device"], 87 if "--on-device" in words else 0)
        self.assert_clean()

    def test_state_on_a_gpu(self):
        run = self.bench(self.drive, *QUICK, "--device", "cuda", "--gpu-memory", "4GiB",
                         "--on-device", "0.5", "--compute-ms", "20", "--json")
        if run.code == USAGE:
            self.skipTest(run.err.splitlines()[0])
        self.assertEqual(run.code, 0, run.err)
        rows = {row["name"]: row for row in json.loads(run.out)["rows"]}
        self.assertAlmostEqual(rows["step"]["% on device"], 50, delta=3)
        self.assertGreater(rows["optimizer pass"]["h2d"], 0)
        self.assertGreater(rows["optimizer pass"]["device busy %"], 0)
        self.assertGreater(rows["step"]["seconds"], 0.02)
        self.assert_clean()

    def test_a_gpu_that_is_not_there(self):
        run = self.ferry("bench", "swap", *QUICK, "--device", "cuda",
                         env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        self.assert_refused(run, USAGE, "device", "cpu")
        self.assert_clean()

    def on_mount(self, options, *words):
        """On a file system that only this one process sees."""
        return self.ferry("bench", "swap", self.drive, *words, through=self.on_tmpfs(self.drive, options))

    def test_refusals_speak_of_its_options(self):
        options = set(re.findall(r"--[a-z-]+", self.bench("--help").out))
        tmpfs = "size=40m"
        self.assert_refused(self.bench(self.drive, "--chunk", "1000"), USAGE, "where:    --chunk", "do:       give 4096")
        for run, remedy in ((self.bench(self.drive, *QUICK, "--host", "1KiB"), "set --host to"),
                            (self.bench(self.drive, "--chunk", "1048576", "--host", "1MiB"), "lower --chunk"),
                            (self.bench(*QUICK, "--host", "1MiB"), "name a directory on a drive"),
                            (self.bench("--millions", "400000"), "lower --millions"),
                            (self.bench(self.drive, "--millions", "400000", "--on-nvme", "0"), "lower --millions"),
                            (self.bench("--millions", "1048576", "--chunk", "4096"), "lower --millions"),
                            (self.on_mount(tmpfs, "--millions", "4"), "lower --millions")):
            self.assert_refused(run, DOES_NOT_FIT, "where:", "do:", remedy)
            refusal = run.err[run.err.index("ferry: "):]
            self.assertNotRegex(refusal, r"\b(budgets|swap|batch|io|model|numerics)\.[a-z]|model's")
            self.assertLessEqual(set(re.findall(r"--[a-z-]+", refusal)), options)
        self.assert_clean()

    def test_little_room(self):
        """Plain transfers do with what is free beside the state."""
        run = self.on_mount("size=48m", *QUICK, "--json")
        self.assertEqual(run.code, 0, run.err)
        for row in json.loads(run.out)["rows"]:
            self.assertGreater(row["ratio"], 0)
        run = self.on_mount("size=20m", *QUICK)
        self.assert_refused(run, DOES_NOT_FIT, "too little free space", "lower --millions")

    def test_only_some_passes(self):
        _, rows = self.rows(self.drive, *QUICK, "--passes", "optimizer,in")
        self.assertEqual(list(rows), ["swap-in", "optimizer pass"])

    def test_what_cannot_be_made_is_refused(self):
        for words in (["--passes", "out"], ["--passes", "optimizer,in"],
                      [self.drive, "--passes", "out", "--on-nvme", "0"],
                      [self.drive, "--passes", "in", "--on-device", "1"]):
            self.assert_refused(self.bench(*words, *QUICK, "--json"), USAGE, "nothing to move", "--passes", "do:")
        for words in (["--on-nvme", "0.5"], ["--compare-fio"]):
            self.assert_refused(self.bench(*words, *QUICK), USAGE, "without a path", words[0], "do:")
        self.assert_clean()
        _, rows = self.rows(self.drive, *QUICK, "--on-nvme", "0")  # nothing by name: all that fit
        self.assertEqual(list(rows), ["optimizer pass, in memory"])

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
        for text in ("optimizer pass", "overlap", "x of bound", "plain"):
            self.assertIn(text, run.out)
        root = xml.etree.ElementTree.parse(picture).getroot()
        space = "{http://www.w3.org/2000/svg}"
        texts = [text.text for text in root.iter(space + "text")]
        self.assertTrue(texts[0].startswith("optimizer pass, as it went"), texts)
        titles = [title.text.split(" ")[0].rstrip(":") for title in root.iter(space + "title")]
        self.assertLessEqual({"read", "write", "update"}, set(titles))

    def test_a_picture_that_cannot_be_written_costs_no_rows(self):
        full = self.path("full")
        os.mkdir(full)
        through = self.on_tmpfs(full, "size=4k")
        run = self.ferry("bench", "swap", self.drive, *QUICK, "--svg", os.path.join(full, "pass.svg"),
                         through=through)
        self.assertEqual(run.code, IO, run.err)
        self.assertIn("No space left", run.err)
        self.assertIn("optimizer pass", run.out)

    @unittest.skipUnless(shutil.which("fio"), "fio is not installed")
    def test_beside_fio(self):
        table, rows = self.rows(self.drive, *TINY, "--pairs", "2", "--seconds", "0.2", "--compare-fio")
        self.assertIn("fio-", table["machine"]["fio"])
        for row in rows.values():
            self.assertGreater(row["reference"], 0)
        self.assert_clean()

    def test_words_that_make_no_sense(self):
        for words in (["--millions", "0"], ["--millions", "nan"], ["--on-nvme", "2"],
                      ["--block", "3KiB"], ["--depth", "0"], ["--pairs", "0"],
                      ["--precision", "int8"], ["--optimizer", "adamax"], ["--host", "much"],
                      ["--backend", "dma"], ["--passes", "sideways"], ["--svg", "/none/a.svg"], ["--compute-ms", "-1"],
                      ["--device", "tpu"], ["--gpu-memory", "much"], ["--on-device", "1.5"], ["--on-device", "nan"],
                      ["--on-device", "0.6", "--on-nvme", "0.7"]):
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

"""`ferry bench io` as a user runs it: its rows, its picture, its machine file, and that it never leaves
or touches a file that is not its own."""

import json
import os
import shutil
import signal
import subprocess
import time
import unittest
import xml.etree.ElementTree

from harness import DOES_NOT_FIT, FERRY, USAGE, DriveTest

MIB = 1 << 20
# Small and short: what is printed is checked here, not how fast it is.
QUICK = ["--size", "64MiB", "--seconds", "0.03", "--blocks", "4KiB,256KiB", "--depths", "1,4"]


class BenchIoTest(DriveTest):
    def bench(self, *words, path=None, through=()):
        return self.ferry("bench", "io", path or self.drive, *words, through=through)


class RowsTest(BenchIoTest):
    def test_json(self):
        run = self.bench(*QUICK, "--json")
        self.assertEqual(run.code, 0, run.err)
        table = json.loads(run.out)
        self.assertEqual(set(table), {"machine", "command", "rows", "settings", "interrupted"})
        self.assertFalse(table["interrupted"])
        self.assertIn("cores", table["machine"])
        self.assertEqual(len(table["rows"]), 4 * 2 * 2)  # kinds of access, blocks, depths
        for row in table["rows"]:
            self.assertLessEqual({"name", "value", "unit", "reference", "ratio"}, set(row))
            self.assertEqual(row["unit"], "GB/s")
            for figure in ("value", "cpu s/GB", "cpu us/op"):
                self.assertGreater(row[figure], 0, row)
        again = json.loads(self.ferry(*table["command"].split()[1:], "--json").out)
        self.assertEqual([row["name"] for row in again["rows"]],
                         [row["name"] for row in table["rows"]])
        self.assertEqual(len(table["settings"]), 1)
        self.assertIn(table["settings"][0]["block_bytes"], (4096, 262144))
        self.assert_clean()

    def test_table_and_picture_in_the_terminal(self):
        run = self.bench(*QUICK, "--integrity")
        self.assertEqual(run.code, 0, run.err)
        for text in ("read 4.00 KiB, depth 1", "mixed 256.00 KiB, depth 4", "randread", "cpu s/GB",
                     "depth down, block size across", "sustained: read", "blocks of"):
            self.assertIn(text, run.out)
        self.assertIn("s left]", run.err)
        self.assert_clean()

    def test_svg(self):
        picture = self.path("picture.svg")
        run = self.bench(*QUICK, "--plot", picture)
        self.assertEqual(run.code, 0, run.err)
        root = xml.etree.ElementTree.parse(picture).getroot()
        texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
        for word in ("Storage bandwidth over block size and depth", "GB/s", "block size (bytes)",
                     "256K", self.drive + ": randread"):
            self.assertIn(word, texts)
        dots = list(root.iter("{http://www.w3.org/2000/svg}circle"))
        self.assertEqual(len(dots), 4 * 2 * 2)
        with open(picture, encoding="utf-8") as file:
            self.assertIn("prefers-color-scheme: dark", file.read())

    def test_several_paths(self):
        other = self.path("other")
        os.makedirs(other, exist_ok=True)
        run = self.ferry("bench", "io", self.drive, other, *QUICK, "--modes", "read", "--json")
        self.assertEqual(run.code, 0, run.err)
        names = [row["name"] for row in json.loads(run.out)["rows"]]
        for place in (self.drive, other, "all together"):
            self.assertEqual(sum(name.startswith(place + ": ") for name in names), 4, names)
        self.assertEqual(os.listdir(other), [])
        self.assert_clean()

    def test_words_that_make_no_sense(self):
        for words in (["--modes", "erase"], ["--blocks", "3KiB"], ["--blocks", "1GiB"],
                      ["--depths", "0"], ["--size", "much"], ["--rings", "0"],
                      ["--backend", "dma"], ["--compare-fio", "--save", "x"],
                      ["--size", "64MiB", "--blocks", "16MiB"]):
            self.assertEqual(self.bench(*words).code, USAGE, words)
        self.assertEqual(self.ferry("bench", "io").code, USAGE)
        self.assert_clean()


class MachineFileTest(BenchIoTest):
    def save(self, name):
        return self.bench(*QUICK, "--modes", "read,write,mixed", "--save", name)

    def test_saved_and_saved_again(self):
        name = self.path("machine.json")
        self.assertEqual(self.save(name).code, 0)
        with open(name, encoding="utf-8") as file:
            machine = json.load(file)
        self.assertEqual(machine["ferry_machine"], 1)
        path = machine["paths"][0]
        self.assertEqual(path["path"], self.drive)
        self.assertIn(path["queue_depth"], (1, 4))
        for key in ("read_bytes_per_s", "write_bytes_per_s", "mixed_read_bytes_per_s",
                    "mixed_write_bytes_per_s"):
            self.assertGreater(path[key], MIB, key)
        machine["notes"] = {"rack": 1}
        path["endurance_tbw"] = 600
        path["read_bytes_per_s"] = 1
        machine["paths"].insert(0, {"path": "/elsewhere", "read_bytes_per_s": 5})
        with open(name, "w", encoding="utf-8") as file:
            json.dump(machine, file)
        self.assertEqual(self.save(name).code, 0)
        with open(name, encoding="utf-8") as file:
            again = json.load(file)
        self.assertEqual(again["notes"], {"rack": 1})
        self.assertEqual(again["paths"][0], {"path": "/elsewhere", "read_bytes_per_s": 5})
        self.assertEqual(len(again["paths"]), 2)
        self.assertEqual(again["paths"][1]["endurance_tbw"], 600)
        self.assertGreater(again["paths"][1]["read_bytes_per_s"], MIB)

    def test_refused_before_anything_is_measured(self):
        for content, text in (("{}", "no machine file"), ("hello", "no machine file"),
                              ('{"ferry_machine": 2}', "newer ferry"),
                              ('{"ferry_machine": 1, "paths": 3}', "no list")):
            name = self.path("bad.json")
            with open(name, "w", encoding="utf-8") as file:
                file.write(content)
            self.assert_refused(self.save(name), USAGE, name, text)
            with open(name, encoding="utf-8") as file:
                self.assertEqual(file.read(), content)
        self.assert_refused(self.save(self.path("none/machine.json")), USAGE, "none")
        self.assert_clean()


class EndTest(BenchIoTest):
    LONG = ["--size", "64MiB", "--seconds", "30", "--blocks", "4KiB", "--depths", "1", "--json"]

    def start(self, *words):
        return self.start_ferry("bench", "io", self.drive, *(words or self.LONG))

    def wait_for_segment(self):
        """Until the files are there: it measures, or is about to."""
        self.wait_for_files("ferry-bench", 64 * MIB)

    def test_ctrl_c(self):
        for name in (signal.SIGINT, signal.SIGTERM):
            process = self.start()
            self.wait_for_segment()
            time.sleep(0.3)
            process.send_signal(name)
            out, err = process.communicate(timeout=20)
            self.assertEqual(process.returncode, -name, err)
            self.assertTrue(json.loads(out)["interrupted"])
            self.assert_clean()

    def test_after_a_kill_nothing_is_left(self):
        """Killed while it lays out its files, and while it measures."""
        for wait in (lambda: time.sleep(0.05), self.wait_for_segment):
            process = self.start()
            wait()
            process.kill()
            process.communicate(timeout=20)
            self.wait_until_clean()

    def test_after_a_kill_of_everything_the_next_run_removes_what_is_left(self):
        process = self.start()
        self.wait_for_segment()
        for caretaker in self.caretakers(process):
            os.kill(caretaker, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=20)
        self.assertIn("ferry-bench", os.listdir(self.drive))
        run = self.bench(*QUICK, "--modes", "read")
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("was killed and left", run.err)
        self.assertIn("its files are removed", run.err)
        self.assert_clean()

    def test_two_at_one_path(self):
        process = self.start()
        self.wait_for_segment()
        self.assert_refused(self.bench(*QUICK), USAGE, "in use by another ferry")
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        self.assert_clean()

    @unittest.skipUnless(shutil.which("fio"), "fio is not installed")
    def test_ctrl_c_beside_fio(self):
        process = self.start("--size", "64MiB", "--seconds", "30", "--blocks", "4KiB", "--depths", "2",
                             "--modes", "read", "--compare-fio", "--json")
        self.wait_for_segment()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        self.assertEqual(process.returncode, -signal.SIGINT, err)
        self.assertEqual(json.loads(out)["rows"], [])
        self.assert_clean()


class PlaceTest(BenchIoTest):
    def on_mount(self, options, *words):
        """On a file system that only this one process sees."""
        inside = ["unshare", "--map-root-user", "--mount", "sh", "-ec",
                  'mount -t tmpfs -o "$1" ferry-test "$2"; shift 2; exec "$@"', "sh", options,
                  self.drive]
        if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
            self.skipTest("cannot mount here")
        return self.bench(*words, through=inside)

    def test_missing(self):
        absent = self.path("absent")
        self.assert_refused(self.bench(path=absent), USAGE, absent, "No such file")
        self.assertFalse(os.path.exists(absent))

    def test_a_file(self):
        name = os.path.join(self.drive, "mine.txt")
        self.assert_refused(self.bench(path=name), USAGE, name, "Not a directory")
        self.assert_clean()

    def test_a_file_of_its_directorys_name(self):
        name = os.path.join(self.drive, "ferry-bench")
        os.symlink("mine.txt", name)
        self.assert_refused(self.bench(), USAGE, "ferry-bench", "Not a directory")
        os.unlink(name)

    def test_a_directory_of_its_name_with_other_files(self):
        name = os.path.join(self.drive, "ferry-bench")
        os.mkdir(name)
        with open(os.path.join(name, "ferry.seg0"), "w", encoding="ascii") as file:
            file.write("a stranger's")
        self.assert_refused(self.bench(), USAGE, "ferry.seg0", "not ferry's")
        with open(os.path.join(name, "ferry.seg0"), encoding="ascii") as file:
            self.assertEqual(file.read(), "a stranger's")

    def test_read_only(self):
        self.assert_refused(self.on_mount("ro"), USAGE, self.drive, "Read-only")

    def test_no_space(self):
        run = self.on_mount("size=100m", "--size", "96MiB")
        self.assert_refused(run, DOES_NOT_FIT, "too little free space", "missing", "left free", "--size")
        run = self.on_mount("size=40m")
        self.assert_refused(run, DOES_NOT_FIT, "too little free space", "missing")

    def test_takes_what_is_free_and_leaves_a_margin(self):
        run = self.on_mount("size=100m", *QUICK[2:], "--modes", "read")
        self.assertEqual(run.code, 0, run.err)


@unittest.skipUnless(shutil.which("fio"), "fio is not installed")
class FioTest(BenchIoTest):
    def test_rows_come_in_pairs(self):
        run = self.bench("--compare-fio", "--pairs", "2", "--seconds", "0.2", "--size", "64MiB",
                         "--modes", "read,randmixed", "--blocks", "64KiB", "--depths", "4", "--json")
        self.assertEqual(run.code, 0, run.err)
        table = json.loads(run.out)
        self.assertIn("fio-", table["machine"]["fio"])
        self.assertEqual([(row["name"], row["unit"]) for row in table["rows"]],
                         [(name + sealed, unit)
                          for name in ("read 64.00 KiB, depth 4", "randmixed 64.00 KiB, depth 4")
                          for sealed in ("", ", integrity") for unit in ("GB/s", "cpu s/GB")])
        for row in table["rows"]:
            self.assertGreater(row["value"], 0, row)
            self.assertGreater(row["reference"], 0, row)
            self.assertGreater(row["ratio"], 0, row)
            self.assertNotIn("ratio_low", row, "two pairs have no interval")
        self.assert_clean()

    def test_without_fio(self):
        done = subprocess.run([FERRY, "bench", "io", self.drive, "--compare-fio"], check=False,
                              capture_output=True, text=True, env={**os.environ, "PATH": "/nowhere"})
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("package fio", done.stderr)
        self.assert_clean()


if __name__ == "__main__":
    unittest.main()

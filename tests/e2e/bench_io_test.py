"""`ferry bench io` as a user runs it: its rows, its picture, its machine file, and that it never leaves
or touches a file that is not its own."""

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import time
import unittest
import xml.etree.ElementTree

from harness import DOES_NOT_FIT, FERRY, IO, USAGE, DriveTest

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
        self.assertEqual(set(table), {"machine", "command", "rows", "settings", "interrupted",
                                      "left_out"})
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
        run = self.bench(*QUICK, "--integrity", "--modes", "read,write,mixed,randread")
        self.assertEqual(run.code, 0, run.err)
        for text in ("read 4.00 KiB, depth 1", "mixed 256.00 KiB, depth 4", "randread", "cpu s/GB",
                     "depth down, block size across", "sustained: read", "blocks of"):
            self.assertIn(text, run.out)
        self.assertIn("s left]", run.err)
        self.assert_clean()

    def test_progress_on_a_terminal(self):
        """A log line begins a line of its own, and what comes after the sweep is still to come."""
        ours, terminal = pty.openpty()
        process = subprocess.Popen([FERRY, "bench", "io", self.drive, "--size", "64MiB", "--seconds", "0.2",
                                    "--blocks", "64KiB", "--depths", "1,2", "--modes", "read,write,mixed"],
                                   stdout=subprocess.DEVNULL, stderr=terminal)
        os.close(terminal)
        text = b""
        with open(ours, "rb", buffering=0) as shown, contextlib.suppress(OSError):  # EIO: its end
            while part := shown.read(4096):
                text += part
        self.assertEqual(process.wait(timeout=60), 0, text)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", text.decode())  # without colours
        self.assertGreater(shown.count("info aio:"), 3)
        self.assertNotRegex(shown, r"left\][^\r\n]*info aio:")
        self.assertNotIn(", 0 s left] " + self.drive + ": rings", shown)
        settling = re.findall(r"\[(\d+)/(\d+), [0-9]+ s left\] [^\r\n]*: rings and backends: read", shown)
        self.assertTrue(settling, shown)
        for done, total in settling:
            self.assertLess(int(done), int(total))
        done, total = re.findall(r"\[(\d+)/(\d+), [0-9]+ s left\] [^\r\n]*: sustained: mixed", shown)[-1]
        self.assertEqual(done, total)

    def test_svg(self):
        picture = self.path("picture.svg")
        run = self.bench(*QUICK, "--plot", picture)
        self.assertEqual(run.code, 0, run.err)
        root = xml.etree.ElementTree.parse(picture).getroot()
        texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
        for word in ("Storage bandwidth over block size and depth", "GB/s", "block size (bytes)",
                     "256K"):
            self.assertIn(word, texts)
        titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
        self.assertIn(self.drive + ": randread", titles)
        dots = list(root.iter("{http://www.w3.org/2000/svg}circle"))
        self.assertEqual(len(dots), 4 * 2 * 2)
        with open(picture, encoding="utf-8") as file:
            self.assertIn("prefers-color-scheme: dark", file.read())

    def test_titles_of_panels_fit_their_width(self):
        picture = self.path("titles.svg")
        short = self.path("ü")
        long = self.path("ein-ziemlich-langer-Name-für-ein-Verzeichnis")
        for path in (short, long):
            os.mkdir(path)
        run = self.ferry("bench", "io", short, long, *QUICK, "--modes", "read,randmixed", "--plot", picture)
        self.assertEqual(run.code, 0, run.err)
        root = xml.etree.ElementTree.parse(picture).getroot()
        texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
        for word in (short + ": read", "all together: randmixed", "…" + (long + ": randmixed")[-41:],
                     "…" + (long + ": read")[-41:]):
            self.assertIn(word, texts)

    def test_a_command_for_a_shell(self):
        odd = os.path.join(self.drive, "two words; and 'more'")
        os.mkdir(odd)
        run = self.bench(*QUICK, "--modes", "read", "--json", path=odd)
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(shlex.split(json.loads(run.out)["command"])[:4], ["ferry", "bench", "io", odd])
        os.rmdir(odd)

    def test_a_picture_replaces_nothing_but_a_picture_of_ferrys(self):
        read = [*QUICK, "--modes", "read"]
        for text in ("a text of some length, no picture", "x", '<svg xmlns="x">mine</svg>',
                     '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"></svg>'):
            notes = self.path("notes.txt")
            with open(notes, "w", encoding="utf-8") as file:
                file.write(text)
            run = self.bench(*read, "--plot", notes)
            self.assert_refused(run, USAGE, "--plot", notes, "another kind")
            with open(notes, encoding="utf-8") as file:
                self.assertEqual(file.read(), text)
        fresh = self.path("fresh.svg")
        self.assertEqual(self.bench(*read, "--plot", fresh, path=self.path("nowhere")).code, USAGE)
        self.assertFalse(os.path.exists(fresh))
        link = self.path("fresh-link.svg")
        os.symlink("fresh.svg", link)
        for name in (fresh, link):  # a new one, and an older picture by another name
            self.assertEqual(self.bench(*read, "--plot", name).code, 0)
            xml.etree.ElementTree.parse(fresh)
        self.assertTrue(os.path.islink(link))
        self.assertEqual([name for name in os.listdir(self.dir) if name.startswith("fresh.svg")],
                         ["fresh.svg"])

    def test_two_results_for_one_file_are_refused(self):
        name = self.path("both.json")
        other = os.path.join(self.drive, "..", "both.json")
        for save in (name, other):
            run = self.bench(*QUICK, "--modes", "read,write,mixed", "--plot", name, "--save", save)
            self.assert_refused(run, USAGE, "one file", name, save)
        self.assertFalse(os.path.exists(name))

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

    def test_the_same_block_twice_is_measured_once(self):
        run = self.bench(*QUICK[:4], "--blocks", "64KiB,64KiB", "--depths", "2,2",
                         "--modes", "read,read", "--json")
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(len(json.loads(run.out)["rows"]), 1)

    def test_a_path_given_twice_is_refused_before_anything_is_measured(self):
        alias = self.path("alias")
        if not os.path.islink(alias):
            os.symlink(self.drive, alias)
        for twice in (self.drive, self.drive + "/.", alias):
            run = self.ferry("bench", "io", self.drive, twice, *QUICK)
            self.assert_refused(run, USAGE, "given twice")
            self.assertNotIn("left]", run.err)
        self.assert_clean()

    def test_more_in_flight_than_hashers_keep_up_with(self):
        run = self.bench("--depths", "2048", "--integrity", "--threads", "2", "--blocks", "64KiB",
                         "--size", "400MiB", "--seconds", "0.3", "--modes", "write")
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("write 64.00 KiB, depth 2048", run.out)
        self.assert_clean()

    def test_many_rings(self):
        """More than half of what a volume takes: twice as many are no candidate."""
        run = self.bench("--size", "1200MiB", "--rings", "33", "--blocks", "256KiB,1MiB,4MiB,16MiB",
                         "--depths", "1", "--modes", "read,write,mixed", "--seconds", "0.03", "--json")
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(json.loads(run.out)["settings"][0]["rings"], 33)

    def test_what_was_measured_before_something_failed(self):
        process = self.start_ferry("bench", "io", self.drive, "--size", "64MiB", "--seconds", "1.5", "--blocks",
                                   "64KiB", "--depths", "1,2", "--modes", "read", "--json")
        self.wait_for_files("ferry-bench", 64 * MIB)
        time.sleep(0.3)
        away = os.path.join(self.drive, "away")
        os.rename(os.path.join(self.drive, "ferry-bench"), away)  # where the next volume is to be
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, USAGE, err)
        self.assertIn("ferry-bench", err)
        self.assertEqual([row["name"] for row in json.loads(out)["rows"]], ["read 64.00 KiB, depth 1"])
        shutil.rmtree(away)

    def test_names_that_are_no_text(self):
        for name in (b"bad-\xff-name", b"two\nlines"):
            odd = os.path.join(os.fsencode(self.dir), name)
            os.makedirs(odd, exist_ok=True)
            for words in (["--json"], ["--save", self.path("odd.json")],
                          ["--plot", self.path("odd.svg")], ["--compare-fio"]):
                done = subprocess.run([FERRY, "bench", "io", odd, *QUICK, *words], check=False,
                                      capture_output=True, timeout=300)
                self.assertEqual(done.returncode, USAGE, done.stderr)
                self.assertIn(b"no text", done.stderr)
            done = subprocess.run([FERRY, "bench", "io", odd, *QUICK[:4], "--blocks", "64KiB",
                                   "--depths", "1", "--modes", "read"], check=False,
                                  capture_output=True, timeout=300)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(os.listdir(odd), [])

    def test_words_that_make_no_sense(self):
        for words in (["--modes", "erase"], ["--blocks", "3KiB"], ["--blocks", "1GiB"],
                      ["--depths", "0"], ["--size", "much"], ["--rings", "0"],
                      ["--backend", "dma"], ["--compare-fio", "--save", "x"],
                      ["--size", "64MiB", "--blocks", "16MiB"], ["--size", "0"], ["--size", "1"],
                      ["--modes", "read", "--save", self.path("part.json")],
                      ["--size", "32MiB", "--rings", "4"],
                      ["--seconds", "nan"], ["--seconds", "inf"], ["--seconds", "0"]):
            self.assert_refused(self.bench(*words), USAGE, "\n  do:       ")
        self.assertFalse(os.path.exists(self.path("part.json")))
        self.assertEqual(self.ferry("bench", "io").code, USAGE)
        self.assert_refused(self.ferry("bench", "io", ""), USAGE, "empty")
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

    def test_a_link_stays_a_link(self):
        name, link = self.path("real.json"), self.path("link.json")
        os.symlink("real.json", link)
        self.assertEqual(self.save(name).code, 0)
        self.assertEqual(self.save(link).code, 0)
        self.assertTrue(os.path.islink(link))
        with open(name, encoding="utf-8") as file:
            self.assertEqual(len(json.load(file)["paths"]), 1)

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

    def start(self, *words, through=()):
        return self.start_ferry("bench", "io", self.drive, *(words or self.LONG), through=through)

    def wait_for_slot_file(self):
        """Until the files are there: it measures, or is about to."""
        self.wait_for_files("ferry-bench", 64 * MIB)

    def test_ctrl_c(self):
        for name in (signal.SIGINT, signal.SIGTERM):
            process = self.start()
            self.wait_for_slot_file()
            time.sleep(0.3)
            process.send_signal(name)
            out, err = process.communicate(timeout=20)
            self.assertEqual(process.returncode, -name, err)
            table = json.loads(out)
            self.assertTrue(table["interrupted"])
            self.assertEqual([row["name"] for row in table["rows"]], ["read 4.00 KiB, depth 1"])
            self.assertGreater(table["rows"][0]["value"], 0)
            self.assert_clean()

    def test_what_it_was_told_to_ignore_does_not_end_it(self):
        through = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]  # as nohup does
        process = self.start("--size", "64MiB", "--seconds", "1", "--blocks", "4KiB", "--depths", "1",
                             "--modes", "read", through=through)
        self.wait_for_slot_file()
        process.send_signal(signal.SIGHUP)
        _, err = process.communicate(timeout=20)
        self.assertEqual(process.returncode, 0, err)
        self.assertNotIn("interrupted", err)
        self.assert_clean()

    def test_ctrl_c_keeps_what_is_known_of_the_depth_under_way(self):
        picture = self.path("interrupted.svg")
        process = self.start("--size", "64MiB", "--seconds", "1.5", "--blocks", "4KiB,16KiB,64KiB,256KiB,1MiB",
                             "--depths", "1", "--modes", "read", "--plot", picture, "--json")
        self.wait_for_slot_file()
        time.sleep(1.6)  # into the fourth block size, in the first of three rounds
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        self.assertEqual(process.returncode, -signal.SIGINT, err)
        rows = json.loads(out)["rows"]
        self.assertGreaterEqual(len(rows), 2)
        self.assertLess(len(rows), 5)
        root = xml.etree.ElementTree.parse(picture).getroot()
        self.assertEqual(len(list(root.iter("{http://www.w3.org/2000/svg}circle"))), len(rows))
        self.assert_clean()

    def test_after_a_kill_nothing_is_left(self):
        """Killed while it lays out its files, and while it measures."""
        for wait in (lambda: self.wait_for_files("ferry-bench", 1), self.wait_for_slot_file):
            process = self.start()
            wait()
            process.kill()
            process.communicate(timeout=20)
            self.wait_until_clean()

    def test_right_after_a_kill_the_next_run_waits(self):
        """For the caretaker, which is kept from its work for a moment here."""
        process = self.start()
        self.wait_for_slot_file()
        (caretaker,) = self.caretakers(process)
        os.kill(caretaker, signal.SIGSTOP)
        process.kill()
        process.communicate(timeout=20)
        again = self.start(*QUICK, "--modes", "read")
        time.sleep(0.5)
        self.assertIsNone(again.poll())
        os.kill(caretaker, signal.SIGCONT)
        _, err = again.communicate(timeout=60)
        self.assertEqual(again.returncode, 0, err)
        self.assertNotIn("was killed and left", err)  # the caretaker had done it
        self.assert_clean()

    def test_after_a_kill_of_everything_the_next_run_removes_what_is_left(self):
        process = self.start()
        self.wait_for_slot_file()
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
        self.wait_for_slot_file()
        for _ in range(3):  # between its volumes too
            self.assert_refused(self.bench(*QUICK), USAGE, "in use by another ferry")
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        self.assert_clean()

    @unittest.skipUnless(shutil.which("fio"), "fio is not installed")
    def test_ctrl_c_beside_fio(self):
        process = self.start("--size", "64MiB", "--seconds", "30", "--blocks", "4KiB", "--depths", "2",
                             "--modes", "read", "--compare-fio", "--json")
        self.wait_for_slot_file()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        self.assertEqual(process.returncode, -signal.SIGINT, err)
        self.assertEqual(json.loads(out)["rows"], [])
        self.assert_clean()


class PlaceTest(BenchIoTest):
    def on_mount(self, options, *words, kind="tmpfs", inside=""):
        """On a file system that only this one process sees; `inside`: in directories there."""
        script = 'mount -t "$1" -o "$2" ferry-test "$3"; cd "$3"; mkdir -p $4; shift 4; exec "$@"'
        through = ["unshare", "--map-root-user", "--mount", "sh", "-ec", script, "sh", kind, options,
                   self.drive, inside or "."]
        if subprocess.run([*through, "true"], capture_output=True, check=False).returncode:
            self.skipTest("cannot mount here")
        if not inside:
            return self.bench(*words, through=through)
        return self.ferry("bench", "io", *inside.split(), *words, through=through)

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
        with open(os.path.join(name, "ferry.slots0"), "w", encoding="ascii") as file:
            file.write("a stranger's")
        self.assert_refused(self.bench(), USAGE, "ferry.slots0", "not ferry's")
        with open(os.path.join(name, "ferry.slots0"), encoding="ascii") as file:
            self.assertEqual(file.read(), "a stranger's")

    def test_what_another_run_left_there_stays(self):
        """Killed runs: one left its durable state, the other only files to be removed by itself."""
        for durable in (True, False):
            with self.subTest(durable=durable):
                name = os.path.join(self.drive, "ferry-bench")
                os.makedirs(name, exist_ok=True)
                self.killed_run(name, durable)
                before = {file: os.stat(os.path.join(name, file)).st_size for file in os.listdir(name)}
                self.assertIn("ferry.slots0", before)
                run = self.bench(*QUICK, "--modes", "read")
                self.assert_refused(run, USAGE, "ferry.volume",
                                    "durable state" if durable else "another run")
                after = {file: os.stat(os.path.join(name, file)).st_size for file in os.listdir(name)}
                self.assertEqual(after, before)
                shutil.rmtree(name)

    def killed_run(self, directory, durable):
        config = self.config(steps=100000, budgets__host="300KiB", checkpoint__durable_steps=durable,
                             budgets__nvme=[{"path": directory, "size": "64MiB"}])
        process = self.start_ferry(*self.command(config))
        for _ in range(4):
            self.assertIn("{", process.stdout.readline())
        process.kill()
        process.wait(timeout=30)

    def test_read_only(self):
        self.assert_refused(self.on_mount("ro"), USAGE, self.drive, "Read-only")

    def test_no_space(self):
        run = self.on_mount("size=100m", "--size", "96MiB")
        self.assert_refused(run, DOES_NOT_FIT, "too little free space", "missing", "left free", "--size")
        run = self.on_mount("size=40m")
        self.assert_refused(run, DOES_NOT_FIT, "too little free space", "missing")

    def test_no_space_for_the_picture_costs_no_settings(self):
        where, machine = self.path("measured"), self.path("machine.json")
        run = self.on_mount("size=4k", *QUICK, "--modes", "read,write,mixed", "--save", machine, "--plot",
                            os.path.join(self.drive, "full.svg"), inside=where)
        self.assertEqual(run.code, IO, run.err)
        for text in ("--plot", "No space left"):
            self.assertIn(text, run.err)
        self.assertIn("GB/s", run.out)
        with open(machine, encoding="utf-8") as file:
            self.assertEqual([path["path"] for path in json.load(file)["paths"]], [where])

    def test_takes_what_is_free_and_leaves_a_margin(self):
        run = self.on_mount("size=100m", *QUICK[2:], "--modes", "read")
        self.assertEqual(run.code, 0, run.err)

    def test_leaves_out_what_there_is_no_room_for(self):
        """With the default block sizes and depths, and nothing but little space."""
        run = self.on_mount("size=600m", "--seconds", "0.03", "--json")
        self.assertEqual(run.code, 0, run.err)
        table = json.loads(run.out)
        self.assertTrue(any(text.startswith("blocks of 16.00 MiB, depth 32: ")
                            for text in table["left_out"]), table["left_out"])
        self.assertEqual(len(table["rows"]), 4 * (6 * 3 - len(table["left_out"])))
        self.assertEqual(len(table["settings"]), 1)
        run = self.on_mount("size=600m", "--blocks", "4KiB,16MiB", "--depths", "1,32", "--seconds", "0.03", "--modes", "read")
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("left out: blocks of 16.00 MiB, depth 32: ", run.out)

    def test_files_that_their_rings_do_not_divide(self):
        for size in ("192MiB", "320MiB", "400MiB"):
            for rings in ("1", "2", "3"):
                with self.subTest(size=size, rings=rings):
                    run = self.bench("--size", size, "--rings", rings, "--blocks", "4KiB,16MiB", "--depths", "2",
                                     "--modes", "read", "--seconds", "0.03")
                    self.assertEqual(run.code, 0, run.err)
                    self.assertIn("no settings: ", run.out)

    def test_two_directories_share_what_their_file_system_has(self):
        run = self.on_mount("size=400m", *QUICK[2:], "--modes", "read", inside="a b")
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("all together", run.out)

    def test_a_file_system_that_does_not_know_its_size(self):
        run = self.on_mount("mode=700", *QUICK, "--modes", "read", kind="ramfs")
        self.assertEqual(run.code, 0, run.err)

    def test_says_where_there_is_no_direct_io(self):
        run = self.bench(*QUICK, "--buffered", "--json")
        self.assertEqual(run.code, 0, run.err)
        table = json.loads(run.out)
        self.assertIs(table["settings"][0]["direct"], False)
        for row in table["rows"]:
            self.assertTrue(row["name"].endswith(", buffered"), row)

    def test_an_empty_directory_of_its_name_stays(self):
        name = os.path.join(self.drive, "ferry-bench")
        os.mkdir(name)
        run = self.bench(*QUICK, "--modes", "read")
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(os.listdir(name), [])
        os.rmdir(name)


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
            self.assertEqual(len(row["ratios"]), 2, row)
        self.assert_clean()

    def test_more_rings_than_one(self):
        for words in (["--size", "64MiB", "--rings", "3"], ["--size", "96MiB", "--rings", "4"]):
            run = self.bench("--compare-fio", "--pairs", "1", "--seconds", "0.2", *words,
                             "--modes", "read", "--blocks", "64KiB", "--depths", "2", "--json")
            self.assertEqual(run.code, 0, run.err)
        self.assert_clean()

    def test_slices_in_which_no_cpu_time_can_be_sampled(self):
        run = self.bench("--compare-fio", "--seconds", "0.05", "--modes", "read")
        self.assert_refused(run, USAGE, "--seconds", "0.05", "0.2 or more")
        self.assert_clean()

    def test_a_slice_without_cpu_samples_has_failed(self):
        """A program in fio's place reports transfers of a time when it did not run."""
        directory = self.path("no-time")
        os.mkdir(directory)
        script = os.path.join(directory, "fio")
        report = {"fio version": "fio-3", "timestamp_ms": 0,
                  "jobs": [{way: {"io_bytes": 1 << 20, "total_ios": 16, "runtime": 200}
                            for way in ("read", "write")}]}
        with open(script, "w", encoding="ascii") as file:
            file.write("#!/bin/sh\ncat <<'END'\n" + json.dumps(report, indent=1) + "\nEND\n")
        os.chmod(script, 0o755)
        env = {**os.environ, "PATH": directory + ":" + os.environ["PATH"]}
        run = self.ferry("bench", "io", self.drive, "--compare-fio", "--seconds", "0.2", "--pairs", "1",
                         "--size", "64MiB", "--modes", "read", "--blocks", "64KiB", "--depths", "4",
                         "--json", env=env)
        self.assert_refused(run, IO, "CPU time", "--seconds")
        self.assert_clean()

    def test_without_fio(self):
        done = subprocess.run([FERRY, "bench", "io", self.drive, "--compare-fio"], check=False,
                              capture_output=True, text=True, env={**os.environ, "PATH": "/nowhere"})
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("package fio", done.stderr)
        self.assert_clean()


if __name__ == "__main__":
    unittest.main()

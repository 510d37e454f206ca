"""What the scripts of bench/ share: statistics, turns, tables, what they need before they begin, the trace and its
picture; and the settings that two of them choose."""

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
import xml.etree.ElementTree
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import common  # noqa: E402
import compute  # noqa: E402
import needs  # noqa: E402
import fits  # noqa: E402
import nvme_step  # noqa: E402
import peers  # noqa: E402
import shared_tensors  # noqa: E402
import slow_network  # noqa: E402
import startup  # noqa: E402
import step_bound  # noqa: E402
import training  # noqa: E402
from step_picture import merged, picture, seconds_text, tick_for  # noqa: E402
from step_trace import Slice, Trace, covered  # noqa: E402


class WriteWholeTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.file = self.folder / "result.json"

    def test_the_old_one_stays_until_the_new_one_is_whole(self):
        self.file.write_text("old")
        with unittest.mock.patch("os.fsync", side_effect=OSError("disk full")), self.assertRaises(OSError):
            common.write_whole(self.file, "new")
        self.assertEqual(self.file.read_text(), "old")
        common.write_whole(self.file, "new")
        self.assertEqual(self.file.read_text(), "new")
        self.assertEqual([self.file], list(self.folder.iterdir()), "a draft was left")

    def test_links_and_what_is_no_file_stay(self):
        link, fifo = self.folder / "link", self.folder / "fifo"
        link.symlink_to(self.file)
        common.write_whole(link, b"new")
        self.assertEqual((link.is_symlink(), self.file.read_bytes()), (True, b"new"))
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        common.write_whole(fifo, "through")
        self.assertEqual((fifo.is_fifo(), os.read(reader, 100)), (True, b"through"))


class SpreadTest(unittest.TestCase):
    def test_few_values_give_their_range(self):
        self.assertEqual(common.spread([3.0]), (3, 3, 3))
        self.assertEqual(common.spread([5, 1, 3]), (3, 1, 5))
        self.assertEqual(common.spread([1, 2, 3, 4, 50]), (3, 1, 50))

    def test_many_values_give_the_interval_of_the_median(self):
        # 0.98 sqrt(15) = 3.8 ranks either side of the eighth: the fourth and the twelfth, as binomial
        # tables have it (96.5 % between them).
        self.assertEqual(common.spread(range(1, 16)), (8, 4, 12))
        self.assertEqual(common.spread([6, 5, 4, 3, 2, 1]), (3.5, 1, 6))

    def test_an_outlier_moves_nothing(self):
        self.assertEqual(common.spread([*range(1, 15), 1e9]), (8, 4, 12))


    def test_a_row_has_the_spread_of_its_ratios(self):
        self.assertEqual(common.spread_of({"ratio": 8, "ratios": [*range(1, 16)]}), (8, 4, 12))
        self.assertEqual(common.spread_of({"ratio": 8, "ratio_low": 7, "ratio_high": 9}), (8, 7, 9))
        self.assertEqual(common.spread_of({"ratio": 8}), (8, None, None))


class RowTest(unittest.TestCase):
    def test_ratios_are_of_pairs(self):
        row = common.compared("x", [2.0, 4.0, 3.0], [4.0, 4.0, 9.0], "s")
        self.assertEqual((row["value"], row["reference"], row["ratio"]), (3, 4, 2))
        self.assertEqual((row["ratio_low"], row["ratio_high"], row["pairs"]), (1, 3, 3))

    def test_larger_is_better_either_way(self):
        self.assertEqual(common.compared("x", [2.0], [4.0], "s")["ratio"], 2)
        self.assertEqual(common.compared("x", [2.0], [4.0], "1/s", less_is_better=False)["ratio"], 0.5)

    def test_outcomes(self):
        def of(ratios, target):
            return common.judged("x", 1, "s", 1, ratios, target)["outcome"]
        self.assertEqual(of([1.2, 1.3, 1.4], 1.25), "met")
        self.assertEqual(of([1.0, 1.1, 1.4], 1.25), "open")
        self.assertEqual(of([1.0, 1.1, 1.2], 1.25), "missed")
        self.assertNotIn("outcome", common.judged("x", 1, "s", 1, [1], None))

    def test_a_ratio_can_be_too_large(self):
        def of(*ratios):
            return common.judged("x", 1, "s", 1, ratios, 0.9, target_high=1.1)["outcome"]
        self.assertEqual([of(0.9), of(1.1)], ["met", "met"])
        self.assertEqual([of(0.89), of(1.11)], ["missed", "missed"])
        self.assertEqual([of(1.0, 1.12, 1.2), of(0.8, 0.85, 0.95)], ["open", "open"])
        self.assertEqual([of(1.11, 1.12, 1.2), of(0.7, 0.8, 0.89)], ["missed", "missed"])
        self.assertIn("0.9 to 1.1  met", common.table([common.judged("x", 1, "s", 1, [1], 0.9, target_high=1.1)]))

    def test_a_prediction_may_be_a_tenth_off(self):
        def of(measured, predicted):
            run = training.Run(1, seconds=[9.0, measured], summary={"steps": 1, "steps_committed": 0,
                                                                    "predicted_seconds": predicted})
            return training.prediction_row("x", [run])
        row = of(measured=2.0, predicted=1.9)
        self.assertEqual((row["name"], row["value"], row["reference"], row["ratio"], row["outcome"]),
                         ("x: step beside prediction", 2, 1.9, 0.95, "met"))
        self.assertEqual([of(2.0, 1.7)["outcome"], of(2.0, 2.3)["outcome"]], ["missed", "missed"])

    def test_table(self):
        rows = [common.compared("with", [1.0, 2.0], [2.0, 2.0], "s", 0.5), common.plain("without", [1, 2], "GB")]
        lines = common.table(rows).splitlines()
        self.assertEqual(len(lines), 3)
        self.assertIn("1 to 2 ", lines[1])
        self.assertIn("met", lines[1])
        self.assertIn("1 to 2 GB", lines[2])

    def test_a_note_has_the_median_of_fios_rates(self):
        """As the ratio beside it is of all rounds."""
        starts = [argparse.Namespace(seconds=2.0, written=1, host_peak=1)] * 3
        row = startup.rows_of(4e9, starts, [4 / 3, 4.0, 2.0])[-1]
        self.assertEqual((row["note"], row["ratio"]), ("fio 2 GB/s", 1))
        self.assertNotIn("note", startup.rows_of(4e9, starts, None)[-1])
        rates = [3e9, 1e9, 2e9]
        runs = [training.Timing(1, seconds=[2.0, 2.0]) for _ in rates]
        for run, rate in zip(runs, rates):
            run.bandwidth = rate
        self.assertEqual(nvme_step.rows_of("x", runs, [4e9] * 3, None)[-1]["note"], "fio 2 GB/s")


class ReportTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ferry-report-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def printed(self, file):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                common.report(argparse.Namespace(json=str(file)), [common.plain("x", 1, "s")], ["a note"])
            finally:
                self.out = out.getvalue()
        return self.out

    def test_the_table_and_the_file(self):
        self.assertIn("a note", self.printed(self.folder / "x.json"))
        self.assertEqual(json.loads((self.folder / "x.json").read_text())["rows"][0]["name"], "x")
        self.assertEqual(json.loads(self.printed("-"))["notes"], ["a note"])

    def test_the_table_is_there_even_if_the_file_can_no_longer_be_written(self):
        with self.assertRaises(OSError):
            self.printed(self.folder / "gone/x.json")
        self.assertIn("a note", self.out)


class TurnsTest(unittest.TestCase):
    def test_order_alternates(self):
        order = []
        sides = {name: lambda name=name: order.append(name) or name for name in "abc"}
        self.assertEqual(common.turns(sides, 3), {"a": ["a"] * 3, "b": ["b"] * 3, "c": ["c"] * 3})
        self.assertEqual("".join(order), "abccbaabc")

    def test_a_side_that_fails_leaves_the_others(self):
        calls = []

        def fails_at_second():
            calls.append(1)
            if len(calls) == 2:
                raise common.SideFailed("no more")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            found = common.turns({"bad": fails_at_second, "good": lambda: 1}, 4)
        self.assertEqual(found, {"good": [1] * 4})
        self.assertIn("bad: no more", said.getvalue())
        self.assertEqual(len(calls), 2)

    def test_no_round_is_begun_that_would_end_too_late(self):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            found = common.turns({"a": lambda: 1}, 5, seconds=0)
        self.assertEqual(found, {"a": [1]})
        self.assertIn("1 of 5 rounds", said.getvalue())


class TraceTest(unittest.TestCase):
    """Three steps of a second: compute 0.6 s, then 0.4 s in which the disk reads half the time."""

    def setUp(self):
        def slice_of(row, name, begin, seconds, step):
            return {"ph": "X", "name": name, "pid": 1, "tid": row, "ts": begin * 1e6, "dur": seconds * 1e6,
                    "args": {"step": step}}
        events = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "measured"}},
                  {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "planned"}},
                  {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "compute"}},
                  {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "nvme read"}},
                  {"ph": "M", "name": "thread_name", "pid": 2, "tid": 2, "args": {"name": "compute"}}]
        for step in (1, 2, 3):
            events += [slice_of(0, "forward", step, 0.2, step), slice_of(0, "backward", step + 0.2, 0.4, step),
                       slice_of(1, "read", step + 0.7, 0.2, step)]
            # As planned: without a pause, and begun a tenth before the step's first kernel was.
            events += [{**slice_of(2, "forward", step - 0.1, 0.2, step), "pid": 2},
                       {**slice_of(2, "backward", step + 0.1, 0.3, step), "pid": 2}]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"traceEvents": events}, file)
            file.flush()
            self.trace = Trace(file.name, first=2)

    def test_busy(self):
        self.assertAlmostEqual(self.trace.begin, 2)
        self.assertAlmostEqual(self.trace.end, 3)
        self.assertAlmostEqual(self.trace.busy("compute"), 0.6)
        self.assertAlmostEqual(self.trace.busy("nvme read"), 0.2)
        self.assertEqual(self.trace.busy("team"), 0)

    def test_waits(self):
        wait, = self.trace.waits("compute")
        self.assertAlmostEqual(wait.seconds, 0.4)
        self.assertEqual((wait.after, wait.before, wait.meanwhile), ("backward", "the next step", "nvme read 50 %"))

    def test_the_step_that_is_drawn(self):
        begin, end, measured, planned = self.trace.last_step()
        self.assertEqual((begin, end), (2, 3))
        self.assertEqual([one.name for one in measured], ["forward", "backward", "read"])
        self.assertEqual([(one.name, round(one.begin, 9), round(one.end, 9)) for one in planned],
                         [("forward", 2.0, 2.2), ("backward", 2.2, 2.5)])

    def test_picture(self):
        drawn = xml.etree.ElementTree.fromstring(picture(self.trace, "a <title>"))
        svg = "{http://www.w3.org/2000/svg}"
        texts = [text.text for text in drawn.iter(svg + "text")]
        self.assertEqual(texts[0], "a <title>: 1 s")
        self.assertEqual(texts[1:7], ["0 s", "200 ms", "400 ms", "600 ms", "800 ms", "1 s"])
        self.assertEqual(texts[7:], ["compute", "60 % measured", "50 % planned", "nvme read", "20 % measured",
                                     "0 % planned", "forward, read", "backward"])
        groups = [(group.get("class"), [title.text for title in group.iter(svg + "title")])
                  for group in drawn.iter(svg + "g")]
        self.assertEqual(groups, [("measured", ["forward: 0 s to 200 ms", "backward: 200 ms to 600 ms"]),
                                  ("planned", ["forward: 0 s to 200 ms", "backward: 200 ms to 500 ms"]),
                                  ("measured", ["read: 700 ms to 900 ms"]), ("planned", [])])
        backward = [rect for rect in drawn.iter(svg + "rect") if "backward" in "".join(rect.itertext())][0]
        self.assertEqual((backward.get("x"), backward.get("width")), ("290.0", "400.0"))  # 90 + 0.2 of 1000

    def test_ticks(self):
        self.assertEqual([tick_for(most) for most in (5, 5.1, 10, 24, 26, 50)], [1, 2, 2, 5, 10, 10])
        self.assertAlmostEqual(tick_for(0.0041), 0.001)
        self.assertEqual([seconds_text(one) for one in (0, 2.5, 0.25)], ["0 s", "2.5 s", "250 ms"])

    def test_overlap_counts_once(self):
        slices = [Slice("x", "a", 0, 2, 1), Slice("x", "a", 1, 3, 1), Slice("x", "b", 5, 9, 1)]
        self.assertEqual(covered(slices, 0, 6), 4)
        self.assertEqual(len(merged(slices, 0)), 2)


class NeedsTest(unittest.TestCase):
    def ended(self, work, *words, **options):
        """Why a script ends there."""
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit) as end:
            work(*words, **options)
        return said.getvalue() if end.exception.code == 2 else end.exception.code

    def test_directory(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--path", type=needs.directory, default="/none")
        self.assertIn("--path: /none is no directory", self.ended(parser.parse_args, []))
        self.assertEqual(parser.parse_args(["--path", "/"]).path, "/")

    def test_output_file(self):
        parser = argparse.ArgumentParser()
        common.add_json_option(parser)

        def said(file):
            return self.ended(parser.parse_args, ["--json", str(file)])
        with tempfile.TemporaryDirectory() as name:
            good = Path(name) / "x.json"
            self.assertEqual(parser.parse_args(["--json", str(good)]).json, str(good))
            good.write_text("{}")
            self.assertEqual(parser.parse_args(["--json", str(good)]).json, str(good))
            self.assertIn(f"--json: {name} is a directory", said(name))
            self.assertIn(f"{name}/nope is no directory", said(f"{name}/nope/x.json"))
            self.assertIn("is no directory", said(good / "x.json"))
            with unittest.mock.patch.object(os, "access", lambda path, _: path != good):  # root may write anywhere
                self.assertIn(f"no right to change {good}", said(good))
            with unittest.mock.patch.object(os, "access", lambda path, _: path != Path(name)):
                self.assertIn(f"no right to change {name}", said(f"{name}/y.json"))
        self.assertEqual(parser.parse_args(["--json", "x.json"]).json, "x.json")
        self.assertEqual(parser.parse_args(["--json"]).json, "-")

    def test_whole_numbers(self):
        parser = common.parser_of("").parse_args
        words = ["--ferry", sys.executable, "--rounds"]
        self.assertEqual(parser([*words, "1"]).rounds, 1)
        for bad in ("0", "-1", "1.5", "x", ""):
            self.assertIn(f"--rounds: {bad} is no whole number of at least 1", self.ended(parser, [*words, bad]))

    def test_steps_after_the_warmup(self):
        words = ["--ferry", sys.executable, "--warmup", "0", "--steps"]
        self.assertEqual(step_bound.options_of([*words, "2"]).steps, 2)
        self.assertIn("at least 2 more than --warmup, which is 0", self.ended(step_bound.options_of, [*words, "1"]))
        self.assertIn("--warmup: -1 is no", self.ended(step_bound.options_of, [*words, "2", "--warmup", "-1"]))

    def test_configuration(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("config", type=fits.configuration)
        good, bad = str(common.ROOT / "examples/quickstart.json"), str(common.ROOT / "README.md")
        self.assertEqual(parser.parse_args([good]).config, good)
        self.assertIn("/none.json: No such file", self.ended(parser.parse_args, ["/none.json"]))
        self.assertIn("README.md is no configuration", self.ended(parser.parse_args, [bad]))

    def test_packages(self):
        needs.packages("json")
        self.assertEqual(self.ended(needs.packages, "json", "no_such_a", "no_such_b"),
                         "python3 cannot import no_such_a and no_such_b: pip install no_such_a no_such_b")

    def test_program(self):
        parser = common.parser_of("")
        self.assertIn("--ferry: /none is no program", self.ended(parser.parse_args, ["--ferry", "/none"]))

    def test_room(self):
        needs.room("/", 0)
        self.assertRegex(self.ended(needs.room, "/", 1 << 60), "/ has .* GiB free; the run writes 1.07e.09 GiB there")

    def test_fio(self):
        with unittest.mock.patch.dict(os.environ, PATH="/none"):
            self.assertIn("--without-fio", self.ended(needs.fio, argparse.Namespace(without_fio=False)))
            needs.fio(argparse.Namespace(without_fio=True))

    def test_gpus(self):
        with unittest.mock.patch.dict(os.environ, PATH="/none"):
            self.assertEqual(self.ended(needs.gpus, 2), "2 GPUs are needed, nvidia-smi names 0")

    def test_control_group(self):
        with unittest.mock.patch.multiple(training.ControlGroup, V1=Path("/none/v1"), V2=Path("/none/v2")):
            self.assertRegex(self.ended(needs.control_group, 1 << 30), "no control group can be made here .*--cgroup")

    def test_a_case_on_the_wrong_kind_of_drive(self):
        with unittest.mock.patch.object(needs, "file_system", {"/dev": "tmpfs", "/": "ext2/ext3", "/gone": ""}.get):
            words = ["--ferry", sys.executable, "--without-fio"]
            for case, path, why in (("tmpfs", "/", "/ is on ext2/ext3"), ("disk", "/dev", "/dev is on tmpfs")):
                said = self.ended(step_bound.options_of, [*words, "--case", case, "--path", path])
                self.assertIn(f"--case {case}: {why}", said)
            with unittest.mock.patch.dict(step_bound.CASES, disk=step_bound.CASES["disk"]._replace(path="/gone")):
                self.assertIn("/gone is not there", self.ended(step_bound.options_of, [*words, "--case", "disk"]))
            self.assertEqual(step_bound.options_of([*words, "--case", "disk", "--path", "/"]).path, "/")

    def test_a_run_that_uses_no_drive(self):
        options = argparse.Namespace(case="disk", path="/")
        with unittest.mock.patch.object(needs, "plan", lambda *_: {"nvme_bytes": 0}):
            self.assertIn("nothing of it is on the drive", self.ended(step_bound.check, options, {}))


class SettingsTest(unittest.TestCase):
    def of_step_bound(self, *words):
        with unittest.mock.patch.object(needs, "file_system", lambda _: "tmpfs"):
            options = step_bound.options_of(["--ferry", sys.executable, "--without-fio", *words])
        return step_bound.settings_of(options, "t", "/v")

    def test_budgets_alone_push_state_to_the_drive(self):
        found = self.of_step_bound("--case", "tmpfs", "--path", "/")
        self.assertEqual({key: found[key] for key in found if key.startswith(("budgets", "model", "swap"))},
                         {"model.layers": 8, "budgets.device": "9GiB", "budgets.host": "4GiB", "budgets.nvme": ["/v"]})
        found = self.of_step_bound("--case", "tmpfs", "--path", "/", "--layers", "28", "--host", "31GiB", "--gpu-memory",
                                   "20GiB")
        self.assertEqual([found[key] for key in ("model.layers", "budgets.device", "budgets.host")],
                         [28, "20GiB", "31GiB"])

    def test_in_memory_there_is_no_drive(self):
        self.assertNotIn("budgets.nvme", self.of_step_bound())

    def of_nvme_step(self, **options):
        asked = argparse.Namespace(**{"case": "memory", "layers": 28, "host": None, "steps": 3, "tiny": False, **options})
        return nvme_step.settings_of(asked, common.config_of(nvme_step.CONFIG), "t", "/v")

    def test_no_state_on_the_gpu_in_either_case(self):
        self.assertEqual([self.of_nvme_step(case=case)["swap.state_on_device"] for case in ("nvme", "memory")], [0, 0])
        self.assertNotIn("budgets.nvme", self.of_nvme_step())
        self.assertEqual(self.of_nvme_step(case="nvme")["swap.state_on_nvme"], 1)

    def test_fewer_layers_have_as_much_host_memory_a_parameter(self):
        self.assertEqual(self.of_nvme_step()["budgets.host"], "56832MiB")  # 55.5 GiB
        self.assertEqual(self.of_nvme_step(layers=8)["budgets.host"], "17606MiB")  # 903.7 of 2,917.1 million
        self.assertEqual(self.of_nvme_step(case="nvme", layers=8)["budgets.host"], "3807MiB")
        self.assertEqual(self.of_nvme_step(layers=8, host="30GiB")["budgets.host"], "30GiB")

    def test_set_stands_above_all(self):
        options = argparse.Namespace(settings=["steps=2"])
        self.assertEqual(training.given(options, {"steps": 5, "seed": 1}), {"steps": "2", "seed": 1})
        self.assertEqual(training.words_of({"steps": 5, "a": [1]}, options.settings),
                         ["--set", "steps=2", "--set", "a=[1]"])


class ControlGroupTest(unittest.TestCase):
    """On a directory that stands for the kernel's, of either version."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ferry-cgroup-")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def group(self, version, files):
        if version == 2:
            (self.root / "cgroup.controllers").touch()
        patch = unittest.mock.patch.multiple(training.ControlGroup, V1=self.root, V2=self.root)
        patch.start()
        self.addCleanup(patch.stop)
        group = training.ControlGroup(1 << 30)
        own = self.root / f"ferry-bench-{os.getpid()}"
        made = Path.mkdir

        def mkdir(path):  # the kernel fills a group's directory
            made(path)
            for name, text in files.items():
                (path / name).write_text(text)
        patch = unittest.mock.patch.object(Path, "mkdir", mkdir)
        patch.start()
        self.addCleanup(patch.stop)
        return group, own

    def test_limit_and_peak(self):
        for version, limit, files in (
                (2, "memory.max", {"memory.peak": "77", "memory.events": "oom 1\noom_kill 1\n"}),
                (1, "memory.limit_in_bytes", {"memory.max_usage_in_bytes": "77", "memory.oom_control": "oom_kill 1\n"})):
            with self.subTest(version=version):
                group, own = self.group(version, files)
                with group:
                    self.assertEqual((own / limit).read_text(), str(1 << 30))
                    self.assertEqual(group.peak(), 77)
                    self.assertTrue(group.killed())
                    self.assertEqual(group.around(["x", "y"])[-3:], [str(own), "x", "y"])
                shutil.rmtree(own)
                (self.root / "cgroup.controllers").unlink(missing_ok=True)

    def test_a_kernel_that_counts_no_peak_is_refused(self):
        group, _ = self.group(2, {})
        with self.assertRaises(OSError):
            group.__enter__()


class PeersTest(unittest.TestCase):
    def test_a_peer_that_is_not_there_is_said_to_be(self):
        def why(**options):
            return peers.why_no_llmq(argparse.Namespace(**{"tiny": False, **options}))
        self.assertIn("--llmq", why(llmq=None))
        self.assertEqual(why(llmq=sys.executable), "")

    def test_parameters(self):
        model = common.config_of(common.ROOT / "examples/3b_gpu.json")["model"]
        self.assertEqual(peers.parameters_of(model, 8), 903662592)  # as `ferry plan` counts them

    def test_llmq_gets_ferrys_tokens(self):
        program = os.environ.get("FERRY")
        if not program:
            self.skipTest("FERRY names no program")
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "text").write_text("hello, world")
            subprocess.run([program, "data", str(directory / "text"), "-o", str(directory / "made.bin")], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            config = common.ROOT / "examples/3b_gpu.json"
            workload = peers.workload_of(common.config_of(config), directory / "made.bin", layers=5)
            peers.llmq_files(workload, directory)
            made = (directory / "llmq.bin").read_bytes()
            self.assertEqual(made[:8], b"BIN.TOK\n")
            count = int.from_bytes(made[16:20], "little")
            self.assertEqual(len(made), 1024 + 4 * count)
            text = bytes(made[1024::4])
            self.assertIn(b"hello, world", text)
            self.assertEqual(json.loads((directory / "config.json").read_text())["num_hidden_layers"], 5)

    def test_llmq_is_timed_by_its_log_and_ended(self):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            program = directory / "train"
            program.write_text(FAKE_LLMQ)
            program.chmod(0o755)
            (directory / "tokens.bin").write_bytes(b"FERRYTOK" + bytes([1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
                                                 + (3).to_bytes(8, "little") + bytes(32) + b"abc")
            config = common.config_of(common.ROOT / "examples/3b_gpu.json")
            workload = peers.workload_of(config, directory / "tokens.bin")
            made = (directory / "tokens.bin").read_bytes()
            timing = peers.llmq(str(program), workload, 3, directory)
            self.assertEqual((directory / "tokens.bin").read_bytes(), made, "ferry reads them in the next round")
            self.assertEqual(timing.seconds, [0.5, 0.2, 0.3])
            self.assertEqual(timing.losses, [9.5, 8.5, 7.5])
            self.assertAlmostEqual(timing.step_seconds, 0.25)
            self.assertEqual(timing.tokens_a_step, 16384)
            self.assertFalse((directory / "saved").exists(), "it would evaluate and save, and is ended before")
            program.write_text("#!/bin/sh\necho out of memory >&2\n")
            with self.assertRaisesRegex(common.SideFailed, "(?s)0 of 3 steps.*out of memory"):
                (directory / "log.json").unlink()
                peers.llmq(str(program), workload, 3, directory)


# Prints and logs as LLMQ does, a step more than is looked at, and then takes its time.
FAKE_LLMQ = f"""#!{sys.executable}
import sys, time
log = next(word.split("=", 1)[1] for word in sys.argv if word.startswith("--log-file="))
with open(log, "w") as file:
    for step, ms in enumerate((500, 200, 300, 400)):
        print(f"[T] step {{step:5d}} [ 1.0%] | time: {{ms}} ms | norm 1.0 | loss {{9.5 - step:10f}} | tps 15k",
              flush=True)
        print(f'  {{{{"log": "step", "time": "x", "step": {{step}}, "step_tokens": 16384, "duration_ms": {{ms}}}}}},',
              file=file, flush=True)
time.sleep(5)
open("saved", "w")
"""


class ComputePeersTest(unittest.TestCase):
    """bench/compute.py's side of the lines that transformers' process prints, which one stands for."""

    def peers(self, program, side_seconds=60):
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        (folder / "child.py").write_text(program)
        options = argparse.Namespace(steps=3, warmup=1, tiny=True, profile=False, side_seconds=side_seconds)
        shape = argparse.Namespace(name="0.5b", directory=folder, options=options, sequences=2, sequence=64, tokens=128)
        with unittest.mock.patch.object(compute, "CHILD", folder / "child.py"):
            peers = compute.Peers(shape, ["eager", "compiled", "layers"], folder / "gate", 1)
        self.addCleanup(peers.end)
        return peers

    def run_quietly(self, work):
        with contextlib.redirect_stderr(io.StringIO()):
            return work()

    def test_a_side_that_does_not_compile_leaves_the_others(self):
        peers = self.peers(FAKE_TRANSFORMERS)
        self.run_quietly(lambda: peers.wait_until_ready(time.monotonic() + 60))
        for side in ("eager", "layers"):
            timing = self.run_quietly(lambda side=side: peers.run(side))
            self.assertEqual(timing.seconds, [4, 0.5, 0.25])
            self.assertAlmostEqual(timing.step_seconds, 0.375)
            self.assertEqual(timing.tokens_a_step, 128)
        self.assertEqual(peers.checkpointed, {"eager": False, "layers": True})
        with self.assertRaisesRegex(common.SideFailed, "0.5b: torch.compile: no such kernel"):
            peers.run("compiled")
        workload = json.loads((peers.shape.directory / "peer.json").read_text())
        self.assertEqual([workload[key] for key in ("sequences", "sequence", "steps", "sides", "device")],
                         [2, 64, 3, ["eager", "compiled", "layers"], "cpu"])

    def test_one_that_ends_says_why_at_each_question(self):
        peers = self.peers("import sys; sys.exit('no room')")
        for ask in (lambda: peers.wait_until_ready(time.monotonic() + 60), lambda: peers.run("eager")):
            with self.assertRaisesRegex(common.SideFailed, "0.5b: transformers ended: no room"):
                self.run_quietly(ask)

    def test_one_that_takes_too_long_is_ended(self):
        peers = self.peers("import time; time.sleep(600)")
        with self.assertRaisesRegex(common.SideFailed, "0.5b: transformers took too long"):
            peers.wait_until_ready(time.monotonic() + 0.1)
        self.assertIsNotNone(peers.process.poll())


FAKE_TRANSFORMERS = """
import json, sys
say = lambda what: print(json.dumps(what), flush=True)
print("a library's own word", flush=True)
say({"ready": 1.5, "failures": {"compiled": "no such kernel"}})
for side in map(str.strip, sys.stdin):
    for step, seconds in enumerate((4, 0.5, 0.25), 1):
        say({"step": step, "seconds": seconds, "loss": 9.5})
    say({"end": side, "checkpointing": side == "layers", "kernels": {}})
"""


class SlowNetworkTest(unittest.TestCase):
    """The ranks of a run share one machine's threads, whatever hosts they stand for."""

    def planned_threads(self, threads, ranks, ranks_per_host, more=()):
        options = argparse.Namespace(ferry="ferry", ranks=ranks, ranks_per_host=ranks_per_host, settings=list(more))
        link = argparse.Namespace(mbit=100.0, latency=1e-4)
        done = subprocess.CompletedProcess([], 0, stdout='{"network": {"steps": []}}', stderr="")
        with unittest.mock.patch.object(slow_network.subprocess, "run", return_value=done) as run:
            slow_network.planned(options, {"threads": threads}, link)
        words = [word for word in run.call_args.args[0] if word.startswith("threads=")]
        return words

    def test_a_rank_is_planned_with_the_threads_that_it_has(self):
        self.assertEqual(self.planned_threads(4, 4, 1), ["threads=1"])
        self.assertEqual(self.planned_threads(4, 4, 2), ["threads=2"])
        self.assertEqual(self.planned_threads(2, 2, 1), ["threads=1"])
        self.assertEqual(self.planned_threads(4, 4, 1, ["threads=16"]), ["threads=4"])
        self.assertEqual(self.planned_threads(1, 4, 1), ["threads=1"])


class SharedTensorsTest(unittest.TestCase):
    def sides(self, ranks, *zero):
        return shared_tensors.sides_of(argparse.Namespace(ranks=ranks, zero=list(zero)))

    def test_every_way_to_share_is_a_side(self):
        self.assertEqual(list(self.sides(4, 1)),
                         ["ZeRO 3 alone", "T 1, P 1, D 4, ZeRO 1", "T 1, P 2, D 2, ZeRO 1", "T 1, P 4, D 1",
                          "T 2, P 1, D 2, ZeRO 1", "T 2, P 2, D 1", "T 4, P 1, D 1"])
        of_eight = self.sides(8, 1)
        self.assertEqual(len(of_eight), 1 + 10)
        self.assertEqual(of_eight["T 2, P 2, D 2, ZeRO 1"], (2, 2, 1))

    def test_zero_3_alone_is_there_once(self):
        both = self.sides(2, 1, 3)
        self.assertEqual(list(both), ["ZeRO 3 alone", "T 1, P 1, D 2, ZeRO 1", "T 1, P 2, D 1", "T 2, P 1, D 1"])


if __name__ == "__main__":
    unittest.main()

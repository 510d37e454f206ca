"""The statistics, turns and tables of bench/common.py, and the trace reader."""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import common  # noqa: E402
import peers  # noqa: E402
from step_trace import Trace, covered, merged, Slice  # noqa: E402


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


class RowTest(unittest.TestCase):
    def test_ratios_are_of_pairs(self):
        row = common.compared("x", [2.0, 4.0, 3.0], [4.0, 4.0, 9.0], "s")
        self.assertEqual((row["value"], row["reference"], row["ratio"]), (3, 4, 2))
        self.assertEqual((row["ratio_low"], row["ratio_high"], row["pairs"]), (1, 3, 3))

    def test_larger_is_better_either_way(self):
        self.assertEqual(common.compared("x", [2.0], [4.0], "s")["ratio"], 2)
        self.assertEqual(common.compared("x", [2.0], [4.0], "1/s", less_is_better=False)["ratio"], 0.5)

    def test_verdicts(self):
        def of(ratios, target):
            return common.judged("x", 1, "s", 1, ratios, target)["verdict"]
        self.assertEqual(of([1.2, 1.3, 1.4], 1.25), "met")
        self.assertEqual(of([1.0, 1.1, 1.4], 1.25), "open")
        self.assertEqual(of([1.0, 1.1, 1.2], 1.25), "missed")
        self.assertNotIn("verdict", common.judged("x", 1, "s", 1, [1], None))

    def test_table(self):
        rows = [common.compared("with", [1.0, 2.0], [2.0, 2.0], "s", 0.5), common.plain("without", [1, 2], "GB")]
        lines = common.table(rows).splitlines()
        self.assertEqual(len(lines), 3)
        self.assertIn("1 to 2 ", lines[1])
        self.assertIn("met", lines[1])
        self.assertIn("1 to 2 GB", lines[2])


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
        events.append({**slice_of(2, "forward", 0, 100, 2), "pid": 2})
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

    def test_picture(self):
        picture = xml.etree.ElementTree.fromstring(self.trace.picture("a <title>"))
        texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
        self.assertEqual(texts[:3], ["a <title>: 1 s", "compute", "60 %"])
        bars = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
        self.assertEqual(bars, ["forward", "backward", "read"])

    def test_overlap_counts_once(self):
        slices = [Slice("x", "a", 0, 2, 1), Slice("x", "a", 1, 3, 1), Slice("x", "b", 5, 9, 1)]
        self.assertEqual(covered(slices, 0, 6), 4)
        self.assertEqual(len(merged(slices, 0)), 2)


class PeersTest(unittest.TestCase):
    def test_a_peer_that_is_not_there_is_said_to_be(self):
        def why(**options):
            return peers.why_no_llmq(argparse.Namespace(**{"tiny": False, **options}))
        self.assertIn("--llmq", why(llmq=None))
        self.assertIn("/none", why(llmq="/none"))
        self.assertEqual(why(llmq=sys.executable), "")

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
            made = (directory / "tokens.bin").read_bytes()
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
            (directory / "made.bin").write_bytes(b"FERRYTOK" + bytes([1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
                                                 + (3).to_bytes(8, "little") + bytes(32) + b"abc")
            config = common.config_of(common.ROOT / "examples/3b_gpu.json")
            workload = peers.workload_of(config, directory / "made.bin")
            timing = peers.llmq(str(program), workload, 3, directory)
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


if __name__ == "__main__":
    unittest.main()

"""bench/compare.py tells a ratio that fell from one that only scatters."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "compare.py"


def row(name, ratio, low=None, high=None):
    one = {"name": name, "value": 1.0, "unit": "s", "reference": 1.0, "ratio": ratio}
    return one if low is None else {**one, "ratio_low": low, "ratio_high": high}


class CompareTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ferry-compare-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, name, content):
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    def run_of(self, rows, **others):
        return {"machine": {"cores": 2, "date": "2026-11-21"}, "command": "bench", "rows": rows, **others}

    def compare(self, old, new, *options):
        files = [self.write(name, run if isinstance(run, (dict, str)) else self.run_of(run))
                 for name, run in (("old.json", old), ("new.json", new))]
        done = subprocess.run([sys.executable, SCRIPT, *files, "--json", *options], capture_output=True,
                              text=True, check=False)
        return done, (json.loads(done.stdout) if done.returncode in (0, 1) else None)

    def outcome(self, old, new, *options):
        done, found = self.compare([old], [new], *options)
        self.assertEqual(done.returncode, 1 if found["fallen"] else 0)
        return found["rows"][0]["outcome"]

    def test_intervals_that_touch_are_scatter(self):
        old = row("read", 1.00, 0.97, 1.03)
        self.assertEqual(self.outcome(old, row("read", 0.95, 0.92, 0.97)), "")
        self.assertEqual(self.outcome(old, row("read", 0.95, 0.92, 0.969)), "fell")
        self.assertEqual(self.outcome(old, row("read", 1.05, 1.031, 1.07)), "rose")

    def test_the_spread_counts_where_pairs_are_few(self):
        old = {**row("step", 1.00, 0.99, 1.01), "pairs": 3}
        self.assertEqual(self.outcome(old, {**row("step", 0.97, 0.96, 0.98), "pairs": 8}), "")
        self.assertEqual(self.outcome(old, {**row("step", 0.93, 0.92, 0.94), "pairs": 3}), "fell")
        self.assertEqual(self.outcome({**old, "pairs": 6}, {**row("step", 0.97, 0.96, 0.98), "pairs": 6}), "fell")

    def test_without_an_interval_the_spread_counts_once(self):
        old = row("step", 1.00)
        self.assertEqual(self.outcome(old, row("step", 0.95)), "")
        self.assertEqual(self.outcome(old, row("step", 0.949)), "fell")
        self.assertEqual(self.outcome(old, row("step", 0.9048)), "fell")
        self.assertEqual(self.outcome(old, row("step", 1.05)), "")
        self.assertEqual(self.outcome(old, row("step", 1.051)), "rose")
        self.assertEqual(self.outcome(old, row("step", 0.90), "--spread", "0.1"), "")
        self.assertEqual(self.outcome(old, row("step", 0.97), "--spread", "0.01"), "fell")
        # With an interval on one side, from its end.
        self.assertEqual(self.outcome(old, row("step", 0.94, 0.93, 0.95)), "")
        self.assertEqual(self.outcome(old, row("step", 0.94, 0.93, 0.949)), "fell")
        self.assertEqual(self.outcome(row("step", 1.0, 0.99, 1.01), row("step", 0.94)), "fell")
        self.assertEqual(self.outcome(row("step", 1.0, 0.99, 1.01), row("step", 0.95)), "")

    def test_a_prediction_falls_on_either_side(self):
        def of(ratio, low=None, high=None):
            return {**row("step beside prediction", ratio, low, high), "target": 0.9, "target_high": 1.1}
        self.assertEqual(self.outcome(of(1.0), of(1.2)), "fell")
        self.assertEqual(self.outcome(of(1.0), of(0.8)), "fell")
        self.assertEqual(self.outcome(of(1.0), of(1.06)), "fell")
        self.assertEqual(self.outcome(of(1.0), of(1.05)), "")
        self.assertEqual(self.outcome(of(1.3), of(1.0)), "rose")
        self.assertEqual(self.outcome(of(0.8), of(1.25)), "")  # as far off as before
        self.assertEqual(self.outcome(of(1.0, 0.9, 1.1), of(1.15, 1.12, 1.2)), "fell")
        self.assertEqual(self.outcome(of(1.0, 0.9, 1.1), of(1.15, 1.09, 1.2)), "")

    def test_rows_are_known_by_name_and_unit(self):
        bandwidth, cpu = row("read", 1.0), {**row("read", 1.0), "unit": "s/GB"}
        # The other row of the name is gone, and what is left is not taken for it.
        _, found = self.compare([bandwidth, cpu], [{**cpu, "ratio": 0.5}])
        self.assertEqual([(one["name"], one["unit"], one["outcome"]) for one in found["rows"]],
                         [("read", "s", "gone"), ("read", "s/GB", "fell")])
        _, found = self.compare([bandwidth], [{**bandwidth, "unit": "GB/s"}])
        self.assertEqual([one["outcome"] for one in found["rows"]], ["gone", "new"])

    def test_rows_that_come_and_go(self):
        done, found = self.compare([row("a", 1), row("b", 1)], [row("b", 1), row("c", 1)])
        self.assertEqual({one["name"]: one["outcome"] for one in found["rows"]},
                         {"a": "gone", "b": "", "c": "new"})
        self.assertEqual(found["fallen"], ["a"])
        self.assertEqual(done.returncode, 1)
        # One that nobody compared is no loss; one that lost its reference is.
        alone = {**row("a", None), "reference": None}
        self.assertEqual(self.compare([alone, row("b", 1)], [row("b", 1)])[1]["fallen"], [])
        self.assertEqual(self.compare([row("a", 1)], [alone])[1]["fallen"], ["a"])

    def test_another_machine_is_said(self):
        same = self.run_of([row("a", 1)])
        later = {**same, "machine": {"cores": 2, "date": "2026-12-01"}}
        other = {**same, "machine": {"cores": 16, "date": "2026-11-21"}}
        self.assertEqual(self.compare(same, later)[0].stderr, "")
        self.assertIn("not the same machine", self.compare(same, other)[0].stderr)
        self.assertIn("not the same command", self.compare(same, {**same, "command": "x"})[0].stderr)

    def test_where_the_output_went_is_no_other_command(self):
        def said(*commands):
            return self.compare(*(self.run_of([row("a", 1)], command=command) for command in commands))[0].stderr
        plain = "bench/fits.py --steps 5 '/a b'"
        for places in ("--json", "--json -", "--json '/c d.json'", "--json=x", "--traces build --json y"):
            self.assertEqual(said(f"{plain} {places}", f"{plain} --json z"), "")
            self.assertIn("not the same command", said(f"{plain} {places}", f"{plain} --rounds 2 --json z"))
        self.assertIn("bench/fits.py --steps 5 '/a b' and bench/fits.py --steps 6",
                      said(f"{plain} --json A", "bench/fits.py --steps 6 '/a b' --json A"))

    def test_what_cannot_be_compared(self):
        good = self.run_of([row("a", 1)])
        for bad, text in (("{", "no output of a benchmark"), ("[]", "no output"), ("{}", "rows"),
                          (self.run_of([{"name": "a"}]), "ratio"), (self.run_of([]), "no row has a ratio"),
                          (self.run_of([row("a", 1), row("a", 2)]), "two rows are called 'a', in s")):
            done, _ = self.compare(bad, good)
            self.assertEqual(done.returncode, 2, bad)
            self.assertIn(text, done.stderr)
            self.assertIn("old.json", done.stderr)
        done = subprocess.run([sys.executable, SCRIPT, self.folder / "none", self.folder / "none"],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("No such file", done.stderr)

    def test_the_table_for_people(self):
        files = [self.write("old.json", self.run_of([row("a", 1), row("b", 1)])),
                 self.write("new.json", self.run_of([row("a", 0.5), row("b", 1)]))]
        done = subprocess.run([sys.executable, SCRIPT, *files], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout, "a    1.000    0.500  fell\nb    1.000    1.000\n"
                                      "1 of 2 fell by more than the spread or are gone\n")
        files = [self.write(name, self.run_of([row("a", 1), {**row("a", 1), "unit": "GB"}])) for name in ("x", "y")]
        done = subprocess.run([sys.executable, SCRIPT, *files], capture_output=True, text=True, check=False)
        self.assertEqual(done.stdout, "a, s     1.000    1.000\na, GB    1.000    1.000\nnothing fell\n")


if __name__ == "__main__":
    unittest.main()

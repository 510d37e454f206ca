"""docs/benchmarks.md and docs/measurements.md are what bench/make_page.py makes of bench/targets.json and bench/results/."""

import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "make_page.py"
PAGE = ROOT / "docs" / "benchmarks.md"
MEASUREMENTS = ROOT / "docs" / "measurements.md"
CELL = 100  # characters: half a line of a screen


def check(*options):
    return subprocess.run([sys.executable, SCRIPT, "--check", *options], capture_output=True, text=True, check=False)


def section(page, target):
    return page.read_text(encoding="utf-8").split(f"\n### {target}\n")[1].split("\n##")[0]


class BenchmarksPageTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ferry-page-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        shutil.copytree(ROOT / "bench" / "results", self.folder / "results")
        shutil.copy(ROOT / "bench" / "targets.json", self.folder)

    def pages(self):
        """Options that make all pages in the test's folder, of its runs and targets."""
        shutil.copy(ROOT / "README.md", self.folder)
        return ("--folder", self.folder, "--benchmarks", self.folder / "benchmarks.md", "--measurements", self.folder / "measurements.md",
                "--readme", self.folder / "README.md")

    def made(self):
        subprocess.run([sys.executable, SCRIPT, *self.pages()], check=True)

    def change(self, name, change):
        path = self.folder / name
        found = json.loads(path.read_text(encoding="utf-8"))
        change(found)
        path.write_text(json.dumps(found), encoding="utf-8")

    def test_the_page_is_current(self):
        done = check()
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_another_figure_is_another_readme(self):
        readme, options = self.folder / "README.md", self.pages()
        self.change("results/peers_llmq.json", lambda run: run["rows"][0].update(value=12345, ratio=1.4))
        subprocess.run([sys.executable, SCRIPT, *options], check=True)
        changed = set(readme.read_text(encoding="utf-8").splitlines()) ^ set((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
        self.assertEqual(len(changed), 2, changed)
        self.assertTrue(any(line.endswith("12,345 tokens/s | LLMQ | 1.40x |") for line in changed), changed)
        self.assertEqual(check(*options).returncode, 0)
        shutil.copy(ROOT / "README.md", readme)
        done = check(*options)
        self.assertEqual((done.returncode, "README.md is not what" in done.stderr), (1, True))

    def test_another_figure_is_another_page(self):
        self.assertEqual(check("--folder", self.folder).returncode, 0)
        self.change("results/peers_llmq.json", lambda run: run["rows"][0].update(ratio=1.4, ratio_low=1.39, ratio_high=1.41))
        self.change("targets.json", lambda found: found["targets"][5]["line"].update(missed="It is made up."))
        done = check("--folder", self.folder)
        self.assertEqual(done.returncode, 1)
        self.assertIn("run it", done.stderr)
        self.made()
        self.assertIn("| LLMQ | 1.5x | 1.400x | 1.390 to 1.410 | missed | [peers_llmq]", section(self.folder / "measurements.md", "T6"))
        self.assertIn("| LLMQ [1.400x](../bench/results/peers_llmq.json) (1.390 to 1.410); DeepSpeed", self.row("T6"))
        self.assertTrue(self.row("T6").endswith("| H200 | 2 met, 1 missed | It is made up. |"), self.row("T6"))

    def row(self, target):
        lines = (self.folder / "benchmarks.md").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(f"| [{target}]"))

    def test_what_is_missed_says_why(self):
        self.change("targets.json", lambda found: found["targets"][6]["line"].pop("missed"))
        self.assertIn("T7 has rows that are missed, and does not say why", check(*self.pages()).stderr)

    def test_a_row_shows_results_that_there_are(self):
        self.change("targets.json", lambda found: found["targets"][5]["line"]["shown"].update(nobody="x"))
        self.assertIn("T6 shows 'nobody', which is the label of 0 results", check(*self.pages()).stderr)

    def test_outcomes_go_by_the_spread(self):
        def outcome(ratio, low, high):
            self.change("results/peers_llmq.json",
                        lambda run: run["rows"][0].update(ratio=ratio, ratio_low=low, ratio_high=high))
            self.made()
            return re.search(r"^\| LLMQ \|.* (\w+) \| \[peers_llmq\]", section(self.folder / "measurements.md", "T6"), re.M)[1]
        self.change("targets.json", lambda found: found["targets"][5]["line"].update(missed="It is made up."))
        self.assertEqual([outcome(1.5, 1.4, 1.6), outcome(1.49, 1.4, 1.6), outcome(1.49, 1.4, 1.4999)],
                         ["met", "open", "missed"])

    def test_runs_and_targets_belong_together(self):
        shutil.copy(self.folder / "results/startup.json", self.folder / "results/nobody.json")
        self.assertIn("nobody", check("--folder", self.folder).stderr)
        (self.folder / "results/nobody.json").unlink()
        (self.folder / "results/startup.json").unlink()
        self.assertIn("'startup'", check("--folder", self.folder).stderr)

    def test_a_row_that_is_gone_is_named(self):
        self.change("results/swap_h200.json", lambda run: run["rows"].clear())
        self.assertIn("swap_h200 has no row", check("--folder", self.folder).stderr)

    def test_every_target_has_a_row_and_a_section(self):
        targets = [f"T{number}" for number in range(1, 25)]
        self.assertEqual(re.findall(r"^\| \[(T\d+)\]\(measurements\.md#t\d+\) \|", PAGE.read_text(encoding="utf-8"), re.M), targets)
        self.assertEqual(re.findall(r"^### (T\d+)$", MEASUREMENTS.read_text(encoding="utf-8"), re.M), targets)

    def test_the_page_is_one_page(self):
        lines = PAGE.read_text(encoding="utf-8").splitlines()
        self.assertLessEqual(len(lines), 100)
        for line in lines:
            if line.startswith("| [T"):
                cells = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell) for cell in line.strip("| ").split(" | ")]
                self.assertLessEqual(max(map(len, cells)), CELL, line)

    def test_a_result_has_a_line_of_its_own(self):
        targets = json.loads((ROOT / "bench" / "targets.json").read_text(encoding="utf-8"))
        for target in targets["targets"]:
            table = section(MEASUREMENTS, target["id"]).split("\n\n")[1:2] if target["results"] else []
            lines = [line for part in table for line in part.splitlines() if line.startswith("| ")][1:]
            self.assertEqual(len(lines), len(target["results"]), target["id"])
            self.assertEqual(len({line.split(" | ")[0] for line in lines}), len(lines), f"{target['id']} has a label twice")

    def test_lines_can_be_read(self):
        text = MEASUREMENTS.read_text(encoding="utf-8")
        self.assertNotIn("<br>", text + PAGE.read_text(encoding="utf-8"))
        shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in text.splitlines()]
        self.assertLessEqual(max(map(len, shown)), 180, max(shown, key=len))

    def test_a_gap_is_what_was_measured(self):
        self.change("results/weak_scaling_2.json", lambda run: [row.update(ratio=0.5) for row in run["rows"] if "share" in row["name"]])
        self.made()
        self.assertIn("two GPUs at 0.95x of one's share of its bound | 0.50x |", (self.folder / "README.md").read_text(encoding="utf-8"))

    def test_the_readme_is_short(self):
        lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        self.assertLessEqual(len(lines), 120)
        self.assertLessEqual(max(map(len, lines)), 135, max(lines, key=len))

    def test_every_run_is_listed_and_printed_whole(self):
        text = MEASUREMENTS.read_text(encoding="utf-8")
        runs = sorted((ROOT / "bench" / "results").glob("*.json"))
        for path in runs:
            self.assertIn(f"| [{path.stem}](../bench/results/{path.name}) |", text)
        printed = subprocess.run([sys.executable, SCRIPT, "--run", "io_tmpfs_h200"], capture_output=True, text=True, check=True).stdout
        for row in json.loads((ROOT / "bench/results/io_tmpfs_h200.json").read_text(encoding="utf-8"))["rows"]:
            self.assertIn(f"| {row['name']} |", printed)
        self.assertIn("no run 'gone'", subprocess.run([sys.executable, SCRIPT, "--run", "gone"], capture_output=True, text=True, check=False).stderr)

    def test_every_run_says_where_when_and_how(self):
        for path in sorted((ROOT / "bench" / "results").glob("*.json")):
            with self.subTest(path.name):
                run = json.loads(path.read_text(encoding="utf-8"))
                self.assertTrue(run["machine"]["processor"] and run["command"] and run["rows"])
                datetime.date.fromisoformat(run.get("date") or run["machine"]["date"])
                keys = [(row["name"], row["unit"]) for row in run["rows"]]
                self.assertEqual(len(keys), len(set(keys)))
                for row in run["rows"]:
                    self.check_row(row)

    def check_row(self, row):
        """Larger is better whichever side is the smaller figure; medians of pairs lie near the medians' ratio."""
        self.assertLessEqual({"name", "value", "unit", "reference", "ratio"}, set(row))
        if "ratio_low" in row:
            self.assertTrue(row["ratio_low"] <= row["ratio"] <= row["ratio_high"], row)
        if None not in (row["value"], row["reference"], row["ratio"]):
            plain = row["value"] / row["reference"]
            apart = min(abs(row["ratio"] / one - 1) for one in (plain, 1 / plain))
            self.assertLess(apart, 0.35, row)


if __name__ == "__main__":
    unittest.main()

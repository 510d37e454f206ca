"""docs/benchmarks.md is what bench/make_page.py makes of bench/targets.json and bench/results/."""

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

    def readme(self):
        shutil.copy(ROOT / "README.md", self.folder)
        return self.folder / "README.md"

    def change(self, name, change):
        path = self.folder / name
        found = json.loads(path.read_text(encoding="utf-8"))
        change(found)
        path.write_text(json.dumps(found), encoding="utf-8")

    def test_the_page_is_current(self):
        done = check()
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_another_figure_is_another_readme(self):
        page, readme = self.folder / "page.md", self.folder / "README.md"
        shutil.copy(ROOT / "README.md", readme)
        options = ("--folder", self.folder, "--page", page, "--readme", readme)
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
        done = check("--folder", self.folder)
        self.assertEqual(done.returncode, 1)
        self.assertIn("run it", done.stderr)
        fresh = self.folder / "page.md"
        subprocess.run([sys.executable, SCRIPT, "--folder", self.folder, "--page", fresh, "--readme", self.readme()], check=True)
        self.assertIn("| LLMQ | 1.5x | 1.400x | 1.390 to 1.410 | missed | [peers_llmq]", section(fresh, "T6"))

    def test_outcomes_go_by_the_spread(self):
        def outcome(ratio, low, high):
            self.change("results/peers_llmq.json",
                        lambda run: run["rows"][0].update(ratio=ratio, ratio_low=low, ratio_high=high))
            fresh = self.folder / "page.md"
            subprocess.run([sys.executable, SCRIPT, "--folder", self.folder, "--page", fresh, "--readme", self.readme()], check=True)
            return re.search(r"^\| LLMQ \|.* (\w+) \| \[peers_llmq\]", section(fresh, "T6"), re.M)[1]
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
        text = PAGE.read_text(encoding="utf-8")
        for pattern in (r"^\| \[(T\d+)\]\(#t\d+\) \|", r"^### (T\d+)$"):
            self.assertEqual(re.findall(pattern, text, re.M), [f"T{number}" for number in range(1, 25)])

    def test_a_result_has_a_line_of_its_own(self):
        targets = json.loads((ROOT / "bench" / "targets.json").read_text(encoding="utf-8"))
        for target in targets["targets"]:
            lines = [line for line in section(PAGE, target["id"]).splitlines() if line.startswith("| ")][1:]
            self.assertEqual(len(lines), len(target["results"]), target["id"])
            self.assertEqual(len({line.split(" | ")[0] for line in lines}), len(lines), f"{target['id']} has a label twice")

    def test_lines_can_be_read(self):
        text = PAGE.read_text(encoding="utf-8")
        self.assertNotIn("<br>", text)
        shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in text.splitlines()]
        self.assertLessEqual(max(map(len, shown)), 180, max(shown, key=len))

    def test_a_gap_is_what_was_measured(self):
        options = ("--folder", self.folder, "--page", self.folder / "page.md", "--readme", self.readme())
        self.change("results/weak_scaling_2.json", lambda run: [row.update(ratio=0.5) for row in run["rows"] if "share" in row["name"]])
        subprocess.run([sys.executable, SCRIPT, *options], check=True)
        self.assertIn("two GPUs at 0.95x of one's share of its bound | 0.50x |", (self.folder / "README.md").read_text(encoding="utf-8"))

    def test_the_readme_is_short(self):
        lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        self.assertLessEqual(len(lines), 120)
        self.assertLessEqual(max(map(len, lines)), 135, max(lines, key=len))

    def test_every_run_is_listed_and_printed_whole(self):
        text = PAGE.read_text(encoding="utf-8")
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

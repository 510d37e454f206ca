"""The scripts in bench/ on a model of seconds, on the CPU: that they run, and what they print. Never how fast."""

import json
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

from harness import FERRY, FerryTest

BENCH = Path(__file__).resolve().parents[2] / "bench"


class ScriptsTest(FerryTest):
    def script(self, name, *words):
        """Runs a script, tiny, one round; its JSON object and its table."""
        file = Path(self.path(f"{name}.json"))
        done = subprocess.run([sys.executable, str(BENCH / f"{name}.py"), "--ferry", FERRY, "--tiny", "--rounds", "1",
                               "--json", str(file), *words], capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(file.read_text())
        self.assertLessEqual({"machine", "command", "rows"}, set(found))
        for row in found["rows"]:
            self.assertLessEqual({"name", "value", "unit", "reference", "ratio"}, set(row))
            self.assertIn(row["name"], done.stdout)
            if row["ratio"] is not None:
                self.assertGreater(row["ratio"], 0, row)
        return {row["name"]: row for row in found["rows"]}, found["notes"]

    def drive(self):
        return ("--path", self.path("nvme"))

    def test_three_tiers(self):
        rows, notes = self.script("three_tiers", "--steps", "3")
        self.assertGreater(rows["NVMe read a step"]["value"], 0)
        self.assertIn("state hash", notes[0])

    def test_durable_steps(self):
        rows, notes = self.script("three_tiers", "--durable", "--steps", "3")
        self.assertIn("step, durable steps beside state on NVMe", rows)
        self.assertIn("state hash", notes[0])

    def test_step_bound_in_memory(self):
        rows, notes = self.script("step_bound", "--steps", "5", "--traces", self.dir)
        for way in ("never clipped", "clipped", "clipped, bets off"):
            self.assertIn(f"memory, {way}: step beside lower bound", rows)
            self.assertIn(f"memory, {way}: step beside prediction", rows)
        self.assertIn("3 of 3 clipped", rows["memory, clipped: step beside lower bound"]["note"])
        self.assertIn("0 of 3 clipped", rows["memory, never clipped: step beside lower bound"]["note"])
        self.assertIn("memory, clipped: beside bets off", rows)
        self.assertTrue(any(note.startswith("clipped: compute") for note in notes), notes)
        self.assertIn("<svg", Path(self.path("memory_clipped.svg")).read_text())

    def test_step_bound_on_a_drive(self):
        rows, _ = self.script("step_bound", "--case", "disk", *self.drive(), "--steps", "5")
        way = "disk, never clipped"
        self.assertIn("bets: 3 of 3 won", rows[f"{way}: step beside lower bound"]["note"])
        self.assertEqual(f"{way}: step beside its bytes at fio's mixed bandwidth" in rows, bool(shutil.which("fio")))

    def test_beside_peers(self):
        rows, notes = self.script("beside_peers", "--micro-batches", "4", "--steps", "4")
        self.assertEqual(rows["ferry, clipped: compute busy"]["target"], 0.95)
        self.assertEqual(notes, ["LLMQ is left out with --tiny", "DeepSpeed is left out with --tiny"])

    def test_nvme_step(self):
        rows, _ = self.script("nvme_step", *self.drive())
        self.assertGreater(rows["ferry: moved a step, read and written"]["value"], 0)

    def test_fits(self):
        configs = [str(BENCH.parent / "examples" / name) for name in
                   ("solar_10b.json", "llama2_13b.json", "qwen14b.json", "qwen14b_split.json", "qwen14b_long.json")]
        rows, notes = self.script("fits", *configs, *self.drive(), "--steps", "16")
        self.assertEqual(notes, [])
        for config in configs:
            self.assertEqual(rows[f"{Path(config).stem}: steps trained"]["verdict"], "met")
            self.assertEqual(rows[f"{Path(config).stem}: last loss beside first"]["verdict"], "met")

    def test_startup(self):
        rows, _ = self.script("startup", *self.drive())
        self.assertGreater(rows["planned on NVMe"]["value"], 0)
        self.assertGreater(rows["start-up"]["value"], 0)

    @unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed")
    def test_weak_scaling(self):
        rows, _ = self.script("weak_scaling", "--ranks", "1", "--steps", "4")
        self.assertGreater(rows["1 ranks: share of bound beside one GPU's"]["ratio"], 0)


if __name__ == "__main__":
    unittest.main()

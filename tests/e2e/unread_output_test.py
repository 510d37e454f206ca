"""A standard output that is full, does not wait, or that nobody reads: the work goes on, and its results stay."""

import json
import os
import subprocess
import unittest

from harness import FERRY, IO
from refusals import Refusals


class UnreadOutputTest(Refusals):
    SMALL = {"budgets__host": "200KiB", "steps": 2}

    def test_standard_output_is_full(self):
        config = self.command(self.config(steps=2))[1]
        # Longer than what stdio writes at a time: the failure comes while it is printed.
        deep = self.command(self.config(steps=9999))[1]
        model, weights = self.path("full-model"), self.path("full.safetensors")
        self.assert_trained(self.train(self.config(steps=1), "--export", model, "--weights-out", weights))
        hosts = self.path("full-hosts")
        with open(hosts, "w", encoding="ascii") as file:
            file.write("localhost slots=1\n")
        commands = [["--help"], ["--version"], *([name, "--help"] for name in ("train", "plan", "data", "bench")),
                    ["train", config, "--json"], ["train", config], ["plan", config], ["plan", config, "--json"],
                    ["plan", deep, "--json", "--schedule", "--no-prediction"],
                    ["data", self.path("text.txt"), "-o", self.path("full.bin")],
                    ["data", self.path("text.txt"), "-o", self.path("full.bin"), "--json"],
                    ["eval", model, self.path("tokens.bin"), "--set", "batch.sequence=32"],
                    ["launch", config, "--hostfile", hosts, "--dry-run"], ["bench", "adam", "--millions", "0.01", "--pairs", "1", "--threads", "1"]]
        for command in commands:
            with self.subTest(command=command), open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run([FERRY, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
                                      timeout=120)
                self.assertEqual(done.returncode, IO, done.stderr)
                # CLI11 flushes a version itself, and drops the reason.
                reason = "an earlier part" if command == ["--version"] else "No space left"
                for text in ("what ferry printed could not be written", "standard output", reason):
                    self.assertIn(text, done.stderr)

    def test_a_standard_output_that_does_not_wait(self):
        """A pipe that is full and does not block is no lack of threads."""
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        deep = self.command(self.config(steps=9999))[1]
        done = subprocess.run([FERRY, "plan", deep, "--json", "--schedule", "--no-prediction"], stdout=theirs,
                              stderr=subprocess.PIPE, text=True, check=False, timeout=60)
        os.close(ours)
        os.close(theirs)
        self.assertEqual(done.returncode, IO, done.stderr)
        self.assertIn("what ferry printed could not be written", done.stderr)

    def test_the_reader_goes_away(self):
        command = [FERRY, *self.command(self.config(**self.SMALL,
                                                    budgets__nvme=[self.nvme()]))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as run:
            run.stdout.readline()
            run.stdout.close()
            said = run.stderr.read()
        self.assertEqual(run.returncode, IO, said)
        self.assertIn("Broken pipe", said)
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def test_results_do_not_depend_on_standard_output(self):
        """Weights, export, trace and durable state are those of a run whose output is read."""
        def outputs(kind):
            names = [self.path(f"{kind}.{name}") for name in ("safetensors", "exported", "trace")]
            return names, ["--weights-out", names[0], "--export", names[1], "--trace", names[2]]

        config = self.config(steps=60, evaluate__every=4, evaluate__micro_batches=1, hash_every="step")
        names, options = outputs("read")
        self.assert_trained(self.train(config, *options))
        with open(names[0], "rb") as file:
            whole = file.read()
        for kind in ("gone", "full", "text"):
            with self.subTest(kind=kind):
                names, options = outputs(kind)
                words = [FERRY, *self.command(config, *options)]
                if kind == "text":
                    words.remove("--json")
                said = self.unread(words, kind)
                with open(names[0], "rb") as file:
                    self.assertEqual(file.read(), whole)
                self.assertIn("model.safetensors", os.listdir(names[1]))
                with open(names[2], encoding="utf-8") as file:
                    self.assertTrue(json.load(file)["traceEvents"])
                self.assertEqual(said.count("nothing more is printed; the work goes on"), 1, said)

    def test_durable_state_does_not_depend_on_standard_output(self):
        volume = self.path("unread-nvme")
        os.mkdir(volume)
        config = self.config(steps=12, budgets__host="300KiB", checkpoint__durable_steps=True,
                             schedule__kind="constant", schedule__warmup_steps=0,
                             budgets__nvme=[{"path": volume, "size": "64MiB"}])
        self.unread([FERRY, *self.command(config)], "gone")
        config["steps"] = 14
        resumed = self.train(config, "--resume")
        self.assert_trained(resumed)
        self.assertEqual([step["step"] for step in resumed.steps][-2:], [13, 14])

    def unread(self, words, kind):
        """What the run says on standard error: of its output nobody reads more than a line."""
        full = open("/dev/full", "w", encoding="utf-8") if kind != "gone" else None
        with subprocess.Popen(words, stdout=full or subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            if full:
                full.close()
            else:
                run.stdout.readline()
                run.stdout.close()
            said = run.stderr.read()
        self.assertEqual(run.returncode, IO, said)
        self.assertIn("what ferry printed could not be written", said)
        self.assertIn("Broken pipe" if kind == "gone" else "No space left", said)
        return said


if __name__ == "__main__":
    unittest.main()

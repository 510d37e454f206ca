"""Words of a command line that are none, and names that must not steer a terminal."""

import json
import os
import subprocess
import unittest

from harness import USAGE
from refusals import Refusals


class CommandLineTest(Refusals):
    def test_names_steer_no_terminal(self):
        """Of files on the command line, and of those that other files name."""
        evil = "c\x1b]0;pwn\x07\u009b2J.json"
        model = self.path("model-of-evil")
        os.mkdir(model)
        with open(os.path.join(model, "config.json"), "w", encoding="utf-8") as file:
            json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
                       "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
                       "tie_word_embeddings": False, "max_position_embeddings": 64}, file)
        with open(os.path.join(model, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump({"weight_map": {"model.norm.weight": "\x1b[2Jb.safetensors"}}, file)
        printed = "c\x1b[2J\u009b\x7f.bin"  # by who succeeds
        drive = self.path("drive\x1b[2J\u009b\x7f\nforged: line")
        os.mkdir(drive)
        steered = self.config(data__tokens=self.path(printed), budgets__host="300KiB",
                              budgets__nvme=[{"path": drive, "size": "64MiB"}])
        config = self.command(steered)[1]
        hosts = self.path("evil-hosts")
        with open(hosts, "w", encoding="ascii") as file:
            file.write("localhost slots=1\n")
        commands = [["plan", config, "--no-prediction"], ["data", self.path("text.txt"), "-o", self.path(printed)],
                    ["data", self.path("text.txt"), "-o", self.path(printed), "--json"],
                    ["plan", config, "--no-prediction"], ["plan", config, "--json"], ["train", config, "--no-bound"],
                    ["bench", "io", drive, "--size", "64MiB", "--seconds", "0.01", "--modes", "read"],
                    ["launch", config, "--hostfile", hosts, "--dry-run", "--", "--weights-out", self.path(printed)]]
        for command in commands:
            run = self.ferry(*command)
            self.assertEqual(run.code, 0, run.err)
            for text in (run.out, run.err):
                for byte in ("\x1b", "\x7f", "\u009b", "\nforged"):
                    self.assertNotIn(byte, text, command)
        self.assertEqual(subprocess.run(["bash", "-c", "printf '%s\\n' " + run.out.strip()], capture_output=True,
                                        text=True, check=True).stdout.splitlines()[-1], self.path(printed))
        for run, shown in ((self.ferry("train", self.path(evil)), "c\\x1b]0;pwn\\x07\\xc2\\x9b2J.json"),
                           (self.ferry("data", self.path(evil), "-o", self.path("new.bin")), "\\x1b]0;"),
                           (self.train(self.config(model={"path": model})), "\\x1b[2Jb.safetensors")):
            self.assertNotEqual(run.code, 0)
            self.assertIn(shown, run.err)
            for byte in ("\x1b", "\x07", "\u009b"):
                self.assertNotIn(byte, run.err)

    def said(self, *words, code=USAGE):
        run = self.ferry(*words)
        self.assertEqual(run.code, code, run.err)
        return run.err

    def test_the_nearest_command_and_option_are_named(self):
        config = self.command(self.config(steps=1))[1]
        for words, near in ((["trian", config], "train"), (["plna"], "plan"), (["bench", "swpa", "x"], "swap"),
                            (["train", config, "--weight-out", "x"], "--weights-out"),
                            (["train", config, "--machin=x"], "--machine"),
                            (["bench", "io", self.path("nvme"), "--block", "4KiB"], "--blocks"),
                            (["plan", config, "--no-predicton"], "--no-prediction")):
            err = self.said(*words)
            self.assertIn(f'did you mean "{near}"?', err)
            self.assertIn("--help", err)
        self.assertIn('did you mean "--path", before io?', self.said("bench", "io", "--pth", self.dir))
        for words in (("xyzzy-xyzzy",), ("ckpt", "xyzzy-xyzzy")):
            said = self.said(*words)
            self.assertNotIn("did you mean", said)
            self.assertIn('"xyzzy-xyzzy" is none', said)

    def test_several_keys_behind_one_set(self):
        config = self.command(self.config())[1]
        command = ["--json", "--no-bound", "--set", "steps=2", "seed=9", "optimizer.lr=0.005"]
        first = self.ferry("train", config, *command)
        self.assert_trained(first)
        self.assertEqual(len(first.steps), 2)
        self.assertEqual(first.steps[-1]["lr"], self.ferry("train", *command, config).steps[-1]["lr"])
        # A file whose name is like a key's value is a file.
        odd = self.path("lr=0.5.json")
        os.rename(config, odd)
        self.assertEqual(self.ferry("train", *command, odd).numbers(), first.numbers())
        self.assertIn("KEY=VALUE ...", self.ferry("train", "--help").out)

    def test_nothing_is_no_name(self):
        config = self.command(self.config(steps=1))[1]
        for option in ("--export", "--weights-out", "--trace", "--machine", "--gpu-memory", "--export-type"):
            self.assertIn(option, self.said("train", config, option, ""))
        self.assertIn("--svg", self.said("plan", config, "--svg", ""))
        self.assertIn("--output", self.said("data", self.path("text.txt"), "-o", ""))
        self.assertIn("config", self.said("train", ""))
        self.assertIn("data", self.said("eval", self.dir, ""))
        self.assertIn("--save", self.said("bench", "--all", "--save", ""))


if __name__ == "__main__":
    unittest.main()

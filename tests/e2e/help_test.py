"""`--help` of the program and of every command ends with an example, which the command takes."""

import re
import shlex
import unittest

from harness import FERRY, FerryTest

COMMANDS = ("train", "plan", "data", "eval", "export", "ckpt", "ckpt ls", "ckpt inspect", "ckpt verify", "ckpt diff", "ckpt rm",
            "ckpt export", "ckpt import", "launch", "bench", "bench adam", "bench attention", "bench comm", "bench io",
            "bench kernels", "bench swap")
LONG = ("bench adam", "bench attention", "bench comm")  # nothing stops these examples: they would measure


class HelpTest(FerryTest):
    def example_of(self, command):
        run = self.ferry(*command.split(), "--help")
        self.assertEqual((run.code, run.err), (0, ""))
        examples = re.findall(r"^ *Example: (.*)$", run.out, re.M)
        self.assertEqual(len(examples), 1, run.out)
        return run.out, shlex.split(examples[0])

    def test_every_command_is_listed_here(self):
        help_text = "".join(self.ferry(*words, "--help").out for words in ([], ["bench"], ["ckpt"]))
        listed = re.findall(r"^  ([a-z]+) {2,}\S", help_text.replace("\nSubcommands:", ""), re.M)
        self.assertEqual(sorted(set(listed)), sorted({command.split()[-1] for command in COMMANDS}))

    def test_the_program_has_one_too(self):
        _, words = self.example_of("")
        commands = [after for word, after in zip(words, words[1:]) if word == "ferry"]
        self.assertTrue(commands and set(commands) <= set(COMMANDS), words)

    def test_examples_use_options_that_exist(self):
        for command in COMMANDS:
            with self.subTest(command):
                text, words = self.example_of(command)
                start = words.index("ferry")
                self.assertEqual(words[start:start + 1 + len(command.split())], ["ferry", *command.split()])
                own = words[start:words.index("--")] if "--" in words else words[start:]
                for word in own:
                    if word.startswith("-"):
                        self.assertRegex(text, rf"(^|[ ,]){re.escape(word)}\b")

    def test_examples_are_no_usage_errors(self):
        """They end for want of the files that they name, not of a word."""
        for command in COMMANDS:
            if command in LONG:
                continue
            with self.subTest(command):
                _, words = self.example_of(command)
                words = [self.path("nowhere") if word.startswith("/mnt/") else word for word in words]
                run = self.ferry(*words[1:], cwd=self.path("nvme"))
                self.assertNotEqual(run.code, 0)
                self.assertNotIn("--help", run.err)


if __name__ == "__main__":
    unittest.main()

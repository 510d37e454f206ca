"""What the tests of refused input share. Every bad input ends with one clear error: what, where, the measured value, the
limit, what to do; and with the exit code of its kind."""

import os

from harness import FerryTest


class Refusals(FerryTest):
    def assert_refused(self, run, code, *said):
        self.assertEqual(run.code, code, run.err)
        self.assertEqual(run.steps, [])
        for text in said:
            self.assertIn(text, run.err)
        # Log lines may come before it (they begin with the time); the error is one, and the last.
        lines = run.err.splitlines()
        errors = [i for i, line in enumerate(lines) if line.startswith("ferry: ")]
        self.assertEqual(len(errors), 1, run.err)
        self.assertTrue(all(line.startswith("  ") for line in lines[errors[0] + 1:]), run.err)
        self.assertEqual(os.listdir(self.path("nvme")), [])

    def refused(self, code, said, *arguments, **changes):
        run = self.train(self.config(**changes), *arguments)
        self.assert_refused(run, code, *said)
        return run

    def tokens(self):
        with open(self.path("tokens.bin"), "rb") as file:
            return file.read()

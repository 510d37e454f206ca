"""Token files that a run cannot train on."""

import os
import re
import unittest

from harness import IO, USAGE
from refusals import Refusals


class TokensTest(Refusals):
    def with_tokens(self, contents):
        path = self.path("bad.bin")
        with open(path, "wb") as file:
            file.write(contents)
        return self.train(self.config(data__tokens=path))

    def test_missing_or_something_else(self):
        self.refused(USAGE, ["absent.bin", "No such file", "ferry data"],
                     data__tokens=self.path("absent.bin"))
        self.refused(USAGE, ["not a token file", "text.txt", "ferry data"],
                     data__tokens=self.path("text.txt"))
        self.refused(USAGE, ["not a token file", "not a regular file"], data__tokens=self.dir)
        self.assert_refused(self.with_tokens(b""), USAGE, "bad.bin", "0 bytes", "header")

    def test_truncated(self):
        whole = self.tokens()
        self.assert_refused(self.with_tokens(whole[:-1]), IO, "truncated", "bad.bin",
                            f"{len(whole) - 65} bytes after the header", "40000 tokens")
        self.assert_refused(self.with_tokens(whole[:70]), IO, "truncated")
        self.assert_refused(self.with_tokens(whole[:50]), USAGE, "50 bytes", "header of 64 bytes")
        self.assert_refused(self.with_tokens(whole + b"x"), IO, "longer than it says")

    def test_corrupt(self):
        flipped = bytearray(self.tokens())
        flipped[1000] ^= 1
        self.assert_refused(self.with_tokens(bytes(flipped)), IO, "damaged", "checksum", "bad.bin")

    def test_tokens_outside_the_vocabulary(self):
        run = self.refused(USAGE, ["a token outside the vocabulary", "tokens.bin, token ",
                                   "below model.vocab, 110", "raise model.vocab"], model__vocab=110)
        measured = int(re.search("measured: ([0-9]+)", run.err).group(1))
        self.assertGreaterEqual(measured, 110)

    def test_too_short(self):
        self.refused(USAGE, ["tokens.bin"], batch__sequence=100000)

    def test_a_plan_refuses_what_a_run_would(self):
        for changes in ({"batch__sequence": 50000}, {"data__held_back": 0.999999}, {"evaluate__micro_batches": 10000},
                        {"reserved_cores": [65000]}, {"reserved_cores": sorted(os.sched_getaffinity(0))}):
            words = self.command(self.config(**changes))
            train, plan = self.ferry(*words), self.ferry("plan", words[1], "--no-prediction")
            self.assert_refused(train, USAGE)
            self.assert_refused(plan, USAGE)
            self.assertEqual(plan.err.splitlines()[-5:], train.err.splitlines()[-5:])

    def test_less_held_back_than_evaluated(self):
        run = self.refused(USAGE, ["evaluate.micro_batches", "10000 asked for", "held back"],
                           evaluate__micro_batches=10000)
        most = int(re.search("set evaluate.micro_batches to ([0-9]+)", run.err).group(1))
        self.assert_trained(self.train(self.config(steps=1, evaluate__micro_batches=most)))

    def test_a_pipe_that_nobody_writes_to(self):
        os.mkfifo(self.path("fifo"))
        self.refused(USAGE, ["fifo", "not a regular file"], data__tokens=self.path("fifo"))


if __name__ == "__main__":
    unittest.main()

"""Ranks that end before the others: by an interrupt, an error or a kill."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import unittest

from harness import FERRY, IO, in_quick, start
from ranks import ENVIRONMENT, MPIRUN, RANK_LOST, Ranks

MORTAL = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "libmortal_rank.so")


def command_of(process):
    try:
        return pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended


class EndedTest(Ranks):
    def two_with(self, first, second):
        """Of two ranks, each by its own command line."""
        return subprocess.run([*MPIRUN, "--enable-recovery", "-n", "1", *first, ":", "-n", "1", *second],
                              capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)

    def test_what_ends_one_outside_the_engine_is_told(self):
        command = [FERRY, *self.command(self.config(steps=100000)), "--weights-out", self.path("nowhere/weights")]
        run = self.two_with(command, command)
        self.assertIn("ferry: lost rank 0: it ended with an error: nothing can be written there", run.stderr)

    def test_ranks_end_with_an_mpirun_that_is_killed(self):
        config = self.config(steps=1000000)
        run = subprocess.Popen([*MPIRUN, "-n", "2", FERRY, *self.command(config)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
        while '"loss"' not in run.stdout.readline():
            self.assertIsNone(run.poll(), "it ended before")
        run.kill()
        run.wait()
        run.stdout.close()
        for _ in range(300):
            left = [entry for entry in os.listdir("/proc") if entry.isdigit() and self.path("").encode() in command_of(entry)]
            if not left:
                return
            time.sleep(0.1)
        for entry in left:
            os.kill(int(entry), signal.SIGKILL)
        self.fail(f"{len(left)} ranks went on for 30 s")

    def test_a_full_standard_output_ends_no_rank(self):
        weights = self.path("unread.safetensors")
        command = [FERRY, *self.command(self.config(steps=3)), "--weights-out", weights]
        run = self.two_with(["sh", "-c", 'exec "$@" >/dev/full', "sh", *command], command)
        self.assertIn("what ferry printed could not be written", run.stderr)
        self.assertNotIn("lost rank", run.stderr)
        self.assertTrue(os.path.exists(weights), run.stderr)

    def start(self, number, config, *arguments):
        command = self.command(config, *arguments)
        process = start([*MPIRUN, "-n", str(number), FERRY, *command], env=ENVIRONMENT)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        line = process.stdout.readline()  # a step has ended: all ranks are at work
        self.assertIn('"loss"', line)
        return process, self.ranks_of(command[1])

    def assert_end_soon(self, ranks):
        deadline = time.monotonic() + 30
        while any(os.path.exists(f"/proc/{pid}") for pid in ranks.values()):
            self.assertLess(time.monotonic(), deadline, "a rank goes on alone")
            time.sleep(0.05)

    def test_an_export_whose_directory_goes_is_written_beside_it(self):
        for stage in (0, 3):
            with self.subTest(stage=stage):
                above = self.path(f"above{stage}")
                out = os.path.join(above, "model")
                os.makedirs(out)
                config = self.config(steps=100000, zero__stage=stage, batch__micro_batches=2)
                process, _ = self.start(2, config, "--export", out)
                shutil.rmtree(above)
                process.send_signal(signal.SIGUSR1)
                printed, err = process.communicate(timeout=60)
                self.assertEqual(process.returncode, IO, err)
                for text in ('"summary"', "state_hash"):
                    self.assertIn(text, printed)
                self.assertIn("the export's directory was removed", err)
                self.assertNotIn("end with this process", err)
                saved = re.search(r"the whole export is in (\S+\.\w{6}): move it", err)[1]
                self.assertEqual(os.path.dirname(saved), self.dir)  # above is gone too
                self.assertEqual(sorted(os.listdir(saved)), ["config.json", "model.safetensors"])
                self.assertFalse(os.path.exists(above))

    def test_an_interrupt_of_one_rank_ends_all_after_the_same_step(self):
        process, ranks = self.start(2, self.config(steps=100000))
        os.kill(ranks[1], signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, err)
        self.assertIn('"interrupted":true', out)
        self.assertIn("state_hash", out)

    def test_an_interrupt_that_mpirun_passes_on_ends_all_after_their_step(self):
        process, _ = self.start(2, self.config(steps=100000, batch__micro_batches=2))
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, err)
        self.assertIn('"interrupted":true', out)
        self.assertIn("state_hash", out)

    def test_an_interrupt_that_mpirun_ends_its_ranks_by_is_no_failure_of_theirs(self):
        """It reads no more of what they print, and kills those whose output waits for it."""
        for sign in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=sign):
                process, ranks = self.start(2, self.config(steps=100000, batch__micro_batches=2))
                process.send_signal(sign)
                _, err = process.communicate(timeout=60)
                self.assertNotIn("ferry: ", err)
                self.assert_end_soon(ranks)

    def test_a_killed_rank_ends_the_run_and_leaves_nothing(self):
        for stage in (1, 3):
            with self.subTest(stage=stage):
                process, ranks = self.start(3, self.config(steps=100000, zero__stage=stage,
                                                           **self.tight(3)))
                os.kill(ranks[1], signal.SIGKILL)
                _, err = process.communicate(timeout=90)
                self.assertNotEqual(process.returncode, 0, err)
                self.assert_end_soon(ranks)
                # The next run finds what the dead one left, says so, and goes its way.
                again = self.ranks(3, self.config(zero__stage=stage, **self.tight(3)))
                self.assert_trained(again)
                left = os.path.join(self.path("nvme"), "rank-1", "ferry.volume")
                self.assertRegex(again.err, rf"was killed and left {left}: not consistent, "
                                            r"state of step \d+ lost")
                self.assert_left_nothing()

    def test_one_that_never_begins_ends_the_others(self):
        command = self.command(self.config(zero__timeout_seconds=3))
        start = time.monotonic()
        run = subprocess.run([*MPIRUN, "-n", "1", FERRY, *command, ":", "-n", "1", "sleep", "60"],
                             capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
        self.assertLess(time.monotonic() - start, 50)
        self.assertEqual(run.returncode, RANK_LOST, run.stderr)
        for text in ("ferry: lost a rank: not all of them came", "where:    rank 0: MPI_Init", "waited 3.0 s for 2 ranks",
                     "zero.timeout_seconds", "do:       "):
            self.assertIn(text, run.stderr)

    def messages(self, command, ranks=3):
        """Bytes of each message of rank 1, in order, in a run that nothing ends."""
        file = self.path("messages")
        if os.path.exists(file):
            os.remove(file)
        said, codes = self.mortal(command, ranks, FERRY_TEST_MESSAGES=file)
        self.assertEqual(codes, dict.fromkeys(range(ranks), 0), said)
        with open(file, encoding="ascii") as lines:
            return [int(line) for line in lines]

    def mortal(self, command, ranks=3, **environment):
        """Rank 1, of 3 unless said, ends as the environment says. Each rank's exit code and last words; mpirun is
        told to leave the others alone, so that they end by themselves."""
        where = self.path("mortal")
        shutil.rmtree(where, ignore_errors=True)
        os.mkdir(where)
        rank = '"$@" 2>"$WHERE/$OMPI_COMM_WORLD_RANK"; echo $? >"$WHERE/$OMPI_COMM_WORLD_RANK.code"'
        sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
        subprocess.run(
            [*MPIRUN, "--enable-recovery", "-x", f"LD_PRELOAD={MORTAL}", "-n", str(ranks), "sh", "-c", rank, "sh",
             FERRY, *command], capture_output=True, text=True, timeout=120, check=False,
            # Everything that a rank has sent has arrived; only the operation that it dies at is missing. With a limit of
            # 512 KiB Open MPI 4.1 leaves shared memory for TCP, where it may turn for ever on a
            # connection that broke.
            env={**ENVIRONMENT, "OMPI_MCA_btl_vader_eager_limit": str(1 << 17), "WHERE": where,
                 "FERRY_TEST_MORTAL": "1", "ASAN_OPTIONS": sanitizer, **environment})
        said, codes = {}, {}
        for name in range(ranks):
            with open(os.path.join(where, str(name)), encoding="utf-8") as file:
                said[name] = file.read()
            with open(os.path.join(where, f"{name}.code"), encoding="ascii") as file:
                codes[name] = int(file.read())
        return said, codes

    def assert_ended(self, said, codes, *texts):
        """The others say so, have ended, and have taken their files with them."""
        self.assertEqual(codes, {0: RANK_LOST, 1: 128 + signal.SIGKILL, 2: RANK_LOST}, said)
        for rank in (0, 2):
            for text in (*texts, f"rank {rank}: "):
                self.assertIn(text, said[rank])
        self.assertLessEqual(set(os.listdir(self.path("nvme"))), {"rank-1"})

    @staticmethod
    def phases(sizes, stage):
        """Messages at which rank 1 begins an operation, by their bytes, and what it is."""
        def begins(size):
            return [i + 1 for i in range(0, len(sizes), 2) if sizes[i] == size]
        outcomes, evaluations = begins(32), begins(24)
        first_step = begins(1)[0] + 2  # behind the question whether anybody wants to stop
        yield 1, "all-gather of the facts"
        yield begins(24)[0], "all-gather of the cores"
        yield begins(max(size for size in sizes if size % 4096))[0], "all-gather of the facts"
        yield first_step, ("all-gather of the weights of layer 0, step 1" if stage == 3 else
                           "exchange of the gradient of layer 4, step 1")
        yield outcomes[0] - 2, "exchange of the gradient of layer 0, step 1"
        yield outcomes[0], "all-gather of the outcome, step 1"
        yield evaluations[-1], "all-gather of the evaluation"
        yield outcomes[-1], "all-gather of the outcome, step 2"
        yield begins(8)[-1], "all-gather of the state hash"

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_killed_in_any_phase_is_named(self):
        for stage in in_quick((1, 3), [1]):
            config = self.config(zero__stage=stage, steps=2, evaluate__micro_batches=3,
                                 evaluate__every=1, **self.tight(3))
            command = self.command(config)
            sizes = self.messages(command)
            for message, operation in self.phases(sizes, stage):
                with self.subTest(stage=stage, operation=operation):
                    said, codes = self.mortal(command, FERRY_TEST_DIES_AT=str(message))
                    self.assert_ended(said, codes, "lost rank 1: its process has ended", operation)
            again = self.ranks(3, config)
            self.assert_trained(again)
            self.assert_left_nothing()

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_that_shares_tensors_is_named_with_its_group(self):
        config = self.config(parallel__tensor=3, model__heads=6, model__kv_heads=3, model__head_dim=8, steps=1,
                             **self.tight(3))
        command = self.command(config)
        self.addCleanup(shutil.rmtree, self.path("nvme/rank-1"), ignore_errors=True)  # the killed rank's
        sizes = self.messages(command)
        part = 11 * 64 * 4  # bytes of a third of 32 tokens' rows
        said, codes = self.mortal(command, FERRY_TEST_DIES_AT=str(sizes.index(part) + 1))
        self.assert_ended(said, codes, "lost rank 1: its process has ended", "exchange of the sums of layer 0, step 1",
                          "among ranks 0, 1, 2")

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_killed_in_either_level_of_an_exchange_is_named(self):
        """Its neighbour on the host waits for it in the first level, the one that stands alike on the other host in the second.
        At stage 1 nothing else of backward is under way that all ranks wait in."""
        config = self.config(zero__stage=1, zero__ranks_per_host=2, zero__compress={"gradients": "int8", "block": 64}, steps=1,
                             **{**self.tight(4), "swap__chunk_elements": 4096})
        command = self.command(config)
        self.addCleanup(shutil.rmtree, self.path("nvme/rank-1"), ignore_errors=True)  # the killed rank's
        sizes = self.messages(command, 4)
        part = 4096 + 4096 // 64 * 4  # bytes of a chunk as codes
        for size, neighbour, operation in ((2 * part, 0, "exchange of the gradient in the host of layer"),
                                           (part, 3, "exchange of the gradient of layer")):
            with self.subTest(operation=operation):
                said, codes = self.mortal(command, 4, FERRY_TEST_DIES_AT=str(sizes.index(size) + 1))
                self.assertEqual(codes, {0: RANK_LOST, 1: 128 + signal.SIGKILL, 2: RANK_LOST, 3: RANK_LOST}, said)
                for rank in (0, 2, 3):
                    self.assertIn("lost rank 1: its process has ended", said[rank])
                self.assertIn(operation, said[neighbour])

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_of_a_pipeline_is_named_when_it_is_killed(self):
        """The middle one of three, when it passes on the first block input."""
        config = self.config(parallel__pipeline=3, model__layers=3, steps=1,
                             **{**self.tight(3), "budgets__host": "6MiB"})
        command = self.command(config)
        self.addCleanup(shutil.rmtree, self.path("nvme/rank-1"), ignore_errors=True)  # the killed rank's
        sizes = self.messages(command)
        passed = config["batch"]["micro_batch"] * config["batch"]["sequence"] * config["model"]["hidden"] * 4
        said, codes = self.mortal(command, FERRY_TEST_DIES_AT=str(sizes.index(passed) + 1))
        self.assert_ended(said, codes, "lost rank 1: its process has ended", "pass of the block input")

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_that_is_killed_or_late_while_a_schedule_is_chosen_is_named(self):
        """All plan each of three schedules, then hear of the first rank once a schedule in two rounds, and take its choice. A
        rank that is late by less than the time limit is waited for."""
        config = self.config(parallel__pipeline=3, model__layers=3, steps=1, zero__timeout_seconds=12,
                             **{**self.tight(3), "budgets__host": "6MiB"})
        command = self.command(config)
        self.addCleanup(shutil.rmtree, self.path("nvme/rank-1"), ignore_errors=True)  # the killed rank's
        sizes = self.messages(command)
        planned = sizes.index(1032)  # behind it two messages of each exchange
        self.assertEqual(sizes[planned:planned + 20], [1032] * 6 + [4] * 12 + [8] * 2, sizes)
        deaths = ((planned + 2, "errors"), (planned + 6, "schedule"), (planned + 16, "schedule"), (planned + 18, "schedule"))
        for first, operation in in_quick(deaths, [1]):
            with self.subTest(message=first):
                said, codes = self.mortal(command, FERRY_TEST_DIES_AT=str(first + 1))
                self.assert_ended(said, codes, "lost rank 1: its process has ended", f"all-gather of the {operation}")
        late = {"FERRY_TEST_LATE_AT": str(planned + 9)}
        said, codes = self.mortal(command, FERRY_TEST_LATE_SECONDS="2", **late)
        self.assertEqual(codes, {0: 0, 1: 0, 2: 0}, said)
        said, codes = self.mortal(command, FERRY_TEST_LATE_SECONDS="15", **late)
        self.assertEqual(set(codes.values()), {RANK_LOST}, said)
        for rank in (0, 2):
            self.assertIn("lost rank 1: took no part in the all-gather of the schedule within 12.0 s", said[rank])

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_of_a_mix_is_named_by_each_of_its_groups(self):
        """Its neighbour waits for its sums, and the rank that stands alike in the next stage for block inputs."""
        config = self.config(parallel__tensor=2, parallel__pipeline=2, model__layers=2, batch__sequence=30, steps=1,
                             **{**self.tight(4), "budgets__host": "8MiB"})
        command = self.command(config)
        self.addCleanup(shutil.rmtree, self.path("nvme/rank-1"), ignore_errors=True)  # the killed rank's
        sizes = self.messages(command, 4)
        rows = config["batch"]["micro_batch"] * 30 // 2 * config["model"]["hidden"] * 4  # a rank's
        # The embedding's sum; a block gathers and adds up twice each; then rank 1 passes its rows on.
        of_rows = [index for index, size in enumerate(sizes, 1) if size == rows]
        for index, waiting, operation, group in ((of_rows[0], 0, "exchange of the sums of layer 0, step 1", "among ranks 0, 1"),
                                                 (of_rows[5], 3, "pass of the block input", "among ranks 1, 3")):
            with self.subTest(operation=operation):
                said, codes = self.mortal(command, 4, FERRY_TEST_DIES_AT=str(index))
                self.assertEqual(codes, {0: RANK_LOST, 1: 128 + signal.SIGKILL, 2: RANK_LOST, 3: RANK_LOST}, said)
                for rank in (0, 2, 3):
                    self.assertIn("lost rank 1: its process has ended", said[rank])
                self.assertIn(operation, said[waiting])
                self.assertIn(group, said[waiting])

    @unittest.skipUnless(os.path.exists(MORTAL), "no MPI was found at build time")
    def test_a_rank_killed_before_the_ranks_have_met(self):
        command = self.command(self.config(zero__timeout_seconds=8))
        said, codes = self.mortal(command, FERRY_TEST_DIES_AT="0")
        self.assert_ended(said, codes, "not all ranks came to the start", "start-up")


if __name__ == "__main__":
    unittest.main()

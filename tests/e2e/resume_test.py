"""kill -9 and --resume: the run goes on with the bits of one that was never interrupted, or says why it cannot."""

import collections
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
import unittest

from harness import DOES_NOT_FIT, FERRY, IO, QUICK, USAGE, FerryTest, Run, in_quick, start

STEPS = 24
BLOCK = 4096
BAD_SECTOR = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "libbad_sector.so")


class ResumeTest(FerryTest):
    def setUp(self):
        name = self.id().rpartition(".")[2]
        self.drives = [self.path(f"{name}-{i}") for i in range(3)]
        for drive in self.drives:
            os.mkdir(drive)

    def durable(self, paths=1, **changes):
        given = {"steps": STEPS, "clip_norm": 1.0, "budgets__host": "300KiB",
                 "checkpoint__durable_steps": True,
                 "budgets__nvme": [{"path": drive, "size": "64MiB"} for drive in self.drives[:paths]]}
        return self.config(**{**given, **changes})

    def whole(self, **changes):
        """The same run in memory, never interrupted."""
        run = self.train(self.config(**{"steps": STEPS, "clip_norm": 1.0, **changes}))
        self.assert_trained(run)
        return run

    def kill_until_it_ends(self, config, whole, rng):
        """Kills it again and again, at random, and lets the last one end."""
        losses = {}
        for limit in [rng.uniform(0.02, 0.5) for _ in range(6)] + [300]:
            run = self.go_on(config, limit)
            for step in run.steps:
                self.assertEqual(losses.setdefault(step["step"], step["loss"]), step["loss"], step)
        self.assert_trained(run)
        self.assertEqual(run.hashes, whole.hashes)
        self.assertEqual(losses, {step["step"]: step["loss"] for step in whole.steps})

    def go_on(self, config, seconds):
        """Resumes, or starts where the last one was killed before anything was durable."""
        run = self.run_for(seconds, config, "--resume")
        if run.code != USAGE:
            return run
        self.assertIn("there is nothing to resume", run.err)
        return self.run_for(seconds, config)

    def run_for(self, seconds, config, *arguments):
        process = subprocess.Popen([FERRY, *self.command(config, *arguments)], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate(timeout=30)
            out = out.rpartition("\n")[0]  # the last line may have been cut
        self.assertIn(process.returncode, (0, USAGE, -signal.SIGKILL), err)
        return Run(process.returncode, out, err)

    def test_killed_at_random_it_ends_with_the_same_bits(self):
        rng = random.Random(11)
        runs = ({}, {"precision": "bf16", "swap__speculate": "all"},
                {"precision": "bf16", "optimizer__master": "split",
                 "optimizer__moments": "bf16", "io__backend": "posix"},
                {"optimizer__moments": "int8"},
                {"optimizer__method": "muon", "budgets__host": "500KiB"},
                {"precision": "fp16", "freeze": ["model.layers.1.*"]})
        for changes in in_quick(runs, (1, 2, 4)):
            with self.subTest(**changes):
                plain = {key: value for key, value in changes.items()
                         if not key.startswith(("swap", "io", "budgets"))}
                self.kill_until_it_ends(self.durable(**changes), self.whole(**plain), rng)
                shutil.rmtree(self.drives[0])
                os.mkdir(self.drives[0])

    def test_it_goes_on_with_the_kernels_it_was_started_with(self):
        def under(core):
            env = {key: value for key, value in os.environ.items() if key != "OPENBLAS_CORETYPE"}
            return {**env, "OPENBLAS_CORETYPE": core} if core else env
        if self.train(self.config(steps=1), env=under(None)).lines[-1]["kernels"] not in ("SkylakeX", "Cooperlake",
                                                                                         "Sapphirerapids"):
            self.skipTest("there are no two sets of kernels that this processor runs and ferry chooses from")
        # Either copy of the header alone knows which kernels they were.
        for first, then, damaged in (("Haswell", None, 200), (None, "Haswell", None),
                                     ("Haswell", "Nehalem", 4096 + 200)):
            with self.subTest(first=first, then=then, damaged=damaged):
                config = self.durable()
                whole = self.train(self.config(steps=STEPS, clip_norm=1.0), env=under(first))
                self.killed(config, steps=5, env=under(first))
                if damaged is not None:
                    self.flip(os.path.join(self.drives[0], "ferry.volume"), damaged)
                resumed = self.train(config, "--resume", env=under(then))
                self.assert_trained(resumed)
                self.assertEqual(resumed.hashes, whole.hashes)
                self.assertEqual(resumed.err.count("goes on with them"), 1, resumed.err)
                self.assertNotIn("older processor", resumed.err)
                shutil.rmtree(self.drives[0])
                os.mkdir(self.drives[0])

    def test_kernels_that_cannot_be_had_are_named(self):
        preloaded = {**os.environ, "LD_PRELOAD": "libopenblas.so.0"}
        preloaded.pop("OPENBLAS_CORETYPE", None)
        run = self.train(self.config(steps=1), env=preloaded)
        if run.code != 0 or "cannot be preloaded" in run.err or run.lines[-1]["kernels"] == "Nehalem":
            self.skipTest("there is no OpenBLAS to preload, or no two sets of kernels")
        others, config = run.lines[-1]["kernels"], self.durable()
        self.killed(config, steps=3, env={**os.environ, "OPENBLAS_CORETYPE": "Nehalem"})
        self.refused(config, ["it was started with OpenBLAS's Nehalem kernels", f"{others} kernels: another part",
                              "LD_PRELOAD is libopenblas.so.0", "OPENBLAS_CORETYPE=Nehalem"],
                     "--resume", env=preloaded)
        self.assert_trained(self.train(config, "--resume"))

    def test_kernels_of_another_maker(self):
        """Barcelona's run on any processor that names them; by itself ferry takes them where their instructions are."""
        barcelona = {**os.environ, "OPENBLAS_CORETYPE": "Barcelona"}
        run = self.train(self.config(steps=1), env=barcelona)
        if run.code != 0 or run.lines[-1]["kernels"] != "Barcelona":
            self.skipTest("this OpenBLAS has no such kernels, or they do not run here")
        config = self.durable()
        self.killed(config, steps=3, env=barcelona)
        unnamed = {key: value for key, value in os.environ.items() if key != "OPENBLAS_CORETYPE"}
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            has_them = " sse4a " in file.read()
        if not has_them:
            self.refused(config, ["OpenBLAS's Barcelona kernels, which this processor has no instructions for",
                                  "OPENBLAS_CORETYPE=Barcelona"], "--resume", env=unnamed)
        resumed = self.train(config, "--resume", env=unnamed if has_them else barcelona)
        self.assert_trained(resumed)
        self.assertEqual(resumed.lines[-1]["kernels"], "Barcelona")

    def test_over_three_paths(self):
        config, whole = self.durable(paths=3, swap__speculate="all"), self.whole()
        first = self.killed(config, steps=5)
        resumed = self.train(config, "--resume")
        self.assert_trained(resumed)
        self.assertEqual(resumed.hashes, whole.hashes)
        self.assertGreaterEqual(resumed.steps[0]["step"], len(first.steps) - 2)
        self.assertEqual(resumed.steps[-1]["loss"], whole.steps[-1]["loss"])

    def test_it_measures_its_bound_and_keeps_its_bits(self):
        """In the memory that its state comes back to."""
        config, whole = self.durable(), self.whole()
        self.killed(config, steps=5)
        resumed = self.ferry(*[word for word in self.command(config, "--resume") if word != "--no-bound"])
        self.assert_trained(resumed)
        self.assertGreater(resumed.summary["bound_seconds"], 0)
        self.assertEqual(resumed.hashes, whole.hashes)

    def test_a_run_that_has_ended_goes_on(self):
        constant = {"schedule__kind": "constant", "schedule__warmup_steps": 0}
        whole = self.whole(**constant)
        half = self.train(self.durable(**constant, steps=STEPS // 2))
        self.assert_trained(half)
        self.assertNotEqual(os.listdir(self.drives[0]), [], "its state stays")
        rest = self.train(self.durable(**constant), "--resume")
        self.assert_trained(rest)
        self.assertEqual([step["step"] for step in rest.steps],
                         list(range(STEPS // 2, STEPS + 1)))
        self.assertEqual(rest.hashes, whole.hashes)
        # With a schedule that falls towards its last step, more steps are another run.
        more = self.train(self.durable(schedule__kind="linear"), "--resume")
        self.assertEqual(more.code, USAGE)
        self.assertIn("schedule.kind = linear", more.err)

    def test_a_run_that_has_ended_is_not_in_the_way(self):
        first = self.train(self.durable())
        self.assert_trained(first)
        self.refused(self.durable(io__leftovers="refuse"), "the durable state of a run is kept here")
        self.refused(self.durable(optimizer__lr=0.1), "the durable state of a run is kept here")
        again = self.train(self.durable())
        self.assert_trained(again)
        self.assertIn("came to its end", again.err)
        self.assertEqual(again.numbers(), first.numbers())
        self.killed(self.durable(), steps=3)
        self.refused(self.durable(), "the durable state of a run is kept here")

    def files(self):
        return {name: os.stat(os.path.join(self.drives[0], name)).st_ino for name in sorted(os.listdir(self.drives[0]))}

    def test_a_start_that_is_refused_leaves_what_ended(self):
        """Whatever refuses it, and however late."""
        ended = self.train(self.durable())
        self.assert_trained(ended)
        there = self.files()

        def limited(what, to):
            def limit():
                resource.setrlimit(what, (to, to))
            return limit
        refusals = [("ulimit -f", self.durable(), limited(resource.RLIMIT_FSIZE, 64 << 10), DOES_NOT_FIT),
                    ("a mistake", self.durable(optimizer__lr=0.1), None, USAGE)]
        refusals += [(f"ulimit -n {most}", self.durable(), limited(resource.RLIMIT_NOFILE, most), None)
                     for most in range(4, 40)]
        refused = 0
        for name, config, limit, code in refusals:
            with self.subTest(name):
                run = self.train(config, preexec_fn=limit)
                if code is None and run.code == 0:
                    self.assertGreater(refused, 4, "there were descriptors enough from the beginning")
                    break
                refused += 1
                self.assertEqual(run.code, code or DOES_NOT_FIT, run.err)
                self.assertEqual(self.files(), there)
                resumed = self.train(self.durable(), "--resume")
                self.assert_trained(resumed)
                self.assertEqual(resumed.hashes, ended.hashes)
        else:
            self.fail("no number of descriptors was enough")

    def test_a_kill_of_the_start_leaves_what_ended(self):
        """Before it is durable itself; after that there is its own state."""
        ended = self.train(self.durable())
        self.assert_trained(ended)
        for milliseconds in range(10, 400, 30):
            self.run_for(milliseconds / 1000, self.durable())
            resumed = self.train(self.durable(), "--resume")
            self.assert_trained(resumed)
            self.assertEqual(resumed.hashes, ended.hashes)

    def test_it_says_which_steps_are_done_again(self):
        config = self.durable(steps=100000)
        done_again = None
        for _ in range(5):  # a kill may come just when the last step has become durable
            self.killed(config, steps=5)
            committed = int(re.search(r"last committed step (\d+)", self.train(config).err)[1])
            resumed = self.killed(config, "--resume", steps=2)
            after, done_again = re.search(r"resumed after step (\d+)(;.*done again)?", resumed.err).groups()
            after = int(after)
            self.assertEqual(resumed.steps[0]["step"], after)
            self.assertIn(committed - after, (0, 1, 2))
            if committed > after:
                break
            self.assertIsNone(done_again)
            shutil.rmtree(self.drives[0])
            os.mkdir(self.drives[0])
        steps = {1: f"step {committed} was committed but not durable and is",
                 2: f"steps {after + 1} to {committed} were committed but not durable and are"}
        self.assertEqual(done_again, f"; {steps[committed - after]} done again")

    def test_a_run_beyond_its_last_step_is_refused(self):
        constant = {"schedule__kind": "constant", "schedule__warmup_steps": 0}
        ended = self.train(self.durable(**constant, steps=6))
        self.assert_trained(ended)
        self.refused(self.durable(**constant, steps=4), ["beyond its last step", "steps = 4", "step 6"],
                     "--resume")
        again = self.train(self.durable(**constant, steps=6), "--resume")
        self.assert_trained(again)
        self.assertEqual([step["step"] for step in again.steps], [6], "the last line, once more")
        self.assertEqual(again.summary["lr"], ended.summary["lr"])
        self.assertEqual(again.hashes, ended.hashes)

    def refused(self, config, words, *arguments, code=USAGE, **options):
        run = self.train(config, *arguments, **options)
        self.assertEqual(run.code, code, run.err)
        for text in [words] if isinstance(words, str) else words:
            self.assertIn(text, run.err)

    def test_what_cannot_be_proved_is_refused(self):
        self.refused(self.durable(), "there is nothing to resume", "--resume")
        self.assertEqual(os.listdir(self.drives[0]), [], "the attempt left something behind")
        config = self.durable(paths=2)
        self.killed(config, steps=3)
        self.refused(config, ["the durable state of a run is kept here", "--resume", "remove_any"])
        self.refused(self.durable(paths=2, optimizer__lr=0.1), "optimizer.lr = 0.1", "--resume")
        self.refused(self.durable(paths=2, optimizer__moments="int8"),
                     ["optimizer.moments = int8", "optimizer.moments = fp32"], "--resume")
        self.refused(self.durable(paths=2, precision="bf16"), "of another run", "--resume")
        self.refused(self.durable(paths=1), "in their order", "--resume")
        self.refused(self.durable(paths=3), ["nothing to resume", self.drives[2]], "--resume")
        self.refused(self.durable(paths=2, swap__chunk_elements=8192, budgets__host="1MiB"),
                     "another plan", "--resume")
        self.refused(self.durable(paths=2, checkpoint__durable_steps=False),
                     "set checkpoint.durable_steps to true", "--resume")
        self.what_is_damaged_is_named(config)
        slot_file = os.path.join(self.drives[1], "ferry.slots0")
        size = os.path.getsize(slot_file)
        os.truncate(slot_file, 0)
        self.refused(config, ["not as it was laid out", slot_file], "--resume", code=IO)
        os.truncate(slot_file, size)  # the right size, but not the bytes
        self.refused(config, ["not consistent", slot_file, "checksum"], "--resume", code=IO)
        self.assert_trained(self.train(self.durable(paths=2, io__leftovers="remove_any")))

    def what_is_damaged_is_named(self, config):
        """A file missing or cut: nobody is told to give the others up."""
        header = os.path.join(self.drives[0], "ferry.volume")
        slot_file = os.path.join(self.drives[1], "ferry.slots0")
        kept = self.path("kept")
        os.rename(slot_file, kept)
        self.refused(config, ["a slot file is missing", slot_file, "mount or restore it"], "--resume", code=IO)
        os.rename(kept, slot_file)
        with open(header, "rb") as file:
            whole = file.read()
        os.truncate(header, 200)
        back = "put the header back as the run left it"
        self.refused(config, ["the header is truncated", "200 bytes", back], "--resume", code=IO)
        self.refused(config, ["a truncated header is left here", back, "io.leftovers"], code=IO)
        for at in (0, 8, 29, 31, 32, 100, 4095):  # magic, format, published, lost, checksum, ...
            damaged = bytearray(whole)
            for copy in (0, len(whole) // 2):
                damaged[copy + at] ^= 1
            with open(header, "wb") as file:
                file.write(damaged)
            self.refused(config, ["the header is damaged", back, "may be whole"], "--resume", code=IO)
            self.refused(config, ["a damaged header is left here", back, "io.leftovers"], code=IO)
        broken = bytearray(whole)
        broken[:BLOCK] = bytes(BLOCK)
        broken[BLOCK + 100] ^= 1
        for contents, what in ((broken, "the header is damaged"), (whole[:1], "an overwritten header"),
                               (bytes(len(whole)), "an overwritten header")):
            with open(header, "wb") as file:
                file.write(contents)
            self.refused(config, [what, back, "may be whole"], "--resume", code=IO)
            self.refused(config, ["header is left here: the files beside it may be whole", back], code=IO)
        os.truncate(header, 0)
        self.refused(config, ["its header is missing or empty", "0 bytes", "may be whole"], "--resume", code=IO)
        self.refused(config, ["an empty header is left here", back, "may be whole"], code=IO)
        os.remove(header)
        self.refused(config, ["its header is missing", "may be whole"], "--resume", code=IO)
        with open(header, "wb") as file:
            file.write(whole)

    def test_a_bit_of_the_header_costs_nothing(self):
        whole = self.whole()
        config = self.durable()
        self.killed(config, steps=3)
        header = os.path.join(self.drives[0], "ferry.volume")
        for at in (0, 29, 4095, 4096 + 100):  # of the first copy, and of the second
            self.flip(header, at)
            self.killed(config, "--resume", steps=2)
        resumed = self.train(config, "--resume")
        self.assert_trained(resumed)
        self.assertEqual(resumed.hashes, whole.hashes)

    def test_a_bad_sector_under_one_header_costs_nothing(self):
        if not os.path.exists(BAD_SECTOR):
            self.skipTest("not built")
        whole, config = self.whole(), self.durable()
        self.killed(config, steps=3)
        bad = {**os.environ, "LD_PRELOAD": BAD_SECTOR, "FERRY_TEST_BAD_BELOW": str(BLOCK),
               "FERRY_TEST_BAD_FILE": os.path.join(self.drives[0], "ferry.volume")}
        self.killed(config, "--resume", steps=4, env=bad)
        resumed = self.train(config, "--resume", env=bad)
        self.assert_trained(resumed)
        for text in ("the first of two headers", "cannot be read (Input/output error)", "check the drive",
                     "one of two headers", "cannot be written: Input/output error"):
            self.assertIn(text, resumed.err)
        self.assertEqual(resumed.hashes, whole.hashes)
        bad["FERRY_TEST_BAD_BELOW"] = str(2 * BLOCK)
        run = self.train(config, "--resume", env=bad)
        self.assertEqual(run.code, IO, run.err)
        self.assertIn("the volume's header cannot be read: Input/output error", run.err)

    def test_a_header_overwritten_at_the_end_is_said(self):
        constant = {"schedule__kind": "constant", "schedule__warmup_steps": 0, "steps": 16}
        header = os.path.join(self.drives[0], "ferry.volume")

        def zero():
            with open(header, "r+b") as file:
                file.write(bytes(2 * BLOCK))
        for damage in (lambda: os.truncate(header, 0), zero):
            with self.subTest(damage=damage):
                run = self.remove_under_it(self.durable(**constant), damage, steps=16)
                self.assertEqual(run.code, IO, run.err)
                self.assertIn("nothing durable is left", run.err)
                self.assertIn(header, run.err)
                shutil.rmtree(self.drives[0])
                os.mkdir(self.drives[0])

    def test_no_line_of_a_step_is_lost(self):
        """A kill may come between a step and its lines: who goes on says them."""
        whole = self.whole(hash_every="step")
        config = self.durable(hash_every="step")
        losses, hashes = {}, {}
        for arguments in ((), ("--resume",), ("--resume",)):
            run = self.killed(config, *arguments, steps=4)
            losses.update({line["step"]: line["loss"] for line in run.steps})
            hashes.update({line["step"]: line["state_hash"] for line in run.lines if "state_hash" in line})
            if arguments:
                after = int(re.search(r"resumed after step (\d+)", run.err)[1])
                self.assertEqual(run.steps[0]["step"], after, "the step that it goes on from has its line")
                self.assertIn(after, hashes)
        run = self.train(config, "--resume")
        self.assert_trained(run)
        losses.update({line["step"]: line["loss"] for line in run.steps})
        hashes.update({line["step"]: line["state_hash"] for line in run.lines if "state_hash" in line})
        self.assertEqual(hashes, {line["step"]: line["state_hash"] for line in whole.lines if "state_hash" in line})
        self.assertEqual(losses, {line["step"]: line["loss"] for line in whole.steps})

    def test_a_reader_that_goes_ends_no_run(self):
        """Standard output breaks; the run comes to its end all the same, and its last step can be read again."""
        changes = {"hash_every": "step", "evaluate__every": 1, "evaluate__micro_batches": 1}
        whole, config = self.whole(**changes), self.durable(**changes)
        with subprocess.Popen([FERRY, *self.command(config)], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:
            process.stdout.readline()
            process.stdout.close()
            err = process.stderr.read()
        self.assertEqual(process.returncode, IO, err)
        rest = self.train(config, "--resume")
        self.assert_trained(rest)
        self.assertEqual([(step["step"], step["loss"]) for step in rest.steps],
                         [(step["step"], step["loss"]) for step in whole.steps[-1:]])
        self.assertEqual(rest.hashes[-1], whole.hashes[-1])

    def test_the_lines_of_the_step_resumed_after_come_first(self):
        config = self.durable(hash_every="step")
        first = self.killed(config, steps=4)
        run = self.train(config, "--resume")
        self.assert_trained(run)
        after = int(re.search(r"resumed after step (\d+)", run.err)[1])
        said = [(line["step"], "state_hash" in line) for line in run.lines if "state_hash" in line or "loss" in line]
        self.assertEqual(said[:3], [(after, False), (after, True), (after + 1, False)])
        kept = ("loss", "gradient_norm", "clip_factor", "lr", "targets", "tokens", "skipped", "committed")
        for step in first.steps:
            if step["step"] == after:
                self.assertEqual([step[key] for key in kept], [run.steps[0][key] for key in kept])

    def test_too_few_descriptors_are_not_taken_for_anothers_files(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))
        config = self.durable(io__leftovers="remove_any")
        self.killed(config, steps=3)
        run = self.train(config, preexec_fn=limit)
        self.assertNotEqual(run.code, 0)
        self.assertIn("Too many open files", run.err)
        self.assertNotIn("not ferry's", run.err)
        self.assert_trained(self.train(config))

    def remove_under_it(self, config, remove, steps=4):
        """What a run says and how it ends when `remove` is called after some of its steps."""
        process = start([FERRY, *self.command(config)])
        out = ""
        while out.count('"loss"') < steps:
            out += process.stdout.readline()
        remove()
        rest, err = process.communicate(timeout=120)
        return Run(process.returncode, out + rest, err)

    def test_what_is_removed_under_a_run_is_said(self):
        constant = {"schedule__kind": "constant", "schedule__warmup_steps": 0, "steps": 16}
        whole = self.whole(**constant)
        def at(name):
            return os.path.join(self.drives[0], name)
        for remove in (lambda: shutil.rmtree(self.drives[0]), lambda: os.remove(at("ferry.volume")),
                       lambda: os.remove(at("ferry.slots0")), lambda: os.rename(at("ferry.slots0"), at("away"))):
            run = self.remove_under_it(self.durable(**constant), remove)
            self.assertEqual(run.code, IO, run.err)
            self.assertIn("nothing of it will outlive the process", run.err)
            self.assertIn("nothing durable is left", run.err)
            self.assertEqual(run.hashes, whole.hashes, "the run itself comes to its end")
            shutil.rmtree(self.drives[0], ignore_errors=True)
            os.mkdir(self.drives[0])

    def damaged_under_it(self, config, slot_file, at, damage):
        """A run of which a block is overwritten after some steps, and what the block held; None: it was not read."""
        process = start([FERRY, *self.command(config)])
        out = ""
        while out.count('"loss"') < 4:
            out += process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)  # what the kernel writes for it arrives
        # Past the page cache, as the run reads and writes: dirty pages would fail its flushes.
        block = mmap.mmap(-1, BLOCK)
        file = os.open(slot_file, os.O_RDWR | os.O_DIRECT)
        os.preadv(file, [block], at)
        was = block[:]
        block[:] = damage
        os.pwrite(file, block, at)
        os.close(file)
        process.send_signal(signal.SIGCONT)
        while process.poll() is None and out.count('"loss"') < 30:
            out += process.stdout.readline()
        process.kill()
        rest, err = process.communicate(timeout=120)
        return Run(process.returncode, out + rest, err) if process.returncode != -signal.SIGKILL else None, was

    def resumed_step(self, config):
        """The step after which --resume goes on; None: it is refused."""
        run = self.train(config, "--resume")
        self.assertIn(run.code, (0, IO), run.err)
        return int(re.search(r"resumed after step (\d+)", run.err)[1]) if run.code == 0 else None

    def test_which_state_is_good_is_said(self):
        """A block is damaged under the run: whether the last durable step has it, resuming with and without it tells."""
        constant = {"schedule__kind": "constant", "schedule__warmup_steps": 0}
        slot_file, kept = os.path.join(self.drives[0], "ferry.slots0"), self.path("kept-state")
        rng = random.Random(7)
        damage = rng.randbytes(BLOCK)
        said = collections.Counter()
        for _ in range(8):
            config = self.durable(**constant, steps=100000)
            size = 4 << 20
            run, was = self.damaged_under_it(config, slot_file, rng.randrange(size // BLOCK) * BLOCK, damage)
            if run is not None:
                self.assertEqual(run.code, IO, run.err)
                self.assertIn("not those written", run.err)
                shutil.copytree(self.drives[0], kept)
                ends = self.durable(**constant, steps=max(step["step"] for step in run.steps) + 3)
                found = self.resumed_step(ends)
                shutil.rmtree(self.drives[0])
                with open(os.path.join(kept, "ferry.slots0"), "r+b") as file:
                    contents = file.read()
                    self.assertEqual(contents.count(damage), 1)
                    file.seek(contents.index(damage))
                    file.write(was)
                os.rename(kept, self.drives[0])
                durable = self.resumed_step(ends)
                self.assertIsNotNone(durable)
                right = "has none of these bytes" if found == durable else "has these bytes too"
                self.assertIn("the last durable step " + right, run.err)
                said[right] += 1
            shutil.rmtree(self.drives[0])
            os.mkdir(self.drives[0])
            if said.total() == (1 if QUICK else 2):
                break
        self.assertGreater(said.total(), 0)

    def test_any_killed_run_says_which_state_is_lost(self):
        config = self.durable(checkpoint__durable_steps=False, steps=100000)
        first = self.killed(config, steps=4)
        last = max(step["step"] for step in first.steps)
        for run in (self.train(config, "--resume"),
                    self.train({**config, "io": {"leftovers": "refuse"}})):
            err = run.err
            self.assertEqual(run.code, USAGE, err)
            self.assertIn("not consistent, state of step", err)
            lost = int(err.split("state of step ")[1].split()[0])
            # A step may have been committed whose line was not read any more.
            self.assertIn(lost, (last, last + 1), err)
        self.assertIn("checkpoint.durable_steps", self.train(config, "--resume").err)

    def test_what_the_plan_cannot_give_is_refused(self):
        small = self.durable()
        small["budgets"]["nvme"][0]["size"] = "2MiB"
        self.refused(small, ["missing", "checkpoint.durable_steps"], code=DOES_NOT_FIT)
        self.refused(self.durable(budgets__nvme=[]), "add a path to budgets.nvme")
        self.refused(self.durable(swap__state_on_nvme=0.5), "all of the optimizer state")
        self.refused(self.durable(swap__verify=False), "checksums")

    def test_what_it_costs_on_disk(self):
        """Twice the slots of the state, and the maps."""
        plain = self.train(self.durable(checkpoint__durable_steps=False, swap__state_on_nvme=1,
                                        swap__speculate="off", steps=1))
        durable = self.train(self.durable(swap__speculate="off", steps=1))
        def slots(run):
            return run.bytes_of("nvme", "state") + run.bytes_of("nvme", "state, fresh slots")
        self.assertGreater(slots(plain), 0)
        self.assertGreater(slots(durable), 1.5 * slots(plain))
        self.assertLess(slots(durable), 2 * slots(plain))
        self.assertEqual(plain.hashes, durable.hashes)
        self.assertEqual(json.dumps(plain.numbers()), json.dumps(durable.numbers()))


if __name__ == "__main__":
    unittest.main()

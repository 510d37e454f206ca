"""Limits of the process: address space, stack, threads, open files, and the size of a file."""

import os
import resource
import subprocess
import unittest

from harness import DOES_NOT_FIT, FERRY, IO
from refusals import Refusals


class ProcessLimitsTest(Refusals):
    def test_address_space(self):
        for threads in (1, 16):
            refused = 0
            for mib in range(256, 16384, 96):
                def limit(mib=mib):
                    resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
                # One that never ends is an error of the test: ferry() has a time limit.
                run = self.train(self.config(steps=2, threads=threads), preexec_fn=limit)
                if run.code == 0:
                    break
                # Below that the loader, or what libraries do before the program, has no room.
                if run.code == DOES_NOT_FIT:
                    self.assert_refused(run, DOES_NOT_FIT, "do:")
                    refused += 1
                else:
                    self.assertEqual(refused, 0, run.err)
            self.assertEqual(run.code, 0)
            self.assertGreater(refused, 0)
            self.assertIn("OpenBLAS", self.refused_by_address_space(mib - 96, threads))

    def refused_by_address_space(self, mib, threads):
        """The last error that speaks of a limit with its value, going down from what is enough."""
        for less in range(mib, 0, -48):
            def limit(less=less):
                resource.setrlimit(resource.RLIMIT_AS, (less << 20, less << 20))
            run = self.train(self.config(steps=2, threads=threads), preexec_fn=limit)
            if "buffers that OpenBLAS" in run.err:
                self.assert_refused(run, DOES_NOT_FIT, "ulimit -v", f"{less:.2f} MiB" if less < 1024 else f"{less / 1024:.2f} GiB")
                return run.err
        return ""

    def test_too_few_open_files_for_openblas(self):
        said = []
        for most in range(3, 10):
            def limit(most=most):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            run = self.train(self.config(steps=2), preexec_fn=limit)
            if "OpenBLAS cannot be loaded" in run.err:
                self.assert_refused(run, DOES_NOT_FIT, f"limit:    {most} open files of the process (ulimit -n)",
                                    "raise that limit")
                said.append(most)
        self.assertNotEqual(said, [])

    def test_a_small_stack(self):
        for kib in (128, 256, 512, 1024, 2048):
            def limit(kib=kib):
                resource.setrlimit(resource.RLIMIT_STACK, (kib << 10, resource.RLIM_INFINITY))
            run = self.train(self.config(steps=2, precision="bf16"), preexec_fn=limit)
            said = f"{kib}.00 KiB" if kib < 1024 else f"{kib // 1024}.00 MiB"
            self.assert_refused(run, DOES_NOT_FIT, "the stack is too small", "ulimit -s", said)

    def test_an_unlimited_stack(self):
        # New threads then have 2 MiB, which a tile of narrow numbers exceeds.
        def limit():
            resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.assert_trained(self.train(self.config(steps=2, precision="bf16", threads=2), preexec_fn=limit))

    def as_nobody(self, most, **changes):
        """Trains as a user who may have so many threads and processes."""
        return self.train(self.config(steps=2, **changes), **self.nobody(most))

    def nobody(self, most):
        """How to run as that user."""
        options, nobody = {}, 65534
        if os.geteuid() == 0:
            os.chmod(self.dir, 0o755)
            options = {"user": nobody, "group": nobody, "extra_groups": []}
            if subprocess.run([FERRY, "--version"], capture_output=True, check=False, **options).returncode:
                self.skipTest("another user cannot run the program here")

        def limit():
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        return {"preexec_fn": limit, **options}

    def test_threads_that_cannot_be_started(self):
        for most in range(1, 40):
            run = self.as_nobody(most, threads=2)
            if run.code == 0:
                break
            self.assert_refused(run, DOES_NOT_FIT, "thread", f"{most} processes and threads of the user (ulimit -u)")
        self.assertEqual(run.code, 0, run.err)
        self.assertGreater(most, 1)

    def test_too_few_threads_leave_nothing_behind(self):
        """However far a start comes: it names the limit, and the next one is not in its way."""
        path = self.path("nobodys-nvme")
        os.mkdir(path)
        os.chmod(path, 0o777)
        for most in range(1, 60):
            run = self.as_nobody(most, budgets__host="300KiB", budgets__nvme=[{"path": path, "size": "64MiB"}])
            self.assertEqual(os.listdir(path), [], most)
            if run.code == 0:
                break
            self.assert_refused(run, DOES_NOT_FIT, f"{most} processes and threads of the user (ulimit -u)")
        self.assertEqual(run.code, 0, run.err)

    def test_benches_name_what_bounds_them(self):
        drive = self.path("bench-drive")
        os.mkdir(drive)
        os.chmod(drive, 0o777)
        io = ["bench", "io", drive, "--size", "64MiB", "--seconds", "0.01"]
        adam = ["bench", "adam", "--millions", "0.01", "--pairs", "1", "--threads", "2"]
        for words in (adam, io):
            for most in range(1, 60):
                run = self.ferry(*words, **self.nobody(most))
                self.assertEqual(os.listdir(drive), [], most)
                if run.code == 0:
                    break
                self.assertEqual(run.code, DOES_NOT_FIT, run.err)
                self.assertIn(f"{most} processes and threads of the user (ulimit -u)", run.err)
            self.assertEqual(run.code, 0, run.err)

    def test_too_few_open_files(self):
        """Of commands that read and write some; below that the loader opens no library."""
        drive, model = self.path("few-drive"), self.path("few-model")
        os.mkdir(drive)
        self.assert_trained(self.train(self.config(steps=1), "--export", model, "--weights-out", self.path("few.safetensors")))
        commands = [["data", self.path("text.txt"), "-o", self.path("few.bin")],
                    ["eval", model, self.path("tokens.bin"), "--set", "batch.sequence=32"],
                    ["export", self.command(self.config(steps=1))[1], self.path("few.safetensors"), self.path("few-export")],
                    ["bench", "io", drive, "--size", "64MiB", "--seconds", "0.01"]]
        for words in commands:
            named = 0
            for most in range(3, 60):
                def limit(most=most):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                run = self.ferry(*words, preexec_fn=limit)
                self.assertEqual(os.listdir(drive), [], (most, run.err))
                if run.code == 0:
                    break
                if not run.err.startswith("ferry: ") and "\nferry: " not in run.err:
                    continue  # the loader's words
                self.assertEqual(run.code, DOES_NOT_FIT, run.err)
                self.assertIn(f"{most} open files of the process (ulimit -n)", run.err)
                self.assertIn("raise", run.err)
                named += 1
            self.assertEqual(run.code, 0, run.err)
            self.assertGreater(named, 0, words)

    def test_files_larger_than_the_process_may_write(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        config = self.config(steps=2)
        for words in (["data", self.path("text.txt"), "-o", self.path("large.bin")],
                      *([*self.command(config), option, self.path("large" + option)]
                        for option in ("--weights-out", "--export", "--trace"))):
            run = self.ferry(*words, preexec_fn=limit)
            self.assertEqual(run.code, IO, run.err)
            self.assertIn("limit:    4096 bytes in a file of the process's (ulimit -f)", run.err)
            self.assertNotIn("free more", run.err)

    def test_address_space_of_benches(self):
        """The limit stands in the error with its value, wherever memory ends."""
        words = ["bench", "adam", "--millions", "64", "--pairs", "1", "--threads", "1"]
        named = 0
        for mib in range(512, 16384, 192):
            def limit(mib=mib):
                resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
            run = self.ferry(*words, preexec_fn=limit)
            if run.code == 0:
                break
            if run.err.startswith("ferry: "):  # else the loader's words
                self.assertEqual(run.code, DOES_NOT_FIT, run.err)
                self.assertIn("of address space for the process (ulimit -v)", run.err)
                named += 1
        self.assertEqual(run.code, 0, run.err)
        self.assertGreater(named, 0)

    def test_threads_beyond_the_control_group(self):
        group = f"/sys/fs/cgroup/pids/ferry-test-{os.getpid()}"
        try:
            os.mkdir(group)
        except OSError as error:
            self.skipTest(f"no control group can be made: {error}")
        self.addCleanup(os.rmdir, group)

        def enter():
            with open(f"{group}/pids.max", "w", encoding="ascii") as file:
                file.write("2")
            with open(f"{group}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
        run = self.train(self.config(steps=2), preexec_fn=enter)
        self.assert_refused(run, DOES_NOT_FIT, "thread", "2 processes and threads of the control group (pids.max)")


if __name__ == "__main__":
    unittest.main()

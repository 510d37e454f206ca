"""Directories for state that are none, full, read-only or somebody else's."""

import os
import resource
import subprocess
import unittest

from harness import DOES_NOT_FIT, FERRY, USAGE
from refusals import Refusals


class NvmePathTest(Refusals):
    SMALL = {"budgets__host": "200KiB", "steps": 2}

    def on_path(self, path, size="16MiB", **options):
        config = self.config(**self.SMALL, budgets__nvme=[{"path": path, "size": size}])
        return self.train(config, **options)

    def on_mount(self, kind, mount_options, size="16MiB"):
        """Trains on a file system that only this one process sees."""
        path = self.path(f"mount-{kind}")
        os.makedirs(path, exist_ok=True)
        inside = ["unshare", "--map-root-user", "--mount", "sh", "-ec",
                  'mount -t "$1" -o "$2" ferry-test "$3"; shift 3; exec "$@"', "sh",
                  kind, mount_options, path]
        if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
            self.skipTest(f"cannot mount {kind} here")
        config = self.config(**self.SMALL, budgets__nvme=[{"path": path, "size": size}])
        return self.ferry(*self.command(config), through=inside)

    def test_missing(self):
        absent = self.path("absent")
        self.assert_refused(self.on_path(absent), USAGE, absent, "No such file", "create")
        self.assertFalse(os.path.exists(absent))

    def test_a_file(self):
        self.assert_refused(self.on_path(self.path("text.txt")), USAGE, "text.txt",
                            "not a directory", "give a directory")

    def test_missing_and_not_needed(self):
        absent = self.path("absent")
        run = self.train(self.config(steps=1, budgets__nvme=[absent]))
        self.assert_refused(run, USAGE, absent, "does not exist", "budgets.nvme[0]")

    def test_read_only(self):
        self.assert_refused(self.on_mount("tmpfs", "ro"), USAGE, "mount-tmpfs", "Read-only")

    def test_full(self):
        self.assert_refused(self.on_mount("tmpfs", "size=3m"), DOES_NOT_FIT, "mount-tmpfs",
                            "too little free space", "bytes free",
                            "16777216 bytes asked for", "free some space")
        run = self.on_mount("tmpfs", "size=3m", size="unlimited")
        self.assert_refused(run, DOES_NOT_FIT, "mount-tmpfs", "missing", "bytes needed")

    def peak_kib(self, *words):
        """The exit code, what was said, and the most memory that was taken."""
        with open(self.path("said"), "w+", encoding="utf-8") as said:
            process = subprocess.Popen([FERRY, *words], stdout=subprocess.DEVNULL, stderr=said)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            return process.returncode, said.read(), usage.ru_maxrss

    def test_full_is_said_before_memory_is_taken(self):
        large = {"model__hidden": 512, "model__intermediate": 2048, "model__layers": 12, "steps": 1,
                 "swap__state_on_nvme": 1}
        enough = self.config(**large, budgets__nvme=[self.nvme("1TiB")])
        run = self.ferry("plan", self.command(enough)[1], "--json", "--no-prediction")
        self.assertEqual(run.code, 0, run.err)
        planned = run.lines[0]["device_bytes"] + run.lines[0]["host_bytes"]
        self.assertGreater(planned, 256 << 20)
        _, _, planning = self.peak_kib("plan", self.command(enough)[1], "--json", "--no-prediction")
        full = self.command(self.config(**large, budgets__nvme=[self.nvme("900TiB")]))
        code, said, peak = self.peak_kib(*full)
        self.assertEqual(code, DOES_NOT_FIT, said)
        self.assertIn("too little free space", said)
        self.assertLess(peak, planning + planned // 1024 // 4)

    def test_file_size_limit(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
        run = self.on_path(self.path("nvme"), preexec_fn=limit)
        self.assert_refused(run, DOES_NOT_FIT, "ferry.slots0", "2097152 bytes (RLIMIT_FSIZE)", "ulimit")

    def test_without_direct_io(self):
        run = self.on_mount("ramfs", "mode=700", size="unlimited")
        self.assertIn("O_DIRECT is refused", run.err)
        if "0 bytes given" in run.err:
            self.skipTest("ramfs counts no free space, and is refused for it")
        self.assert_trained(run)

    def test_a_file_of_somebody_else(self):
        other = self.path("other")
        os.mkdir(other)
        for name in ("ferry.volume", "ferry.slots0"):
            with open(os.path.join(other, name), "w", encoding="ascii") as file:
                file.write("my thesis")
            self.assert_refused(self.on_path(other), USAGE, name, "not ferry's")
            with open(os.path.join(other, name), encoding="ascii") as file:
                self.assertEqual(file.read(), "my thesis")
            self.assertEqual(os.listdir(other), [name])
            os.remove(os.path.join(other, name))


if __name__ == "__main__":
    unittest.main()

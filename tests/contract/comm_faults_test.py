"""A rank of mpirun's that is killed, stalls or gives up in every kind of operation: the others name
it, the operation, the layer and the step, long before the timeout where there is one to be had."""

import os
import shutil
import subprocess
import tempfile
import time
import unittest

PROGRAM = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "test_comm")
MPIRUN = [shutil.which("mpirun") or "", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
#mpirun kills all ranks when one has ended; this long after it has asked them to end.
          "--mca", "odls_base_sigkill_timeout", "3"]
QUICK = bool(os.environ.get("FERRY_QUICK_TESTS"))  # tools/test.sh --quick: a run is mostly waiting, for five seconds
TEXTS = {"weights": "all-gather of the weights of layer 3, step 4",
         "gradient": "exchange of the gradient of layer 3, step 4",
         "outcome": "all-gather of the outcome of layer 3, step 4",
         "heads": "exchange of the heads of layer 3, step 4 among ranks "}


@unittest.skipUnless(MPIRUN[0] and os.path.exists(PROGRAM), "no mpirun, or comm is not built")
class FaultsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # mpirun removes the directory of all its user's runs when it ends, and one that begins meanwhile fails.
        cls.directory = tempfile.mkdtemp(prefix="ferry-mpi-")
        cls.addClassCleanup(shutil.rmtree, cls.directory, ignore_errors=True)

    def texts(self, count, few):
        """What each operation is called on so many ranks, all of which are the group; the quick run has few of them."""
        members = ", ".join(map(str, range(count)))
        return {operation: text + (members if operation == "heads" else "") for operation, text in TEXTS.items()
                if not QUICK or operation in few}

    def ranks(self, count, fault, operation):
        """What each rank said, by rank, and the seconds it took."""
        start = time.monotonic()
        done = subprocess.run(
            [*MPIRUN, "-n", str(count), PROGRAM, "--gtest_also_run_disabled_tests",
             "--gtest_filter=DISABLED_LaunchedFault.*"],
            capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "TMPDIR": self.directory, "FERRY_FAULT": f"{fault} {operation}"})
        self.assertNotEqual(done.returncode, 0)
        said, rank = {}, None
        for line in done.stdout.splitlines():
            if line.startswith("rank "):
                rank = int(line.split()[1].rstrip(":"))
                said[rank] = line
            elif rank is not None and line.startswith("  "):
                said[rank] += "\n" + line
        return said, time.monotonic() - start, done.stdout + done.stderr

    def named_by(self, others, said, how, output, where="", lost="rank 1"):
        for rank in others:
            self.assertIn(f"rank {rank}: lost {lost}: {how}", said.get(rank, ""), output)
            self.assertIn(where and f"where:    {where}", said[rank], output)

    def test_a_killed_rank_is_named_at_once(self):
        for operation, text in self.texts(3, ("weights", "heads")).items():
            said, seconds, output = self.ranks(3, "kill", operation)
            self.named_by((0, 2), said, "its process has ended", output, text)
            self.assertLess(seconds, 50, output)  # and not after the timeout, which is 60 s

    def test_a_stalled_rank_is_named_after_the_timeout(self):
        for operation, text in self.texts(3, ("gradient", "outcome")).items():
            said, _, output = self.ranks(3, "stall", operation)
            self.named_by((0, 2), said, f"took no part in the {text} within 1.0 s", output, text)
            self.assertIn("given this rank (1) up", said.get(1, ""), output)

    def test_where_two_stall_all_others_name_both(self):
        for operation, text in self.texts(5, ("weights", "heads")).items():
            said, _, output = self.ranks(5, "stall-both", operation)
            self.named_by((0, 3, 4), said, f"took no part in the {text} within 1.0 s", output,
                          lost="ranks 1 and 2")
            for rank in (1, 2):
                self.assertIn(f"given this rank ({rank}) up", said.get(rank, ""), output)

    def test_a_rank_that_gives_up_says_why(self):
        cases = (("weights", 4), ("gradient", 3), ("outcome", 2), ("heads", 3))
        for operation, count in cases[:3:2] if QUICK else cases:
            said, seconds, output = self.ranks(count, "abandon", operation)
            others = [rank for rank in range(count) if rank != 1]
            # It may be heard before the operation is begun: then there is no where.
            self.named_by(others, said, "it ended with an error: the disk is full", output)
            self.assertLess(seconds, 50, output)


if __name__ == "__main__":
    unittest.main()

"""What ranks share of a host: its memory, its cores, and the log."""

import os
import re
import unittest

from ranks import ENVIRONMENT, MPIRUN, Ranks


class HostTest(Ranks):
    def test_each_rank_labels_its_log_lines(self):
        run = self.ranks(2, self.config(steps=1))
        self.assert_trained(run)
        said = [line for line in run.err.splitlines() if "planned by" in line]
        self.assertEqual(sorted(line.split(" info ")[1].split(":")[0] for line in said),
                         ["rank 0", "rank 1"], run.err)
        self.assertNotIn("rank", self.train(self.config(steps=1)).err)

    def test_ranks_that_are_bound_share_the_hosts_memory(self):
        """As mpirun binds them where it is not told otherwise; and all to one core, which is less than
        their part of any host."""
        def said(*through):
            run = self.train(self.config(steps=1), through=through, env=ENVIRONMENT)
            self.assert_trained(run)
            return run.err, re.findall(r"memory limit ([0-9.]+) (\w+),", run.err)
        text, ((whole, unit),) = said()
        cores = sum(map(int, re.findall(r"(\d+) cores, ", text)))  # not their threads
        if cores < 2:
            self.skipTest("one core")
        mpirun = MPIRUN[:-2]
        for name, through, warned in (
                ("unbound", [*MPIRUN, "-n", "2"], False),
                # With two cores that is a rank's part of them; with more, the quota says whether.
                ("core", [*mpirun, "--bind-to", "core", "-n", "2"], False if cores == 2 else None),
                ("one core", [*MPIRUN, "-n", "2", "taskset", "-c", str(min(os.sched_getaffinity(0)))], True)):
            with self.subTest(bound=name):
                text, limits = said(*through)
                self.assertEqual(len(limits), 2, text)
                for limit in limits:
                    self.assertEqual(limit[1], unit)
                    self.assertAlmostEqual(float(limit[0]), float(whole) / 2, delta=0.02)
                if warned is not None:
                    self.assertEqual("start them with mpirun --bind-to none" in text, warned, text)

    def test_cores_are_reserved_before_ranks_share_the_others(self):
        said = self.train(self.config(reserved_cores=[65535])).err
        cores = [int(core) for core in re.search(r"may run on ([0-9, ]+)", said)[1].split(", ")]
        if len(cores) < 2:
            self.skipTest("one core")
        for core in cores[:2]:  # whichever rank's it would be
            with self.subTest(core=core):
                self.assert_trained(self.ranks(2, self.config(steps=1, threads="auto", reserved_cores=[core])))
        run = self.ranks(2, self.config(reserved_cores=cores))
        self.assertNotEqual(run.code, 0)
        self.assertIn("every core is reserved", run.err)


if __name__ == "__main__":
    unittest.main()

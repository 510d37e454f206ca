"""Budgets that a model does not fit into: the error names the smallest that works."""

import re
import unittest

from harness import DOES_NOT_FIT
from refusals import Refusals


class BudgetsTest(Refusals):
    def assert_smallest(self, key, **changes):
        """The error names the missing bytes and the smallest budget; that one works, and one byte
        less does not."""
        name = key.replace("__", ".")
        run = self.train(self.config(**{**changes, key: 1000}))
        self.assert_refused(run, DOES_NOT_FIT, f"where:    {name}", "missing", "limit:    1000 B")
        smallest = int(re.search(f'set {name} to ([0-9]+) or more', run.err).group(1))
        self.assertIn(f"({smallest} bytes)", run.err)
        less = self.train(self.config(**{**changes, key: smallest - 1}))
        self.assert_refused(less, DOES_NOT_FIT, "1 B (1 bytes) missing")
        works = self.train(self.config(**{**changes, key: smallest}))
        self.assert_trained(works)
        used = works.summary["device_bytes" if "device" in key else "host_bytes"]
        self.assertLessEqual(used, smallest)
        return smallest

    def test_device_budget(self):
        self.assert_smallest("budgets__device", steps=2)
        tied = {"model__tie_embeddings": True, "precision": "bf16"}
        self.assert_smallest("budgets__device", steps=2, swap__groups=2, **tied)
        self.assert_smallest("budgets__device", steps=2, swap__chunk_elements=32768,
                             budgets__nvme=[self.nvme()], budgets__host="1MiB")

    def test_host_budget(self):
        nvme = {"budgets__nvme": [self.nvme()]}
        in_memory = self.assert_smallest("budgets__host", steps=2)
        self.assert_smallest("budgets__host", steps=2, model__hidden=128, model__intermediate=512)
        self.assert_smallest("budgets__host", steps=2, swap__speculate="all", swap__chunk_elements=8192)
        three_tiers = self.assert_smallest("budgets__host", steps=2, budgets__device="1300KiB", **nvme)
        self.assertLess(three_tiers * 10, in_memory)
        self.assert_smallest("budgets__host", steps=2, swap__groups=4, precision="bf16",
                             swap__chunk_elements=16384, **nvme)

    def test_nvme_budget(self):
        small = {"budgets__host": "200KiB", "steps": 2}
        run = self.refused(DOES_NOT_FIT, ["the NVMe budget is too small", "missing"], **small,
                           budgets__nvme=[self.nvme("1MiB")])
        smallest = int(re.search(r'to ([0-9]+) in all', run.err).group(1))
        self.refused(DOES_NOT_FIT, ["1 B missing"], **small, budgets__nvme=[self.nvme(smallest - 1)])
        self.assert_trained(self.train(self.config(**small, budgets__nvme=[self.nvme(smallest)])))
        run = self.train(self.config(**small, budgets__nvme=[self.path("nvme")]))  # without limit
        self.assert_trained(run)

    def test_two_paths_that_only_fit_together(self):
        half = [self.nvme("2500KiB"), self.nvme("2500KiB", "nvme2")]
        small = {"budgets__host": "200KiB", "steps": 2}
        self.refused(DOES_NOT_FIT, ["NVMe budget"], **small, budgets__nvme=half[:1])
        self.assert_trained(self.train(self.config(**small, budgets__nvme=half)))

    def test_nvme_budget_over_two_paths(self):
        small = {"budgets__host": "200KiB", "steps": 2}

        def paths(first, second):
            return [self.nvme(first), self.nvme(second, "nvme2")]
        run = self.refused(DOES_NOT_FIT, ["NVMe budget"], **small,
                           budgets__nvme=paths("100KiB", "100KiB"))
        enough = int(re.search(r'to ([0-9]+) in all', run.err).group(1))
        for part in (enough // 2, enough // 3 + 1, 1234567):
            run = self.train(self.config(**small, budgets__nvme=paths(part, enough - part)))
            self.assert_trained(run)

    def test_more_than_the_machine_has(self):
        self.refused(DOES_NOT_FIT, ["less memory than the budgets allow", "budgets.host",
                                    "budgets.nvme"],
                     model__hidden=65536, model__intermediate=262144, model__layers=32, steps=2,
                     swap__chunk_elements=1048576)


if __name__ == "__main__":
    unittest.main()

"""What the tests of ranks share: how they are started, and with how little memory."""

import os
import shutil
import unittest

from harness import FerryTest

RANK_LOST = 6
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
# Settings that a rank needs where this machine lacks them, or guesses at them slowly.
ENVIRONMENT = {**os.environ, "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
               "OMPI_MCA_rmaps_base_oversubscribe": "1"}


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class Ranks(FerryTest):
    """Runs of several ranks."""

    def config(self, **changes):  # pylint: disable=arguments-differ
        # Long enough for ranks that share two busy cores with others: steps of an instant then take half a minute. Shorter than
        # what ends a test, so that ranks which do wait for ever still say for what.
        return super().config(**{"batch__micro_batch": 1, "batch__micro_batches": 12, "steps": 4,
                                 "clip_norm": 0.5, "zero__timeout_seconds": 200, **changes})

    def ranks(self, number, config, *arguments):
        return self.train(config, *arguments, through=[*MPIRUN, "-n", str(number)], env=ENVIRONMENT)

    def tight(self, ranks):
        """As little in memory as a rank can do with."""
        return {"budgets__nvme": [self.nvme()], "budgets__host": f"{ranks * 600}KiB",
                "swap__chunk_elements": 8192, "swap__state_on_nvme": 1, "swap__speculate": "all",
                "io__direct": False}

    def assert_left_nothing(self):
        self.assertEqual(os.listdir(self.path("nvme")), [])

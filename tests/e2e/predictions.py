"""What tests of `ferry plan` share."""

import os

from harness import FerryTest

EXAMPLE = os.path.join(os.path.dirname(__file__), "../../examples/3b_gpu.json")
SAVED = os.path.join(os.path.dirname(__file__), "machine_h100.json")


class PredictionTest(FerryTest):
    def plan(self, config, *arguments):
        return self.ferry("plan", self.command(config)[1], "--json", *arguments)

    def tiers(self, **changes):
        """Three tiers, all of the state stored."""
        return self.config(**{"budgets__nvme": [self.nvme()], "swap__state_on_nvme": 1, **changes})

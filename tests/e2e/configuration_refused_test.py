"""Keys and values that a configuration may not have."""

import unittest

from harness import USAGE
from refusals import Refusals


class ConfigurationTest(Refusals):
    def test_unknown_keys_name_the_nearest(self):
        self.refused(USAGE, ["unknown key \"batch.sequense\"", "config", "batch.sequence"],
                     batch__sequense=32)
        self.refused(USAGE, ["unknown key \"optimiser\"", "optimizer"], optimiser={"lr": 1})
        self.refused(USAGE, ["unknown key \"swap.chunks\"", "--set"], "--set", "swap.chunks=4096")
        self.refused(USAGE, ["unknown key", "budgets.nvme[0].sise", "size"],
                     budgets__nvme=[{"path": self.path("nvme"), "sise": 1}])

    def test_wrong_types_and_ranges(self):
        self.refused(USAGE, ["wrong type", "model.hidden", "text \"wide\""], model__hidden="wide")
        self.refused(USAGE, ["wrong type", "model", "array"], model=[])
        self.refused(USAGE, ["steps", "number 2.5"], steps=2.5)
        self.refused(USAGE, ["steps", "-3", "the nearest value allowed is 1"], steps=-3)
        self.refused(USAGE, ["precision", "fp32, bf16", "did you mean \"bf16\""], precision="bf61")
        self.refused(USAGE, ["budgets.host", "10 apples"], budgets__host="10 apples")
        self.refused(USAGE, ["io.block_bytes", "5000", "8192"], io__block_bytes=5000)
        self.refused(USAGE, ["swap.chunk_elements", "5000", "8192"], swap__chunk_elements=5000)
        self.refused(USAGE, ["swap.groups", "groups 3, micro_batches 4", "set groups 2"], swap__groups=3)
        self.refused(USAGE, ["swap.state_on_nvme", "budgets.nvme"], swap__state_on_nvme=0.5)
        self.refused(USAGE, ["optimizer.adjust_lr", "Muon's alone", "method adamw"], optimizer__adjust_lr="original")
        self.refused(USAGE, ["optimizer.adamw_tensors[0]", "matches no tensor"],
                     optimizer__method="muon", optimizer__adamw_tensors=["*no_such*"])
        self.refused(USAGE, ["muon has no matrix", "freeze"], optimizer__method="muon", freeze=["*proj*"])
        muon = self.command(self.config(optimizer__method="muon", batch__micro_batches=16))[1]
        self.assertEqual(self.ferry("plan", muon, "--ranks", "4").code, 0)
        self.assert_refused(self.ferry("plan", muon, "--ranks", "16"), USAGE, "matrices whole", "16 ranks: 73 %", "fewer ranks")
        self.refused(USAGE, ["weight of 16 bits", "bf16 or fp16"], optimizer__master="split", precision="fp32")
        self.refused(USAGE, ["freeze", "model.layer.*"], freeze=["model.layer.*"])
        self.refused(USAGE, ["freeze", "nothing to train"], freeze=["*"])

    def test_which_moments_are_coded_is_said(self):
        """q, o and the MLP's matrices of three blocks, and the head: k and v have 2,048 elements."""
        run = self.train(self.config(steps=1, optimizer__moments="int8"))
        self.assert_trained(run)
        self.assertIn("int8 moments: 16 tensors with 133120 parameters; fp32 moments: 14 with 29120", run.err)
        nothing = self.train(self.config(steps=1, optimizer__moments="int8", optimizer__fp32_moments=["*"]))
        self.assert_trained(nothing)
        self.assertIn("optimizer.moments int8 does nothing", nothing.err)
        for silent in ("bf16", "fp32"):
            self.assertNotIn("int8 moments", self.train(self.config(steps=1, optimizer__moments=silent)).err)

    def test_heads_that_do_not_divide(self):
        self.refused(USAGE, ["model.heads", "hidden 64, heads 7", "set heads 8"], model__heads=7)
        self.refused(USAGE, ["model.kv_heads", "heads 4, kv_heads 3", "set kv_heads"],
                     model__kv_heads=3)
        self.refused(USAGE, ["model.kv_heads", "set kv_heads 4"], model__kv_heads=12)
        self.refused(USAGE, ["model.head_dim", "head_dim 1", "even"], model__heads=64)

    def test_broken_files_and_command_lines(self):
        broken = self.path("broken.json")
        with open(broken, "w", encoding="utf-8") as file:
            file.write('{"steps": 3,\n "model": {"hidden" 64}}')
        self.assert_refused(self.ferry("train", broken), USAGE, "not valid JSON", "line 2")
        absent = self.path("absent.json")
        self.assert_refused(self.ferry("train", absent), USAGE, absent, "No such file")
        for arguments in ([], ["train"], ["fly"], ["train", broken, "--fast"],
                          ["train", broken, "--set"]):
            run = self.ferry(*arguments)
            self.assertEqual(run.code, USAGE, run.err)
            self.assertIn("--help", run.err + run.out)
            self.assertTrue(run.err.startswith("ferry: "), run.err)


if __name__ == "__main__":
    unittest.main()

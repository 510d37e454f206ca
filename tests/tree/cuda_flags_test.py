"""What the compiler made of the kernels that have the CPU's bits, on machines without a GPU: no
contracted multiply-add, exact division and square root, no flushing of denormals
(docs/numerics.md)."""

import os
import re
import unittest

from ptx import ptx_of


def faults(ptx):
    # Instructions that the source writes itself (division and square root in src/optim/cuda/formulas.h) are
    # not the compiler's choice; tests/contract/optim_cuda.cc compares their bits.
    code = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL)
    code = re.sub(r"//.*", "", code)
    wrong = r"\bfma\.\S*|\b(?:div|sqrt|rcp|rsqrt)\.(?:approx|full)\S*|\b\S*\.ftz\S*"
    return sorted(set(re.findall(wrong, code)))


class Flags(unittest.TestCase):
    def test_every_operation_rounds_once(self):
        for name in ("update", "coded"):
            ptx = ptx_of(f"src/optim/cuda/{name}.cu")
            if ptx is None:
                self.skipTest("built without CUDA")
            self.assertEqual(faults(ptx), [], name)
            missing = [operation for operation in ("div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "add.rn.f32")
                       if operation not in ptx]
            self.assertEqual(missing, [], name)

    def test_norm_leaves_round_every_square_and_sum(self):
        for name in ("src/ops/cuda/rows/round.cu", "src/optim/cuda/norms.cu"):
            ptx = ptx_of(name)
            if ptx is None:
                self.skipTest("built without CUDA")
            self.assertEqual(faults(ptx), [], name)
            missing = [operation for operation in ("mul.rn.f32", "add.rn.f32") if operation not in ptx]
            self.assertEqual(missing, [], name)

    def test_codecs_round_every_product_and_sum(self):
        operations = {"encode": ("div.rn.f32", "mul.rn.f32", "add.rn.f32", "cvt.rni.s32.f32"),
                      "decode": ("mul.rn.f32", "add.rn.f32"),
                      "sums": ("div.rn.f32", "mul.rn.f32", "add.rn.f32", "cvt.rni.s32.f32"),
                      "feedback": ("mul.rn.f32", "add.rn.f32")}
        for name, needed in operations.items():
            ptx = ptx_of(f"src/zero/cuda/{name}.cu")
            if ptx is None:
                self.skipTest("built without CUDA")
            self.assertEqual(faults(ptx), [], name)
            self.assertEqual([operation for operation in needed if operation not in ptx], [], name)

    def test_each_flag_is_needed(self):
        flags = (("-fmad=false", "-fmad=true", "fma.rn"), ("-prec-div=true", "-prec-div=false", "div.full"),
                 ("-prec-sqrt=true", "-prec-sqrt=false", "sqrt.approx"), ("-ftz=false", "-ftz=true", ".ftz"))
        quick = bool(os.environ.get("FERRY_QUICK_TESTS"))  # tools/test.sh --quick: the first, on what compiles in a second
        name = "norms" if quick else "update"
        for flag, wrong, shows in flags[:1] if quick else flags:
            with self.subTest(flag):
                ptx = ptx_of(f"src/optim/cuda/{name}.cu", [flag], [wrong])
                if ptx is None:
                    self.skipTest("built without CUDA")
                self.assertIn(shows, " ".join(faults(ptx)))


if __name__ == "__main__":
    unittest.main()

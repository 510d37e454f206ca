"""Kernels that start while the one before still runs wait for it, in code that was compiled for sm_90 or newer.
Code that the driver makes of sm_80's PTX on a newer GPU has no such wait, and src/ops/cuda/early_start.h must not start
it early: it asks for the version of the PTX, which only sm_90's reaches."""

import os
import re
import unittest

from ptx import ptx_of

WAIT, LET = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
SOURCES = ("sums_of_rows", "norm_forward")  # the smallest of those whose kernels all start early


def kernels(ptx):
    """The text of each entry."""
    return re.split(r"\.entry ", ptx)[1:]


class EarlyStart(unittest.TestCase):
    def ptx(self, name, architecture):
        ptx = ptx_of(f"src/ops/cuda/{name}.cu", architecture=architecture)
        if ptx is None:
            self.skipTest("built without CUDA")
        return ptx

    def test_code_for_sm_90_waits_before_it_touches_memory(self):
        quick = bool(os.environ.get("FERRY_QUICK_TESTS"))  # tools/test.sh --quick
        for name in SOURCES[:1] if quick else SOURCES:
            found = kernels(self.ptx(name, "90"))
            self.assertGreater(len(found), 0)
            for kernel in found:
                with self.subTest(kernel.split("(")[0]):
                    self.assertIn(WAIT, kernel)
                    before = kernel[:kernel.index(WAIT)]
                    self.assertNotRegex(before, r"\b(?:ld|st|atom|red)\.global|cp\.async")
                    if LET in kernel:
                        self.assertLess(kernel.index(WAIT), kernel.index(LET))

    def test_code_for_sm_80_does_not_and_is_told_apart_by_its_version(self):
        for name in SOURCES[:1]:
            ptx = self.ptx(name, "80")
            self.assertNotIn("griddepcontrol", ptx)
            self.assertIn(".target sm_80", ptx)


if __name__ == "__main__":
    unittest.main()

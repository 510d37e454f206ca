"""Kernels that start while the one before still runs wait for it, in code that was compiled for sm_90 or newer.
Code that the driver makes of sm_80's PTX on a newer GPU has no such wait, and src/ops/cuda/shared/early_start.h must not start
it early: it asks for the version of the PTX, which only sm_90's reaches."""

import os
import re
import unittest

from ptx import ptx_of

WAIT, LET = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
SOURCES = ("rows/sums_of_rows", "norms/norm_forward", "norms/rms_norm_backward", "norms/layer_norm_backward")  # all start early
QUICK = bool(os.environ.get("FERRY_QUICK_TESTS"))  # tools/test.sh --quick: the first alone, the backward ones compile for minutes
# Parameters, constants and what is the block's own are there before the kernel that ran last is through.
MEMORY = re.compile(r"\b(?:ld|ldu|st|atom|red|prefetch|prefetchu|cp|tex|tld4|suld|sust|sured|call)\.[\w.:]+")
OWN = re.compile(r"^(?:ld|st|atom|red)\.(?:\w+\.)*?(?:param|const|shared|local)\b")
LEAVES = re.compile(r"^\s*(?:@!?%\w+\s+)?(?:ret|exit|trap)\b", re.MULTILINE)
BRANCH = re.compile(r"\b(?:bra|brx\.idx)(?:\.uni)?\s+([^;]*)")


def kernels(ptx):
    """The text of each entry."""
    return re.split(r"\.entry ", ptx)[1:]


def faults_before_wait(kernel):
    """What a kernel does before it waits and must not: touch memory that others write, or get past the wait."""
    if WAIT not in kernel:
        return ["no wait"]
    before = re.sub(r"//.*", "", kernel[:kernel.index(WAIT)])
    labels = set(re.findall(r"^\s*(\$?\w+):", before, re.MULTILINE))
    past = [target.strip() for target in BRANCH.findall(before) if target.strip() not in labels]
    return [word for word in MEMORY.findall(before) if not OWN.match(word)] + \
        [found[0].strip() for found in LEAVES.finditer(before)] + [f"a branch to {target}" for target in past]


class Faults(unittest.TestCase):
    def test_what_comes_before_the_wait(self):
        def of(line, label=""):
            return faults_before_wait(f"k(.param .u64 p)\n{{\n{line}\n{label}\ngriddepcontrol.wait;\n$L_2:\nret;\n}}")
        for allowed in ("ld.param.u64 %rd1, [p];", "st.shared.u32 [%r1], %r2;", "ld.volatile.shared.u32 %r1, [%r2];",
                        "ld.const.u32 %r1, [c];", "add.s32 %r1, %r2, 1;"):
            self.assertEqual(of(allowed), [], allowed)
        self.assertEqual(of("@%p1 bra $L_1;", "$L_1:"), [])  # which waits all the same
        for wrong in ("ld.global.nc.v4.u32 {%r1}, [%rd1];", "ld.u32 %r1, [%rd1];", "st.volatile.global.u32 [%rd1], %r1;",
                      "cp.async.cg.shared.global [%r1], [%rd1], 16;", "atom.global.add.u32 %r1, [%rd1], 1;",
                      "@%p1 bra $L_2;", "bra.uni $L_2;", "@%p1 ret;", "exit;", "call.uni f, ();"):
            self.assertEqual(len(of(wrong)), 1, wrong)
        self.assertEqual(faults_before_wait("k()\n{ ret; }"), ["no wait"])


class EarlyStart(unittest.TestCase):
    def ptx(self, name, architecture):
        ptx = ptx_of(f"src/ops/cuda/{name}.cu", architecture=architecture)
        if ptx is None:
            self.skipTest("built without CUDA")
        return ptx

    def test_code_for_sm_90_waits_before_it_touches_memory(self):
        for name in SOURCES[:1] if QUICK else SOURCES:
            found = kernels(self.ptx(name, "90"))
            self.assertGreater(len(found), 0)
            for kernel in found:
                with self.subTest(kernel.split("(")[0]):
                    self.assertEqual(faults_before_wait(kernel), [])
                    if LET in kernel:
                        self.assertLess(kernel.index(WAIT), kernel.index(LET))

    def test_code_for_sm_80_does_not_and_is_told_apart_by_its_version(self):
        for name in SOURCES[:1]:
            ptx = self.ptx(name, "80")
            self.assertNotIn("griddepcontrol", ptx)
            self.assertIn(".target sm_80", ptx)


if __name__ == "__main__":
    unittest.main()

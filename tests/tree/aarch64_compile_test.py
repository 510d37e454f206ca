"""SIMD sources of the optimizer and of the codecs for processors this machine is not: NEON and SVE,
compiled by the cross compiler of the distribution (g++-aarch64-linux-gnu) and looked at, not run. What
must hold is what numerics.md asks of every target: no fused multiply-add, exact division and square root."""

import concurrent.futures
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER, DISASSEMBLER = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump"
HIGHWAY = pathlib.Path("/usr/include/hwy")
# The longest rule, one with a sign, and the norms with the casts; the others are made of the same. And the codecs.
SOURCES = ("optim/adamw", "optim/lion", "optim/norms", "zero/codec")
# Every target that the compiler and Highway have: those of one build with the baseline of ARMv8.
TARGETS = {"NEON", "SVE", "SVE2", "SVE_256", "SVE2_128"}
FUSED = re.compile(r"\t(f?n?m(?:la|ls|add|sub|ad|sb)|f(?:recpe|rsqrte)\w*)\s+[vzsd]\d+[.,]")


def missing():
    if not shutil.which(COMPILER):
        return f"{COMPILER} is not installed (package g++-aarch64-linux-gnu)"
    return "" if HIGHWAY.is_dir() else f"no Highway headers in {HIGHWAY}"


@unittest.skipIf(missing(), missing())
class Aarch64Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="ferry-aarch64-")
        cls.addClassCleanup(cls.folder.cleanup)
        # Highway alone: the host's other headers are not for this compiler.
        (pathlib.Path(cls.folder.name) / "hwy").symlink_to(HIGHWAY)

    def assembly(self, source, contract="off"):
        out = pathlib.Path(self.folder.name) / f"{source.name}-{contract}.o"
        subprocess.run([COMPILER, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror",
                        f"-ffp-contract={contract}", "-DHWY_SHARED_DEFINE",
                        f"-I{ROOT}/include", f"-I{ROOT}/src",
                        "-isystem", self.folder.name, "-c", source, "-o", out], check=True)
        return subprocess.run([DISASSEMBLER, "-d", "-C", "--no-show-raw-insn", out], check=True,
                              stdout=subprocess.PIPE, text=True).stdout

    def check(self, name):
        text = self.assembly(ROOT / f"src/{name}.cc")
        found = set(re.findall(r"\bN_(\w+)::(?:run|encode)_", text))
        return name, found, sorted({match.group(0) for match in FUSED.finditer(text)})

    def test_every_target_compiles_and_fuses_nothing(self):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for name, targets, fused in pool.map(self.check, SOURCES):
                self.assertEqual(targets, TARGETS, name)
                self.assertEqual(fused, [], name)

    def test_fusing_would_be_seen(self):
        source = pathlib.Path(self.folder.name) / "fused.cc"
        source.write_text("float f(float a, float b, float c) { return a * b + c; }\n"
                          "void g(float* a, const float* b) {\n"
                          "    for (int i = 0; i < 64; ++i) a[i] = a[i] * 3 + b[i]; }\n")
        self.assertRegex(self.assembly(source, "fast"), FUSED)
        self.assertNotRegex(self.assembly(source), FUSED)


if __name__ == "__main__":
    unittest.main()

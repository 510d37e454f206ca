"""Every kernel assembles for every architecture that ferry is for. nvcc 13 does not compile for Volta (sm_70)
any more: its PTX for the next one, sm_75, is assembled by the last assembler that knows Volta, CUDA 12's."""

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

from ptx import COMMANDS, kernel_files, ptx_of

WHEEL = "nvidia-cuda-nvcc-cu12==12.9.86"
PTX_VERSION = "8.8"  # the newest that CUDA 12.9 reads
ARCHITECTURES = (80, 89, 100, 120)  # one of each generation; the build compiles for 90
# tools/test.sh --quick: Volta's alone, the one that lacks something, and of the files those that are written otherwise for
# it. Two more of that kind, of the norms' backward, take nvcc a minute and the assembler another.
QUICK = bool(os.environ.get("FERRY_QUICK_TESTS"))
QUICK_FILES = ("coded.cu", "loss.cu", "tensor_attention.cu", "tensor_attention_backward.cu")
# Asynchronous copies came with sm_80.
NEEDS_AMPERE = """.version 8.8
.target sm_70
.address_size 64
.visible .entry wait() { cp.async.wait_all; ret; }
"""


def assembler():
    """CUDA 12.9's ptxas: named by FERRY_PTXAS12, kept beside the build, or fetched there."""
    given = os.environ.get("FERRY_PTXAS12")
    kept = Path(given) if given else COMMANDS.parent / "ptxas-12.9"
    if kept.exists():
        return kept
    with tempfile.TemporaryDirectory(prefix="ferry-ptxas-") as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL],
                       check=True, timeout=300, capture_output=True)
        wheel = zipfile.ZipFile(next(Path(folder).glob("*.whl")))
        part = kept.with_suffix(".part")
        with wheel.open("nvidia/cuda_nvcc/bin/ptxas") as packed, open(part, "wb") as out:
            shutil.copyfileobj(packed, out)
    part.chmod(0o755)
    part.rename(kept)
    return kept


def assemble(ptxas, ptx, architecture):
    return subprocess.run([ptxas, f"-arch=sm_{architecture}", "-o", "/dev/null", "-"], input=ptx, text=True,
                          capture_output=True, timeout=600, check=False)


class Kernels(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not kernel_files():
            raise unittest.SkipTest("built without CUDA")

    def assert_assemble(self, check):
        files = [file for file in kernel_files() if not QUICK or os.path.basename(file) in QUICK_FILES]
        self.assertGreaterEqual(len(files), len(QUICK_FILES))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for file, results in pool.map(lambda file: (file, check(file)), files):
                for architecture, result in results.items():
                    with self.subTest(file, architecture=architecture):
                        self.assertEqual(result.returncode, 0, result.stderr[-2000:])


@unittest.skipIf(QUICK, "quick: the build compiles for some of these")
class Newer(Kernels):
    def test_every_kernel_assembles(self):
        ptxas = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"

        def check(file):
            ptx = ptx_of(file, architecture="80")  # nothing asks for more (__CUDA_ARCH__)
            return {architecture: assemble(ptxas, ptx, architecture) for architecture in ARCHITECTURES}
        self.assert_assemble(check)


class Volta(Kernels):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        try:
            cls.ptxas = assembler()
        except (OSError, subprocess.SubprocessError) as error:
            raise unittest.SkipTest(f"no CUDA 12 assembler here (FERRY_PTXAS12), and none could be "
                                    f"fetched: {error}") from error

    def test_every_kernel_assembles(self):
        def check(file):
            ptx = ptx_of(file, architecture="75")
            ptx = re.sub(r"^\.version .*$", f".version {PTX_VERSION}", ptx, count=1, flags=re.M)
            ptx = re.sub(r"^\.target sm_75", ".target sm_70", ptx, count=1, flags=re.M)
            return {70: assemble(self.ptxas, ptx, 70)}
        self.assert_assemble(check)

    def test_what_volta_lacks_is_seen(self):
        result = assemble(self.ptxas, NEEDS_AMPERE, 70)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("sm_80", result.stderr)


if __name__ == "__main__":
    unittest.main()

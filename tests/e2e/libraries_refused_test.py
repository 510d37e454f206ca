"""A driver, processors and settings that the libraries of the computation cannot do with."""

import os
import platform
import re
import unittest

from harness import DOES_NOT_FIT, USAGE
from refusals import Refusals

OLD_DRIVER = os.path.join(os.environ.get("FERRY_BUILD_DIR", ""), "old_driver")


class LibrariesTest(Refusals):
    def test_a_gpu_where_there_is_none_or_too_small_a_part_of_one(self):
        run = self.train(self.config(device="cuda", budgets__device="100MiB"))
        if run.code == DOES_NOT_FIT:  # there is a GPU: its context alone is larger
            self.assert_refused(run, DOES_NOT_FIT, "budgets.device", "missing")
        else:
            self.assert_refused(run, USAGE, "where:    device", "choose device cpu")
        self.refused(USAGE, ["numerics.residual", "bf16 compute"], precision="fp16",
                     numerics__residual="bf16")
        self.refused(USAGE, ["numerics.wire", "loss scaling"], precision="bf16",
                     numerics__wire="fp16")

    def test_the_program_starts_without_nvidias_libraries(self):
        """They take longer to load than a short run on the CPU."""
        listed = self.ferry(env={**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"})
        self.assertIn("libc.so", listed.out)
        self.assertNotRegex(listed.out, "nccl|cudnn|cublas|nvrtc|cudart|libcuda")

    @unittest.skipUnless(os.path.isdir(OLD_DRIVER), "built without CUDA")
    def test_a_driver_that_is_too_old(self):
        libraries = f"{OLD_DRIVER}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        run = self.train(self.config(device="cuda"), env={**os.environ, "LD_LIBRARY_PATH": libraries})
        self.assert_refused(run, USAGE, "driver is too old", "knows CUDA 11.4", "built with CUDA 1",
                            "update the driver")

    @unittest.skipUnless(platform.machine() == "x86_64", "OpenBLAS's kernels are named for x86-64")
    def test_kernels_that_this_processor_has_no_instructions_for(self):
        with open("/proc/cpuinfo", encoding="ascii") as file:
            flags = re.search(r"^flags\s*: (.*)$", file.read(), re.M)[1].split()
        tried = 0
        for core, flag in (("Bulldozer", "fma4"), ("bulldozer", "fma4"), ("Opteron", "3dnow"), ("SkylakeX", "avx512f")):
            if flag in flags:
                continue
            run = self.train(self.config(steps=1), env={**os.environ, "OPENBLAS_CORETYPE": core})
            self.assert_refused(run, USAGE, "no instructions for", "OPENBLAS_CORETYPE", "unset it")
            tried += 1
        self.assertGreater(tried, 0)

    @unittest.skipUnless(platform.machine() == "x86_64", "OpenBLAS's kernels are named for x86-64")
    def test_kernels_that_openblas_does_not_have(self):
        for core in ("bogus", "Haswel", "SkylakeX ", "\x1b[2J"):
            run = self.train(self.config(steps=1), env={**os.environ, "OPENBLAS_CORETYPE": core})
            shown = core.replace("\x1b", "\\x1b")
            self.assert_refused(run, USAGE, "OpenBLAS has no kernels of this name", "OPENBLAS_CORETYPE", shown,
                                "Prescott", "unset it")
        for core in ("", "prescott", "PRESCOTT"):
            run = self.train(self.config(steps=1), env={**os.environ, "OPENBLAS_CORETYPE": core})
            self.assert_trained(run)
            self.assertNotIn("OPENBLAS_CORETYPE is", run.err)

    def test_numbers_that_openblas_does_not_read(self):
        for name, value, said in (("OPENBLAS_VERBOSE", "yes", 1), ("OPENBLAS_VERBOSE", "1", 0),
                                  ("OPENBLAS_BLOCK_FACTOR", "12x", 1), ("OPENBLAS_THREAD_TIMEOUT", "-3", 1),
                                  ("OPENBLAS_THREAD_TIMEOUT", "", 0), ("OPENBLAS_NUM_THREADS", "many", 0)):
            with self.subTest(f"{name}={value}"):
                run = self.train(self.config(steps=1), env={**os.environ, name: value})
                self.assert_trained(run)
                self.assertEqual(run.err.count(f"{name} is \"{value}\""), said, run.err)


if __name__ == "__main__":
    unittest.main()

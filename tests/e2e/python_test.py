"""The Python package as its users get it: a wheel is built around this build's libferry.so, installed
and tested with pytest (tests/python). Where torch is not installed its tests are skipped by name."""

import os
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = os.environ.get("FERRY_BUILD_DIR", "")
PYTHON = ROOT / "build/python/bin/python"


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False, **options)
    if done.returncode:
        raise AssertionError(f"{command[1:4]} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


class PythonPackage(unittest.TestCase):
    def test_the_wheel(self):
        if not BUILD or not (Path(BUILD) / "libferry.so").exists():
            self.skipTest("FERRY_BUILD_DIR names no build with libferry.so")
        if not PYTHON.exists():
            self.skipTest("no build/python: tools/install-packages.sh python makes it")
        work = Path(BUILD) / "python"
        for old in work.glob("*.whl"):
            old.unlink()
        offline = [PYTHON, "-m", "pip", "--disable-pip-version-check"]
        run(*offline, "wheel", "-q", "--no-index", "--no-build-isolation", "--no-deps", "-w", work, ROOT,
            f"--config-settings=cmake.define.FERRY_BUILD_DIR={BUILD}", f"--config-settings=build-dir={work}/build")
        wheels = list(work.glob("*.whl"))
        self.assertEqual(len(wheels), 1)
        run(*offline, "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target", work / "site", *wheels)
        print(run(PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", ROOT / "tests/python", cwd=work,
                  env={**os.environ, "PYTHONPATH": str(work / "site")}))


if __name__ == "__main__":
    unittest.main()

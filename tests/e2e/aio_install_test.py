"""aio as a library of its own: built without the rest of ferry, installed, found by another project
through its CMake package, and used by examples/minimal.cc."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(minimal LANGUAGES CXX)
find_package(ferry_aio 0.1 REQUIRED)
add_executable(minimal ${SOURCE})
target_link_libraries(minimal PRIVATE ferry::aio)
add_library(plugin SHARED ${SOURCE})
target_link_libraries(plugin PRIVATE ferry::aio)
target_link_options(plugin PRIVATE -Wl,-z,defs)
"""


def run(*command):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise AssertionError(f"{command[0]} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


class Install(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir="/var/tmp")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def install(self):
        build, prefix = self.folder / "build", self.folder / "prefix"
        run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            "-DFERRY_ONLY_AIO=ON", "-DFERRY_TESTS=OFF")
        run("cmake", "--build", build)
        run("cmake", "--install", build, "--component", "aio", "--prefix", prefix)
        return prefix

    def test_the_example_builds_against_the_installed_package(self):
        prefix = self.install()
        headers = sorted(path.name for path in prefix.rglob("*.h"))
        self.assertEqual(headers, ["aio.h", "aio_kinds.h", "error.h", "executor.h", "streams.h", "units.h", "user_files.h"])
        libraries = sorted(path.name for path in prefix.rglob("*.a"))
        self.assertEqual(libraries, ["libferry_aio.a", "libferry_base.a"])
        for config in prefix.rglob("*.cmake"):
            self.assertNotIn(str(ROOT), config.read_text(), "the package points into its sources")

        project, build = self.folder / "project", self.folder / "project" / "build"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(PROJECT)
        run("cmake", "-S", project, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}",
            f"-DSOURCE={ROOT / 'examples' / 'minimal.cc'}")
        run("cmake", "--build", build)
        storage = self.folder / "storage"
        storage.mkdir()
        said = run(build / "minimal", storage)
        self.assertIn("every byte came back", said)
        self.assertEqual(os.listdir(storage), [])

        linked = run("ldd", build / "minimal")
        for library in ("hwloc", "tbb", "openblas", "cuda"):
            self.assertNotIn(library, linked)


if __name__ == "__main__":
    unittest.main()

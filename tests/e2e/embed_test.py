"""ferry as a package: installed, found by other projects through CMake and pkg-config, and used by
examples/embed.cc (the static libraries) and examples/embed.c (the C ABI in libferry.so)."""

import os
import re
import shlex
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = os.environ.get("FERRY_BUILD_DIR", "")
HEADER = (ROOT / "include/ferry/ferry.h").read_text()
C99 = ["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(host LANGUAGES C CXX)
find_package(ferry 0.1 REQUIRED)
foreach(target aio pinned_mem swap optim engine c ferry)
    if(NOT TARGET ferry::${target})
        message(FATAL_ERROR "no target ferry::${target}")
    endif()
endforeach()
add_executable(embed ${EXAMPLES}/embed.cc)
target_link_libraries(embed PRIVATE ferry::swap ferry::optim ferry::pinned_mem)
add_executable(embed_c ${EXAMPLES}/embed.c)
target_link_libraries(embed_c PRIVATE ferry::c m)
add_executable(feed_c ${EXAMPLES}/feed.c)
target_link_libraries(feed_c PRIVATE ferry::c)
add_executable(engine engine.cc)
target_link_libraries(engine PRIVATE ferry::engine)
"""
# A program of the engine's own: it links all of ferry, and is told what is wrong.
ENGINE = """
#include <cstdio>
#include "ferry/train.h"
int main() try {
    auto executor = ferry::make_thread_executor();
    ferry::train::Runtime runtime{.executor = executor.get()};
    ferry::train::Engine::make(ferry::parse_config("{}", "here", {}), std::move(runtime))->step();
} catch (const ferry::Error& error) {
    std::puts(error.what());
    return error.exit_code();
}
"""


def run(*command, code=0, **options):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode != code:
        raise AssertionError(f"{command[0]} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def listed():
    """The version of each name that the library is to export."""
    nodes = re.findall(r"^(FERRY_[\d.]+) \{(.*?)^\}", (ROOT / "src/capi/ferry.map").read_text(), re.MULTILINE | re.DOTALL)
    return {name: version for version, names in nodes for name in re.findall(r"^ +(ferry_\w+);$", names, re.MULTILINE)}


def declared():
    return sorted(re.findall(r"FERRY_API\s[^;(]*?\b(ferry_\w+)\(", HEADER))


class Symbols(unittest.TestCase):
    def test_the_list_is_the_header(self):
        self.assertGreater(len(listed()), 50)
        self.assertEqual(sorted(listed()), declared())

    def test_the_library_exports_the_list(self):
        library = Path(BUILD) / "libferry.so"
        if not BUILD or not library.exists():
            self.skipTest("libferry.so is not built")
        lines = run("nm", "-D", "--defined-only", "--with-symbol-versions", library).splitlines()
        symbols = {line.split()[-1]: line.split()[-2] for line in lines}
        versions = {name for name, kind in symbols.items() if kind == "A"}
        self.assertEqual({name.rstrip("@").split("@")[0] for name in versions}, set(listed().values()))
        self.assertEqual(sorted(set(symbols) - versions), sorted(f"{name}@@{version}" for name, version in listed().items()))

    def test_each_is_called_at_random_and_with_handles_that_are_none(self):
        """Under the sanitizers too: the asan-ubsan preset runs test_capi."""
        tests = {name: (ROOT / f"tests/contract/capi_{name}.cc").read_text() for name in ("random", "handles")}
        called = {name: set(re.findall(r"\b(ferry_\w+)\b", text)) for name, text in tests.items()}
        self.assertEqual(set(declared()) - called["random"], set())
        refused = re.search(r"\bexpect_no_call_takes\(.*?^TEST\(CapiHandles, OfAnotherKind", tests["handles"], re.MULTILINE | re.DOTALL)[0]
        takes = {name for name, arguments in re.findall(r"FERRY_API\s[^;(]*?\b(ferry_\w+)\(([^;]*)\);", HEADER)
                 if re.search(r"\bferry_(aio|files|pool|store|team|engine)\* ", arguments)}
        self.assertGreater(len(takes), 40)
        self.assertEqual(takes - set(re.findall(r"\b(ferry_\w+)\(", refused)), set())

    def test_it_brings_none_of_nvidia_s_libraries(self):
        """A process has one of each name, and another part of it may want its own (torch does)."""
        library = Path(BUILD) / "libferry.so"
        if not BUILD or not library.exists():
            self.skipTest("libferry.so is not built")
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library))
        self.assertIn("libc.so.6", needed)
        self.assertEqual([name for name in needed if re.match("lib(nccl|cudnn|cublas|cudart|nvrtc|cuda|mpi)", name)], [])
        # Each of them is looked for when it is called.
        undefined = run("nm", "-D", "--undefined-only", library)
        self.assertNotRegex(undefined, r"\b(nccl|cudnn|cublas|nvrtc|MPI_)")


class Header(unittest.TestCase):
    def test_it_is_c99_and_cxx(self):
        for compiler in (C99, ["g++", "-x", "c++", "-std=c++11", "-pedantic", "-Wall", "-Wextra", "-Werror"]):
            with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
                source.write('#include "ferry/ferry.h"\nint main(void) { ferry_path path; '
                             "FERRY_INIT(path); return (int)path.size * 0; }\n")
                source.flush()
                run(*compiler, "-fsyntax-only", f"-I{ROOT}/include", source.name)


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not BUILD or not (Path(BUILD) / "ferry").exists():
            raise unittest.SkipTest("FERRY_BUILD_DIR names no build with the program")
        folder = tempfile.TemporaryDirectory(dir="/var/tmp")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.prefix = cls.folder / "prefix"
        run("cmake", "--install", BUILD, "--prefix", cls.prefix)
        cls.environment = {**os.environ, "PKG_CONFIG_PATH": ":".join(
            str(path) for path in cls.prefix.rglob("pkgconfig"))}

    def storage(self):
        storage = Path(tempfile.mkdtemp(dir=self.folder))
        self.addCleanup(lambda: self.assertEqual(os.listdir(storage), []))
        return storage

    def flags(self, *packages):
        return shlex.split(run("pkg-config", "--cflags", "--libs", *packages, env=self.environment))

    def test_cmake_finds_it(self):
        for config in self.prefix.rglob("*.cmake"):
            self.assertNotIn(str(ROOT), config.read_text(), "the package points into its sources")
        project = self.folder / "project"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(PROJECT)
        (project / "engine.cc").write_text(ENGINE)
        run("cmake", "-S", project, "-B", project / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DEXAMPLES={ROOT / 'examples'}")
        run("cmake", "--build", project / "build", "-j2")
        for program in ("embed", "embed_c"):
            self.assertIn("the loss fell", run(project / "build" / program, self.storage()))
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            self.assertRegex(run(project / "build" / "feed_c", folder), r"checkpoint: \d+ bytes\n61 batches; the loss fell")
        self.assertIn("here", run(project / "build" / "engine", code=2))
        # Whoever takes a part takes no more than that.
        self.assertNotRegex(run("ldd", project / "build" / "embed"), "openblas|libmpi|nccl|cudnn|cublas")

    def test_pkg_config_finds_it(self):
        cxx = self.folder / "embed"
        run("g++", "-std=c++20", "-O2", ROOT / "examples/embed.cc", "-o", cxx,
            *self.flags("ferry-swap", "ferry-optim", "ferry-pinned-mem"))
        self.assertIn("the loss fell", run(cxx, self.storage()))
        c = self.folder / "embed_c"
        library = next(self.prefix.rglob("libferry.so")).parent
        run(*C99, "-O2", ROOT / "examples/embed.c", "-o", c, *self.flags("ferry"), "-lm",
            f"-Wl,-rpath,{library}")
        self.assertIn("the loss fell", run(c, self.storage()))

    def test_the_program_runs_where_it_is_installed(self):
        self.assertIn("train", run(self.prefix / "bin" / "ferry", "--help"))


if __name__ == "__main__":
    unittest.main()

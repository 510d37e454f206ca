"""include/ferry/ is what an embedder calls: each header compiles alone, with no other folder to look in,
and so pulls in nothing of the engine's own."""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = sorted((ROOT / "include/ferry").glob("*.h"))
COMPILER = os.environ.get("CXX") or shutil.which("g++") or "c++"


def compile_alone(text):
    """The compiler's complaints of a source that sees include/ and the system's headers alone."""
    with tempfile.TemporaryDirectory(prefix="ferry-headers-") as folder:
        source = pathlib.Path(folder) / "alone.cc"
        source.write_text(text)
        done = subprocess.run([COMPILER, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
                               f"-I{ROOT}/include", source], capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""


class PublicHeaders(unittest.TestCase):
    def test_each_compiles_alone(self):
        self.assertGreater(len(HEADERS), 10)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for header, complaint in zip(HEADERS, pool.map(
                    lambda h: compile_alone(f'#include "ferry/{h.name}"\n'), HEADERS)):
                self.assertEqual(complaint, "", header.name)

    def test_each_includes_public_headers_alone(self):
        for header in HEADERS:
            for include in re.findall(r'^\s*#\s*include\s+"([^"]+)"', header.read_text(), re.MULTILINE):
                self.assertTrue((ROOT / "include" / include).is_file(), f"{header.name}: {include}")

    def test_none_names_a_module_that_has_no_header_here(self):
        """Not even to declare a type of it."""
        modules = {folder.name for folder in (ROOT / "src").iterdir() if folder.is_dir()}
        modules -= {header.stem for header in HEADERS}
        for header in HEADERS:
            text = re.sub(r"//.*", "", header.read_text())
            named = {name for name in modules if re.search(rf"namespace {name}\b|\b{name}::", text)}
            self.assertEqual(named, set(), header.name)

    def test_an_embedder_gets_what_it_names(self):
        # Types of the engine that train.h only names must not be needed to set up a run.
        self.assertEqual(compile_alone("""
            #include "ferry/lease.h"
            #include "ferry/pinned_mem.h"
            #include "ferry/train.h"
            double loss(ferry::Executor& executor, const char* path) {
                ferry::train::Runtime runtime{.executor = &executor};
                const auto machine = ferry::this_machine();
                ferry::NodeTeams teams(*machine, 2);
                ferry::pinned_mem::Pool pool(*machine, ferry::kGiB);
                pool.reserve("buffers", ferry::kMiB, teams);
                return ferry::train::Engine::make(ferry::load_config(path, {}), std::move(runtime))
                    ->step().loss;
            }
            """), "")

    def test_a_user_of_aio_gets_no_random_numbers(self):
        self.assertIn("Purpose", compile_alone('#include "ferry/aio.h"\n'
                                               "auto p = ferry::Purpose::shuffle;\n"))

    def test_a_user_of_leases_gets_no_schedules(self):
        for name in ("Lane", "Tier", "Object"):
            self.assertIn(name, compile_alone('#include "ferry/lease.h"\n#include "ferry/train.h"\n'
                                              f"ferry::swap::{name} thing;\n"))


if __name__ == "__main__":
    unittest.main()

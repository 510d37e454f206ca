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
# One of two ranks that share a unique id by means of their own: a file.
RANK = """
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "ferry/ferry.h"
static int64_t load(void* context, int64_t step, int64_t sequences, int64_t sequence, int32_t* tokens, int32_t* targets) {
    int64_t i;
    (void)context;
    for (i = 0; i < sequences * sequence; ++i) tokens[i] = (int32_t)((step + i) % 64), targets[i] = (int32_t)((step + i + 1) % 64);
    return sequences;
}
static void must(ferry_status status) {
    if (status == FERRY_OK) return;
    fprintf(stderr, "%s\\n", ferry_last_error());
    _exit(status);
}
static void make_id(const char* path, char* id) {
    void* const nccl = dlopen("libnccl.so.2", RTLD_NOW);
    int (*get)(void*) = NULL;
    char fresh[4096];
    FILE* file;
    if (!nccl) _exit(77);
    *(void**)&get = dlsym(nccl, "ncclGetUniqueId");
    if (!get || get(id) != 0) _exit(77);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    file = fopen(fresh, "wb");
    if (!file || fwrite(id, 1, 128, file) != 128 || fclose(file) != 0 || rename(fresh, path) != 0) _exit(78);
}
int main(int argc, char** argv) { /* CONFIG RANK ID REFUSED SAVED */
    char id[128];
    FILE* file;
    ferry_engine_options options;
    ferry_engine* engine;
    ferry_step_report report;
    uint64_t hash;
    if (argc != 6) return 2;
    FERRY_INIT(options);
    FERRY_INIT(report);
    options.rank = options.gpu = atoi(argv[2]);
    options.ranks = 2;
    if (options.rank == 0) {
        make_id(argv[3], id);
    } else {
        while (!(file = fopen(argv[3], "rb"))) usleep(10000);
        if (fread(id, 1, 128, file) != 128) return 78;
        fclose(file);
    }
    options.config_file = argv[1];
    options.nccl_unique_id = id;
    options.load = load;
    must(ferry_engine_create(&options, &engine));
    must(ferry_engine_step(engine, &report));
    printf("%d\\n%s\\n", (int)ferry_engine_save(engine, options.rank == 0 ? argv[4] : argv[5]), ferry_last_error());
    printf("%d\\n%s\\n", (int)ferry_engine_export(engine, options.rank == 0 ? argv[4] : argv[5], FERRY_F32), ferry_last_error());
    must(ferry_engine_save(engine, argv[5]));
    must(ferry_engine_step(engine, &report));
    must(ferry_engine_state_hash(engine, &hash));
    printf("%.17g %llu\\n", report.loss, (unsigned long long)hash);
    must(ferry_engine_destroy(engine));
    return 0;
}
"""
TWO_GPUS = """{"model": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocab": 64}, "device": "cuda",
    "batch": {"sequence": 16, "micro_batch": 1, "micro_batches": 4}, "zero": {"stage": 3, "timeout_seconds": 60}, "steps": 4}"""


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

    def test_two_ranks_bring_a_unique_id(self):
        """And hear at once, both of them, where the first one cannot write."""
        if sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev")) < 2:
            self.skipTest("no two NVIDIA GPUs")
        place = Path(tempfile.mkdtemp(dir=self.folder))
        (place / "rank.c").write_text(RANK)
        (place / "config.json").write_text(TWO_GPUS)
        (place / "refused").write_text("no directory")
        library = next(self.prefix.rglob("libferry.so")).parent
        run("gcc", "-std=gnu99", "-O2", place / "rank.c", "-o", place / "rank", *self.flags("ferry"), "-ldl", f"-Wl,-rpath,{library}")
        ranks = [subprocess.Popen([str(word) for word in (place / "rank", place / "config.json", rank, place / "id",
                                                          place / "refused", place / "saved")], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
        said = [(*rank.communicate(timeout=300), rank.returncode) for rank in ranks]
        if said[0][2] == 77:
            self.skipTest("no NCCL")
        self.assertEqual([code for _, _, code in said], [0, 0], said)
        self.assertEqual(said[0][0], said[1][0])  # statuses, texts, loss and hash
        self.assertEqual(said[0][0].count(str(place / "refused")), 2, said[0][0])
        self.assertEqual(re.findall(r"^2$", said[0][0], re.MULTILINE), ["2", "2"])
        self.assertTrue((place / "saved/step-00000001").is_dir())

    def test_the_program_runs_where_it_is_installed(self):
        self.assertIn("train", run(self.prefix / "bin" / "ferry", "--help"))


if __name__ == "__main__":
    unittest.main()

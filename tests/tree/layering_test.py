"""Holds the sources to the dependency graph that CMakeLists.txt states.

A module is a ferry_module line. What others may include of it, its contract, is public in
include/ferry/ or lies beside its sources: <module>.h and what CONTRACTS adds. Its files may include
the headers beside them, its own contract, base's and those of the modules it DEPENDS on; nothing else
of the project. A contract is included by its path: "ferry/aio.h", "ops/ops.h". The graph has no cycle,
every arrow of it is used, and so is every header and every module; every source is built by a target. Nor do files include each other in
a circle: a source, the header of its name, contract or not, and <name>_impl.h count as one file. Nor do the rooms of a module, its folder and those in it (but for cuda/, which holds the other half
of the files beside it).
"""

import os
import re
import sys
import unittest
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]

# A public header (include/ferry/) that does not bear its module's name.
OWNERS = {"error": "base", "units": "base", "dtype": "base", "device_kind": "base", "aio_kinds": "base", "codec_kind": "base", "optim_kinds": "base", "executor": "base",
          "streams": "base", "user_files": "aio", "lease": "swap", "learning_rate": "optim", "export": "train", "team": "topology", "ferry": "capi"}
# The contract headers in a module's folder beside <module>.h.
CONTRACTS = {"base": "bugs checksum cpu_time cuda_values files json_reader log median of_rank philox-inl process_limits progress random simd_dispatch simd_targets text threads widen-inl words",
             "aio": "published_run", "ops": "attention_tiles blas_kernels block_lists matrix_kernels part_attention patterns product_table slow_paths stopwatch timed_ops timed_stream view",
             "model": "gradients huggingface saved_activations", "planner": "recording/recorder request work",
             "checkpoint": "array_file file_writer io_memory manifest stripe_sums saved steps tensors_ahead",
             "zero": "codec feedback stage_order", "config": "words", "cost": "bound drives estimate kernel_times layout_seconds layouts measurements operands operation_table operations rank_layout simulator traffic",
             "swap": "objects schedule store", "data": "fed_batches tokens", "train": "setup/from_config inside setup/loader_of step/momentum_schedule setup/rank_share saving/export setup/stages state/saving prediction/config_facts prediction/predictor prediction/kernel_profile measuring/planning_measurements prediction/rehearsal"}
# Which module may depend on which: the design. base is everybody's. An arrow that CMakeLists.txt
# states and this table does not is a change of the design: it wants a decision record first
# (docs/decisions/0005, 0011 and 0031 hold those made so far). A row is of a module that there is.
ALLOWED = {
    "trace": "", "topology": "", "config": "", "data": "", "aio": "",
    "device": "", "pinned_mem": "device topology", "ops": "device topology",
    "comm": "device", "optim": "device topology", "swap": "aio device trace",
    "zero": "comm device model", "checkpoint": "aio topology", "model": "ops",
    "cost": "zero model swap", "planner": "cost config model swap aio zero",
    "train": "planner cost zero data checkpoint optim model comm config swap aio pinned_mem device ops "
             "topology trace",
    # The C ABI, on top of what an embedder calls.
    "capi": "train config swap aio pinned_mem optim device topology",
}
# Tests are built by the name of their module; what else tests/ holds, by cmake/ferry.cmake, which names it or all of a folder.
# python/CMakeLists.txt takes all of python/src.
TEST_FOLDERS = ("tests/unit", "tests/contract", "tests/sim", "tests/golden")
WHOLE_FOLDERS = ("tests/support", "tests/fuzz", "python/src")
# Packages that are included with quotes.
PACKAGES = ("hwy/",)


class Module:
    def __init__(self, kind, name, folder, depends, sources):
        self.kind, self.name, self.folder = kind, name, folder
        self.contract = {f"{folder}/{stem}.h" for stem in [name, *CONTRACTS.get(name, "").split()]}
        self.depends = depends
        self.sources = sources  # those of its folder that belong to it; empty: all

    def owns(self, path):
        if not self.sources:
            return path.startswith(self.folder + "/")
        # A header belongs to the source of the same name.
        return os.path.splitext(path)[0] in [os.path.splitext(s)[0] for s in self.sources]

    def builds(self, path):
        """Whether its target takes this source (cmake/ferry.cmake: which folders it looks into)."""
        if self.sources:
            return path in self.sources
        inner = PurePosixPath(path).relative_to(self.folder).parts[:-1]
        if self.kind == "ferry_program":
            return path.endswith(".cc") and len(inner) <= 1
        if inner == () or inner[0] == "cuda" and len(inner) <= 2:
            return path.endswith((".cc", ".cu"))
        return len(inner) == 1 and path.endswith(".cc")  # a room


def parse_modules(cmake):
    """The ferry_module and ferry_program lines, by name."""
    cmake = re.sub(r"#.*", "", cmake)
    modules = {}
    for kind, body in re.findall(r"\b(ferry_module|ferry_program)\(([^)]*)\)", cmake):
        name, folder, *words = body.split()
        lists, keyword = {"DEPENDS": [], "USES": [], "SOURCES": []}, "USES"
        for word in words:
            if word in lists:
                keyword = word
            else:
                lists[keyword].append(word)
        modules[name] = Module(kind, name, folder, lists["DEPENDS"], lists["SOURCES"])
    return modules


def find_cycle(arrows):
    """The names along one cycle, or None. `arrows`: what each name leads to."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name):] + [name]
        if name in done or name not in arrows:
            return None
        path.append(name)
        for other in arrows[name]:
            cycle = visit(other)
            if cycle:
                return cycle
        path.pop()
        done.add(name)
        return None

    for name in arrows:
        cycle = visit(name)
        if cycle:
            return cycle
    return None


def find_header(path, include, files):
    """The file that `path` includes by this name, or None: beside it, public, or from src/ or the root."""
    for folder in (os.path.dirname(path), "include", "src", "."):
        target = os.path.normpath(os.path.join(folder, include))
        if target in files:
            return target
    return None


def file_arrows(files):
    """What a file includes, by name: extensions left out, and what says that a header is the inside of its class."""
    def name_of(path):
        return os.path.splitext(path)[0].removesuffix("_impl")

    arrows = {}
    for path, text in sorted(files.items()):
        found = {find_header(path, include, files) for include in quoted_includes(text)} - {None}
        arrows.setdefault(name_of(path), set()).update(name_of(f) for f in found)
    return {name: sorted(to - {name}) for name, to in arrows.items()}


def room_arrows(files, modules):
    """For each module, which of its rooms include which others of them."""
    arrows = {}
    for module in modules.values():
        inside = {path: str(PurePosixPath(path).parent) for path in files if not module.sources and module.owns(path)}
        rooms = arrows.setdefault(module.name, {})
        for path, room in inside.items():
            found = {inside.get(find_header(path, include, files)) for include in quoted_includes(files[path])}
            rooms.setdefault(room, set()).update(found - {None, room})
        rooms.pop(f"{module.folder}/cuda", None)
    return arrows


def quoted_includes(text):
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)


class Checker:
    """`files` maps paths, relative to the root, to their text."""

    def __init__(self, cmake, files, allowed=None):
        self.allowed = allowed
        self.modules = parse_modules(cmake)
        self.files = files
        self.problems = []
        self.used = set()    # paths of headers that another file includes
        self.arrows = set()  # (module, module) that an include needs

    def run(self):
        cycle = find_cycle({name: module.depends for name, module in self.modules.items()})
        if cycle:
            self.problems.append("cycle: " + " -> ".join(cycle))
        cycle = find_cycle(file_arrows(self.files))
        if cycle:
            self.problems.append("cycle of files: " + " -> ".join(cycle))
        for rooms in room_arrows(self.files, self.modules).values():
            cycle = find_cycle({room: sorted(to) for room, to in sorted(rooms.items())})
            if cycle:
                self.problems.append("cycle of rooms: " + " -> ".join(cycle))
        for name in self.allowed or ():
            if name not in self.modules:
                self.problems.append(f"ALLOWED: {name} is no module of CMakeLists.txt")
        for module in self.modules.values():
            for other in module.depends:
                if self.forbids(module, other):
                    self.problems.append(f"CMakeLists.txt: {module.name} DEPENDS on {other}, "
                                         "which the design does not allow (ALLOWED)")
                if other not in self.modules:
                    self.problems.append(f"CMakeLists.txt: {module.name} DEPENDS on {other}, "
                                         "which is no module")
        for path, text in sorted(self.files.items()):
            self.check_file(path, text)
        self.check_used()
        return self.problems

    def forbids(self, module, other):
        return (self.allowed is not None and module.kind == "ferry_module" and other != "base"
                and other not in self.allowed.get(module.name, "").split())

    def owner_of(self, path):
        """The module that a file belongs to, or None."""
        pure = PurePosixPath(path)
        if str(pure.parent) == "include/ferry":
            name = OWNERS.get(pure.stem, pure.stem)
            return name if name in self.modules else None
        found = [m for m in self.modules.values() if m.owns(path)]
        return max(found, key=lambda m: len(m.folder)).name if found else None

    def check_file(self, path, text):
        owner = self.owner_of(path)
        if owner is None:
            self.problems.append(f"{path}: belongs to no module of CMakeLists.txt")
            return
        if path.endswith((".cc", ".cu")) and not self.modules[owner].builds(path):
            self.problems.append(f"{path}: no target builds it")
        if re.search(r"#\s*include\s+<ferry/", text):
            self.problems.append(f"{path}: include the project's headers with quotes")
        for include in quoted_includes(text):
            self.check_include(path, owner, include)

    def check_include(self, path, owner, include):
        if include.startswith(PACKAGES):
            return
        target = find_header(path, include, self.files)
        if target is None or ".." in PurePosixPath(include).parts:
            self.problems.append(f'{path}: "{include}" is no header beside it and no contract')
            return
        if target != path:
            self.used.add(target)
        other = self.owner_of(target)
        public = target.startswith("include/")
        if other is None or (not public and other != owner and target not in self.modules[other].contract):
            self.problems.append(f'{path}: "{include}" is no contract header')
        elif other not in (owner, "base"):
            self.arrows.add((owner, other))
            if other not in self.modules[owner].depends:
                self.problems.append(f'{path}: includes "{include}", and {owner} does not '
                                     f"DEPEND on {other}")

    def check_used(self):
        for path in sorted(self.files):
            if path.endswith(".h") and path not in self.used:
                self.problems.append(f"{path}: nobody includes it")
        wanted = {other for module in self.modules.values() for other in module.depends}
        for module in self.modules.values():
            built = any(self.owner_of(p) == module.name and p.endswith(".cc") for p in self.files)
            if not built:
                self.problems.append(f"CMakeLists.txt: {module.name} has no sources")
            if module.kind == "ferry_module" and module.name not in wanted:
                self.problems.append(f"CMakeLists.txt: nobody depends on {module.name}")
            for other in module.depends:
                used = other == "base" or (module.name, other) in self.arrows
                if not used and other in self.modules:
                    self.problems.append(f"CMakeLists.txt: {module.name} DEPENDS on {other} and "
                                         "includes nothing of it")


def read_tree(root):
    modules = parse_modules((root / "CMakeLists.txt").read_text())
    folders = {"include", "src"} | {m.folder for m in modules.values()}
    files = {}
    for folder in folders:
        for path in (root / folder).rglob("*"):
            if path.suffix in (".cc", ".h", ".cu"):
                files[path.relative_to(root).as_posix()] = path.read_text()
    return files


def unbuilt_beside_modules(sources, cmake, modules):
    """Of the sources that belong to no module, those that no line of CMake takes."""
    def is_built(path):
        folder, name = os.path.split(path)
        if folder in TEST_FOLDERS:
            built = name.endswith(".cc") and any(name.startswith(module + "_") for module in modules)
            return built or f"/{path}" in cmake
        return (folder in WHOLE_FOLDERS and name.endswith(".cc")) or f"/{path}" in cmake
    return sorted(path for path in sources if not is_built(path))


class Tree(unittest.TestCase):
    def test_the_sources_keep_to_the_graph(self):
        files = read_tree(ROOT)
        self.assertGreater(len(files), 10)
        problems = Checker((ROOT / "CMakeLists.txt").read_text(), files, ALLOWED).run()
        self.assertEqual(problems, [], "\n" + "\n".join(problems))

    def test_helpers_of_the_tests_are_used(self):
        texts = {p: p.read_text() for folder in ("tests", "bench")
                 for p in (ROOT / folder).rglob("*") if p.suffix in (".cc", ".h", ".cu")}
        names = {PurePosixPath(i).name for text in texts.values() for i in quoted_includes(text)}
        unused = [str(p) for p in texts if p.suffix == ".h" and p.name not in names]
        self.assertEqual(unused, [])

    def test_commands_print_in_one_place(self):
        """tools/output/output.h: else what a reader or a full disk does to the output becomes the command's own error, and
        what a file's name holds reaches the terminal."""
        texts = {path.relative_to(ROOT).as_posix(): re.sub(r"//.*", "", path.read_text())
                 for path in (ROOT / "tools").rglob("*") if path.suffix in (".cc", ".h")}
        printing = re.compile(r"fmt::print|std::cout|(?<![\w:])(?:std::)?(?:printf|puts|putchar)\(")
        self.assertEqual([path for path, text in texts.items() if printing.search(text)], [])
        # It throws: only before the work, and at the end.
        throwing = {path for path, text in texts.items() if re.search(r"\bcheck_output\(\)", text)}
        self.assertEqual(throwing - {"tools/output/output.h", "tools/output/output.cc"}, {"tools/main.cc", "tools/launch/cmd_launch.cc"})

    def test_the_program_has_rooms_that_say_what_they_hold(self):
        """tools/commands.h names them; above them are that header and main alone."""
        top = {path.name for path in (ROOT / "tools").iterdir() if path.suffix in (".cc", ".h")}
        self.assertEqual(top, {"main.cc", "commands.h"})
        rooms = sorted({path.parent.name for path in (ROOT / "tools").glob("*/*.cc")})
        said = re.findall(r"^//   (\w+) +\S", (ROOT / "tools/commands.h").read_text(), re.MULTILINE)
        self.assertEqual(sorted(said), rooms)

    def test_rooms_of_train_stand_in_their_order(self):
        """CONTRIBUTING.md's table: each includes only those above it."""
        table = re.findall(r"^\| (?:`(\w+)`|the folder (itself)) \| ", (ROOT / "CONTRIBUTING.md").read_text().partition("room of `src/train`")[2],
                           re.MULTILINE)
        place = {f"src/train/{room}" if room else "src/train": number for number, (room, _) in enumerate(table)}
        arrows = room_arrows(read_tree(ROOT), parse_modules((ROOT / "CMakeLists.txt").read_text()))["train"]
        self.assertEqual(set(arrows) - set(place), set())
        self.assertEqual([(room, other) for room, others in arrows.items() for other in others if place[other] > place[room]], [])

    def test_the_python_package_stands_on_the_c_abi(self):
        sources = [*(ROOT / "python/src").iterdir()]
        self.assertGreater(len(sources), 5)
        included = {include for path in sources for include in quoted_includes(path.read_text())}
        self.assertEqual(included, {"core.h", "transfers.h", "ferry/ferry.h"})

    def test_every_source_is_built(self):
        cmake = (ROOT / "CMakeLists.txt").read_text()
        modules = parse_modules(cmake)
        inside = read_tree(ROOT)
        for path in ROOT.glob("cmake/*.cmake"):
            cmake += path.read_text()
        beside = {path.relative_to(ROOT).as_posix() for suffix in ("cc", "cu", "cpp", "c")
                  for top in ROOT.iterdir() if top.is_dir() and top.name not in ("build", "shared")
                  and not top.name.startswith(".") for path in top.rglob(f"*.{suffix}")} - set(inside)
        self.assertGreater(len(beside), 50)
        self.assertEqual(unbuilt_beside_modules(beside, cmake, set(modules)), [])


class TheCheckItself(unittest.TestCase):
    """A small tree that is in order, and one fault at a time."""

    CMAKE = """
        ferry_module(base src/base USES spdlog::spdlog)
        ferry_module(disk disk DEPENDS base  # the kernel seam
                     USES PkgConfig::uring)
        ferry_program(ferry tools DEPENDS disk base)"""
    FILES = {
        "include/ferry/base.h": "#pragma once\n",
        "include/ferry/disk.h": '#include "ferry/base.h"\n',
        "src/base/base.cc": '#include "ferry/base.h"\n#include <spdlog/spdlog.h>\n',
        "disk/disk.cc": '#include "ferry/disk.h"\n#include "queue.h"\n',
        "disk/queue.h": "#pragma once\n",
        "tools/main.cc": '#include "ferry/base.h"\n#include "ferry/disk.h"\n',
    }

    def problems(self, files=None, cmake=CMAKE):
        return Checker(cmake, {**self.FILES, **(files or {})}).run()

    def expect(self, part, files=None, cmake=CMAKE):
        problems = self.problems(files, cmake)
        self.assertTrue(any(part in problem for problem in problems), (part, problems))

    def test_in_order(self):
        self.assertEqual(self.problems(), [])

    def test_forbidden_arrow(self):
        self.expect("base does not DEPEND on disk",
                    {"src/base/up.cc": '#include "ferry/disk.h"\n'})

    def test_arrow_that_the_design_does_not_know(self):
        cmake = self.CMAKE + """
            ferry_module(net net DEPENDS base disk)"""
        files = {**self.FILES, "include/ferry/net.h": '#include "ferry/disk.h"\n',
                 "net/net.cc": '#include "ferry/net.h"\n',
                 "tools/main.cc": self.FILES["tools/main.cc"] + '#include "ferry/net.h"\n'}
        cmake = cmake.replace("tools DEPENDS disk base", "tools DEPENDS disk net base")
        self.assertEqual(Checker(cmake, files, {"net": "disk"}).run(), [])
        problems = Checker(cmake, files, {"net": "base"}).run()
        self.assertEqual(len(problems), 1)
        self.assertIn("net DEPENDS on disk, which the design does not allow", problems[0])
        self.assertEqual(Checker(cmake, files, {"net": "disk", "wire": "net"}).run(),
                         ["ALLOWED: wire is no module of CMakeLists.txt"])

    def test_another_modules_private_header(self):
        self.expect("no header beside it", {"tools/a.cc": '#include "queue.h"\n'})
        self.expect("no header beside it", {"tools/a.cc": '#include "../disk/queue.h"\n'})
        self.expect('"disk/queue.h" is no contract', {"tools/a.cc": '#include "disk/queue.h"\n'})

    def test_a_contract_beside_the_sources(self):
        self.assertEqual(self.problems({"src/base/base.h": "\n", "disk/a.cc": '#include "base/base.h"\n'}), [])
        self.assertEqual(self.problems({"src/base/log.h": "\n", "disk/a.cc": '#include "base/log.h"\n'}), [])

    def test_cycle(self):
        self.expect("cycle: base -> disk -> base",
                    cmake=self.CMAKE.replace("src/base USES", "src/base DEPENDS disk USES"))

    def test_unused(self):
        self.expect("disk/old.h: nobody includes it", {"disk/old.h": "#pragma once\n"})
        self.expect("nobody depends on disk", cmake=self.CMAKE.replace("DEPENDS disk base",
                                                                       "DEPENDS base"))
        self.expect("ferry DEPENDS on disk and includes nothing of it",
                    {"tools/main.cc": '#include "ferry/base.h"\n'})

    def test_strangers(self):
        self.expect("belongs to no module", {"src/lost/a.cc": "\n"})
        self.expect("and no contract", {"tools/a.cc": '#include "ferry/none.h"\n'})
        self.expect("no module", cmake=self.CMAKE.replace("DEPENDS base ", "DEPENDS base gone "))
        self.expect("has no sources", cmake=self.CMAKE + "ferry_module(new new DEPENDS base)")

    def test_sources_that_nothing_builds(self):
        for path in ("src/base/deep/er/a.cc", "src/base/deep/a.cu", "src/base/cuda/deep/er/a.cu", "tools/deep/er/a.cc", "tools/a.cu"):
            self.expect(f"{path}: no target builds it", {path: "\n"})
        self.assertEqual(self.problems({"src/base/cuda/a.cu": "\n", "src/base/cuda/b.cc": "\n",
                                        "src/base/cuda/room/a.cu": "\n", "tools/deep/a.cc": "\n"}), [])
        cmake = "add_library(x MODULE ${PROJECT_SOURCE_DIR}/tests/e2e/named.cc)"
        sources = {"tests/unit/disk_a.cc", "tests/unit/gone_a.cc", "tests/unit/disk_a.cu", "tests/support/a.cc",
                   "tests/support/deep/a.cc", "tests/e2e/named.cc", "tests/e2e/a.cc", "python/a.cc"}
        self.assertEqual(unbuilt_beside_modules(sources, cmake, {"disk"}),
                         ["python/a.cc", "tests/e2e/a.cc", "tests/support/deep/a.cc", "tests/unit/disk_a.cu",
                          "tests/unit/gone_a.cc"])

    def test_programs_that_share_a_folder(self):
        cmake = self.CMAKE + """
            ferry_program(one bench DEPENDS disk SOURCES bench/one.cc)
            ferry_program(two bench DEPENDS base SOURCES bench/two.cc)"""
        files = {"bench/one.cc": '#include "one.h"\n', "bench/one.h": '#include "ferry/disk.h"\n',
                 "bench/two.cc": '#include "ferry/base.h"\n'}
        self.assertEqual(self.problems(files, cmake), [])
        self.expect("two does not DEPEND on disk",
                    {**files, "bench/two.cc": '#include "ferry/disk.h"\n'}, cmake)
        self.expect("bench/three.cc: belongs to no module", {**files, "bench/three.cc": "\n"}, cmake)

    def test_files_in_a_circle(self):
        files = {"disk/queue.cc": '#include "queue.h"\n#include "ring.h"\n', "disk/ring.h": "\n",
                 "disk/ring.cc": '#include "ring.h"\n'}
        self.assertEqual(self.problems(files), [])
        files["disk/ring.cc"] += '#include "queue.h"\n'
        self.expect("cycle of files: disk/queue -> disk/ring -> disk/queue", files)

    def test_contracts_in_a_circle(self):
        files = {"src/base/log.h": "\n", "src/base/log_impl.h": '#include "base/log.h"\n',
                 "src/base/log.cc": '#include "log_impl.h"\n', "disk/a.cc": '#include "base/log.h"\n'}
        self.assertEqual(self.problems(files), [])
        files["src/base/text.h"] = "\n"
        files["src/base/text.cc"] = '#include "base/text.h"\n#include "base/log.h"\n'
        files["src/base/log.cc"] += '#include "base/text.h"\n'
        self.expect("cycle of files: src/base/log -> src/base/text -> src/base/log", files)

    def test_rooms_in_a_circle(self):
        files = {"disk/a.cc": '#include "disk/room/b.h"\n', "disk/c.h": "\n", "disk/room/b.h": "\n",
                 "disk/room/b.cc": '#include "b.h"\n'}
        self.assertEqual([p for p in self.problems(files) if "cycle" in p], [])
        files["disk/room/b.cc"] += '#include "disk/c.h"\n'
        self.expect("cycle of rooms: disk -> disk/room -> disk", files)


if __name__ == "__main__":
    sys.exit(unittest.main())

#!/usr/bin/env python3
"""Runs clang-tidy over sources, but for those that it has passed as they are.

    tools/tidy.py [--all] FILE...

Needs build/release, built: it says by which command a source is compiled and which headers it includes. A source is
looked at again when one of these, the source or .clang-tidy has changed; --all looks at every one. What passed is kept
under ~/.cache/ferry (XDG_CACHE_HOME), for every checkout, and forgotten ninety days after it was last asked for.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/release"
PASSED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ferry" / "tidy.json"
KEPT_SECONDS = 90 * 86400
TIDY = "clang-tidy-16"


def commands():
    """The command of each source, by its path from the root."""
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    return {os.path.relpath(entry["file"], ROOT): entry["command"] for entry in entries}


def included():
    """What each object was made of, by its name, as ninja noted it. An object that is older than that has no entry."""
    text = subprocess.run(["ninja", "-C", BUILD, "-t", "deps"], capture_output=True, text=True, check=True).stdout
    found = {}
    for block in text.split("\n\n"):
        head, *files = block.strip().split("\n")
        match = re.match(r"(\S+): #deps \d+, deps mtime \d+ \(VALID\)", head)
        if match:
            found[match[1]] = [file.strip() for file in files]
    return found


@functools.lru_cache(maxsize=None)
def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def key_of(source, command, files):
    """Everything that clang-tidy's findings in a source depends on. Paths are of this checkout: they are left out."""
    parts = [source, digest(ROOT / ".clang-tidy"), command.replace(str(ROOT), "")]
    parts += [digest((BUILD / file).resolve()) for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def passed_before():
    """The keys of what has passed, each with when it was last asked for."""
    try:
        return json.loads(PASSED.read_text())
    except (OSError, ValueError):
        return {}


def keep(keys):
    now = time.time()
    kept = {key: when for key, when in passed_before().items() if now - when < KEPT_SECONDS}
    kept.update(dict.fromkeys(keys, now))
    PASSED.parent.mkdir(parents=True, exist_ok=True)
    part = PASSED.with_name(f"{PASSED.name}.{os.getpid()}")
    part.write_text(json.dumps(kept))
    part.replace(PASSED)


def look_at(source):
    done = subprocess.run([TIDY, "--quiet", "--warnings-as-errors=*", "-p", BUILD, source], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "warnings generated" not in line]
    return done.returncode == 0, "\n".join([done.stdout, *errors]).strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("sources", nargs="+")
    options = parser.parse_args()
    made_by, made_of = commands(), included()
    passed = {} if options.all else passed_before()
    keys = {}
    for source in options.sources:
        command = made_by[source]
        files = made_of.get(re.search(r" -o (\S+)", command)[1])
        keys[source] = key_of(source, command, files) if files else None
    todo = [source for source in options.sources if keys[source] not in passed]
    good = [keys[source] for source in options.sources if keys[source] in passed]
    failed = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for source, (passes, text) in zip(todo, pool.map(look_at, todo)):
            if not passes:
                failed.append(source)
                print(text)
            elif keys[source]:
                good.append(keys[source])
                keep(good)
    keep(good)
    print(f"tidy: {len(options.sources)} sources, {len(options.sources) - len(todo)} of them as they have passed before")
    sys.exit(f"tidy: {len(failed)} failed" if failed else 0)


if __name__ == "__main__":
    main()

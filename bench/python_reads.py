#!/usr/bin/env python3
"""Reads awaited in asyncio, beside the same reads in C++: one file, the same blocks, as many at once.

    bench/python_reads.py                    256 KiB, 1 MiB and 8 MiB
    bench/python_reads.py --dir /mnt/nvme    on this drive

ferry's Files and aio::UserFiles read a file of the script's own around the page cache, 32 blocks at once (8 MiB: 8). A
process a side and round; its figure leaves out what comes before the first read. Needs the package of python/ and
bench_file_reads (docs/embedding.md). No model is trained, so there is no configuration and neither --set nor --tokens.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import common

TARGET = 0.95
SIZES = {"4KiB": (4 << 10, 32), "256KiB": (256 << 10, 32), "1MiB": (1 << 20, 32), "8MiB": (8 << 20, 8)}


async def read_all(work):
    import ferry_offload as ferry
    with ferry.Files() as files, ferry.Pool(work["block"] * work["at_once"] + (2 << 20)) as pool:
        file = files.open(work["file"])
        blocks, reads = files.size(file) // work["block"], iter(range(work["reads"]))
        memory = pool.reserve(work["block"] * work["at_once"], "buffers").numpy("uint8").reshape(work["at_once"], -1)

        async def reader(buffer):
            for read in reads:  # all readers share it
                await files.submit_read(file, buffer, read % blocks * work["block"])

        start = time.perf_counter()
        await asyncio.gather(*(reader(buffer) for buffer in memory))
        seconds = time.perf_counter() - start
        del memory
    return seconds


def ran(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise common.SideFailed(done.stderr.strip()[-2000:])
    return float(done.stdout.splitlines()[-1])


def rows_of(options, file):
    rows = []
    for name in options.blocks:
        block, at_once = SIZES[name]
        reads = max(at_once, int(options.gib * 2**30) // block)
        reads = min(reads, 100_000)
        work = {"file": str(file), "block": block, "at_once": at_once, "reads": reads}
        sides = {"Python": lambda work=work: ran([sys.executable, __file__, "--child", json.dumps(work)]),
                 "C++": lambda work=work: ran([options.reads, *(str(work[key]) for key in ("file", "block", "at_once", "reads"))])}
        found = {side: [reads * block / 1e9 / s for s in seconds]
                 for side, seconds in common.turns(sides, options.rounds, options.seconds).items()}
        if len(found) == 2:
            rows.append(common.compared(f"awaited reads of {name}, {at_once} at once", found["Python"], found["C++"], "GB/s",
                                        TARGET if block >= 256 << 10 else None, less_is_better=False))
    return rows


def main():
    if sys.argv[1:2] == ["--child"]:
        print(asyncio.run(read_all(json.loads(sys.argv[2]))))
        return
    parser = common.parser_of(__doc__, rounds=7)
    parser.set_defaults(ferry=None)  # it is not run
    parser.add_argument("--reads", default=str(common.ROOT / "build/release/bench_file_reads"), help="the C++ side")
    parser.add_argument("--dir", help="where the file is; default: the system's temporary directory")
    parser.add_argument("--blocks", nargs="+", choices=list(SIZES), default=["256KiB", "1MiB", "8MiB"], help="of a read")
    parser.add_argument("--gib", type=float, default=2, help="read a turn; the file is as large")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.gib, options.rounds, options.blocks = 1 / 64, 1, ["256KiB"]
    if not importlib.util.find_spec("ferry_offload"):
        sys.exit("python3 cannot import ferry_offload: docs/embedding.md says how to install it")
    if not Path(options.reads).is_file():
        parser.error(f"--reads: {options.reads} is no program: build bench_file_reads (-DFERRY_BENCHES=ON), or name another")
    with common.scratch(options.dir) as directory:
        file = directory / "file"
        with open(file, "wb") as out:
            for _ in range(max(1, int(options.gib * 2**30) >> 24)):
                out.write(os.urandom(1 << 24))
            out.flush()
            os.fsync(out.fileno())
        rows = rows_of(options, file)
    if not rows:
        sys.exit("nothing could be measured")
    common.report(options, rows)


if __name__ == "__main__":
    main()

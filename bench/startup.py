#!/usr/bin/env python3
"""How long until the first step: a model of 10 B initialised at random and laid out over the tiers.

From the program's start to the plan that it prints when everything stands, beside the bytes planned for
NVMe at fio's write bandwidth, taken before and after. It is ended then, before its first step.

A virtual machine may hand out memory for the first time far more slowly than it writes. So as many bytes as the
host budget are touched before all rounds, by a process on each core, and once more: how long either takes is told.

    bench/startup.py --path /var/tmp
"""
import mmap
import multiprocessing
import os
import statistics
import sys
import threading
import time

import common
import needs
from common import compared, plain
from training import GIB, TINY, Child, Storage, words_of

CONFIG = common.ROOT / "examples/solar_10b.json"
TARGET = 1 / 1.2  # of the bytes' time over the start-up
POPULATE_WRITE = 23  # of madvise, as <linux/mman.h> has it


def touch(size, all_touched):
    with mmap.mmap(-1, size) as memory:
        try:
            memory.madvise(POPULATE_WRITE)
            all_touched.wait()  # else another process would get the same memory
        except OSError:
            all_touched.abort()
        except threading.BrokenBarrierError:
            pass  # the script has ended it


def touching_seconds(size):
    """Of so many bytes of memory that nothing has used, by a process on each core."""
    cores = len(os.sched_getaffinity(0))
    share = max(size // cores // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    all_touched = multiprocessing.Barrier(cores + 1)
    processes = [multiprocessing.Process(target=touch, args=(share, all_touched)) for _ in range(cores)]
    begin = time.monotonic()
    for process in processes:
        process.start()
    try:
        all_touched.wait(timeout=600)
        return time.monotonic() - begin
    except threading.BrokenBarrierError:
        sys.exit(f"{size / GIB:.3g} GiB of memory could not be touched within 600 s: the plan's host memory is more "
                 "than this machine has free; give less with --host")
    finally:
        all_touched.abort()
        for process in processes:
            process.join()


class Start:
    """One start, with its files in `volume`: its seconds, the bytes it wrote to drives, its peak of host memory."""

    def __init__(self, options, words, volume):
        self.seconds = 0.0
        with Child([options.ferry, "train", str(CONFIG), "--no-bound", *words]) as child:
            for text, at in child.lines():
                if "parameters (" in text:
                    self.seconds = at
                    break
            self.written = written_by(child.process.pid) if self.seconds else 0
            child.end(kill=self.seconds > 0)  # else it ended by itself and has said why
            self.host_peak = child.host_peak
        for file in volume.iterdir():
            file.unlink(missing_ok=True)  # they would be in the way of fio's


def written_by(pid):
    """Bytes that a process has written to drives."""
    with open(f"/proc/{pid}/io", encoding="ascii") as file:
        return int(dict(line.split(": ") for line in file)["write_bytes"])


def rows_of(planned, starts, rates, touching=()):
    """`rates`: fio's, around each start; `touching`: seconds, the first time and again."""
    rows = [plain(f"touching as much memory, {when}", [seconds], "s")
            for when, seconds in zip(("the first time", "again"), touching)]
    rows += [plain("start-up", [start.seconds for start in starts], "s"),
            plain("planned on NVMe", planned / 1e9, "GB"),
            plain("written until then", [start.written / 1e9 for start in starts], "GB"),
            plain("host memory in use", [start.host_peak / GIB for start in starts], "GiB")]
    if all(rates):
        rows.append(compared("start-up beside its bytes at fio's write bandwidth", [start.seconds for start in starts],
                             [planned / rate for rate in rates], "s", TARGET,
                             note=f"fio {statistics.median(rates) / 1e9:.3g} GB/s"))
    return rows


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--path", type=needs.directory, default="/var/tmp", help="directory for the volume")
    parser.add_argument("--host", help="host budget instead of the configuration's")
    needs.add_fio_option(parser)
    options = parser.parse_args()
    needs.fio(options)
    config = common.config_of(CONFIG)
    with common.scratch() as directory, common.scratch(options.path) as volume:
        settings = {"data.tokens": common.tokens_for(options, config, directory),
                    "budgets.nvme": [{**config["budgets"]["nvme"][0], "path": str(volume)}],
                    **({"budgets.host": options.host} if options.host else {})}
        if options.tiny:
            settings.update({**TINY, "budgets.host": "600KiB", "budgets.nvme": [str(volume)]})
        plan = needs.plan(options, CONFIG, settings)
        planned = plan["nvme_bytes"]
        needs.room(options.path, planned)
        touching = [touching_seconds(plan["host_bytes"]) for _ in range(2)]
        words = words_of(settings, options.settings)
        storage = Storage(options, volume, "write")
        runs = common.turns({"start-up": lambda: storage.around(lambda: Start(options, words, volume))}, options.rounds,
                            options.seconds)
    if not runs:
        sys.exit("nothing could be measured")
    common.report(options, rows_of(planned, *zip(*runs["start-up"]), touching), [storage.missing] if storage.missing else [])


if __name__ == "__main__":
    main()

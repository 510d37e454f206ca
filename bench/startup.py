#!/usr/bin/env python3
"""How long until the first step: a model of 10 B initialised at random and laid out over the tiers.

From the program's start to the plan that it prints when everything stands; it is ended then, before its first step.
Beside it fio writes as many bytes as are planned for NVMe, in turns: to a new file like the start-up, and as long, for a
drive may write faster in the first second than in the tenth.

A virtual machine may hand out memory for the first time far more slowly than it writes. So as many bytes as the
host budget are touched before all rounds, by a process on each core, and once more: how long either takes is told.

    bench/startup.py --path /var/tmp
"""
import json
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time

import common
import needs
from common import SideFailed, compared, plain
from training import GIB, TINY, Child, words_of

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
        empty(volume)


def empty(volume):
    """What one side wrote would be in the way of the other's."""
    for file in volume.iterdir():
        file.unlink(missing_ok=True)


def fio_seconds(volume, size):
    """That fio writes so many bytes for, in blocks of 1 MiB, 32 at a time, past the page cache where there is one."""
    direct = needs.file_system(volume) != "tmpfs"
    done = subprocess.run(["fio", "--name=startup", f"--directory={volume}", f"--size={size}", "--rw=write", "--bs=1M",
                           f"--direct={direct:d}", "--ioengine=io_uring", "--iodepth=32", "--output-format=json"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
                          env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})  # else in small pieces
    empty(volume)
    if done.returncode != 0:
        raise SideFailed(f"it ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return size / json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]["write"]["bw_bytes"]


def written_by(pid):
    """Bytes that a process has written to drives."""
    with open(f"/proc/{pid}/io", encoding="ascii") as file:
        return int(dict(line.split(": ") for line in file)["write_bytes"])


def rows_of(planned, starts, fio, touching=()):
    """`fio`: its seconds, one a start, or none; `touching`: seconds, the first time and again."""
    rows = [plain(f"touching as much memory, {when}", [seconds], "s")
            for when, seconds in zip(("the first time", "again"), touching)]
    rows += [plain("start-up", [start.seconds for start in starts], "s"),
             plain("planned on NVMe", planned / 1e9, "GB"),
             plain("written until then", [start.written / 1e9 for start in starts], "GB"),
             plain("host memory in use", [start.host_peak / GIB for start in starts], "GiB")]
    if fio:
        rows.append(compared("start-up beside fio writing its bytes", [start.seconds for start in starts], fio, "s", TARGET,
                             note=f"fio {planned / statistics.median(fio) / 1e9:.3g} GB/s"))
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
        if planned == 0:
            sys.exit("everything fits into memory, so nothing would be written: give a smaller --host")
        needs.room(options.path, planned)
        touching = [touching_seconds(plan["host_bytes"]) for _ in range(2)]
        words = words_of(settings, options.settings)
        sides = {"start-up": lambda: Start(options, words, volume)}
        if not options.without_fio:
            sides["fio"] = lambda: fio_seconds(volume, planned)
        runs = common.turns(sides, options.rounds, options.seconds)
    if "start-up" not in runs:
        sys.exit("nothing could be measured")
    notes = [] if runs.get("fio") else ["fio is left out"]
    common.report(options, rows_of(planned, runs["start-up"], runs.get("fio"), touching), notes)


if __name__ == "__main__":
    main()

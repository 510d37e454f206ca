#!/usr/bin/env python3
"""What a call through the C ABI costs beside what it does, in nanoseconds; the reference is a microsecond.

    bench/capi_calls.py --program build/release/bench_capi --dir /mnt/nvme

Each row is the best of seven rounds of 100,000 calls. A refused call, which makes a text, has no target. --tiny
measures the same once.
"""
import re
import subprocess

import common

MOST = 1000.0  # ns
LINE = re.compile(r"(.*\S) +(\d+) ns")


def main():
    parser = common.parser_of(__doc__)
    parser.set_defaults(ferry=None)  # it is not run
    parser.add_argument("--program", type=common.program, required=True, help="bench_capi, as it was built")
    parser.add_argument("--dir", help="where the store's file is; default: the system's temporary directory")
    options = parser.parse_args()
    found = {}
    with common.scratch(options.dir) as directory:
        for _ in range(1 if options.tiny else options.rounds):
            said = subprocess.run([options.program, str(directory)], check=True, capture_output=True, text=True).stdout
            for name, nanoseconds in LINE.findall(said):
                found.setdefault(name, []).append(float(nanoseconds))
    rows = [common.judged(name, sorted(times)[len(times) // 2], "ns", MOST, [MOST / one for one in times],
                          None if "refused" in name else 1.0) for name, times in found.items()]
    common.report(options, rows)


if __name__ == "__main__":
    main()

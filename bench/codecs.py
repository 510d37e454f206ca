#!/usr/bin/env python3
"""The rate of the codecs of what ranks exchange, beside a copy of the same values by as many threads.

    bench/codecs.py --program build/release/bench_codecs --threads 2
    bench/codecs.py --program build/release/bench_codecs --device cuda     # beside a copy within its memory

Rates are of the memory that a pass reads and writes. --tiny takes a million values, which lie in a cache.
"""
import re
import subprocess

import common

LEAST = 0.8  # of a copy
LINE = re.compile(r"\s*((?:int\d|signs) in blocks of \d+) +(\w+) +([\d.]+) GB/s")
COPY = re.compile(r"copy: ([\d.]+) GB/s")


def main():
    parser = common.parser_of(__doc__)
    parser.add_argument("--program", type=common.program, required=True, help="bench_codecs, as it was built")
    parser.add_argument("--threads", type=common.at_least(1), default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    on = str(options.threads) if options.device == "cpu" else "gpu"
    rates, copies = {}, []
    for _ in range(options.rounds):
        said = subprocess.run([options.program, on, "1" if options.tiny else "64"], check=True,
                              capture_output=True, text=True).stdout
        copies.append(float(COPY.search(said)[1]))
        for codec, what, rate in LINE.findall(said):
            rates.setdefault(f"{codec}: {what}", []).append(float(rate))
    rows = [common.compared(name, found, copies, "GB/s", LEAST, less_is_better=False) for name, found in rates.items()]
    common.report(options, rows, [f"{options.threads} threads" if options.device == "cpu" else "the GPU"])


if __name__ == "__main__":
    main()

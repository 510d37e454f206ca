#!/usr/bin/env python3
"""DeepSpeed's CPU-Adam with the unscale and the cast that its users pay for, beside ferry's one pass.

    bench/adam_deepspeed.py [--millions 128] [--threads 1 8 16]

Both sides in turns, a process each (DeepSpeed's OpenMP team and torch's are fixed at start-up): the
medians of the rounds in nanoseconds a parameter, and the median of the rounds' ratios, DeepSpeed /
ferry (1.5 is asked for). Both have fp32 gradients and bf16 weights. Where python3 cannot import DeepSpeed
ferry is measured alone. No model is trained, so there is no configuration and neither --set nor --tokens.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import common

TARGET = 1.5
PARTS = ("update", "unscale", "cast")


def timed(work, calls):
    work()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def child(elements, threads, calls):
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(threads)
    weight = torch.nn.Parameter(torch.full((elements,), 0.01))
    weight.grad = torch.full((elements,), 0.001)
    half = torch.empty(elements, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([weight], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    work = {"update": optimizer.step,
            # 1 exactly: the same bytes, and no gradient that shrinks into denormals.
            "unscale": lambda: weight.grad.mul_(1.0),
            "cast": lambda: half.copy_(weight.data)}
    print(json.dumps({part: timed(work[part], calls) / elements * 1e9 for part in PARTS}))


def of_deepspeed(options, threads):
    command = [sys.executable, __file__, "--child", str(threads), "--millions",
               str(options.millions), "--calls", str(options.calls)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)
    if done.returncode != 0:
        raise common.SideFailed(done.stderr.strip()[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def of_ferry(options, threads):
    command = [options.ferry, "bench", "adam", "--json", "--in-place", "--gradient", "fp32", "--pairs",
               str(options.calls), "--threads", str(threads), "--millions", str(options.millions)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)  # it has said why
    return json.loads(done.stdout)["rows"][0]["value"]


def row_of(options, threads, sides):
    found = common.turns({name: lambda side=side: side(options, threads) for name, side in sides.items()},
                         options.rounds, options.seconds)
    name, ours, theirs = f"unscale, AdamW and cast, {threads} threads", found["ferry"], found.get("DeepSpeed")
    if not theirs:
        return common.plain(name, ours, "ns/param", threads=threads)
    parts = {part: statistics.median(turn[part] for turn in theirs) for part in PARTS}
    return common.compared(name, ours, [sum(turn.values()) for turn in theirs], "ns/param", TARGET, threads=threads,
                           **parts, note=", ".join(f"DeepSpeed's {part} {parts[part]:.3f}" for part in PARTS))


def imported():
    """DeepSpeed's version, and why there is none."""
    try:
        import deepspeed.ops.adam
    except Exception as error:  # whatever its many imports do
        return None, f"DeepSpeed cannot be imported ({error})"
    return deepspeed.__version__, ""


def theirs_alone(options, missing):
    """For `ferry bench adam --deepspeed`."""
    if missing:
        print(json.dumps({"missing": missing}))
        return
    for threads in options.threads:
        print(json.dumps({"threads": threads, **of_deepspeed(options, threads)}), flush=True)


def options_of():
    parser = common.parser_of(__doc__)
    parser.set_defaults(ferry=Path(parser.get_default("ferry")))  # no text, so not looked for: --theirs needs none
    parser.add_argument("--millions", type=common.at_least(1), default=128, help="elements, in units of 2^20")
    parser.add_argument("--threads", type=common.at_least(1), nargs="+", default=[1, os.cpu_count()],
                        help="each of these counts")
    parser.add_argument("--calls", type=common.at_least(1), default=7, help="calls a turn; its figure is their median")
    parser.add_argument("--theirs", action="store_true", help="DeepSpeed alone, a JSON line a thread count")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.theirs and not options.child and not shutil.which(options.ferry):
        parser.error(f"--ferry: {options.ferry} is no program")
    if options.tiny:
        options.millions, options.threads, options.calls = 1, [1], 1
    return options


def main():
    options = options_of()
    if options.child:
        child(options.millions << 20, options.child, options.calls)
        return
    version, missing = imported()
    if options.theirs:
        theirs_alone(options, missing)
        return
    sides = {**({} if missing else {"DeepSpeed": of_deepspeed}), "ferry": of_ferry}
    rows = [row_of(options, threads, sides) for threads in options.threads]
    common.report(options, rows, [missing or f"DeepSpeed {version}"])


if __name__ == "__main__":
    main()

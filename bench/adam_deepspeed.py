"""DeepSpeed's CPU-Adam with the unscale and the cast that its users pay for, beside ferry's one pass.

    python3 bench/adam_deepspeed.py [--ferry build/release/ferry] [--millions 128] [--threads 1 8 16]

Both sides in turns, a process each (DeepSpeed's OpenMP team and torch's are fixed at start-up): the
medians of the rounds in nanoseconds a parameter, and the median of the rounds' ratios, DeepSpeed /
ferry (1.5 is asked for). Both have fp32 gradients and bf16 weights. --json prints one object instead of
the table; --theirs prints DeepSpeed's side alone, for `ferry bench adam --deepspeed`. Without DeepSpeed it
says so and ends with 0.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

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


def of_deepspeed(arguments, threads):
    command = [sys.executable, __file__, "--child", str(threads), "--millions",
               str(arguments.millions), "--calls", str(arguments.calls)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def of_ferry(arguments, threads):
    command = [arguments.ferry, "bench", "adam", "--json", "--in-place", "--gradient", "fp32", "--pairs",
               str(arguments.calls), "--threads", str(threads), "--millions", str(arguments.millions)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(out.stdout)["rows"][0]["value"]


def compare(arguments, threads):
    found = common.turns({"DeepSpeed": lambda: of_deepspeed(arguments, threads),
                          "ferry": lambda: of_ferry(arguments, threads)}, arguments.rounds)
    theirs, ours = found["DeepSpeed"], found["ferry"]
    parts = {part: statistics.median(round_[part] for round_ in theirs) for part in PARTS}
    return common.compared(f"unscale, AdamW and cast, {threads} threads", ours, [sum(turn.values()) for turn in theirs],
                           "ns/param", TARGET, threads=threads, **parts,
                           note=", ".join(f"{part} {parts[part]:.3f}" for part in PARTS))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ferry", default="build/release/ferry")
    parser.add_argument("--millions", type=int, default=128, help="elements, in units of 2^20")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count()])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--calls", type=int, default=7, help="calls a turn; its figure is their median")
    common.add_json_option(parser)
    parser.add_argument("--theirs", action="store_true", help="DeepSpeed alone, a JSON line a thread count")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.millions << 20, arguments.child, arguments.calls)
    try:
        import deepspeed.ops.adam
    except Exception as error:  # whatever its many imports do
        reason = f"DeepSpeed cannot be imported ({error})"
        print(json.dumps({"missing": reason}) if arguments.theirs or arguments.json else f"skipped: {reason}")
        return None
    if arguments.theirs:
        for threads in arguments.threads:
            print(json.dumps({"threads": threads, **of_deepspeed(arguments, threads)}), flush=True)
        return None
    rows = [compare(arguments, threads) for threads in arguments.threads]
    common.report(arguments, rows, [f"DeepSpeed {deepspeed.__version__}"])
    return None


if __name__ == "__main__":
    main()

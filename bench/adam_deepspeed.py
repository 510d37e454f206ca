"""DeepSpeed's CPU-Adam with the unscale and the cast that its users pay for, beside ferry's one pass.

    python3 bench/adam_deepspeed.py [--ferry build/release/ferry] [--millions 128] [--threads 1 8 16]

One process a thread count: DeepSpeed's OpenMP team and torch's are fixed at start-up. Prints
nanoseconds a parameter and the ratio (DeepSpeed / ferry; T3 asks for 1.5). Without DeepSpeed it says
so and ends with 0.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def timed(work, rounds):
    work()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def child(elements, threads, rounds):
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(threads)
    weight = torch.nn.Parameter(torch.full((elements,), 0.01))
    weight.grad = torch.full((elements,), 0.001)
    half = torch.empty(elements, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([weight], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    parts = {"update": optimizer.step,
             # 1 exactly: the same bytes, and no gradient that shrinks into denormals.
             "unscale": lambda: weight.grad.mul_(1.0),
             "cast": lambda: half.copy_(weight.data)}
    print(json.dumps({name: timed(work, rounds) / elements * 1e9 for name, work in parts.items()}))


def of_deepspeed(arguments, threads):
    command = [sys.executable, __file__, "--child", str(threads), "--millions",
               str(arguments.millions), "--rounds", str(arguments.rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def of_ferry(arguments, threads):
    command = [arguments.ferry, "bench", "adam", "--json", "--in-place", "--gradient", "fp32",
               "--threads", str(threads), "--millions", str(arguments.millions)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(out.stdout)["rows"][0]["value"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ferry", default="build/release/ferry")
    parser.add_argument("--millions", type=int, default=128, help="elements, in units of 2^20")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count()])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.millions << 20, arguments.child, arguments.rounds)
    try:
        import deepspeed.ops.adam  # noqa: F401
    except ImportError as error:
        print(f"skipped: DeepSpeed is not installed ({error})")
        return None
    print(f"{'threads':>7} {'update':>8} {'unscale':>8} {'cast':>8} {'sum':>8} {'ferry':>8} {'ratio':>6}")
    for threads in arguments.threads:
        theirs = of_deepspeed(arguments, threads)
        total, ours = sum(theirs.values()), of_ferry(arguments, threads)
        print(f"{threads:>7} {theirs['update']:>8.3f} {theirs['unscale']:>8.3f} {theirs['cast']:>8.3f} "
              f"{total:>8.3f} {ours:>8.3f} {total / ours:>6.2f}")
    return None


if __name__ == "__main__":
    main()

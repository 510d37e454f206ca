#!/usr/bin/env python3
"""How much slower three tight tiers are than everything in memory, on this machine.

Runs the quick start's model both ways, alternating, and prints the ratio of their step times. The
two must end with the same state hash. Needs tools/quickstart.sh to have been run once.

    bench/three_tiers.py [--rounds 5] [--steps 40] [--json]
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UNLIMITED = ["--set", "budgets.device=unlimited", "--set", "budgets.host=unlimited", "--set", "budgets.nvme=[]"]


def run(steps, extra):
    command = ["build/release/ferry", "train", "examples/quickstart.json", "--json", "--no-bound",
               "--set", f"steps={steps}", "--set", "schedule.total_steps=160",
               "--set", "evaluate.every=0", "--set", "evaluate.micro_batches=0", *extra]
    lines = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                           text=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    state_hash = next(row["state_hash"] for row in rows if "state_hash" in row)
    summary = next(row["summary"] for row in rows if "summary" in row)
    return summary["seconds"] / summary["steps"], state_hash, summary


def machine():
    return {"cores": os.cpu_count(), "kernel": platform.release(), "cpu": platform.processor() or platform.machine()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    tiers, memory, hashes = [], [], set()
    for round_index in range(options.rounds):
        order = [(tiers, []), (memory, UNLIMITED)]
        for times, extra in order if round_index % 2 == 0 else reversed(order):
            seconds, state_hash, summary = run(options.steps, extra)
            times.append(seconds)
            hashes.add(state_hash)
            if times is tiers:
                lanes = {lane["lane"]: lane["bytes"] / summary["steps"] for lane in summary["lanes"]}
    if len(hashes) != 1:
        sys.exit(f"the two ways ended with different states: {hashes}")
    ratios = sorted(t / m for t, m in zip(tiers, memory))
    rows = [
        {"name": "step, three tiers", "value": statistics.median(tiers), "unit": "s",
         "reference": statistics.median(memory), "ratio": statistics.median(memory) / statistics.median(tiers)},
        {"name": "slowdown, median of pairs", "value": statistics.median(ratios), "unit": "x", "reference": 1.15,
         "ratio": 1.15 / statistics.median(ratios)},
        {"name": "NVMe read a step", "value": lanes["nvme read"], "unit": "B", "reference": None, "ratio": None},
        {"name": "NVMe written a step", "value": lanes["nvme write"], "unit": "B", "reference": None, "ratio": None},
    ]
    if options.json:
        print(json.dumps({"machine": machine(), "command": " ".join(sys.argv), "rows": rows}))
        return
    print(f"step in memory    {statistics.median(memory):.4f} s  ({min(memory):.4f} .. {max(memory):.4f})")
    print(f"step, three tiers {statistics.median(tiers):.4f} s  ({min(tiers):.4f} .. {max(tiers):.4f})")
    print(f"slowdown          {statistics.median(ratios):.3f} x  ({ratios[0]:.3f} .. {ratios[-1]:.3f}), "
          f"{options.rounds} pairs; state hash {hashes.pop()} both ways")
    print(f"NVMe a step       {lanes['nvme read'] / 2**20:.1f} MiB read, {lanes['nvme write'] / 2**20:.1f} MiB written")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Has anything become slower? Two files that a benchmark wrote with --json, row by row.

A row has fallen where its ratio is below the old one by more than the two spreads, or 5 % where a file
has none. Rows without a ratio, or in one file only, are not judged. Exit code 1: something fell.

    bench/compare.py OLD.json NEW.json
"""
import argparse
import json
import sys

from common import number

WITHOUT_SPREAD = 0.05


def low(row):
    return row.get("ratio_low", row["ratio"] * (1 - WITHOUT_SPREAD))


def high(row):
    return row.get("ratio_high", row["ratio"] * (1 + WITHOUT_SPREAD))


def judge(old, new):
    if high(new) < low(old):
        return "fell"
    return "rose" if low(new) > high(old) else ""


def ratios_of(file):
    with open(file, encoding="utf-8") as text:
        return {row["name"]: row for row in json.load(text)["rows"] if row["ratio"] is not None}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    options = parser.parse_args()
    old, new = ratios_of(options.old), ratios_of(options.new)
    both = [name for name in old if name in new]
    if not both:
        sys.exit("the files have no row with a ratio in common")
    verdicts = {name: judge(old[name], new[name]) for name in both}
    width = max(len(name) for name in both)
    for name in both:
        print(f"{name:<{width}}  {number(old[name]['ratio']):>8}  {number(new[name]['ratio']):>8}  {verdicts[name]}"
              .rstrip())
    return 1 if "fell" in verdicts.values() else 0


if __name__ == "__main__":
    sys.exit(main())

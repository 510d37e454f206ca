#!/usr/bin/env python3
"""What became slower between two runs of a benchmark.

    bench/compare.py OLD.json NEW.json [--spread 0.05] [--json]

Both are what `ferry bench ... --json` or a script in bench/ printed: {"machine", "command", "rows"}. Rows are
matched by name and unit. Ratios, not values, are compared: each was taken beside its own reference, in the same
minutes. A ratio fell when its whole 95 % interval (`ratio_low` to `ratio_high`) lies below the old one's; where a
run has no interval, --spread stands for it, a part of the ratio each way. A row that had a ratio and has none now
counts as fallen: what is not measured any more guards nothing.

Ends with 0 where nothing fell, with 1 where something did, with 2 for files that cannot be compared.
"""

import argparse
import json
import math
import sys


class Unreadable(Exception):
    pass


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def interval(row, spread):
    """Where a ratio lies: as measured, or within the spread."""
    low, high = row.get("ratio_low"), row.get("ratio_high")
    if is_number(low) and is_number(high):
        return low, high
    return row["ratio"] * (1 - spread), row["ratio"] * (1 + spread)


def read(name):
    """The run, and its rows that have a ratio, by name."""
    try:
        with open(name, encoding="utf-8") as file:
            run = json.load(file)
        rows, names = {}, [row["name"] for row in run["rows"]]
        for row in run["rows"]:
            if not is_number(row["ratio"]):
                continue
            # Some benchmarks have bandwidth and CPU time of one thing.
            title = row["name"] if names.count(row["name"]) == 1 else f"{row['name']}, {row['unit']}"
            if title in rows:
                raise Unreadable(f"{name}: two rows are called {title!r}")
            rows[title] = row
        return run, rows
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{name}: no output of a benchmark ({type(error).__name__}: {error})") from error


def compare(old, new, spread):
    """A line for each row that either has: (name, old ratio, new ratio, verdict)."""
    lines = []
    for name, before in old.items():
        if name not in new:
            lines.append((name, before["ratio"], None, "gone"))
            continue
        (old_low, old_high), (low, high) = interval(before, spread), interval(new[name], spread)
        verdict = "fell" if high < old_low else "rose" if low > old_high else ""
        lines.append((name, before["ratio"], new[name]["ratio"], verdict))
    lines += [(name, None, row["ratio"], "new") for name, row in new.items() if name not in old]
    return lines


def warnings(old, new):
    found = []
    for key in ("machine", "command"):
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):  # a day is no difference between machines
            before, now = ({k: v for k, v in one.items() if k != "date"} for one in (before, now))
        if before != now:
            found.append(f"not the same {key}: {before} and {now}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--spread", type=float, default=0.05,
                        help="part of a ratio by which runs without an interval may differ")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if not 0 <= options.spread < 1:
        parser.error("--spread is a part of a ratio: at least 0 and below 1")
    try:
        (old_run, old), (new_run, new) = read(options.old), read(options.new)
        if not old:
            raise Unreadable(f"{options.old}: no row has a ratio, so there is nothing to compare with")
    except Unreadable as error:
        print(error, file=sys.stderr)
        return 2
    for line in warnings(old_run, new_run):
        print(line, file=sys.stderr)
    lines = compare(old, new, options.spread)
    fallen = [line[0] for line in lines if line[3] in ("fell", "gone")]
    if options.json:
        rows = [dict(zip(("name", "old", "new", "verdict"), line)) for line in lines]
        print(json.dumps({"rows": rows, "fallen": fallen}))
    else:
        width = max(len(line[0]) for line in lines)
        for name, before, now, verdict in lines:
            cells = ("" if ratio is None else f"{ratio:.3f}" for ratio in (before, now))
            print(f"{name:<{width}}" + "".join(f" {cell:>8}" for cell in cells) + f"  {verdict}".rstrip())
        print(f"{len(fallen)} of {len(lines)} fell by more than the spread" if fallen else "nothing fell")
    return 1 if fallen else 0


if __name__ == "__main__":
    sys.exit(main())

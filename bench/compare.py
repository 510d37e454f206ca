#!/usr/bin/env python3
"""What became slower between two runs of a benchmark.

    bench/compare.py OLD.json NEW.json [--spread 0.05] [--json]

Both are what `ferry bench ... --json` or a script in bench/ printed: {"machine", "command", "rows"}. Rows are
matched by name and unit. Ratios, not values, are compared: each was taken beside its own reference, in the same
minutes. A ratio fell when its whole interval (`ratio_low` to `ratio_high`, or that of `ratios`) lies below the old one's. A ratio without an
interval is a point, and where either run has none, or one of fewer than six pairs, the new one fell when it lies below
the old one's low end times 1 - SPREAD: with the 0.05 that --spread is unless given, from 1.000 to less than 0.950. A
ratio that can be too large as well (its row has `target_high`: a prediction over what came of it) fell when it lies
farther from 1. A row that had a ratio and has none now is gone, which counts as fallen: what is not measured any more
guards nothing.

Ends with 0 where nothing fell, with 1 where something did, with 2 for files that cannot be compared.
"""

import argparse
import json
import math
import shlex
import sys
from typing import NamedTuple

import common


class Unreadable(Exception):
    pass


class Line(NamedTuple):
    name: str
    unit: str
    old: float | None  # ratios
    new: float | None
    outcome: str


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def has_interval(row):
    found = common.spread_of(row)
    return is_number(found.low) and is_number(found.high)


def interval(row):
    """Where a ratio lies: as measured, or a point."""
    found = common.spread_of(row)
    low, high = (found.low, found.high) if has_interval(row) else (row["ratio"], row["ratio"])
    return nearness(low, high) if is_number(row.get("target_high")) else (low, high)


def pairs_of(row):
    """An interval without a count is of enough pairs: who wrote it gave none for fewer."""
    return len(row["ratios"]) if row.get("ratios") else row.get("pairs", common.LEAST_FOR_INTERVAL)


def is_firm(row):
    """Of fewer pairs it is the least to the most: three new ones lie below three old ones once in 20 by chance."""
    return has_interval(row) and pairs_of(row) >= common.LEAST_FOR_INTERVAL


def outcome_of(before, now, spread):
    """The spread counts once, however many of the two have no firm interval."""
    (old_low, old_high), (low, high) = interval(before), interval(now)
    scatter = 0 if is_firm(before) and is_firm(now) else spread
    if high < old_low * (1 - scatter):
        return "fell"
    return "rose" if low > old_high * (1 + scatter) else ""


def nearness(low, high):
    """A prediction over what came of it can be too large as well: how near to 1, from below, such a ratio lies."""
    ends = sorted(min(one, 1 / one) if one > 0 else 0 for one in (low, high))
    return (ends[0], 1) if low <= 1 <= high else tuple(ends)


def read(name):
    """The run, and its rows that have a ratio, by name and unit: some have bandwidth and CPU time of one thing."""
    try:
        with open(name, encoding="utf-8") as file:
            run = json.load(file)
        rows = {}
        for row in run["rows"]:
            if not is_number(row["ratio"]):
                continue
            key = row["name"], row["unit"]
            if key in rows:
                raise Unreadable(f"{name}: two rows are called {key[0]!r}, in {key[1] or 'no unit'}")
            rows[key] = row
        return run, rows
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{name}: no output of a benchmark ({type(error).__name__}: {error})") from error


def compare(old, new, spread):
    """A line for each row that either has."""
    lines = []
    for key, before in old.items():
        if key not in new:
            lines.append(Line(*key, before["ratio"], None, "gone"))
            continue
        now = new[key]
        lines.append(Line(*key, before["ratio"], now["ratio"], outcome_of(before, now, spread)))
    lines += [Line(*key, None, row["ratio"], "new") for key, row in new.items() if key not in old]
    return lines


def machine_of(run):
    """A day is no difference between machines."""
    machine = run.get("machine")
    return {k: v for k, v in machine.items() if k != "date"} if isinstance(machine, dict) else machine


def command_of(run):
    """Without what only says where the output goes."""
    places = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    places.add_argument("--json", nargs="?")
    places.add_argument("--traces", nargs="?")
    return shlex.join(places.parse_known_args(shlex.split(str(run.get("command"))))[1])


def warnings(old, new):
    found = []
    for key, of in (("machine", machine_of), ("command", command_of)):
        before, now = of(old), of(new)
        if before != now:
            found.append(f"not the same {key}: {before} and {now}")
    return found


def print_table(lines):
    """With units only where names alone would not do."""
    names = [line.name for line in lines]
    titles = [line.name if names.count(line.name) == 1 else f"{line.name}, {line.unit}" for line in lines]
    width = max(map(len, titles))
    for title, line in zip(titles, lines):
        cells = ("" if ratio is None else f"{ratio:.3f}" for ratio in (line.old, line.new))
        print(f"{title:<{width}}" + "".join(f" {cell:>8}" for cell in cells) + f"  {line.outcome}".rstrip())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD.json", help="the run to hold to")
    parser.add_argument("new", metavar="NEW.json", help="the run to judge")
    parser.add_argument("--spread", type=float, default=0.05,
                        help="where a run has no interval or few pairs: a ratio below the old one by at most this part of it "
                             "has not fallen; default: %(default)s")
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
    fallen = [line.name for line in lines if line.outcome in ("fell", "gone")]
    if options.json:
        print(json.dumps({"rows": [line._asdict() for line in lines], "fallen": fallen}))
    else:
        print_table(lines)
        print(f"{len(fallen)} of {len(lines)} fell by more than the spread or are gone" if fallen else "nothing fell")
    return 1 if fallen else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""docs/benchmarks.md, docs/measurements.md and two tables of README.md, made of what was measured.

    bench/make_page.py              writes them
    bench/make_page.py --check      says whether they are what would be written
    bench/make_page.py --run NAME   prints a run: where, when and how, and all of its rows

docs/benchmarks.md has a row a target, docs/measurements.md all results of each and the runs.

bench/targets.json names each target, what was asked, and which rows answer it. "line" is a target's row in
docs/benchmarks.md: "shown" names the results in it and says what each is called there, "missed" why some are. "figures" is
a table of what no run's rows have. A file of bench/results/ is one run: what
`ferry bench ... --json` or a script in bench/ printed, {"machine", "command", "date", "rows"}. For a newer result replace
the file, or add one and name it in targets.json. A run without a "date" has its machine's.
"readme" and "gaps" of targets.json are the two tables of README.md: a gap is a row of a run, of several the least ratio, or
"measured" in words.

An outcome is a row's ratio beside what the target asks: met where the median reaches it, missed where the whole spread
falls short, else open.
"""

import argparse
import fnmatch
import json
import math
import re
import sys
import textwrap
from pathlib import Path

import common

ROOT = Path(__file__).resolve().parents[1]

BENCHMARKS = """# Benchmarks

What was asked of ferry, and what was measured: a row a target. [Measurements](measurements.md) has all results of each, with
their spread and the notes.

- *A ratio* is ferry over the reference, larger is better: "1.52x" is half as fast again. It is the median of pairs that were
  measured in turns in one run. Brackets have its 95 % interval, or of fewer than six pairs the least and the most.
- *"0.8x to 1.0x"* is the range of several ratios, of one kind of result.
- *Met*: the median reaches the target. *Missed*: the whole spread falls short. *Open*: only the median does.
- *The machine* is named by its GPU, or by its cores. Machines of one kind differ by a third, and one machine differs by the hour.
- *"3B"* is a Llama shape of 2.9 billion parameters: hidden 3072, 28 layers, vocabulary 32,000, tied embedding, bf16. A step
  has 16,384 tokens unless the row says otherwise.
- A figure leads to its run's file: machine, command, date and all rows. `bench/make_page.py --run NAME` prints it.

"""

BELOW_BENCHMARKS = """
`bench/make_page.py` writes this page from `bench/targets.json` and the runs in `bench/results/`; a test holds them together.
`bench/compare.py OLD.json NEW.json` names the ratios that fell. [The glossary](glossary.md) explains the words.
"""

MEASUREMENTS = """# Measurements

All results behind [benchmarks](benchmarks.md), which says how to read them. A section a target, then what was measured
beside the targets, tables of kernels, and the runs. `bench/make_page.py` writes this page.

"As expected" is a run with `swap.expect_clipped=0`: it was told that no step will be clipped. Absolute figures are there for
the size only.

## Results by target

A line a result. "Asked" is the ratio that it was held to; results without one are there beside the others. One row has its
ratio and its spread; several have the least and the greatest ratio, and their number.
"""

HEADING_OF_RESULTS = "| result | asked | measured | spread, or rows | outcome | run |\n|---|---|---|---|---|---|\n"

EARLIER = """
## Of earlier states

What a change gave when it was made, beside the code before it. The code has changed since.

"""

RUNS = """
## Runs

A run's file has the whole command, system and kernel, and all rows.

"""


def load(folder):
    """The runs by name, and the targets."""
    runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("results/*.json"))}
    return runs, json.loads((folder / "targets.json").read_text(encoding="utf-8"))


def date_of(run):
    return run.get("date") or run["machine"]["date"]


def times(ratio, digits=3):
    """A ratio as people read it: 0.919x, 12.6x; with two digits 0.92x, 13x."""
    return f"{ratio:.{digits if ratio < 10 else digits - 2}f}x"


def share_of(row):
    """Whether its ratio is a part of a whole, which people read as a percentage: model FLOPs over the GPU's peak."""
    return row["name"].endswith("MFU")


def ratio_of(row, ratio):
    return f"{100 * ratio:.3g} %" if share_of(row) else times(ratio)


def number(value):
    return f"{value:,.0f}" if value is not None and value >= 1000 else common.number(value)


def spread_of(row):
    found = common.spread_of(row)
    if found.low is None:
        return ""
    low, high = (ratio_of(row, bound).removesuffix("x").removesuffix(" %") for bound in (found.low, found.high))
    return f" ({low} to {high})"


def outcome(row, result):
    """What a row is beside what the target asks; nothing where it asks nothing."""
    if result.get("least") is None or row.get("ratio") is None:
        return ""
    found = common.spread_of(row)
    if found.low is None:
        found = common.Spread(row["ratio"], row["ratio"], row["ratio"])
    return common.outcome(found, result["least"], result.get("most", math.inf))


def rows_of(runs, result):
    """The rows that a result of a target is about."""
    rows = [row for row in runs[result["run"]]["rows"]
            if fnmatch.fnmatchcase(row["name"], result["rows"]) and result.get("unit") in (None, row["unit"])]
    if not rows:
        raise SystemExit(f"{result['run']} has no row {result['rows']!r}")
    return rows


def figure(rows):
    """What was measured: of one row its ratio or its value, of several the range of their ratios."""
    ratios = [row["ratio"] for row in rows]
    if len(rows) == 1:
        return ratio_of(rows[0], ratios[0]) if ratios[0] is not None else f"{number(rows[0]['value'])} {rows[0]['unit']}"
    return " to ".join(ratio_of(rows[0], ratio) for ratio in (min(ratios), max(ratios)))


def counted(outcomes):
    return {word: outcomes.count(word) for word in ("met", "open", "missed") if word in outcomes}


def outcome_of_rows(outcomes):
    """The outcome of one row, or how many of several have which."""
    found = counted(outcomes)
    return next(iter(found), "") if len(outcomes) == 1 else ", ".join(f"{count} {word}" for word, count in found.items())


def asked_of(result, row):
    if result.get("least") is None:
        return ""
    if share_of(row):
        return ratio_of(row, result["least"])
    return f"{result['least']:g}x" + (f" to {result['most']:g}x" if "most" in result else "")


def line_of(runs, result):
    rows = rows_of(runs, result)
    cells = (result.get("label") or rows[0]["name"], asked_of(result, rows[0]), figure(rows), spread_of(rows[0]).strip(" ()") if len(rows) == 1 else
             f"{len(rows)} rows", outcome_of_rows([outcome(row, result) for row in rows]), link(result["run"]))
    return f"| {' | '.join(cells)} |"


def machine_in_short(machine):
    """By what it is known: "H200", "2 x H100", "16 cores"."""
    gpus = [gpu.split()[1] for gpu in machine.get("gpus", [])]
    if gpus:
        return f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else gpus[0]
    return f"{machine['cores']} cores"


def shown_in(runs, target):
    """The results that a target's row shows, each with what it is called there."""
    for label, words in target["line"]["shown"].items():
        found = [one for one in target["results"] if label in (one.get("label"), rows_of(runs, one)[0]["name"])]
        if len(found) != 1:
            raise SystemExit(f"{target['id']} shows {label!r}, which is the label of {len(found)} results")
        yield words, found[0]


def row_of_overview(runs, target):
    """A target: what, asked, the results that decide, where, how many rows have which outcome, and why some are missed."""
    line, measured, machines = target["line"], [], []
    for words, one in shown_in(runs, target):
        rows = rows_of(runs, one)
        measured.append(f"{words} [{figure(rows)}](../bench/results/{one['run']}.json)" + (spread_of(rows[0]) if len(rows) == 1 else ""))
        machines.append(machine_in_short(runs[one["run"]]["machine"]))
    outcomes = [outcome(row, one) for one in target["results"] for row in rows_of(runs, one)]
    counts = ", ".join(f"{count} {word}" for word, count in counted(outcomes).items())
    if ("missed" in counts or not counts) and not line.get("missed"):
        raise SystemExit(f"{target['id']} has rows that are missed, and does not say why")
    cells = (f"[{target['id']}](measurements.md#{target['id'].lower()})", line.get("what", target["what"]), line["asked"], "; ".join(measured),
             ", ".join(dict.fromkeys(machines)), counts or "not measured", line.get("missed", ""))
    return f"| {' | '.join(cells)} |\n"


def overview(runs, targets):
    """A row a target."""
    return ("| | what | asked | measured | on | all results | what falls short, and why |\n|---|---|---|---|---|---|---|\n" +
            "".join(row_of_overview(runs, target) for target in targets))


def paragraph(text):
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def bullet(text):
    return textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def section_of(runs, target):
    """A target: what was asked, a line a result, figures beside them, and what limits it."""
    text = f"\n### {target['id']}\n\n" + paragraph(f"{capital(target['what'])}. Asked: {target['asked']}.")
    if target["results"]:
        text += "\n" + HEADING_OF_RESULTS + "".join(line_of(runs, one) + "\n" for one in target["results"])
    if target.get("figures"):
        text += "\n" + table_of_figures(**target["figures"])
    if target.get("notes"):
        text += "\n" + "".join(bullet(note) for note in target["notes"])
    return text


def table_of_figures(columns, rows):
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, ["---"] * len(columns), *rows)).replace(" --- ", "---")


def capital(text):
    return text[0].upper() + text[1:]


def link(name):
    return f"[{name}](../bench/results/{name}.json)"


def program_of(command):
    """The script, or the part of ferry, that a command runs."""
    found = re.search(r"(bench|tools)/\w+\.(py|sh)|ferry (bench )?\w+", command)
    return f"`{found[0]}`" if found else command.split(":")[0]


def table_of_runs(runs):
    lines = ["| run | date | machine | made by |", "|---|---|---|---|"]
    lines += [f"| {link(name)} | {date_of(run)} | {hardware(run['machine'])} | {program_of(run['command'])} |"
              for name, run in runs.items()]
    return "\n".join(lines) + "\n"


def table_of_others(runs, others):
    lines = ["| what | measured | | run |", "|---|---|---|---|"]
    for other in others:
        for one in other["results"]:
            rows = rows_of(runs, one)
            what = other["what"] + (f": {one['label']}" if one.get("label") else "")
            spread = spread_of(rows[0]).strip(" ()") if len(rows) == 1 else f"{len(rows)} rows"
            lines.append(f"| {what} | {figure(rows)} | {spread} | {link(one['run'])} |")
    return "\n".join(lines) + "\n"


def table_of_limits(run, below, without=()):
    """A run's operations whose ratio is below that, by what limits them: their notes. `without`: patterns of rows that a
    newer run has."""
    limits = {}
    for row in run["rows"]:
        if row["ratio"] < below and not any(fnmatch.fnmatchcase(row["name"], pattern) for pattern in without):
            limits.setdefault(row["note"], []).append(row)
    lines = [f"| operation | x of a copy | {run['rows'][0]['unit']}, at most | what limits it |", "|---|---|---|---|"]
    digits = 2 if max((row["value"] for rows in limits.values() for row in rows), default=1) >= 0.5 else 3
    for note, rows in limits.items():
        names = dict.fromkeys(row["name"].rsplit(": ", 1)[-1].split(", ")[0] for row in rows)
        ratios = [row["ratio"] for row in rows]
        lines.append(f"| {', '.join(names)} | {min(ratios):.2f} to {max(ratios):.2f} | "
                     f"{max(row['value'] for row in rows):.{digits}f} | {note} |")
    return "\n".join(lines) + "\n"


def hardware(machine):
    parts = [machine["processor"]] + ([f"{machine['cores']} cores"] if "cores" in machine else [])
    gpus = machine.get("gpus", [])
    parts += [machine["memory"]] if "memory" in machine else []
    parts += [f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else gpus[0]] if gpus else []
    return ", ".join(parts)


def machine_text(machine):
    return ", ".join([hardware(machine)] + [machine[key] for key in ("system", "kernel") if key in machine])


def section(name, run, results):
    """A run: where, when and how, and its rows."""
    def judged(row):
        found = [outcome(row, one) for one in results if fnmatch.fnmatchcase(row["name"], one["rows"])
                 and one.get("unit") in (None, row["unit"])]
        return next((word for word in ("missed", "open", "met") if word in found), "")
    rows = [(row, judged(row)) for row in run["rows"]]
    lines = [name, "", f"{date_of(run)}; {machine_text(run['machine'])}.", "", f"    {run['command']}", ""]
    lines += [note + "\n" for note in run.get("notes", [])]
    lines += ["| | value | unit | reference | ratio | outcome | |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {row['name']} | {number(row['value'])} | {row['unit']} | {number(row['reference'])} | "
              f"{ratio_of(row, row['ratio']) + spread_of(row) if row['ratio'] is not None else ''} | {word} | {row.get('note', '')} |"
              for row, word in rows]
    return "\n".join(lines) + "\n"


def named_in(targets):
    return [one for target in targets["targets"] + targets["others"] + targets["earlier"] for one in target["results"]]


def limits_of(runs, one):
    return f"\n## {one['title']}\n\n{one['text']}\n\n" + \
        table_of_limits(runs[one["run"]], one["below"], one.get("without", ()))


def table_of_profiles(runs, one):
    """Kernels of a step by their kind, each beside its reference: rows named "SHAPE: KIND"."""
    lines = [f"| shape | kernels | {one['value']} | {one['reference']} | ratio | run |", "|---|---|---|---|---|---|"]
    for of_run in one["runs"]:
        for row in rows_of(runs, of_run):
            shape, kind = row["name"].split(": ", 1)
            milliseconds = 1e3 if row["unit"] == "s" else 1
            lines.append(f"| {of_run.get('shape', shape)} | {kind.split(', beside')[0]} | {row['value'] * milliseconds:.1f} | "
                         f"{row['reference'] * milliseconds:.1f} | {times(row['ratio'])} | {link(of_run['run'])} |")
    return "\n".join(lines) + "\n"


def profile_of(runs, one):
    return f"\n## {one['title']}\n\n{one['text']}\n\n{table_of_profiles(runs, one)}"


def loaded(folder):
    """The runs and the targets, which belong together."""
    runs, targets = load(folder)
    named = {one["run"] for one in named_in(targets)}
    unknown, unused = sorted(named - set(runs)), sorted(set(runs) - named)
    if unknown or unused:
        raise SystemExit(f"targets.json names runs that are not there: {unknown}; runs that it does not name: {unused}")
    return runs, targets


def benchmarks(runs, targets):
    """docs/benchmarks.md."""
    return BENCHMARKS + overview(runs, targets["targets"]) + BELOW_BENCHMARKS


def measurements(runs, targets):
    """docs/measurements.md."""
    return (MEASUREMENTS + "".join(section_of(runs, target) for target in targets["targets"]) + "\n## Beside the targets\n\n" +
            table_of_others(runs, targets["others"]) + EARLIER + table_of_others(runs, targets["earlier"]) +
            "".join(profile_of(runs, one) for one in targets["profiles"]) +
            "".join(limits_of(runs, one) for one in targets["limits"]) +
            RUNS + table_of_runs(runs))


def table_of_readme(runs, measured):
    lines = ["| what | reference | ratio |", "|---|---|---|"]
    for one in measured:
        row = rows_of(runs, {"run": one["run"], "rows": one["row"]})[0]
        lines.append(f"| {one['what'].format(value=number(row['value']))} | {one['reference']} | {times(row['ratio'], 2)} |")
    return lines


def table_of_gaps(runs, gaps):
    """What falls short: of several rows the least ratio."""
    lines = ["| target | measured | why |", "|---|---|---|"]
    for one in gaps:
        rows = rows_of(runs, {**one, "rows": one["row"]}) if "run" in one else []
        found = times(min(row["ratio"] for row in rows), 2) if rows else one["measured"]
        lines.append(f"| {one['what']} | {found} | {one['why']} |")
    return lines


def readme(runs, targets, text):
    """README.md with its tables of results and of gaps anew."""
    for lines in (table_of_readme(runs, targets["readme"]), table_of_gaps(runs, targets["gaps"])):
        text = re.sub(re.escape(lines[0]) + r"\n(\|.*\n)*", lambda _, table="\n".join(lines) + "\n": table, text)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "bench", help="where targets.json and results/ lie; default: bench")
    parser.add_argument("--benchmarks", type=Path, default=ROOT / "docs/benchmarks.md", help="default: docs/benchmarks.md")
    parser.add_argument("--measurements", type=Path, default=ROOT / "docs/measurements.md", help="default: docs/measurements.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is another one")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="default: README.md")
    parser.add_argument("--run", metavar="NAME", help="print this run, and write nothing")
    options = parser.parse_args()
    if options.run:
        runs, targets = load(options.folder)
        if options.run not in runs:
            parser.error(f"no run {options.run!r} in {options.folder / 'results'}")
        print(section(options.run, runs[options.run], [one for one in named_in(targets) if one["run"] == options.run]), end="")
        return
    runs, targets = loaded(options.folder)
    written = {options.benchmarks: benchmarks(runs, targets), options.measurements: measurements(runs, targets),
               options.readme: readme(runs, targets, options.readme.read_text(encoding="utf-8"))}
    for path, text in written.items():
        if not options.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what bench/make_page.py writes from {options.folder}: run it")


if __name__ == "__main__":
    main()

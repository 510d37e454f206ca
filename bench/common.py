"""What the scripts beside this one share: pairs and their statistics, the table and its JSON, options.

A script measures its sides in turns(), makes rows of them with compared(), judged() and plain(), and
ends with report(): a table, and with --json the object that `ferry bench` prints too.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
LEAST_FOR_INTERVAL = 6  # pairs; with fewer the least and the most stand for the interval
COLUMNS = """Of each row the table has the value's and the reference's median over the rounds, and the median of the rounds' ratios,
which are of value and reference so that larger is better. The spread is the ratio's 95 % interval, of fewer than six
rounds the least and the most. A target is met if the ratio is, missed if the whole spread is not, else open."""


class SideFailed(Exception):
    """One side could not be measured; the others can."""


class Spread(NamedTuple):
    middle: float
    low: float
    high: float


def spread(values):
    """The median and its 95 % interval by rank; of few values, their range."""
    ordered = sorted(values)
    count = len(ordered)
    half = 0.98 * math.sqrt(count) if count >= LEAST_FOR_INTERVAL else count
    centre = (count - 1) / 2
    return Spread(statistics.median(ordered), ordered[max(0, math.floor(centre - half))],
                  ordered[min(count - 1, math.ceil(centre + half))])


def spread_of(row):
    """A row's ratio, and its interval where the row has one. `ferry bench` gives the ratios of all pairs."""
    if row.get("ratios"):
        return spread(row["ratios"])._replace(middle=row["ratio"])
    return Spread(row["ratio"], row.get("ratio_low"), row.get("ratio_high"))


def outcome(ratio, least, most=math.inf):
    """A target is missed where the whole interval lies outside it, and open where only the median does."""
    if least <= ratio.middle <= most:
        return "met"
    return "missed" if ratio.high < least or ratio.low > most else "open"


def plain(name, values, unit, **more):
    """A row without another side. `values`: one, or one a round."""
    values = values if isinstance(values, list) else [values]
    found = spread(values)
    row = {"name": name, "value": found.middle, "unit": unit, "reference": None, "ratio": None}
    if len(values) > 1:
        row.update(value_low=found.low, value_high=found.high, pairs=len(values))
    return {**row, **more}


def compared(name, values, references, unit, target=None, less_is_better=True, **more):
    """A row of pairs: value and reference of each round. The ratio is larger where the value is better."""
    assert len(values) == len(references) > 0
    ratios = [r / v if less_is_better else v / r for v, r in zip(values, references)]
    return judged(name, statistics.median(values), unit, statistics.median(references), ratios, target,
                  **more)


def judged(name, value, unit, reference, ratios, target=None, target_high=None, **more):
    """A row whose ratios, one a round, are not simply value against reference. With `target_high` a ratio
    can be too large as well."""
    found = spread(ratios)
    row = {"name": name, "value": value, "unit": unit, "reference": reference, "ratio": found.middle}
    if len(ratios) > 1:
        row.update(ratio_low=found.low, ratio_high=found.high, pairs=len(ratios))
    if target is not None:
        row.update(target=target, outcome=outcome(found, target, math.inf if target_high is None else target_high))
    if target_high is not None:
        row.update(target_high=target_high)
    return {**row, **more}


def turns(sides, rounds, seconds=None):
    """Runs every side once a round, every other round in the opposite order: what drifts meets all.

    `sides`: functions by name. Returns whole rounds only, {name: [result a round]}; a round that would
    probably end later than `seconds` after the start is not begun. A side that fails is left out from
    then on, with what it said on standard error.
    """
    sides = dict(sides)
    results = {name: [] for name in sides}
    start, longest = time.monotonic(), 0.0
    for index in range(rounds):
        began = time.monotonic()
        if seconds is not None and index > 0 and began - start + longest > seconds:
            print(f"{index} of {rounds} rounds: another would not end within {seconds} s", file=sys.stderr)
            break
        names = list(sides)
        for name in names if index % 2 == 0 else reversed(names):
            try:
                results[name].append(sides[name]())
            except SideFailed as failure:
                print(f"{name}: {failure}", file=sys.stderr)
                del sides[name], results[name]
        longest = max(longest, time.monotonic() - began)
    return results


def output_file(text):
    """The type of an option that names a file to write, which may be there. `-` is standard output."""
    path = Path(text)
    if text == "-":
        return text
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {path.parent} is no directory")
    needed, right = (path, os.W_OK) if path.exists() else (path.parent, os.W_OK | os.X_OK)
    if not os.access(needed, right):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: no right to change {needed}")
    return text


def add_json_option(parser):
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", type=output_file,
                        help="one JSON object instead of the table, or beside it in FILE")


def at_least(least):
    """The type of an option that is a whole number, `least` or more."""
    def whole(text):
        with contextlib.suppress(ValueError):
            if int(text) >= least:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least {least}")
    return whole


def check_steps(parser, options, steady=1):
    """Ends where --steps leaves fewer than `steady` after those of --warmup."""
    if options.steps < options.warmup + steady:
        parser.error(f"--steps: at least {steady} more than --warmup, which is {options.warmup}")


def bytes_of(text):
    """Of a size as configurations have it."""
    if text == "unlimited":
        return math.inf
    found = re.fullmatch(r"([0-9]+\.?[0-9]*) ?([KMGT]iB|B|)", str(text))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; 128GiB is one")
    return float(found[1]) * UNITS[found[2]]


def program(text):
    """The type of an option that names a program."""
    if not shutil.which(text):
        raise argparse.ArgumentTypeError(f"{text} is no program: build it, or name another")
    return text


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Names the default of an option that has one and does not say it itself."""

    def _get_help_string(self, action):
        text = action.help or ""
        tells = action.default in (None, False, argparse.SUPPRESS) or action.default == [] or "default" in text
        return text if tells else f"{text}; default: %(default)s".lstrip("; ")


def parser_of(doc, rounds=3):
    """The options that every script has."""
    parser = argparse.ArgumentParser(description=doc, epilog=COLUMNS, formatter_class=HelpFormatter)
    parser.add_argument("--ferry", type=program, default=str(ROOT / "build/release/ferry"),
                        help="the built program; default: build/release/ferry beside bench/")
    parser.add_argument("--rounds", type=at_least(1), default=rounds, help="turns of each side")
    parser.add_argument("--seconds", type=float, help="begin no round that would end later than this")
    add_json_option(parser)
    parser.add_argument("--tiny", action="store_true", help="seconds on the CPU: does the script work?")
    return parser


def arguments_parser(doc, rounds=3):
    """Those, and what a script has that trains by a configuration."""
    parser = parser_of(doc, rounds)
    parser.add_argument("--tokens", help="token file; default: the configuration's, else made of ferry's own texts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="for ferry's side: override a key of the configuration; stands above all other options")
    return parser


@contextlib.contextmanager
def scratch(parent=None):
    """A directory of the script's own, gone at its end."""
    directory = tempfile.mkdtemp(prefix="ferry-", dir=parent)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def config_of(file):
    """A configuration, without the `//` comments that ferry takes."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return json.loads("\n".join(line for line in lines if not line.lstrip().startswith("//")))


def tokens_for(options, config, directory):
    """The token file to train on."""
    if options.tokens:
        return options.tokens
    named = ROOT / config["data"]["tokens"]
    if named.exists() and not options.tiny:
        return str(named)
    made = directory / "tokens.bin"
    texts = sorted(str(path) for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md"])
    subprocess.run([options.ferry, "data", *texts, "-o", str(made)], check=True, stdout=subprocess.DEVNULL)
    return str(made)


def output_of(command):
    """What a command prints; nothing where it cannot be run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def bench_rows(options, *words):
    """The rows that `ferry bench WORDS` prints as JSON. Throws SideFailed."""
    done = subprocess.run([options.ferry, "bench", *map(str, words), "--json"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SideFailed(done.stderr.strip() or f"exit code {done.returncode}")
    return json.loads(done.stdout)["rows"]


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    found = {"processor": names[0] if names else platform.machine(), "cores": len(os.sched_getaffinity(0)),
             "kernel": f"{platform.system()} {platform.release()}", "date": time.strftime("%Y-%m-%d")}
    gpu = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    if gpu:
        found["gpus"] = gpu.splitlines()
    return found


def number(value):
    return "" if value is None else f"{value:.4g}"


def interval(row):
    for kind in ("ratio", "value"):
        if kind + "_low" in row:
            text = f"{number(row[kind + '_low'])} to {number(row[kind + '_high'])}"
            return text if kind == "ratio" else text + " " + row["unit"]
    return ""


def target_of(row):
    if "target_high" in row:
        return f"{number(row['target'])} to {number(row['target_high'])}"
    return number(row.get("target"))


def table(rows):
    """Rows as text. The spread is the ratio's, or where there is none the value's."""
    head = ["", "value", "unit", "reference", "ratio", "spread", "pairs", "target", "", ""]
    cells = [[row["name"], number(row["value"]), row["unit"], number(row["reference"]), number(row["ratio"]),
              interval(row), str(row.get("pairs", "")), target_of(row), row.get("outcome", ""),
              row.get("note", "")] for row in rows]
    widths = [max(len(line[column]) for line in [head, *cells]) for column in range(len(head))]
    right = {1, 3, 4, 6, 7}
    return "\n".join("  ".join(cell.rjust(width) if column in right else cell.ljust(width)
                               for column, (cell, width) in enumerate(zip(line, widths))).rstrip()
                     for line in [head, *cells])


def write_whole(path, contents):
    """A result's file, whole or not at all: hours of measuring must not end in half of one, nor two scripts in one draft.
    What is no regular file is written into, never replaced."""
    path = Path(path).resolve()
    data = contents if isinstance(contents, bytes) else contents.encode()
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    handle, draft = tempfile.mkstemp(prefix=path.name[:200] + ".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(draft, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~mask)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def report(options, rows, notes=()):
    """Prints the table and, where asked, the JSON. `notes`: what a reader must know to judge the rows."""
    found = {"machine": machine(), "command": shlex.join(sys.argv), "rows": rows, "notes": list(notes)}
    if options.json == "-":
        print(json.dumps(found))
        return
    about = found["machine"]
    print(", ".join([about["processor"], f"{about['cores']} cores", *about.get("gpus", []), about["kernel"],
                     about["date"]]))
    print(table(rows))
    for note in notes:
        print(note)
    if options.json:
        write_whole(options.json, json.dumps(found, indent=1) + "\n")

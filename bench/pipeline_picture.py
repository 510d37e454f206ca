#!/usr/bin/env python3
"""Draws what the kernels of several ranks did in one step, rank by rank, and below each what was planned for its stage.

The ranks are of one host, whose clock their traces share. Traces are of `ferry train --trace`, the plan of `ferry plan
--json` with as many ranks:

    mpirun -n 2 ferry train my.json --trace step.json
    ferry plan my.json --ranks 2 --json > plan.json
    bench/pipeline_picture.py step.json step.json.1 --plan plan.json --svg step.svg
"""
import argparse
import json
import sys
from pathlib import Path

from step_picture import drawn, seconds_text
from step_trace import Slice, Trace, covered, step_begins

LANE = "compute"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", help="of all ranks; their names end with the rank, but the first one's")
    parser.add_argument("--plan", help="what was planned")
    parser.add_argument("--svg", required=True, help="where the picture goes")
    return parser.parse_args()


def by_rank(files):
    """A shell names step.json.10 before step.json.2."""
    def rank_of(file):
        ending = Path(file).suffix[1:]
        return int(ending) if ending.isdigit() else 0
    return sorted(files, key=rank_of)


def kernels_of(traces):
    """Of each rank the kernels, by the host's clock."""
    return [[one._replace(begin=one.begin + trace.origin, end=one.end + trace.origin)
             for one in trace.slices if one.lane == LANE] for trace in traces]


def last_step(kernels):
    """From the first kernel of the last but one step of the first rank to that of the last one."""
    return sorted(step_begins(kernels[0]).values())[-2:]


def waits(kernels, begin, end):
    """The part of the window in which a rank computes nothing."""
    return 1 - covered(kernels, begin, end) / (end - begin)


def planned_of(plan, ranks):
    """Of each rank the kernels of its stage, from 0 on."""
    stages = plan["pipeline"]["stages"]
    each = ranks // len(stages)
    return [[Slice(LANE, one["name"], one["begin_seconds"], one["end_seconds"], -1)
             for one in stages[rank // each]["timeline"]] for rank in range(ranks)]


def picture(kernels, plan, title):
    """The last step of the ranks' kernels, above those of the plan where there is one: an SVG's text."""
    planned = planned_of(plan, len(kernels)) if plan else []
    begin, end = last_step(kernels)
    names = [f"rank {rank}" for rank in range(len(kernels))]

    def rows(of_ranks, late):
        return [one._replace(lane=name, begin=one.begin + late, end=one.end + late)
                for name, its in zip(names, of_ranks) for one in its
                if one.end + late > begin and one.begin + late < end]
    return drawn(names, begin, end, rows(kernels, 0.0), rows(planned, begin), title)


def main():
    options = arguments()
    kernels = kernels_of([Trace(file, 1) for file in by_rank(options.traces)])
    plan = json.loads(Path(options.plan).read_text(encoding="utf-8")) if options.plan else None
    Path(options.svg).write_text(picture(kernels, plan, "One step of several ranks"), encoding="utf-8")
    begin, end = last_step(kernels)
    for rank, its in enumerate(kernels):
        sys.stdout.write(f"rank {rank}: waits {100 * waits(its, begin, end):.1f} % of {seconds_text(end - begin)}\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What the stages of a pipeline wait, beside theory, and steps beside their plans, by schedule. On CPU ranks with a core each.

Theory takes what a forward, a backward and weights' gradients of one block take from the run itself, and all stages to be
as fast. The first row of a pipeline has what theory makes of its kernels' seconds, over the measured step: 1 where stages
wait as theory says. The second has the planned step over the measured one. With fewer cores than ranks these take turns
and neither says anything, so the script refuses.

    bench/bubbles.py --stages 2 4 --picture step.svg

--picture draws the last step of the last run with the most stages and zero bubble, above its plan.
"""
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import common
from common import compared, plain
from pipeline_picture import kernels_of, last_step, picture, waits
from step_trace import Slice, Trace, covered
from training import NEVER_CLIPPED, TINY, SideFailed, train, words_of

CONFIG = common.ROOT / "examples/quickstart.json"
SCHEDULES = ("1f1b", "zero_bubble")
KERNELS = ("forward", "backward", "weight gradients", "head")
BLOCKS, WITHIN, PREDICTED_WITHIN = 8, 0.05, 0.15
# Blocks are nearly all that takes time.
MODEL = {"model.hidden": 512, "model.layers": BLOCKS, "model.heads": 8, "model.kv_heads": 8, "model.head_dim": 64,
         "model.intermediate": 1408, "batch.sequence": 256, "batch.micro_batch": 1}


def settings_of(options, tokens, stages, schedule):
    return {"steps": options.steps, "data.tokens": tokens, "evaluate.every": 0, "evaluate.micro_batches": 0, **NEVER_CLIPPED,
            "budgets.nvme": [], "budgets.device": "unlimited", "budgets.host": "unlimited", "threads": stages, **MODEL,
            "batch.micro_batches": options.micro_batches, "swap.groups": options.micro_batches, "swap.save_attention": 0,
            "swap.save_mlp": 0, "swap.save_projections": 0, "parallel.pipeline": stages, "parallel.schedule": schedule,
            **({**TINY, "model.layers": BLOCKS, "threads": stages} if options.tiny else {})}


def of_theory(kernels, begin, end, stages, micro_batches):
    """Seconds of a step: what the busiest stage computes, and what all wait for each other: the first forwards and
    backwards of the other stages, less the weights' gradients that fill in."""
    busiest = max(covered(its, begin, end) for its in kernels)

    def mean(name):
        found = [one.end - one.begin for its in kernels for one in its if one.name == name and begin <= one.begin < end]
        return statistics.mean(found) if found else 0.0
    left = min(stages - 1, micro_batches - 1) * mean("weight gradients")
    waited = (stages - 1) * (mean("forward") + mean("backward"))
    return busiest + BLOCKS / stages * (waited - left)


def planned_slices(stages):
    return [Slice("compute", one["name"], one["begin_seconds"], one["end_seconds"], -1)
            for stage in stages for one in stage["timeline"]]


def by_name(slices):
    """Seconds that all ranks' kernels take in a step."""
    found = {}
    for one in slices:
        found[one.name] = found.get(one.name, 0.0) + one.end - one.begin
    return found


class Pipeline:
    """Runs one schedule, and keeps of each run its step, the theory of it, and the planned one."""

    def __init__(self, options, directory, tokens, stages, schedule):
        self.options, self.stages = options, stages
        self.settings = settings_of(options, tokens, stages, schedule)
        self.trace = directory / f"{schedule}-{stages}.json"
        bound = ("--oversubscribe", "--bind-to", "none") if options.tiny else ("--bind-to", "core")
        self.launcher = ("mpirun", "--allow-run-as-root", *bound, "-n", str(stages))

    def run(self):
        run = train(self.options, CONFIG, self.settings, trace=self.trace, bound=False, launcher=self.launcher)
        files = [self.trace, *(self.trace.with_name(f"{self.trace.name}.{rank}") for rank in range(1, self.stages))]
        kernels = kernels_of([Trace(file, 1) for file in files])
        begin, end = last_step(kernels)
        run.traced, run.waits = end - begin, [waits(its, begin, end) for its in kernels]
        run.theory = of_theory(kernels, begin, end, self.stages, self.options.micro_batches)
        plan = self.plan()
        run.planned = plan["prediction"]["step_seconds"]
        if self.options.picture:
            run.picture = picture(kernels, plan, self.title())
        run.kernels = by_name([one for its in kernels for one in its if begin <= one.begin < end])
        run.planned_kernels = by_name(planned_slices(plan["pipeline"]["stages"]))
        return run

    def title(self):
        """Of a picture: what ran, and where."""
        about = common.machine()
        schedule = self.settings["parallel.schedule"].replace("_", " ")
        return (f"{self.stages} stages, {schedule}, {self.options.micro_batches} micro-batches; a core a rank of "
                f"{about['processor']}, {about['date']}")

    def plan(self):
        done = subprocess.run([self.options.ferry, "plan", str(CONFIG), "--json", "--ranks", str(self.stages),
                               *words_of(self.settings, self.options.settings)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SideFailed(done.stderr.strip())
        return json.loads(done.stdout)


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--stages", type=common.at_least(2), nargs="+", choices=(2, 4, 8), default=[2, 4])
    parser.add_argument("--steps", type=common.at_least(3), default=5, help="of each run")
    parser.add_argument("--micro-batches", type=common.at_least(2), default=8, help="of a step")
    parser.add_argument("--picture", type=common.output_file, metavar="FILE", help="of one step, measured and planned, as SVG")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if cores < max(options.stages) and not options.tiny:
        sys.exit(f"{max(options.stages)} ranks on {cores} cores would take turns: bubbles are of a core a rank")
    with common.scratch() as directory:
        tokens = common.tokens_for(options, common.config_of(CONFIG), directory)
        sides = {f"{stages} stages, {schedule}": Pipeline(options, directory, tokens, stages, schedule).run
                 for stages in options.stages for schedule in SCHEDULES}
        found = common.turns(sides, options.rounds, options.seconds)
    drawn = found.get(f"{max(options.stages)} stages, {SCHEDULES[-1]}")
    if options.picture and drawn:
        Path(options.picture).write_text(drawn[-1].picture, encoding="utf-8")
    report(options, found, cores)


def report(options, found, cores):
    rows = []
    for name, runs in found.items():
        rows.append(compared(f"{name}: a step beside theory", [run.traced for run in runs], [run.theory for run in runs],
                             "s", 1 - WITHIN, target_high=1 + WITHIN))
        rows.append(compared(f"{name}: a step beside its plan", [run.step_seconds for run in runs],
                             [run.planned for run in runs], "s", 1 - PREDICTED_WITHIN, target_high=1 + PREDICTED_WITHIN))
        rows.append(plain(f"{name}: the stage that waits most", [100 * max(run.waits) for run in runs], "%"))
        # Which kernels a plan errs in, where it does.
        for kernel in KERNELS:
            if all(run.kernels.get(kernel) and run.planned_kernels.get(kernel) for run in runs):
                rows.append(compared(f"{name}: {kernel} of all ranks beside its plan", [run.kernels[kernel] for run in runs],
                                     [run.planned_kernels[kernel] for run in runs], "s"))
        plainest = found.get(name.replace("zero_bubble", "1f1b"))
        if "zero_bubble" in name and plainest:
            rows.append(compared(f"{name}: a step beside 1f1b's", [run.step_seconds for run in runs],
                                 [run.step_seconds for run in plainest], "s"))
    common.report(options, rows, [f"a core a rank, of {cores}; {BLOCKS} blocks, {options.micro_batches} micro-batches of "
                                  f"{MODEL['batch.sequence']} tokens"])


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The plan that ferry makes, beside the best that other choices of speculation, placement and saved activations give.

None of these keys changes a number of a run, and the script holds every run's state hash against the others'. First each
choice is tried alone, then those that helped together; what does not fit is left out. At the end the default and
the best of all take turns: the default's step is to be within 5 % of it.

    bench/default_plan.py                                       the 3 B model of examples/3b_gpu.json
    bench/default_plan.py --config FILE --set steps=12          another configuration
    bench/default_plan.py --config examples/8b_small_steps.json --choices "block inputs stay" "attention saved"
                                                                some of the choices
"""
import json
import sys
from pathlib import Path

import common
import needs
from common import SideFailed, compared, plain
from training import NEVER_CLIPPED, TINY, WARMUP, train

CONFIG = common.ROOT / "examples/3b_gpu.json"
TARGET = 0.95  # of the best step over the default's
BETTER = 0.99  # of the default's step: a choice that helps is tried with the others that do
ALL = 65536  # blocks


def choices_of(plan):
    """What may be decided otherwise, by name: keys and their values. `plan`: of `ferry plan --json`."""
    chunk = plan["chunk_elements"]
    found = {"no speculative updates": {"swap.speculate": "off"}, "all updates speculative": {"swap.speculate": "all"},
             "attention recomputed": {"swap.save_attention": 0}, "attention saved": {"swap.save_attention": ALL},
             "MLP recomputed": {"swap.save_mlp": 0}, "MLP saved": {"swap.save_mlp": ALL},
             "projections recomputed": {"swap.save_projections": 0}, "projections saved": {"swap.save_projections": ALL},
             "block inputs leave": {"swap.save_inputs": 0}, "block inputs stay": {"swap.save_inputs": ALL},
             "no state on the device": {"swap.state_on_device": 0},
             "a quarter of the state on the device at most": {"swap.state_on_device": 0.25},
             "chunks of a quarter": {"swap.chunk_elements": max(4096, chunk // 4 // 4096 * 4096)},
             "chunks of four": {"swap.chunk_elements": 4 * chunk}}
    found.update({f"{groups} groups": {"swap.groups": groups} for groups in range(1, plan["micro_batches"] + 1)
                  if plan["micro_batches"] % groups == 0 and groups != plan["groups"]})
    return found


def chosen(options, choices):
    """Those that --choices names. Ends the script where there is no such choice."""
    unknown = sorted(set(options.choices or ()) - set(choices))
    if unknown:
        sys.exit(f"--choices: no choice {', '.join(map(repr, unknown))} here; there are {', '.join(map(repr, choices))}")
    return {name: choice for name, choice in choices.items() if options.choices is None or name in options.choices}


class Tries:
    """Runs of one configuration under different plans, each tried once."""

    def __init__(self, options, settings):
        self.options, self.settings, self.hashes = options, settings, {}

    def run(self, choice, name):
        run = train(self.options, self.options.config, {**self.settings, **choice}, warmup=self.options.warmup, bound=False)
        self.hashes[name] = run.state_hash
        self.check()
        return run

    def check(self):
        if len(set(self.hashes.values())) > 1:
            sys.exit(f"the plan changed a run's numbers: {json.dumps(self.hashes)}")

    def seconds(self, choice, name):
        """Of a step; None where it does not fit or is refused."""
        try:
            return self.run(choice, name).step_seconds
        except SideFailed as failure:
            print(f"{name}: {failure}", file=sys.stderr)
            return None


def together(tried, choices, default):
    """The choices that helped, the one that helped most first where two set one key."""
    helped = {}
    for name in sorted((name for name, seconds in tried.items() if seconds < BETTER * default), key=tried.get):
        helped = {**choices[name], **helped}
    return helped


def options_of():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="default: examples/3b_gpu.json")
    parser.add_argument("--steps", type=common.at_least(1), default=8, help="of each run")
    parser.add_argument("--warmup", type=common.at_least(0), default=WARMUP, help="first steps left out")
    parser.add_argument("--choices", nargs="+", metavar="NAME", help="some of the choices, by name; default: all")
    options = parser.parse_args()
    common.check_steps(parser, options)
    return options


def main():
    options = options_of()
    with common.scratch() as directory:
        tokens = common.tokens_for(options, common.config_of(options.config), directory)
        settings = {"steps": options.steps, "data.tokens": tokens, "evaluate.micro_batches": 0, **NEVER_CLIPPED,
                    **(TINY if options.tiny else {})}
        tries = Tries(options, settings)
        choices = chosen(options, choices_of(needs.plan(options, options.config, settings)))
        default = tries.run({}, "default").step_seconds
        tried = {name: seconds for name, choice in choices.items()
                 if (seconds := tries.seconds(choice, name)) is not None}
        if not tried:
            sys.exit("no choice but the default is possible here")
        best, of_best = min(((name, choices[name]) for name in tried), key=lambda found: tried[found[0]])
        combined = together(tried, choices, default)
        if len(combined) > len(of_best):
            seconds = tries.seconds(combined, "what helped, together")
            if seconds is not None and seconds < tried[best]:
                best, of_best = "what helped, together", combined
        sides = {"default": lambda: tries.run({}, "default"), "best": lambda: tries.run(of_best, best)}
        runs = common.turns(sides, options.rounds, options.seconds)
    rows = [plain(f"{name}: a step", seconds, "s") for name, seconds in sorted(tried.items(), key=lambda one: one[1])]
    rows.append(compared(f"default: a step, beside the best: {best}", [run.step_seconds for run in runs["default"]],
                         [run.step_seconds for run in runs["best"]], "s", TARGET))
    left_out = sorted(set(choices) - set(tried))
    common.report(options, rows, [f"the best sets {json.dumps(of_best)}", f"all {len(tries.hashes)} runs have one state hash",
                                  *([f"not possible here: {', '.join(left_out)}"] if left_out else [])])


if __name__ == "__main__":
    main()

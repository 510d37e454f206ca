#!/usr/bin/env python3
"""How much slower three tight tiers are than everything in memory, on this machine; or, with --durable,
how much slower steps are that outlive a power failure than the same with all state on NVMe.

Runs the quick start's model in both variants, alternating, and prints the ratio of their step times. The
two must end with the same state hash.

    bench/three_tiers.py [--durable] [--path /var/tmp] [--rounds 5] [--steps 40]
"""
import sys

import common
import needs
from common import compared, plain
from training import TINY, train

CONFIG = common.ROOT / "examples/quickstart.json"
TARGET = 1 / 1.15  # of the step in memory over the step through three tiers
UNLIMITED = {"budgets.device": "unlimited", "budgets.host": "unlimited", "budgets.nvme": []}
STORED = {"swap.state_on_nvme": 1, "io.leftovers": "remove_any"}  # a durable run's files stay
DURABLE = {**STORED, "checkpoint.durable_steps": True}
TINY_TIERS = {**TINY, "budgets.device": "3MiB", "budgets.host": "2MiB"}


def main():
    parser = common.arguments_parser(__doc__, rounds=5)
    parser.add_argument("--steps", type=common.at_least(1), default=40, help="of each run")
    parser.add_argument("--path", type=needs.directory, default="/var/tmp", help="directory for the volume")
    parser.add_argument("--durable", action="store_true", help="durable steps beside others, all state on NVMe")
    options = parser.parse_args()
    with common.scratch() as directory, common.scratch(options.path) as volume:
        tokens = common.tokens_for(options, common.config_of(CONFIG), directory)
        settings = {"steps": options.steps, "schedule.total_steps": 160, "evaluate.every": 0,
                    "evaluate.micro_batches": 0, "data.tokens": tokens,
                    "budgets.nvme": [{"path": str(volume), "size": "256MiB"}], **(TINY_TIERS if options.tiny else {})}
        variants = ({"durable steps": DURABLE, "state on NVMe": STORED} if options.durable else
                {"three tiers": {}, "memory": UNLIMITED})
        runs = common.turns({variant: lambda changes=changes: train(options, CONFIG, {**settings, **changes}, warmup=0,
                                                                bound=False)
                             for variant, changes in variants.items()}, options.rounds, options.seconds)
    if len(runs) != len(variants):
        sys.exit("only one variant could be measured")
    tiers, memory = runs.values()
    hashes = {run.state_hash for run in [*tiers, *memory]}
    if len(hashes) != 1:
        sys.exit(f"the two variants ended with different states: {hashes}")
    per_step = [[run.summary["seconds"] / run.summary["steps"] for run in of_way] for of_way in (tiers, memory)]
    rows = [compared(f"step, {' beside '.join(variants)}", *per_step, "s", None if options.durable else TARGET),
            plain("NVMe read a step", tiers[-1].lane_bytes("nvme read"), "B"),
            plain("NVMe written a step", tiers[-1].lane_bytes("nvme write"), "B")]
    common.report(options, rows, [f"state hash {hashes.pop()} in both variants"])


if __name__ == "__main__":
    main()

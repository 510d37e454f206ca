#!/usr/bin/env python3
"""The held-back loss that ranks reach with each codec, beside uncoded runs of other seeds.

The quick-start model on ferry's own texts, over several ranks of this machine. A seed fixes weights and order. A
codec's run has the first seed; its loss is asked to lie within the spread of the uncoded seeds, or below.

    bench/codec_losses.py --ranks 4 --seeds 5

The seeds are the rounds: --rounds and --seconds do nothing.
"""
import sys

import common
from common import compared, plain
from slow_network import CODECS, ONEBIT
from training import TINY, train
from weak_scaling import mpirun

CONFIG = common.ROOT / "examples/quickstart.json"


def main():
    parser = common.arguments_parser(__doc__)
    parser.add_argument("--ranks", type=common.at_least(2), default=4)
    parser.add_argument("--seeds", type=common.at_least(2), default=5, help="of the uncoded runs")
    parser.add_argument("--steps", type=common.at_least(2), default=160)
    parser.add_argument("--micro-batch", type=common.at_least(1), default=4, help="sequences of a rank and step")
    options = parser.parse_args()
    with common.scratch() as directory:
        config = common.config_of(CONFIG)
        settings = {"steps": options.steps, "data.tokens": common.tokens_for(options, config, directory),
                    "evaluate.every": options.steps, "evaluate.micro_batches": 8 * options.ranks, "budgets.nvme": [],
                    "budgets.device": "unlimited", "budgets.host": "unlimited", "threads": options.ranks,
                    "schedule.total_steps": options.steps, "schedule.warmup_steps": options.steps // 8,
                    **(TINY if options.tiny else {}),
                    "batch.micro_batch": options.micro_batch, "batch.micro_batches": options.ranks}

        def loss(seed, codec, more=()):
            compressed = {**{f"zero.compress.{key}": value for key, value in codec.items()}, **dict(more)}
            found = train(options, CONFIG, {**settings, "seed": seed, **compressed}, bound=False,
                          launcher=mpirun(options.ranks))
            return found.evaluations[-1]["evaluation_loss"]
        seeds = [loss(seed, {}) for seed in range(1, options.seeds + 1)]
        coded = {name: loss(1, codec) for name, codec in CODECS.items() if codec}
        coded[ONEBIT] = loss(1, {}, {"optimizer.method": "onebit_adam", "optimizer.freeze_step": options.steps // 5})
    rows = [plain(f"uncoded, {options.seeds} seeds", seeds, "nats")]
    worst = max(seeds)
    rows += [compared(f"{name}, beside the worst uncoded seed", [value], [worst], "nats", 1.0)
             for name, value in coded.items()]
    rows += [compared(f"{name}, beside the same seed", [value], [seeds[0]], "nats") for name, value in coded.items()]
    common.report(options, rows, [f"{options.ranks} ranks, {options.steps} steps, losses uncoded: "
                                  + ", ".join(f"{value:.4f}" for value in seeds)])


if __name__ == "__main__":
    sys.exit(main())

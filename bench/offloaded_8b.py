#!/usr/bin/env python3
"""An 8 B model under 24 GiB of a GPU and 112 GiB of host memory: large steps, and small ones that the host binds.

The Llama-3-8B shape, random weights and tokens, one GPU. Large steps have 32 sequences of 2,048 tokens, a split master
and bf16 moments: beside so many tokens fp32 state does not fit. Small ones have 4 of 1,024 and fp32 state. The limit of
the norm never binds. Each beside its lower bound and its prediction; the large ones beside the tokens a second asked for.

    bench/offloaded_8b.py                      both
    bench/offloaded_8b.py --cases large        one
"""
import array
import json
import random
import subprocess
import sys

import common
import needs
from common import compared, judged, plain
from training import GIB, NEVER_CLIPPED, TINY, WARMUP, bound_row, prediction_row, train

SHAPE = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336,
         "vocab": 128256, "tie_embeddings": False}
SMALLER = {"master": "split", "moments": "bf16"}
PUBLISHED = 10778  # tokens a second of ml_dataflow on an H100 under 24 GiB, pure bf16: its README
# By name: batch, what the optimizer keeps, tokens a second and MFU asked for, step beside its bound.
CASES = {"large": ({"sequence": 2048, "micro_batch": 8, "micro_batches": 4}, SMALLER, 11500, 0.66, None),
         "small": ({"sequence": 1024, "micro_batch": 4, "micro_batches": 1}, {}, None, None, 1 / 1.15)}
TOKENS_OF_STEP = {name: batch["sequence"] * batch["micro_batch"] * batch["micro_batches"]
                  for name, (batch, *_) in CASES.items()}


def tokens_of(options, directory, count, vocabulary):
    draw = random.Random(1)
    (directory / "ids.bin").write_bytes(array.array("I", (draw.randrange(vocabulary) for _ in range(count))).tobytes())
    made = str(directory / "tokens.bin")
    subprocess.run([options.ferry, "data", str(directory / "ids.bin"), "-o", made, "--ids", "uint32", "--vocab",
                    str(vocabulary)], check=True, stdout=subprocess.DEVNULL)
    return made


def config_of(options, name, tokens, directory):
    batch, kept, *_ = CASES[name]
    file = directory / f"{name}.json"
    file.write_text(json.dumps({
        "steps": options.steps, "device": "cuda", "precision": "bf16", "model": SHAPE, "data": {"tokens": tokens},
        "batch": batch, "optimizer": {"betas": [0.9, 0.95], "weight_decay": 0.1, **kept},
        "budgets": {"device": f"{options.device_gib}GiB", "host": f"{options.host_gib}GiB"}}))
    return file


def rows_of(name, runs):
    *_, rate, mfu, of_bound = CASES[name]
    rates = [run.tokens_per_second for run in runs]
    rows = [plain(f"{name}: a step", [run.step_seconds for run in runs], "s"),
            judged(f"{name}: tokens a second", sum(rates) / len(rates), "1/s", rate,
                   [of / rate for of in rates], 1) if rate else plain(f"{name}: tokens a second", rates, "1/s"),
            *([compared(f"{name}: beside ml_dataflow's published tokens a second", rates, [PUBLISHED] * len(rates), "1/s",
                        less_is_better=False)] if rate else []),
            bound_row(name, runs, of_bound, note=f"bound by {runs[-1].summary['binding']}; {runs[-1].speculation}"),
            prediction_row(name, runs)]
    if runs[-1].summary.get("mfu"):
        rows.append(judged(f"{name}: MFU", runs[-1].summary["mfu"], "share", mfu,
                           [run.summary["mfu"] / mfu for run in runs], 1) if mfu else
                    plain(f"{name}: MFU", [run.summary["mfu"] for run in runs], "share"))
    if all(run.gpu_peak for run in runs):
        rows.append(plain(f"{name}: GPU peak", [run.gpu_peak / GIB for run in runs], "GiB"))
    rows.append(plain(f"{name}: host peak", [run.host_peak / GIB for run in runs], "GiB"))
    return rows


def main():
    parser = common.parser_of(__doc__, rounds=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which steps")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="override a key of the configuration")
    parser.add_argument("--steps", type=common.at_least(1), default=8, help="of each run")
    parser.add_argument("--warmup", type=common.at_least(0), default=WARMUP, help="first steps left out")
    parser.add_argument("--device-gib", type=common.at_least(1), default=24, help="of the GPU")
    parser.add_argument("--host-gib", type=common.at_least(1), default=112, help="of the host")
    options = parser.parse_args()
    common.check_steps(parser, options)
    settings = {**NEVER_CLIPPED, **(TINY if options.tiny else {})}
    vocabulary = TINY["model.vocab"] if options.tiny else SHAPE["vocab"]
    with common.scratch() as directory:
        of_step = max(TOKENS_OF_STEP[name] for name in options.cases)
        tokens = tokens_of(options, directory, (options.steps + 2) * of_step, vocabulary)
        files = {name: config_of(options, name, tokens, directory) for name in options.cases}
        for file in files.values():
            needs.plan(options, file, settings)

        sides = {name: lambda file=file: train(options, file, settings, warmup=options.warmup)
                 for name, file in files.items()}
        runs = common.turns(sides, options.rounds, options.seconds)
    if not runs:
        sys.exit("nothing could be measured")
    common.report(options, [row for name, of_case in runs.items() for row in rows_of(name, of_case)])


if __name__ == "__main__":
    main()

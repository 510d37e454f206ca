#!/usr/bin/env python3
"""7 and 8 B models under 24 GiB of a GPU and 112 GiB of host memory: large steps, and small ones that the host binds.

Random weights and tokens, one GPU. Of the Llama-3-8B shape large steps have 32 sequences of 2,048 tokens, a split
master and bf16 moments: beside so many tokens fp32 state does not fit. Small ones have 4 of 1,024 and fp32 state.
Steps of the Mistral-7B shape have 2 sequences of 8,192 tokens in one micro-batch, a window of 4,096, and the large
steps' state. The limit of the norm never binds. Each beside its lower bound and its prediction; the large ones beside
the tokens a second asked for.

    bench/offloaded_8b.py                      large and small
    bench/offloaded_8b.py --cases mistral      one
"""
import array
import json
import random
import subprocess
import sys

import common
import needs
from common import compared, judged, plain
from training import GIB, NEVER_CLIPPED, TINY, WARMUP, bound_at_peaks_rows, bound_row, prediction_row, train

SHAPE = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336,
         "vocab": 128256, "tie_embeddings": False}
# config.json: the window is a key of the family's.
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
           "intermediate_size": 14336, "vocab_size": 32000, "tie_word_embeddings": False, "sliding_window": 4096,
           "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 32768,
           "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
TINY_MISTRAL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16, "intermediate_size": 160, "vocab_size": 256, "sliding_window": 16}
SMALLER = {"master": "split", "moments": "bf16"}
PUBLISHED = 10778  # tokens a second of ml_dataflow on an H100 under 24 GiB, pure bf16: its README
# By name: model, batch, what the optimizer keeps, tokens a second and MFU asked for, step beside its bound.
CASES = {"large": (SHAPE, {"sequence": 2048, "micro_batch": 8, "micro_batches": 4}, SMALLER, 11500, 0.66, None),
         "small": (SHAPE, {"sequence": 1024, "micro_batch": 4, "micro_batches": 1}, {}, None, None, 1 / 1.15),
         "mistral": (MISTRAL, {"sequence": 8192, "micro_batch": 2, "micro_batches": 1}, SMALLER, None, None, None)}
WANTED = ("large", "small")
TOKENS_OF_STEP = {name: batch["sequence"] * batch["micro_batch"] * batch["micro_batches"]
                  for name, (_, batch, *_) in CASES.items()}


def tokens_of(options, directory, count, vocabulary):
    draw = random.Random(1)
    (directory / "ids.bin").write_bytes(array.array("I", (draw.randrange(vocabulary) for _ in range(count))).tobytes())
    made = str(directory / "tokens.bin")
    subprocess.run([options.ferry, "data", str(directory / "ids.bin"), "-o", made, "--ids", "uint32", "--vocab",
                    str(vocabulary)], check=True, stdout=subprocess.DEVNULL)
    return made


def config_of(options, name, tokens, directory):
    model, batch, kept, *_ = CASES[name]
    file = directory / f"{name}.json"
    if model is MISTRAL:
        of_family = {**MISTRAL, **(TINY_MISTRAL if options.tiny else {})}
        (directory / "config.json").write_text(json.dumps(of_family))
        model = {"path": str(directory), "load": False}
    file.write_text(json.dumps({
        "steps": options.steps, "device": "cuda", "precision": "bf16", "model": model, "data": {"tokens": tokens},
        "batch": batch, "optimizer": {"betas": [0.9, 0.95], "weight_decay": 0.1, **kept},
        "budgets": {"device": f"{options.device_gib}GiB", "host": f"{options.host_gib}GiB"}}))
    return file


def settings_of(options, name):
    """A family's shape is its config.json's alone."""
    found = {**NEVER_CLIPPED, **(TINY if options.tiny else {})}
    return {key: value for key, value in found.items() if CASES[name][0] is not MISTRAL or not key.startswith("model.")}


def rows_of(name, runs):
    *_, rate, mfu, of_bound = CASES[name]
    rates = [run.tokens_per_second for run in runs]
    rows = [plain(f"{name}: a step", [run.step_seconds for run in runs], "s"),
            judged(f"{name}: tokens a second", sum(rates) / len(rates), "1/s", rate,
                   [of / rate for of in rates], 1) if rate else plain(f"{name}: tokens a second", rates, "1/s"),
            *([compared(f"{name}: beside ml_dataflow's published tokens a second", rates, [PUBLISHED] * len(rates), "1/s",
                        less_is_better=False)] if rate else []),
            bound_row(name, runs, of_bound, note=f"bound by {runs[-1].summary['binding']}; {runs[-1].speculation}"),
            *bound_at_peaks_rows(name, runs), prediction_row(name, runs)]
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
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(WANTED), help="which steps")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="override a key of the configuration")
    parser.add_argument("--steps", type=common.at_least(1), default=8, help="of each run")
    parser.add_argument("--warmup", type=common.at_least(0), default=WARMUP, help="first steps left out")
    parser.add_argument("--device-gib", type=common.at_least(1), default=24, help="of the GPU")
    parser.add_argument("--host-gib", type=common.at_least(1), default=112, help="of the host")
    options = parser.parse_args()
    common.check_steps(parser, options)
    # One file for all: the smallest vocabulary has its tokens.
    vocabulary = TINY["model.vocab"] if options.tiny else min(
        CASES[name][0].get("vocab") or CASES[name][0]["vocab_size"] for name in options.cases)
    with common.scratch() as directory:
        of_step = max(TOKENS_OF_STEP[name] for name in options.cases)
        tokens = tokens_of(options, directory, (options.steps + 2) * of_step, vocabulary)
        files = {name: config_of(options, name, tokens, directory) for name in options.cases}
        for name, file in files.items():
            needs.plan(options, file, settings_of(options, name))

        sides = {name: lambda name=name, file=file: train(options, file, settings_of(options, name),
                                                          warmup=options.warmup) for name, file in files.items()}
        runs = common.turns(sides, options.rounds, options.seconds)
    if not runs:
        sys.exit("nothing could be measured")
    common.report(options, [row for name, of_case in runs.items() for row in rows_of(name, of_case)])


if __name__ == "__main__":
    main()

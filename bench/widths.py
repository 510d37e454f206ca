#!/usr/bin/env python3
"""Operations at widths that are no multiple of 8, beside the next that is: what `ferry plan` reckons them with.

16-bit rows of a multiple of 8 elements begin at multiples of 16 bytes, as tensor cores and whole loads want them. Of a
model of one block `ferry bench kernels` times every operation, at even widths and at such that lack 4, 2 or 1 of them.
An operation is compared where its shape has the odd width. The ratio is the even width's time over the odd one's.

    bench/widths.py                              hidden 4,096, intermediate 14,336, 128,256 words; 4,096 tokens, bf16
    bench/widths.py --lacking 4 --seconds 60     of a kind alone
"""
import json
import re
import subprocess
import sys

import common
from common import SideFailed, compared

UNIT = 8  # elements, as kTensorUnit
EVEN = {"hidden": 4096, "intermediate": 14336, "vocab": 128256}
HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
TOKENS = (2, 2048)  # sequences of so many
TINY = ({"hidden": 64, "intermediate": 160, "vocab": 512}, {"heads": 4, "kv_heads": 2, "head_dim": 16}, (2, 40))
# No operation has both widths of a run.
RUNS = (("hidden",), ("intermediate", "vocab"))
KERNEL_ROUNDS = 3


class Model:
    """Even widths, and the file that ferry reads."""

    def __init__(self, options, directory):
        self.ferry = options.ferry
        self.even, heads, (sequences, tokens) = TINY if options.tiny else (EVEN, HEADS, TOKENS)
        self.config = directory / "widths.json"
        self.config.write_text(json.dumps({
            "model": {**self.even, **heads, "layers": 1, "tie_embeddings": True}, "data": {"tokens": "none"},
            "batch": {"sequence": tokens, "micro_batch": sequences, "micro_batches": 1}, "precision": "bf16",
            "device": "cpu" if options.tiny else "cuda", "steps": 1, "optimizer": {"method": "adamw"}}))

    def odd(self, keys, lacking):
        return {key: self.even[key] - lacking for key in keys}

    def microseconds(self, widths):
        """Of a call of each operation, by kernel, name and shape."""
        command = [self.ferry, "bench", "kernels", "--config", str(self.config), "--rounds", str(KERNEL_ROUNDS), "--json"]
        for key, width in widths.items():
            command += ["--set", f"model.{key}={width}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise SideFailed(done.stderr.strip() or f"exit code {done.returncode}")
        return {row["name"]: row["us a call"] for row in json.loads(done.stdout)["rows"] if "us a call" in row}


def evened(name, key, odd, even):
    """An operation's name as the even model has it; None where it has no such width. Gate and up lie side by side."""
    found = name
    for times in (1, 2) if key == "intermediate" else (1,):
        found = re.sub(rf"\b{times * odd}\b", str(times * even), found)
    return found if found != name else None


def rows_of(model, even, keys, lacking, odd):
    """`even`, `odd`: of each round, its operations."""
    rows = []
    for key, width in model.odd(keys, lacking).items():
        for name in odd[0]:
            other = evened(name, key, width, model.even[key])
            if other is None:
                continue
            if other not in even[0]:
                print(f"{key} {width}: {name} has no match", file=sys.stderr)
                continue
            rows.append(compared(f"{key} {width}: {name}", [of[name] for of in odd], [of[other] for of in even], "us"))
    return rows


def main():
    parser = common.parser_of(__doc__, rounds=1)
    parser.add_argument("--lacking", nargs="+", type=int, choices=range(1, UNIT), default=[4, 2, 1], metavar="N",
                        help="elements that a width is short of a multiple of 8; default: 4 2 1")
    options = parser.parse_args()
    with common.scratch() as directory:
        model = Model(options, directory)
        sides = {(): lambda: model.microseconds({})}
        for lacking in options.lacking:
            for keys in RUNS:
                sides[keys, lacking] = lambda of=(keys, lacking): model.microseconds(model.odd(*of))
        runs = common.turns(sides, options.rounds, options.seconds)
    if () not in runs:
        sys.exit("the even widths could not be measured")
    rows = []
    for side, odd in runs.items():
        if side:
            rows += rows_of(model, runs[()], *side, odd)
    if not rows:
        sys.exit("no odd width could be measured")
    common.report(options, rows, ["a model of one block; us: of one call, in bursts"])


if __name__ == "__main__":
    main()

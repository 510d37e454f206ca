#!/usr/bin/env python3
"""The values of ferry's attention beside torch's under the same mask, both against a plain masked softmax in fp64.

Every pattern, lengths that no block divides, 1 to 64 documents a row, windows, grouped heads, bf16 and fp16; forward
and backward. The largest error of each side is printed, over the largest value that it should have. ferry fails where its
error is more than twice torch's and more than a unit of the type. The masks are drawn here, token by token, from the blocks
that a pattern has.

    bench/attention_values.py                    on a GPU, with torch
    bench/attention_values.py --device cpu       the CPU's kernels
    bench/attention_values.py --only fixed       cases whose name has the word
"""
import argparse
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import common

UNIT = {"bf16": 2.0 ** -8, "fp16": 2.0 ** -11}
RESULTS = ("out", "dq", "dk", "dv")


class Case(NamedTuple):
    pattern: str
    type: str
    sequences: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    documents: int

    @property
    def name(self):
        of = f", window {self.window}" if self.window else ""
        of += f", {self.documents} documents" if self.documents else ""
        return (f"{self.pattern}{of}: {self.sequences} x {self.sequence}, {self.heads}/{self.kv_heads} heads of "
                f"{self.head_dim}, {self.type}")


def cases():
    patterns = ("dense", "whole", "window", "fixed", "fixed-heads", "bigbird", "longformer", "variable", "layout")
    for type_, pattern in itertools.product(("bf16", "fp16"), patterns):
        yield Case(pattern, type_, 1, 1000, 4, 2, 64, 0, 0)
        yield Case(pattern, type_, 2, 777, 8, 2, 128, 0, 0)
        yield Case(pattern, type_, 1, 641, 2, 1, 96, 0, 7)
        yield Case(pattern, type_, 2, 449, 4, 4, 64, 0, 64)
        yield Case(pattern, type_, 1, 515, 4, 1, 128, 150, 0)
    for type_ in ("bf16", "fp16"):
        yield Case("bigbird", type_, 1, 600, 2, 1, 256, 0, 3)
        yield Case("dense", type_, 1, 1, 4, 2, 64, 0, 0)
        yield Case("dense", type_, 1, 64, 2, 2, 64, 0, 64)  # each token sees itself alone
        yield Case("dense", type_, 1, 4097, 4, 2, 64, 0, 0)


def borders(torch, case):
    """Where the document of each token begins and ends, [sequences, sequence]."""
    starts = torch.zeros(case.sequences, case.sequence, dtype=torch.int32)
    ends = torch.full_like(starts, case.sequence)
    for row in range(case.sequences):
        cuts = sorted({0, case.sequence, *(torch.randperm(case.sequence - 1)[:max(0, case.documents - 1)] + 1).tolist()})
        for begin, end in zip(cuts, cuts[1:]):
            starts[row, begin:end], ends[row, begin:end] = begin, end
    return starts, ends


def raw(torch, tensor):
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def prepare(torch, case, directory):
    """Operands in files; [sequences, sequence, heads * head_dim]."""
    directory.mkdir()
    type_ = torch.bfloat16 if case.type == "bf16" else torch.float16
    operands = {}
    for name, heads in (("q", case.heads), ("k", case.kv_heads), ("v", case.kv_heads), ("dout", case.heads)):
        operands[name] = torch.randn(case.sequences, case.sequence, heads * case.head_dim).to(type_)
        (directory / name).write_bytes(raw(torch, operands[name]))
    if case.documents:
        operands["starts"], operands["ends"] = borders(torch, case)
        for name in ("starts", "ends"):
            (directory / name).write_bytes(raw(torch, operands[name]))
    return operands


def line_of(case, directory):
    return " ".join(map(str, (directory, *case[:-1], int(case.documents > 0))))


def mask_of(torch, case, operands, directory, block, layouts, blocks):
    """[sequences, heads, sequence, sequence]: what is seen."""
    token = torch.arange(case.sequence)
    seen = (token[None, :] <= token[:, None])[None, None].repeat(case.sequences, case.heads, 1, 1)
    if case.window:
        seen &= token[None, :] > token[:, None] - case.window
    if case.documents:
        seen &= (token[None, None, :] >= operands["starts"][:, :, None])[:, None]
    if case.pattern != "dense":
        cells = torch.frombuffer(bytearray((directory / "cells").read_bytes()), dtype=torch.uint8).bool()
        cells = cells.reshape(layouts, blocks, blocks)
        place = token // block
        for head in range(case.heads):
            seen[:, head] &= cells[head % layouts][place][:, place]
    return seen


def by_heads(x, case, heads):
    return x.reshape(case.sequences, case.sequence, heads, case.head_dim).transpose(1, 2)


def attended(torch, case, operands, seen, type_, attention):
    """out, dq, dk, dv of a function of q, k, v by heads."""
    given = [operands[name].to(seen.device, type_).requires_grad_() for name in ("q", "k", "v")]
    q, k, v = (by_heads(x, case, heads) for x, heads in zip(given, (case.heads, case.kv_heads, case.kv_heads)))
    group = case.heads // case.kv_heads
    out = attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    out = out.transpose(1, 2).reshape(case.sequences, case.sequence, -1)
    out.backward(operands["dout"].to(seen.device, type_))
    return [x.detach().double() for x in (out, *(x.grad for x in given))]


def softmax_of(torch, case, seen):
    def attention(q, k, v):
        scores = (q @ k.transpose(2, 3) / math.sqrt(case.head_dim)).masked_fill(~seen, -math.inf)
        return torch.softmax(scores, 3) @ v
    return attention


def ferrys(torch, case, directory):
    type_ = torch.bfloat16 if case.type == "bf16" else torch.float16
    return [torch.frombuffer(bytearray((directory / name).read_bytes()), dtype=type_)
            .reshape(case.sequences, case.sequence, -1).double() for name in RESULTS]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=common.program, default=str(common.ROOT / "build/release/bench_attention_values"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="cases whose name has this")
    options = parser.parse_args()
    import torch
    torch.manual_seed(1)
    wanted = [case for case in cases() if options.only in case.name]
    failed = 0
    with common.scratch() as scratch:
        directories = [scratch / str(i) for i in range(len(wanted))]
        operands = [prepare(torch, case, directory) for case, directory in zip(wanted, directories)]
        done = subprocess.run([options.program, options.device], text=True, capture_output=True, check=False,
                              input="\n".join(map(line_of, wanted, directories)) + "\n")
        if done.returncode:
            sys.exit(done.stderr)
        lists = {Path(words[0]): tuple(map(int, words[1:])) for words in map(str.split, done.stdout.splitlines())}
        print(f"{'largest error / largest value':52}" + "".join(f"{name + ' ferry':>12}{'torch':>10}" for name in RESULTS))
        for case, directory, given in zip(wanted, directories, operands):
            seen = mask_of(torch, case, given, directory, *lists[directory]).to(options.device)
            exact = attended(torch, case, given, seen, torch.float64, softmax_of(torch, case, seen))
            type_ = torch.bfloat16 if case.type == "bf16" else torch.float16

            def sdpa(q, k, v):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)

            theirs = attended(torch, case, given, seen, type_, sdpa)
            bad, text = False, ""
            for want, mine, its in zip(exact, ferrys(torch, case, directory), theirs):
                largest = want.abs().max().item() or 1.0
                errors = [((x.to(want.device) - want).abs().max() / largest).item() for x in (mine, its)]
                bad |= not errors[0] <= max(2 * errors[1], UNIT[case.type])
                text += f"{errors[0]:12.2e}{errors[1]:10.2e}"
            failed += bad
            print(f"{case.name:52}{text}{'  FAILED' if bad else ''}", flush=True)
    print(f"{len(wanted)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

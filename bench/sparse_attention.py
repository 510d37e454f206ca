#!/usr/bin/env python3
"""Attention over a pattern of blocks: ferry's, deterministic, beside its own dense attention and FlexAttention.

Patterns are a window and a few global blocks, of 128 tokens; the density is the share of all blocks, those behind the
diagonal counted, that are there: 1/2 is every block before a query. Each shape is one sequence in bf16. FlexAttention is
compiled and given the same lists of blocks, whole ones apart from those on the diagonal. All sides run warm, one after
the other.

    bench/sparse_attention.py                                  all shapes
    bench/sparse_attention.py --density 8 16 --head-dim 128    some
"""
import statistics
import sys
from typing import NamedTuple

import common
from attention import Torch, ferry_times, torch_times, why_no_torch
from common import compared, plain

OF_DENSE = 0.85  # of the rate of ferry's dense attention, forward and backward together
OF_FLEX = 1.0
BLOCK = 128
HEAD_DIMS = (64, 128, 256)
DENSITIES = (2, 4, 8, 16)


class Shape(NamedTuple):
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    density: int  # of all blocks one in so many; 0: dense, without a pattern
    sequences: int = 1

    def __str__(self):
        pattern = f"1/{self.density} of the blocks" if self.density else "dense"
        return f"{self.sequence} tokens, {self.heads}/{self.kv_heads} heads of {self.head_dim}, {pattern}"

    @property
    def blocks(self):
        return -(-self.sequence // BLOCK)

    @property
    def global_blocks(self):
        return max(1, self.blocks // 64)

    @property
    def window_blocks(self):
        """The narrowest window with which so many blocks are there."""
        if self.density == 2:
            return self.blocks
        wanted = self.blocks ** 2 / self.density
        return next((w for w in range(1, self.blocks) if self.count(w) >= wanted), self.blocks)

    def row(self, row, window):
        return min(row + 1, window + min(self.global_blocks, max(0, row + 1 - window)))

    def count(self, window):
        return sum(self.row(row, window) for row in range(self.blocks))

    def cells(self):
        window, first = self.window_blocks, self.global_blocks
        return [[column <= row and (row - column < window or column < first) for column in range(self.blocks)]
                for row in range(self.blocks)]


def shapes_of(options):
    if options.tiny:
        return [Shape(512, 2, 1, 64, density) for density in (2, 4)]
    return [Shape(options.tokens, 32 if head_dim <= 128 else 16, 8 if head_dim <= 128 else 4, head_dim, density)
            for head_dim in options.head_dim for density in options.density]


def ferry(options, shape):
    sizes = {name: getattr(shape, name) for name in ("sequence", "heads", "kv_heads", "head_dim")}
    if shape.density:
        sizes |= {"block": BLOCK, "window_blocks": shape.window_blocks, "global_blocks": shape.global_blocks}
    return ferry_times(options, sizes)


class Flex(Torch):
    """FlexAttention compiled for one shape."""

    def __init__(self, shape):
        import torch
        import torch._functorch.config
        from torch.nn.attention.flex_attention import BlockMask, flex_attention
        torch._functorch.config.donated_buffer = False  # else a backward pass cannot be timed again
        super().__init__(shape)
        there = torch.tensor(shape.cells())
        diagonal = torch.eye(shape.blocks, dtype=torch.bool)

        def lists(cells):  # how many a row, and which, those that are there first
            order = cells.int().argsort(dim=-1, descending=True, stable=True)
            return cells.sum(-1)[None, None].int().cuda(), order[None, None].int().cuda()
        self.mask = BlockMask.from_kv_blocks(*lists(there & diagonal), *lists(there & ~diagonal), BLOCK_SIZE=BLOCK,
                                             mask_mod=lambda b, h, query, key: query >= key)
        self.compiled = torch.compile(flex_attention)

    def forward(self):
        return self.compiled(self.q, self.k, self.v, block_mask=self.mask, enable_gqa=True)


def rows_of(shape, runs):
    ours, dense, theirs = (runs.get(side, []) for side in ("ferry", "dense", "flex"))
    if not ours:
        return []
    rates, milliseconds = [times.rate for times in ours], [times.both for times in ours]
    split = f"{statistics.median(t.forward for t in ours):.2f} + {statistics.median(t.backward for t in ours):.2f} ms"
    rows = []
    if dense:
        rows.append(compared(f"{shape}: rate beside ferry's dense", rates, [times.rate for times in dense], "TFLOP/s",
                             OF_DENSE, less_is_better=False, note=split))
    else:
        rows.append(plain(f"{shape}: rate", rates, "TFLOP/s", note=split))
    if theirs:
        note = f"{statistics.median(t.forward for t in theirs):.2f} + {statistics.median(t.backward for t in theirs):.2f} ms"
        rows.append(compared(f"{shape}: beside FlexAttention", milliseconds, [times.both for times in theirs], "ms",
                             OF_FLEX, note=note))
    return rows


def main():
    parser = common.parser_of(__doc__)
    parser.add_argument("--tokens", type=common.at_least(BLOCK), default=32768, help="of one sequence")
    parser.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=[128, 64],
                        help="elements of its 32 heads, 8 of keys; of 256 half as many")
    parser.add_argument("--density", nargs="+", type=common.at_least(2), default=list(DENSITIES),
                        help="of all blocks one in so many is there")
    parser.add_argument("--calls", type=common.at_least(1), default=7, help="of each pass and round; the median counts")
    options = parser.parse_args()
    why = why_no_torch(options)
    rows = []
    for shape in shapes_of(options):
        sides = {"ferry": lambda shape=shape: ferry(options, shape),
                 "dense": lambda shape=shape: ferry(options, shape._replace(density=0))}
        if not why:
            sides["flex"] = lambda shape=shape: torch_times(Flex, options, shape)
        rows += rows_of(shape, common.turns(sides, options.rounds, options.seconds))
    if not rows:
        sys.exit("nothing could be measured")
    notes = ["ferry: deterministic; the reference of a rate: ferry's dense attention of the same heads, forward and backward"]
    common.report(options, rows, notes + ([why] if why else []))


if __name__ == "__main__":
    main()

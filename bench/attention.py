#!/usr/bin/env python3
"""Attention alone: ferry's, whose backward pass is deterministic, beside cuDNN's faster one through torch.

Each shape is one call, causal, in bf16: `ferry bench attention` and torch's scaled_dot_product_attention with the
cuDNN backend, which keeps no order in its backward pass. Both sides run warm, one after the other.

    bench/attention.py                                 all shapes
    bench/attention.py --tokens 32768 --head-dim 128   some
"""
import importlib.util
import statistics
import sys
from typing import NamedTuple

import common
from common import SideFailed, compared, plain

BESIDE = 0.7  # of cuDNN's backward pass that is not deterministic
TOKENS = (4096, 8192, 16384, 32768, 65536, 131072)
HEAD_DIMS = (128, 64)
WARM_SECONDS = 1.0


class Shape(NamedTuple):
    sequences: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self):
        return f"{self.sequences} x {self.sequence}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"


class Times(NamedTuple):
    forward: float  # ms
    backward: float
    rate: float = 0.0  # TFLOP/s, of both together; of ferry alone

    @property
    def both(self):
        return self.forward + self.backward


def shapes_of(options):
    if options.tiny:
        return [Shape(1, 256, 4, 1, 64), Shape(2, 96, 3, 3, 128)]
    long = [Shape(1, tokens, 32, 8, head_dim) for head_dim in options.head_dim for tokens in options.tokens]
    return long + ([Shape(8, 2048, 24, 8, 128)] if options.short else [])


def ferry_times(options, sizes):
    """`sizes`: options of `ferry bench attention` by name."""
    given = [word for name, value in sizes.items() for word in ("--" + name.replace("_", "-"), value)]
    rows = common.bench_rows(options, "attention", "--device", "cpu" if options.tiny else "cuda", "--rounds", options.calls,
                             *given)
    forward, backward = (next(row for row in rows if row["name"].startswith(f"attention {name}"))
                         for name in ("forward", "backward"))
    work = sum(row["TFLOP/s"] * row["value"] for row in (forward, backward))
    return Times(forward["value"], backward["value"], work / (forward["value"] + backward["value"]))


def why_no_torch(options):
    if options.tiny:
        return "torch is left out with --tiny"
    if importlib.util.find_spec("torch") is None:
        return "torch is not here: python3 cannot import it"
    import torch
    return "" if torch.cuda.is_available() else "torch is left out: it sees no GPU"


class Torch:
    """The tensors of one shape, and its calls."""

    def __init__(self, shape):
        import torch
        self.torch, self.shape = torch, shape
        torch.manual_seed(1)

        def tensor(heads, grad=True):  # tokens outermost in memory, as products of a block leave them
            made = torch.randn(shape.sequences, shape.sequence, heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
            return made.transpose(1, 2).detach().requires_grad_(grad)
        self.q, self.k, self.v = tensor(shape.heads), tensor(shape.kv_heads), tensor(shape.kv_heads)
        self.dout = tensor(shape.heads, False)

    def forward(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self.torch.nn.functional.scaled_dot_product_attention(
                self.q, self.k, self.v, is_causal=True, enable_gqa=self.shape.heads != self.shape.kv_heads)

    def backward(self, out):
        self.torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)

    def timed(self, work):
        """What it gives, and its milliseconds on the GPU."""
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        found = work()
        end.record()
        end.synchronize()
        return found, begin.elapsed_time(end)

    def once(self):
        out, forward_ms = self.timed(self.forward)
        return forward_ms, self.timed(lambda: self.backward(out))[1]

    def times(self, calls):
        self.once()  # chooses kernels, or compiles them
        spent = 0.0
        while spent < 1e3 * WARM_SECONDS:
            spent += sum(self.once())
        return Times(*(statistics.median(times) for times in zip(*(self.once() for _ in range(calls)))))


def torch_times(side, options, shape):
    """Of Torch, or of a class like it."""
    import torch
    try:
        return side(shape).times(options.calls)
    except RuntimeError as error:  # no memory, or no kernel
        raise SideFailed(f"{shape}: torch: {str(error).splitlines()[0]}") from error
    finally:
        torch.cuda.empty_cache()


def flops(shape):
    """Of the two products of a forward pass over the causal half."""
    pairs = shape.sequence * (shape.sequence + 1) / 2
    return 4 * pairs * shape.sequences * shape.heads * shape.head_dim


def rows_of(shape, runs):
    rows = []
    for name, factor, target in (("backward", 2.5, BESIDE), ("forward", 1.0, None)):
        ours, theirs = ([getattr(times, name) for times in runs.get(side, [])] for side in ("ferry", "cudnn"))
        if not ours:
            continue
        note = f"{factor * flops(shape) / statistics.median(ours) * 1e-9:.0f} TFLOP/s"
        label = f"{shape}: {name}"
        rows.append(compared(label, ours, theirs, "ms", target, note=note) if theirs else
                    plain(label, ours, "ms", note=note))
    return rows


def main():
    parser = common.parser_of(__doc__)
    parser.add_argument("--tokens", nargs="+", type=common.at_least(1), default=list(TOKENS), help="of one sequence")
    parser.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=list(HEAD_DIMS),
                        help="elements of its 32 heads, 8 of keys")
    parser.add_argument("--no-short", action="store_false", dest="short", help="without 8 sequences of 2,048 tokens")
    parser.add_argument("--calls", type=common.at_least(1), default=7, help="of each pass and round; the median counts")
    options = parser.parse_args()
    why = why_no_torch(options)
    rows = []
    for shape in shapes_of(options):
        sides = {"ferry": lambda shape=shape: ferry_times(options, shape._asdict())}
        if not why:
            sides["cudnn"] = lambda shape=shape: torch_times(Torch, options, shape)
        rows += rows_of(shape, common.turns(sides, options.rounds, options.seconds))
    if not rows:
        sys.exit("nothing could be measured")
    notes = ["ferry: deterministic; the reference: cuDNN through torch, not deterministic"]
    common.report(options, rows, notes + ([why] if why else []))


if __name__ == "__main__":
    main()

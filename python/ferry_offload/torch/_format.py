"""How masters and moments are kept, and what they are in fp32: torch tensors by update()'s names, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .._core import moment_shares
from ..errors import usage
from ..tiered_state import MASTERS, MOMENT_BLOCK, MOMENT_TYPES, rows_of

Rows = dict[str, torch.Tensor]
_LEAST_SCALE = 1e-12  # also of a block of zeros
_SLICE = 8192 * MOMENT_BLOCK  # elements that are coded at once: in a dozen temporary arrays
_TYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.uint16): torch.bfloat16, np.dtype(np.uint8): torch.uint8}


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """The same memory. uint16 becomes bf16, whose bits it is, or 16 bits in its clothes."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(array)


def blocks_in(elements: int) -> int:
    return -(-elements // MOMENT_BLOCK)


class Format:
    """Of one optimizer's state. A split master is its weights in bf16 and a row of their low halves, and together they are
    the fp32 master exactly; whoever keeps the rows keeps those weights."""

    def __init__(self, method: str, moments: Sequence[str], moment_type: str, master: str) -> None:
        for what, given, known in (("moments", moment_type, MOMENT_TYPES), ("master", master, MASTERS)):
            if given not in known:
                raise usage(f"{what} can be of no such type", measured=repr(given), limit=" or ".join(map(repr, known)))
        self.is_split, self.is_coded = master == "split", moment_type == "int8"
        self.moments = dict(zip(("m", "v"), moments))  # their names in a state_dict
        self.rows = rows_of(len(moments), moment_type, master)
        self._shares = {name: torch.tensor(moment_shares(method, i)) for i, name in enumerate(self.moments)} if self.is_coded else {}

    def empty(self, count: int, device: torch.device) -> Rows:
        """Rows of their own, and of a split master the weights too."""
        made = {row.name: torch.zeros(row.items(count), dtype=_TYPES[row.type], device=device) for row in self.rows}
        if self.is_split:
            made["weight"] = torch.zeros(count, dtype=torch.bfloat16, device=device)
        return made

    def bytes_for(self, count: int) -> int:
        """What empty() takes."""
        return sum(row.bytes(count) for row in self.rows) + (2 * count if self.is_split else 0)

    def check_weights(self, weights: torch.Tensor, name: str) -> None:
        if self.is_split and weights.dtype != torch.bfloat16:
            raise usage("a split master is of weights in bfloat16", where=name, measured=weights.dtype, limit="torch.bfloat16",
                        remedy='leave master="split" out')

    # ---- masters

    def master(self, rows: Rows) -> torch.Tensor:
        return _join(rows["weight"], rows["low"]) if self.is_split else rows["p"]

    def set_master(self, rows: Rows, values: torch.Tensor) -> None:
        if self.is_split:
            _split(values.to(torch.float32), rows["weight"], rows["low"])
        else:
            rows["p"].copy_(values)

    def take_over(self, rows: Rows, weights: torch.Tensor) -> None:
        """Where weights are no longer those of the master, they are it."""
        if self.is_split:
            ours = rows["weight"]
            _bits(rows["low"]).mul_((ours == weights).to(torch.int16))
            ours.copy_(weights)
        else:
            ours = rows["p"]
            ours.copy_(torch.where(ours.to(weights.dtype) == weights, ours, weights.float()))

    # ---- moments

    def moment(self, rows: Rows, name: str) -> torch.Tensor:
        kept = rows[name]
        if not self.is_coded:
            return kept.float()
        shares = self._shares[name].to(kept.device)
        return shares[kept.int()].mul_(of_elements(rows[f"{name}_scale"], kept.numel()))

    def set_moment(self, rows: Rows, name: str, values: torch.Tensor | None, scales: torch.Tensor | None = None) -> None:
        """None: zeros. `scales` come with moments that were in int8; else each is the largest magnitude of its block."""
        if not self.is_coded:
            rows[name].zero_() if values is None else rows[name].copy_(values)
            return
        into, scale, shares = rows[name], rows[f"{name}_scale"], self._shares[name]
        if scales is not None:
            scale.copy_(scales)
        if values is None:
            into.fill_(int(_codes(torch.zeros(1), shares)))
            if scales is None:
                scale.fill_(_LEAST_SCALE)
            return
        shares = shares.to(into.device)
        for start in range(0, into.numel(), _SLICE):
            part = values[start:start + _SLICE].to(into.device, torch.float32)
            blocks = scale[start // MOMENT_BLOCK:][:blocks_in(part.numel())]
            if scales is None:
                blocks.copy_(_largest(part).clamp_(min=_LEAST_SCALE))
            into[start:start + _SLICE].copy_(_codes(part / of_elements(blocks, part.numel()), shares))


def scales_of(given: torch.Tensor, count: int) -> torch.Tensor | None:
    """One a block, of what a state_dict has: one a block, or one an element. None: of another size."""
    if given.numel() == blocks_in(count):
        return given.reshape(-1)
    return _largest(given.reshape(-1)) if given.numel() == count else None


def _largest(values: torch.Tensor) -> torch.Tensor:
    short = -values.numel() % MOMENT_BLOCK
    return torch.nn.functional.pad(values.abs(), (0, short)).view(-1, MOMENT_BLOCK).amax(1)


def of_elements(scales: torch.Tensor, count: int) -> torch.Tensor:
    return scales.repeat_interleave(MOMENT_BLOCK)[:count]


def _codes(x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Of the share that is nearest to x, of two the greater. Of moments in fp32 that a state_dict brings; updates have lines
    (src/optim/moment_map.h), by which an x within 2^-12 of a step of half way may get the other code. What is decoded from
    codes is further from half way than that: it gets its own code back either way."""
    code = (torch.bucketize(x, shares, right=True) - 1).clamp_(min=0)  # the last share that is not above x
    here, next_one = shares[code], shares[(code + 1).clamp_(max=255)]
    return code + ((code < 255) & (x - here >= (next_one - here) * 0.5))


def _bits(row: torch.Tensor) -> torch.Tensor:
    return row.view(torch.int16)


def _split(values: torch.Tensor, weight: torch.Tensor, low: torch.Tensor) -> None:
    """ferry/optim.h: rounded half up in magnitude."""
    bits = values.contiguous().view(torch.int32)
    _bits(weight).copy_((bits + 0x8000) >> 16)
    _bits(low).copy_(bits & 0xFFFF)


def _join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    below = _bits(low).to(torch.int32) & 0xFFFF
    return ((_bits(weight).to(torch.int32) - (below >> 15)) << 16 | below).view(torch.float32)

"""Fp32 master weights and moments of an optimizer's parameters: begun, taken over, read and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import usage
from ..tiered_state import Chunk, Piece, TieredState, Update
from ._records import Record, local
from ._worker import Worker


class Tier:
    """Parameters that were there at the same time: their state has one store."""

    def __init__(self, records: list[Record], state: TieredState) -> None:
        self.records, self.state = records, state
        for chunk in state.chunks:
            for piece in chunk.pieces:
                records[piece.parameter].chunks.append((self, chunk))


class Masters:
    """`moments` are their names in a state_dict. The worker alone touches the stores."""

    def __init__(self, moments: Sequence[str], worker: Worker) -> None:
        self.tiers: list[Tier] = []
        self._moments, self._worker = moments, worker

    def add(self, records: list[Record], state: TieredState) -> Tier:
        """Their state is to be in `state`; begin() fills it."""
        self.tiers.append(Tier(records, state))
        return self.tiers[-1]

    @property
    def nvme_bytes(self) -> int:
        return sum(tier.state.nvme_bytes for tier in self.tiers)

    @property
    def host_bytes(self) -> int:
        return sum(tier.state.host_bytes for tier in self.tiers)

    def check(self) -> None:
        for tier in self.tiers:
            tier.state.check()

    def begin(self, tier: Tier) -> None:
        """Masters are the weights, and moments are zero."""

        def apply(piece: Piece, _: list[Any], new: list[Any]) -> None:
            torch.from_numpy(new[0]).copy_(_weights_of(tier.records[piece.parameter], piece))
            for moment in new[1:]:
                moment.fill(0)

        for chunk in tier.state.chunks:
            self._write(tier, chunk, apply, "overwrite")

    def take_over(self, changed: list[Record]) -> None:
        """Weights that somebody else has changed are the masters from now on."""
        wanted = set(changed)
        for r in changed:
            if r.resident is not None:
                r.resident.take_over(r)
        for tier, chunk in chunks_of(changed):

            def apply(piece: Piece, _: list[Any], new: list[Any], records: list[Record] = tier.records) -> None:
                r = records[piece.parameter]
                if r in wanted:
                    ours, theirs = torch.from_numpy(new[0]), _weights_of(r, piece)
                    ours.copy_(torch.where(ours.to(theirs.dtype) == theirs, ours, theirs.float()))

            self._write(tier, chunk, apply)

    def read(self, record: Record) -> dict[str, torch.Tensor]:
        """In fp32, as a state_dict names them; "master" where weights have 16 bits."""
        rows = torch.empty(1 + len(self._moments), record.count)
        if record.resident is not None:
            for row, theirs in zip(rows, record.resident.rows):
                row.copy_(theirs)
        for tier, chunk in record.chunks:

            def apply(piece: Piece, values: list[Any], records: list[Record] = tier.records) -> None:
                if records[piece.parameter] is record:
                    for row, theirs in zip(rows, values):
                        row[piece.start:piece.start + piece.count] = _tensor_of(theirs.copy())

            self._worker.submit(lambda t=tier, c=chunk, a=apply: t.state.read(c, a)).result()
        weights = record.weights
        found = {name: rows[1 + i].view(weights.shape) for i, name in enumerate(self._moments)}
        if weights.dtype != torch.float32:
            found["master"] = rows[0].view(weights.shape)
        return {name: _like(record.parameter, value) for name, value in found.items()}

    def load(self, given: dict[torch.Tensor, Any], residents: list[Record]) -> None:
        """`given` by parameter, named as by read(): a missing master is the weight, a missing moment is zero."""
        for tier in self.tiers:

            def apply(piece: Piece, _: list[Any], new: list[Any], records: list[Record] = tier.records) -> None:
                self._load(records[piece.parameter], given, piece, [_tensor_of(row) for row in new])

            for chunk in tier.state.chunks:
                self._write(tier, chunk, apply)
        for r in residents:
            assert r.resident is not None
            self._load(r, given, Piece(r.index, 0, r.count, 0), r.resident.rows)

    def _load(self, record: Record, given: dict[torch.Tensor, Any], piece: Piece,
              rows: list[torch.Tensor]) -> None:
        values = given.get(record.parameter, {})
        for row, name in enumerate(("master", *self._moments)):
            value = values.get(name)
            if value is not None and local(value).numel() != record.count:
                raise usage(f"{name} has another size than its parameter", where=record.name,
                            measured=tuple(value.shape), limit=tuple(record.weights.shape))
            if value is not None:
                rows[row].copy_(local(value).reshape(-1)[piece.start:piece.start + piece.count])
            elif row == 0:
                rows[row].copy_(_weights_of(record, piece))
            else:
                rows[row].zero_()

    def _write(self, tier: Tier, chunk: Chunk, apply: Update, access: str = "write") -> None:
        self._worker.submit(lambda: tier.state.write(chunk, apply, access)).result()


def chunks_of(records: list[Record]) -> list[tuple[Tier, Chunk]]:
    found = {id(chunk): (tier, chunk) for r in records for tier, chunk in r.chunks}
    return list(found.values())


def _tensor_of(row: Any) -> torch.Tensor:
    """The same memory. uint16 is bf16's bits."""
    return torch.from_numpy(row) if row.dtype == np.float32 else torch.from_numpy(row.view(np.int16)).view(torch.bfloat16)


def _weights_of(record: Record, piece: Piece) -> torch.Tensor:
    return record.weights.reshape(-1)[piece.start:piece.start + piece.count].cpu()


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A shard's values as the DTensor that the parameter is, for torch.distributed.checkpoint."""
    if not hasattr(parameter, "device_mesh"):
        return value
    from torch.distributed.tensor import DTensor
    return DTensor.from_local(value.to(parameter.device), parameter.device_mesh, parameter.placements,
                              shape=parameter.shape, stride=parameter.stride(), run_check=False)

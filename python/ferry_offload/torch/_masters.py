"""Fp32 master weights and moments of an optimizer's parameters: begun, taken over, read and loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import usage
from ..tiered_state import MOMENT_BLOCK, Chunk, Part, TieredState, Update
from ._format import Format, Rows, blocks_in, of_elements, scales_of, tensor_of
from ._records import Record, local
from ._transfers import Transfers
from ._worker import Worker


class Tier:
    """Parameters that were there at the same time: their state has one store."""

    def __init__(self, records: list[Record], state: TieredState) -> None:
        self.records, self.state = records, state
        for chunk in state.chunks:
            for part in chunk.parts:
                records[part.parameter].chunks.append((self, chunk))


class Masters:
    """The worker alone touches the stores."""

    def __init__(self, format: Format, transfers: Transfers, worker: Worker) -> None:
        self.tiers: list[Tier] = []
        self._format, self._transfers, self._worker = format, transfers, worker

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

        for chunk in tier.state.chunks:

            def apply(part: Part, _: dict[str, Any], new: dict[str, Any], chunk: Chunk = chunk) -> None:
                record = tier.records[part.parameter]
                rows = self._rows(new, record, part, chunk)
                self._format.set_master(rows, _weights_of(record, part))
                for name in self._format.moments:
                    self._format.set_moment(rows, name, None)

            self._write(tier, chunk, apply, "overwrite")

    def take_over(self, changed: list[Record]) -> None:
        """Weights that somebody else has changed are the masters from now on."""
        wanted = set(changed)
        self._wait_until_sent()
        for r in changed:
            if r.resident is not None:
                self._format.take_over(r.resident.rows, r.weights.reshape(-1))
        for tier, chunk in chunks_of(changed):

            def apply(part: Part, _: dict[str, Any], new: dict[str, Any], tier: Tier = tier, chunk: Chunk = chunk) -> None:
                r = tier.records[part.parameter]
                if r in wanted:
                    self._format.take_over(self._rows(new, r, part, chunk), _weights_of(r, part))

            self._write(tier, chunk, apply)

    def read(self, record: Record) -> dict[str, torch.Tensor]:
        """In fp32, as a state_dict names them; "master" where weights have 16 bits, and scales where moments have 8."""
        rows = self._format.empty(record.count, torch.device("cpu"))
        if record.resident is not None:
            for name, row in rows.items():
                row.copy_(record.resident.rows[name])
        for tier, chunk in record.chunks:

            def apply(part: Part, values: dict[str, Any], tier: Tier = tier, chunk: Chunk = chunk) -> None:
                if tier.records[part.parameter] is record:
                    theirs = self._rows({name: value.copy() for name, value in values.items()}, record, part, chunk)
                    for row in self._format.rows:
                        first = row.items(part.start)
                        rows[row.name][first:first + row.items(part.count)] = theirs[row.name]
                    if self._format.is_split:
                        rows["weight"][part.start:part.start + part.count] = theirs["weight"]

            self._worker.submit(lambda t=tier, c=chunk, a=apply: t.state.read(c, a)).result()
        return self._named(record, rows)

    def _named(self, record: Record, rows: Rows) -> dict[str, torch.Tensor]:
        found = {name: self._format.moment(rows, short) for short, name in self._format.moments.items()}
        if record.weights.dtype != torch.float32:
            found["master"] = self._format.master(rows)
        made = {name: _like(record.parameter, value.view(record.weights.shape)) for name, value in found.items()}
        if self._format.is_coded:
            for short, name in self._format.moments.items():
                scales = rows[f"{short}_scale"]
                if record.is_sharded:  # another sharding cuts other blocks
                    scales = _like(record.parameter, of_elements(scales, record.count).view(record.weights.shape))
                made[f"{name}_scale"] = scales
        return made

    def _rows(self, arrays: dict[str, Any], record: Record, part: Part, chunk: Chunk) -> Rows:
        """Tensors of a part's rows, and of a split master the committed weights too."""
        rows = {name: tensor_of(array) for name, array in arrays.items()}
        if self._format.is_split:
            rows["weight"] = self._transfers.staged(record, chunk.side)[part.start:part.start + part.count]
        return rows

    def load(self, given: dict[torch.Tensor, Any], residents: list[Record]) -> None:
        """`given` by parameter, named as by read(): a missing master is the weight, a missing moment is zero."""
        self._wait_until_sent()
        for tier in self.tiers:
            for chunk in tier.state.chunks:

                def apply(part: Part, _: dict[str, Any], new: dict[str, Any], tier: Tier = tier, chunk: Chunk = chunk) -> None:
                    record = tier.records[part.parameter]
                    self._load(record, given, part, self._rows(new, record, part, chunk))

                self._write(tier, chunk, apply)
        for r in residents:
            assert r.resident is not None
            self._load(r, given, Part(r.index, 0, r.count, 0), r.resident.rows)

    def check_state(self, given: dict[torch.Tensor, Any], records: Iterable[Record]) -> None:
        """Before load() changes anything."""
        for record in records:
            values = given.get(record.parameter, {})
            for name in ("master", *self._format.moments.values()):
                value = values.get(name)
                if value is None:
                    continue
                if not isinstance(value, torch.Tensor):
                    raise usage(f"{name} is no tensor", where=record.name, measured=type(value).__name__)
                if local(value).numel() != record.count:
                    raise usage(f"{name} has another size than its parameter", where=record.name,
                                measured=tuple(value.shape), limit=tuple(record.weights.shape))
            for name in self._format.moments.values() if self._format.is_coded else ():
                value = values.get(f"{name}_scale")
                if value is not None and scales_of(local(value), record.count) is None:
                    raise usage(f"{name}_scale has another size than its parameter's blocks", where=record.name,
                                measured=tuple(value.shape), limit=f"{blocks_in(record.count)} blocks of {MOMENT_BLOCK}")

    def _load(self, record: Record, given: dict[torch.Tensor, Any], part: Part, rows: Rows) -> None:
        values = given.get(record.parameter, {})

        def values_of(name: str) -> torch.Tensor | None:
            value = values.get(name)
            return None if value is None else local(value).reshape(-1)[part.start:part.start + part.count]

        def scales(name: str) -> torch.Tensor | None:
            value = values.get(name) if self._format.is_coded else None
            found = None if value is None else scales_of(local(value), record.count)
            if found is None:
                return None
            first = part.start // MOMENT_BLOCK
            return found[first:first + blocks_in(part.count)]

        master = values_of("master")
        self._format.set_master(rows, _weights_of(record, part) if master is None else master)
        for short, name in self._format.moments.items():
            self._format.set_moment(rows, short, values_of(name), scales(f"{name}_scale"))

    def _wait_until_sent(self) -> None:
        """Before a split master's weights change that a GPU may still read."""
        if self._format.is_split:
            self._worker.submit(self._transfers.wait_until_sent).result()

    def _write(self, tier: Tier, chunk: Chunk, apply: Update, access: str = "write") -> None:
        self._worker.submit(lambda: tier.state.write(chunk, apply, access)).result()


def chunks_of(records: list[Record]) -> list[tuple[Tier, Chunk]]:
    found = {id(chunk): (tier, chunk) for r in records for tier, chunk in r.chunks}
    return list(found.values())


def _weights_of(record: Record, part: Part) -> torch.Tensor:
    return record.weights.reshape(-1)[part.start:part.start + part.count].cpu()


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A shard's values as the DTensor that the parameter is, for torch.distributed.checkpoint."""
    if not hasattr(parameter, "device_mesh"):
        return value
    from torch.distributed.tensor import DTensor
    return DTensor.from_local(value.to(parameter.device), parameter.device_mesh, parameter.placements,
                              shape=parameter.shape, stride=parameter.stride(), run_check=False)

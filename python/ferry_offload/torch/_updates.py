"""The update of a chunk: what it is made from, the version made ahead of step(), and the job that ends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .._core import Hyper, update
from ..tiered_state import Chunk, Part
from ._masters import Tier
from ._records import Record, wait_for

if TYPE_CHECKING:
    from .optimizer import OffloadOptimizer


class Work:
    """The numbers of an update: what it needs is what was there when it was asked for."""

    def __init__(self, optimizer: OffloadOptimizer, scale: float, records: dict[int, Record]) -> None:
        self.optimizer, self.scale, self.records = optimizer, scale, records
        self.transfers, self.team, self.stats = optimizer._transfers, optimizer._team, optimizer.stats
        self.hypers = {g: Hyper(optimizer.method, **optimizer._constants(group))
                       for g, group in enumerate(optimizer.param_groups)}
        self.given = {index: (r.gradient, optimizer._step_of(r) + 1) for index, r in records.items()}
        self.arriving = {index: r.left for index, r in records.items()}  # zero_grad() forgets it
        self.left = {index: r.count for index, r in records.items()}  # elements without new weights yet
        self.after: dict[torch.device, Any] = {}  # events: weights may change on their GPU

    def apply(self, tier: Tier, chunk: Chunk, speculative: bool) -> Callable[[Part, Any, Any], None]:
        def one(part: Part, old: dict[str, Any], new: dict[str, Any]) -> None:
            r = tier.records[part.parameter]
            if r.index not in self.records:
                return
            gradient, step = self.given[r.index]
            assert gradient is not None
            here = slice(part.start, part.start + part.count)
            weights = {name: w[here] for name, w in self.transfers.target(r, chunk.side, speculative).items()}
            update(self.hypers[r.group], step, gradient[here], gradient_scale=self.scale, layer=r.number, element=part.start,
                   team=self.team, **weights, **new, **{f"{name}_in": row for name, row in old.items()})

        return one


@dataclasses.dataclass(eq=False)
class Version:
    """Of a chunk, made ahead of step()."""

    tier: Tier
    chunk: Chunk
    key: Any
    work: Work
    job: Any = None

    def _parts(self) -> Iterator[tuple[Record, int]]:
        for part in self.chunk.parts:
            yield self.tier.records[part.parameter], part.start + part.count

    def has_arrived(self) -> bool:
        return all(r.has_arrived(stop) for r, stop in self._parts())

    def wait(self) -> None:
        for r, stop in self._parts():
            r.wait(stop)

    def make(self) -> None:
        self.work.transfers.wait_until_sent()
        for part in self.chunk.parts:
            r = self.tier.records[part.parameter]
            if part.count == r.count:  # of a larger one step() makes it
                r.square(self.work.team)
        self.tier.state.speculate(self.chunk, self.work.apply(self.tier, self.chunk, speculative=True))


@dataclasses.dataclass(eq=False)
class Finish:
    """The job that ends a chunk's update: the version made ahead of step() stands, or it is made now. Returns what
    tells that the weights are there: a device and an event for each."""

    work: Work
    tier: Tier
    chunk: Chunk
    version: Version | None = None
    key: Any = None
    next_ones: list[Finish] = dataclasses.field(default_factory=list)

    def records(self) -> list[Record]:
        records = [self.tier.records[part.parameter] for part in self.chunk.parts]
        return [r for r in records if r.index in self.work.records]

    def __call__(self) -> list[tuple[torch.device, Any]]:
        try:
            commits = self._commits()
            if not commits:
                self._update()
            return self._send(commits)
        except BaseException as error:
            self.work.optimizer._failed = str(error)
            raise

    def _commits(self) -> bool:
        if self.version is None:
            return False
        if self.version.job.exception() is None and self.version.key == self.key:
            self.tier.state.commit(self.chunk)
            self.work.stats.updates_committed += 1
            return True
        self.tier.state.roll_back(self.chunk)
        self.work.stats.updates_rolled_back += 1
        return False

    def _update(self) -> None:
        for later in self.next_ones:
            later.tier.state.prefetch([later.chunk])
        for part in self.chunk.parts:  # so far as it is used: what comes behind is still on its way
            r = self.tier.records[part.parameter]
            if r.index in self.work.records:
                wait_for(self.work.arriving[r.index], part.start + part.count)
        self.tier.state.write(self.chunk, self.work.apply(self.tier, self.chunk, speculative=False))
        self.work.stats.updates_in_step += 1

    def _send(self, committed: bool) -> list[tuple[torch.device, Any]]:
        sent = []
        for part in self.chunk.parts:
            r = self.tier.records[part.parameter]
            if r.index not in self.work.records:
                continue
            self.work.left[r.index] -= part.count
            if not committed and self.work.transfers.is_direct(r.weights):
                continue
            if r.weights.is_contiguous() or self.work.left[r.index] == 0:
                # What is made now may be needed before what was made ahead.
                event = self.work.transfers.send(r, part.start, part.count, self.chunk.side, self.work.after,
                                                 "weights" if committed else "late weights")
                if event is not None:
                    sent.append((r.weights.device, event))
        return sent

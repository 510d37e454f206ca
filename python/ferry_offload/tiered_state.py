"""Master weights and moments of many parameters, in chunks over host memory and NVMe.

A chunk is one object of the store: a row of masters, and then one of each moment, with the scales of moments in int8 last.
Where chunks lie, and how large they are, changes no number: an optimizer's update is elementwise, or of blocks that no cut
goes through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._core import Store
from .errors import error_of, message
from .sizes import to_bytes

_ELEMENTS_MIN, _ELEMENTS_MAX = 4096, 16 << 20
# An update holds the old version and the new one; two are read ahead, two written behind.
_BUFFERS = 6
_PAGE = 4096  # bytes: what NVMe moves
_GRAIN = 64  # elements: every row of a part begins at a line of the cache
MOMENT_BLOCK = 256  # elements that have a scale together, with moments in int8


@dataclasses.dataclass(frozen=True)
class Row:
    """Of a chunk, by the name that update() has for it: an item for every `per` elements. uint16 is bf16's bits, or a
    split master's low ones: NumPy has no such type."""

    name: str
    type: np.dtype[Any]
    per: int = 1

    def items(self, elements: int) -> int:
        return -(-elements // self.per)

    def bytes(self, elements: int) -> int:
        return self.items(elements) * self.type.itemsize


MOMENT_TYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "int8": np.dtype(np.uint8)}
MASTERS = {"fp32": Row("p", np.dtype(np.float32)), "split": Row("low", np.dtype(np.uint16))}


def rows_of(moments: int, moment_type: str = "fp32", master: str = "fp32") -> list[Row]:
    """A split master's weights are elsewhere, and not in the chunk."""
    names = ("m", "v")[:moments]
    rows = [MASTERS[master], *(Row(name, MOMENT_TYPES[moment_type]) for name in names)]
    if moment_type == "int8":
        rows += [Row(f"{name}_scale", np.dtype(np.float32), MOMENT_BLOCK) for name in names]
    return rows


@dataclasses.dataclass
class Part:
    """Elements [start, start + count) of a parameter, at `offset` of their chunk's rows."""

    parameter: int
    start: int
    count: int
    offset: int


@dataclasses.dataclass
class Chunk:
    parts: list[Part]
    home: str = "host"
    object: int = -1  # with the committed version
    next: int = -1  # with a speculative one
    side: int = 0  # of what is kept twice beside the chunk: which one belongs to the committed version


# Called for each part, with the rows to read from and the rows to write by name, which may be the same.
Update = Callable[[Part, dict[str, Any], dict[str, Any]], None]


def cut(counts: Sequence[int], elements: int, grain: int = _GRAIN) -> list[Chunk]:
    """Chunks of at most so many elements, of the parameters in their order."""
    chunks = [Chunk([])]
    used = 0
    for parameter, count in enumerate(counts):
        start = 0
        while start < count:
            if used == elements:
                chunks.append(Chunk([]))
                used = 0
            here = min(count - start, elements - used)
            chunks[-1].parts.append(Part(parameter, start, here, used))
            start += here
            used = min(elements, -(-(used + here) // grain) * grain)
    return [chunk for chunk in chunks if chunk.parts]


@dataclasses.dataclass
class Placement:
    """How many chunks lie where, and how many spare objects take speculative versions."""

    host: int
    nvme: int
    host_spares: int
    nvme_spares: int
    buffers: int


def place(chunks: int, chunk_bytes: int, host_bytes: int, has_nvme: bool, speculative: bool) -> Placement:
    """All in host memory where it fits, with what is left for speculation. Otherwise what is updated last in
    backward is in host memory, and the rest on NVMe."""
    room = host_bytes // chunk_bytes
    if chunks <= room:
        return Placement(chunks, 0, min(chunks, room - chunks) if speculative else 0, 0, 0)
    least = min(_BUFFERS, 2 * chunks) if has_nvme else chunks
    if room < least or not has_nvme:
        raise error_of(3, "does not fit", message(
            "the optimizer's state does not fit into host memory" if not has_nvme
            else "host memory has no room for the buffers of state on NVMe", "",
            f"{chunks * chunk_bytes} bytes of state", f"{host_bytes} bytes of `host` are left for it",
            f"give {(least - room) * chunk_bytes} bytes more" + ("" if has_nvme else ", or directories for `nvme`")))
    on_nvme = chunks - (room - least)
    return Placement(chunks - on_nvme, on_nvme, 0, on_nvme if speculative else 0, least)


class TieredState:
    """One thread at a time calls it. Every function of it may wait for storage."""

    def __init__(self, counts: Sequence[int], rows: Sequence[Row], *, host_bytes: int | str, nvme: Sequence[Any] = (),
                 speculative: bool = True, chunk_elements: int | None = None, threads: int = 0) -> None:
        budget = to_bytes(host_bytes)
        self.rows = rows
        # Parts begin at multiples of the grain. Random bits of stochastic rounding come for 32 elements at a time.
        grain = max(_GRAIN, *(row.per for row in rows))
        self.elements = -(-(chunk_elements or self._elements_for(sum(counts), budget)) // grain) * grain
        self.chunks = cut(counts, self.elements, grain)
        size = -(-self._bytes(self.elements) // _PAGE) * _PAGE
        self.placement = place(len(self.chunks), size, budget, bool(nvme), speculative)
        buffers = self.placement.buffers
        self._store = Store(max(budget, size), list(nvme), buffers=buffers, threads=threads)
        for i, chunk in enumerate(self.chunks):
            chunk.home = "host" if i < self.placement.host else "nvme"
            chunk.object = self._store.register(size, chunk.home)
        self._spares = {home: [self._store.register(size, home) for _ in range(count)]
                        for home, count in (("host", self.placement.host_spares), ("nvme", self.placement.nvme_spares))}
        self._store.open()

    def _bytes(self, elements: int) -> int:
        return sum(row.bytes(elements) for row in self.rows)

    def _elements_for(self, total: int, budget: int) -> int:
        """Small chunks for a small budget: half of it is buffers at most."""
        most = max(_ELEMENTS_MIN, budget * MOMENT_BLOCK // (2 * _BUFFERS * self._bytes(MOMENT_BLOCK)))
        wanted = min(_ELEMENTS_MAX, most, max(_ELEMENTS_MIN, total))
        return -(-wanted // 1024) * 1024 if wanted == total else wanted // 1024 * 1024

    @property
    def host_bytes(self) -> int:
        return self._store.stats().host_bytes

    @property
    def nvme_bytes(self) -> int:
        return self._store.stats().nvme_bytes

    def _view(self, lease: Any) -> dict[str, Any]:
        found, start = {}, 0
        for row in self.rows:
            end = start + row.bytes(self.elements)
            found[row.name] = lease.numpy(np.uint8)[start:end].view(row.type)
            start = end
        return found

    def _rows_of(self, view: dict[str, Any], part: Part) -> dict[str, Any]:
        first = {row.name: row.items(part.offset) for row in self.rows}
        return {row.name: view[row.name][first[row.name]:first[row.name] + row.items(part.count)] for row in self.rows}

    def write(self, chunk: Chunk, apply: Update, access: str = "write") -> None:
        """Changes the committed version."""
        with self._store.acquire(chunk.object, access) as lease:
            rows = self._view(lease)
            for part in chunk.parts:
                values = self._rows_of(rows, part)
                apply(part, values, values)

    def read(self, chunk: Chunk, apply: Callable[[Part, dict[str, Any]], None]) -> None:
        with self._store.acquire(chunk.object) as lease:
            rows = self._view(lease)
            for part in chunk.parts:
                apply(part, self._rows_of(rows, part))

    def can_speculate(self, chunk: Chunk) -> bool:
        return chunk.next >= 0 or bool(self._spares[chunk.home])

    def speculate(self, chunk: Chunk, apply: Update) -> None:
        """Writes a new version of all parts; the committed one stays. One that was there is overwritten."""
        if chunk.next < 0:
            chunk.next = self._spares[chunk.home].pop()
        try:
            with self._store.acquire(chunk.object) as old, self._store.acquire(chunk.next, "overwrite") as new:
                before, after = self._view(old), self._view(new)
                for part in chunk.parts:
                    apply(part, self._rows_of(before, part), self._rows_of(after, part))
        except BaseException:
            self.roll_back(chunk)
            raise

    def commit(self, chunk: Chunk) -> None:
        self._spares[chunk.home].append(chunk.object)
        chunk.object, chunk.next = chunk.next, -1
        chunk.side ^= 1

    def roll_back(self, chunk: Chunk) -> None:
        if chunk.next >= 0:
            self._spares[chunk.home].append(chunk.next)
            chunk.next = -1

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        self._store.prefetch([chunk.object for chunk in chunks if chunk.home == "nvme"])

    def check(self) -> None:
        """Raises a write that failed in the background."""
        self._store.check()

    def close(self) -> None:
        self._store.close()

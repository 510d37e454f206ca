"""How gradients come to the host and weights go back: by reference on the CPU, by a side stream and pinned
memory on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._core import Pool

if TYPE_CHECKING:
    from ._records import Record


def pinned(count: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Memory on huge pages, page-locked for CUDA."""
    bytes = count * dtype.itemsize
    memory = Pool(bytes).reserve(bytes, name)
    tensor = torch.frombuffer(memory, dtype=dtype)
    failed = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), bytes, 0)
    if int(failed) != 0:
        raise RuntimeError(f"cudaHostRegister of {bytes} bytes ({name}): {failed}")
    return tensor


class Transfers:
    """Of the parameters of one optimizer. `gradients` and `weights` are flat host tensors by parameter index:
    of a GPU's parameters both, of the CPU's those that a speculative update writes. `keeps_weights`: those of the last step
    stay here for all parameters, as half of a split master. An update ahead of step() then writes to `others`, and a
    chunk's `side` tells which of both is the last step's."""

    def __init__(self, keeps_weights: bool = False) -> None:
        self.gradients: dict[int, torch.Tensor] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.others: dict[int, torch.Tensor] = {}
        self._keeps_weights = keeps_weights
        self._streams: dict[tuple[torch.device, str], Any] = {}
        self._sent: list[Any] = []  # events of weights under way
        self._registered: list[torch.Tensor] = []

    def reserve(self, records: list[Record], speculative: set[int]) -> int:
        """Takes the memory for these; the bytes of it."""
        total = 0
        for on_gpu in (True, False):
            mine = [r for r in records if (r.weights.device.type == "cuda") == on_gpu]
            for dtype in {r.weights.dtype for r in mine}:
                typed = [r for r in mine if r.weights.dtype == dtype]
                ahead = [r for r in typed if r.index in speculative]
                total += self._cut(self.weights, typed if on_gpu or self._keeps_weights else ahead, dtype, on_gpu)
                total += self._cut(self.others, ahead if self._keeps_weights else [], dtype, on_gpu)
                total += self._cut(self.gradients, typed if on_gpu else [], dtype, on_gpu)
        return total

    def _cut(self, into: dict[int, torch.Tensor], records: list[Record], dtype: torch.dtype, on_gpu: bool) -> int:
        count = sum(r.count for r in records)
        if count == 0:
            return 0
        flat = pinned(count, dtype, "gradients and weights") if on_gpu else torch.empty(count, dtype=dtype)
        if on_gpu:
            self._registered.append(flat)
        for record, part in zip(records, flat.split([r.count for r in records])):
            into[record.index] = part
        return count * dtype.itemsize

    def bytes_for(self, records: list[Record], speculative: bool) -> int:
        """What reserve() takes at most."""
        more = int(speculative) if self._keeps_weights else 0
        on_gpu, on_cpu = 2 + more, (1 if self._keeps_weights else int(speculative)) + more
        return sum(r.count * r.weights.dtype.itemsize * (on_gpu if r.weights.device.type == "cuda" else on_cpu) for r in records)

    @property
    def host_bytes(self) -> int:
        return sum(t.nbytes for kept in (self.weights, self.others, self.gradients) for t in kept.values())

    # ---- gradients

    def to_host(self, record: Record, gradient: torch.Tensor, stops: list[int]) -> tuple[torch.Tensor, list[tuple[int, Any]]]:
        """The gradient, flat on the host, and up to where it is there after which event."""
        if gradient.device.type == "cpu":
            return gradient.detach().reshape(-1), []
        if record.index not in self.gradients:  # of a parameter that is not on this GPU itself
            self.gradients[record.index] = pinned(record.count, gradient.dtype, "gradients")
            self._registered.append(self.gradients[record.index])
        home = self.gradients[record.index]
        return home, self._copy(home, gradient.reshape(-1), stops)

    def read(self, gradient: torch.Tensor) -> torch.Tensor:
        """Waits for it."""
        flat = gradient.detach().reshape(-1)
        if flat.device.type == "cpu":
            return flat
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._copy(host, flat, [flat.numel()])[-1][1].synchronize()
        return host

    def _copy(self, host: torch.Tensor, flat: torch.Tensor, stops: list[int]) -> list[tuple[int, Any]]:
        stream = self.gradient_stream(flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        copied, start = [], 0
        with torch.cuda.stream(stream):
            for stop in stops:
                host[start:stop].copy_(flat[start:stop], non_blocking=True)
                copied.append((stop, stream.record_event()))
                start = stop
        flat.record_stream(stream)  # autograd may free it: its memory is used again after the copy only
        return copied

    def gradient_stream(self, device: torch.device) -> Any:
        return self._stream(device, "gradients")

    def _stream(self, device: torch.device, use: str) -> Any:
        if (device, use) not in self._streams:
            self._streams[device, use] = torch.cuda.Stream(device)
        return self._streams[device, use]

    # ---- weights

    def target(self, record: Record, side: int, speculative: bool) -> dict[str, torch.Tensor]:
        """Where an update writes new weights, by update()'s names: of a split master it reads the last step's. Of
        contiguous weights on the CPU it is they, unless that comes too early."""
        weights = record.weights
        if self._keeps_weights:
            return {"weight": self.staged(record, side ^ int(speculative)), "weight_in": self.staged(record, side)}
        if not speculative and self.is_direct(weights):
            return {"weight": weights.view(-1)}
        if record.index not in self.weights:
            self.weights[record.index] = torch.empty(record.count, dtype=weights.dtype)
        return {"weight": self.weights[record.index]}

    def staged(self, record: Record, side: int) -> torch.Tensor:
        return (self.others if side and self._keeps_weights else self.weights)[record.index]

    def is_direct(self, weights: torch.Tensor) -> bool:
        return weights.device.type == "cpu" and weights.is_contiguous() and not self._keeps_weights

    @staticmethod
    def now(records: list[Record]) -> dict[torch.device, Any]:
        """What their GPUs do so far: weights that it reads are changed after it."""
        devices = {r.weights.device for r in records if r.weights.device.type == "cuda"}
        return {device: torch.cuda.current_stream(device).record_event() for device in devices}

    def send(self, record: Record, start: int, count: int, side: int, after: dict[torch.device, Any], use: str) -> Any:
        """Staged weights [start, start + count) into the parameter: all of them where it is not contiguous. Returns
        an event to wait for, or None. The parameter's version is the caller's to change."""
        weights = record.weights.data
        if weights.is_contiguous():
            into, part = weights.view(-1)[start:start + count], self.staged(record, side)[start:start + count]
        else:
            into, part = weights, self._whole(record).view(weights.shape)
        if weights.device.type == "cpu":
            into.copy_(part)
            return None
        stream = self._stream(weights.device, use)
        stream.wait_event(after[weights.device])
        with torch.cuda.stream(stream):
            into.copy_(part, non_blocking=True)
        sent = stream.record_event()
        self._sent.append(sent)
        return sent

    def _whole(self, record: Record) -> torch.Tensor:
        """Its chunks may be on different sides."""
        if record.index not in self.others:
            return self.weights[record.index]
        parts = [self.staged(record, chunk.side)[part.start:part.start + part.count]
                 for tier, chunk in record.chunks for part in chunk.parts if tier.records[part.parameter] is record]
        return torch.cat(parts)

    def wait_until_sent(self) -> None:
        """Before staged weights are overwritten."""
        while self._sent:
            self._sent.pop().synchronize()

    def close(self) -> None:
        for tensor in self._registered:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._registered.clear()

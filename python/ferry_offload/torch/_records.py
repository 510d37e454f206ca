"""What the optimizer knows of a parameter: its gradient on the host, and where its state lies."""

from __future__ import annotations

from typing import Any

import torch

from .._core import square_sum
from ..errors import usage
from ._departed import DepartedGradient
from ._resident import Resident
from ._squares import Squares
from ._transfers import Transfers

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter (DTensor), or the tensor itself, without autograd."""
    shard = getattr(tensor, "_local_tensor", None)
    return (tensor if shard is None else shard).detach()


def has_ranks() -> bool:
    """Then DDP may be there, or the program adds up gradients itself: .grad is not final in backward."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Record:
    """`gradient` is flat and on the host; `arrivals` counts backward passes since step() or zero_grad().
    `generation` tells whether an update was made from what the gradient is now. `landing` are jobs that end with new
    weights on their way to the parameter. `dropped` tells gradients apart that `.grad` has held."""

    def __init__(self, index: int, parameter: torch.nn.Parameter, group: int, name: str) -> None:
        self.index, self.parameter, self.group, self.name = index, parameter, group, name
        self.number = index  # among all parameters of the groups: random bits follow from it
        self.chunks: list[Any] = []
        self.resident: Resident | None = None  # in place of chunks
        self.gradient: torch.Tensor | None = None
        self.arrivals = self.generation = self.dropped = 0
        self.left: list[tuple[int, Any]] = []  # of a gradient that a stream still copies: how far, and an event
        self.landing: list[Any] = []
        self.departed: DepartedGradient | None = None  # what .grad holds then
        self.taken: tuple[Any, int, Any] | None = None  # .grad as it was taken, where it stays
        self._square: tuple[int, float] | None = None  # and the generation that it is of
        self._squares: tuple[int, Squares] | None = None  # on their way from a GPU, likewise
        self.hooks: list[Any] = []
        self.accumulates: Any = None  # autograd's node that adds to .grad: without us it would come and go with each graph
        self._check()
        self.kind = self.weights.dtype, self.weights.device
        self.size = self.count
        self.version = self.weights._version

    def _check(self) -> None:
        weights = self.weights
        if weights.dtype not in _TYPES:
            raise usage("a parameter has a type that no update knows", where=self.name, measured=weights.dtype,
                        limit="float32, bfloat16 or float16")
        if weights.layout != torch.strided or weights.device.type not in ("cpu", "cuda"):
            raise usage("a parameter lies where no update reaches it", where=self.name,
                        measured=f"{weights.layout} on {weights.device}", limit="dense tensors on CPU or CUDA")
        if getattr(self.parameter, "_fsdp_flattened", False):
            raise usage("a parameter is a shard whose common norm with other ranks' is not done", where=self.name,
                        measured="FullyShardedDataParallel", limit="fully_shard(), or DDP", remedy="fully_shard(model)")
        if torch._debug_has_internal_overlap(weights) == 1:  # type: ignore[attr-defined]
            raise usage("a parameter's elements share memory", where=self.name,
                        measured=f"shape {tuple(weights.shape)}, strides {weights.stride()}", limit="a place for each element",
                        remedy="torch.nn.Parameter(tensor.contiguous())")

    @property
    def weights(self) -> torch.Tensor:
        return local(self.parameter)

    def check_moved(self) -> None:
        now = self.weights.dtype, self.weights.device
        if now != self.kind:
            raise usage("a parameter was moved or cast after the optimizer was made", where=self.name, measured=now,
                        limit=self.kind, remedy="make the optimizer afterwards")
        if self.count != self.size:
            raise usage("a parameter has another size than when the optimizer was made", where=self.name,
                        measured=f"{self.count} elements", limit=self.size, remedy="make the optimizer afterwards")

    @property
    def is_sharded(self) -> bool:
        return hasattr(self.parameter, "device_mesh")

    @property
    def count(self) -> int:
        return self.weights.numel()

    # ---- the gradient

    def take(self, gradient: torch.Tensor, transfers: Transfers, keep: bool, watch: bool = True) -> None:
        """The whole gradient is this one. Without `watch` one that stays is taken again in every step."""
        whole = self.check_gradient(gradient)
        on_gpu = whole.device.type == "cuda"
        squares = Squares(whole, transfers.gradient_stream(whole.device)) if on_gpu else None  # before the gradient itself
        self.gradient, self.left = transfers.to_host(self, whole, self.stops)
        self.taken = (gradient, whole._version, _fingerprint(whole) if watch else None) if keep else None
        self.changed()
        self._squares = None if squares is None else (self.generation, squares)

    def check_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of it."""
        if gradient.is_sparse:
            raise usage("a gradient is sparse", where=self.name, limit="dense gradients",
                        remedy="sparse=False at the embedding")
        whole = local(gradient)
        if whole.numel() != self.count:
            raise usage("a gradient has another size than its parameter", where=self.name,
                        measured=f"{whole.numel()} elements", limit=f"{self.count}")
        return whole

    def add(self, gradient: torch.Tensor, transfers: Transfers) -> None:
        """One more micro-batch, added in the gradient's type: what .grad would hold."""
        assert self.gradient is not None
        self.wait()
        self.gradient.add_(transfers.read(local(gradient)))
        self.taken = None
        self.changed()

    @property
    def stops(self) -> list[int]:
        """Where chunks of it end: so far a copy brings it at a time."""
        parts = [part for tier, chunk in self.chunks for part in chunk.parts if tier.records[part.parameter] is self]
        return sorted(part.start + part.count for part in parts)

    def wait(self, stop: int | None = None) -> None:
        """Until the gradient is on the host, the elements before `stop` at least."""
        wait_for(self.left, stop)

    def has_arrived(self, stop: int) -> bool:
        return next((copied.query() for end, copied in self.left if end >= stop), True)

    def fetch(self) -> torch.Tensor:
        assert self.gradient is not None
        self.wait()
        weights = self.weights
        return self.gradient.view(weights.shape).to(weights.device)

    def scale(self, factor: float) -> None:
        assert self.gradient is not None
        self.wait()
        self.gradient.zero_() if factor == 0 else self.gradient.mul_(factor)
        self.changed()

    def drop(self) -> None:
        self.gradient = self.taken = self.departed = None
        self.dropped += 1
        self.left = []
        self.changed()

    def changed(self) -> None:
        self.generation += 1

    @property
    def has_square(self) -> bool:
        """Or it comes without a pass over the gradient here."""
        return any(one is not None and one[0] == self.generation for one in (self._square, self._squares))

    def square(self, team: Any) -> float:
        """Of a gradient that changes meanwhile it is not kept."""
        if self._square is None or self._square[0] != self.generation:
            generation, gradient = self.generation, self.gradient
            assert gradient is not None
            begun = self._squares
            if begun is not None and begun[0] == generation:
                self._square = generation, begun[1].sum()
            else:
                self.wait()
                self._square = generation, square_sum(gradient, team=team)
        return self._square[1]

    def is_stale(self) -> bool:
        """.grad is not what was taken: someone clipped, unscaled or replaced it."""
        gradient = self.parameter.grad
        if self.taken is None or gradient is not self.taken[0] or local(gradient)._version != self.taken[1]:
            return True
        return self.taken[2] is None or not torch.equal(_fingerprint(local(gradient)), self.taken[2])


def wait_for(left: list[tuple[int, Any]], stop: int | None = None) -> None:
    for end, copied in left:
        copied.synchronize()
        if stop is not None and end >= stop:
            return


def _fingerprint(gradient: torch.Tensor) -> torch.Tensor:
    """Of its bits, where it is: not every operation that changes a tensor in place counts as a new version."""
    bits = torch.int32 if gradient.dtype == torch.float32 else torch.int16
    return gradient.detach().reshape(-1).view(bits).sum(dtype=torch.int64)

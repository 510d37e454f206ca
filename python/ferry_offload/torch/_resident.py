"""A parameter whose state lies on its GPU (gpu_state): masters and moments beside the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._core import Hyper, add_leaves, leaf_norms_on_stream, update_on_stream

if TYPE_CHECKING:
    from ._records import Record

_LEAF = 4096  # elements of a sum of squares: those of square_sum()


class Resident:
    """`rows`: masters first and then each moment, as in a chunk. Its gradient stays in .grad until step(), and the
    numbers are those of every other place."""

    def __init__(self, record: Record, moments: int, moment_type: torch.dtype) -> None:
        weights = record.weights
        self.rows = [weights.reshape(-1).to(torch.float32, copy=True)]
        self.rows += [torch.zeros(record.count, dtype=moment_type, device=weights.device) for _ in range(moments)]

    @staticmethod
    def bytes_for(record: Record, moments: int, moment_type: torch.dtype) -> int:
        return record.count * (4 + moments * moment_type.itemsize)

    def begin_square(self, gradient: torch.Tensor) -> Any:
        """Sums of squares on their way to the host: finish_square() waits for them."""
        flat = gradient.reshape(-1)
        leaves = torch.empty(-(-flat.numel() // _LEAF), device=flat.device)
        with torch.cuda.device(flat.device):
            stream = torch.cuda.current_stream()
            leaf_norms_on_stream(flat, leaves, stream=stream.cuda_stream)
            host = torch.empty(leaves.shape, pin_memory=True)
            host.copy_(leaves, non_blocking=True)
            return host, stream.record_event()

    @staticmethod
    def finish_square(begun: Any) -> float:
        host, copied = begun
        copied.synchronize()
        return float(add_leaves(host))

    def update(self, record: Record, gradient: torch.Tensor, hyper: Hyper, step: int, scale: float) -> None:
        """Enqueued on the current stream."""
        weights = record.weights
        into = weights.view(-1) if weights.is_contiguous() else torch.empty_like(weights.reshape(-1))
        with torch.cuda.device(weights.device):
            stream = torch.cuda.current_stream().cuda_stream
            update_on_stream(hyper, step, gradient.reshape(-1), self.rows[0], weight=into, gradient_scale=scale,
                             layer=record.number, stream=stream, **dict(zip(("m", "v"), self.rows[1:])))
        if into.data_ptr() != weights.data_ptr():
            weights.copy_(into.view(weights.shape))

    def take_over(self, record: Record) -> None:
        """What was changed of the weights is the master's from now on."""
        masters, theirs = self.rows[0], record.weights.reshape(-1)
        masters.copy_(torch.where(masters.to(theirs.dtype) == theirs, masters, theirs.float()))

"""A parameter whose state lies on its GPU (gpu_state): masters and moments beside the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._core import Hyper, update_on_stream
from ._format import Format

if TYPE_CHECKING:
    from ._records import Record


class Resident:
    """`rows`: as in a chunk, and of a split master the weights too. Its gradient stays in .grad until step(), and the
    numbers are those of every other place."""

    def __init__(self, record: Record, format: Format) -> None:
        weights = record.weights
        self.rows = format.empty(record.count, weights.device)
        format.set_master(self.rows, weights.reshape(-1))
        for name in format.moments:
            format.set_moment(self.rows, name, None)

    def update(self, record: Record, gradient: torch.Tensor, hyper: Hyper, step: int, scale: float) -> None:
        """Enqueued on the current stream."""
        weights, rows = record.weights, self.rows
        into = rows.get("weight")  # a split master's
        if into is None:
            into = weights.view(-1) if weights.is_contiguous() else torch.empty_like(weights.reshape(-1))
        with torch.cuda.device(weights.device):
            stream = torch.cuda.current_stream().cuda_stream
            update_on_stream(hyper, step, gradient.reshape(-1), gradient_scale=scale, layer=record.number, stream=stream,
                             **rows | {"weight": into})
        if into.data_ptr() != weights.data_ptr():
            weights.copy_(into.view(weights.shape))

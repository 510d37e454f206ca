"""Sums of squares of gradients on a GPU: the numbers of square_sum(), without waiting for the gradient to leave."""

from __future__ import annotations

from typing import Any

import torch

from .._core import add_leaves, leaf_norms_on_stream

_LEAF = 4096  # elements of a sum of squares: those of square_sum()


class Squares:
    """On their way to the host. The current stream computes them, and `copies` brings them: a copy on the current stream
    would have what is computed next wait for the gradients that the GPU's copy engine still has before it."""

    def __init__(self, gradient: torch.Tensor, copies: Any = None) -> None:
        flat = gradient.reshape(-1)
        leaves = torch.empty(-(-flat.numel() // _LEAF), device=flat.device)
        self._host: Any = torch.empty(leaves.shape, pin_memory=True)
        with torch.cuda.device(flat.device):
            stream = torch.cuda.current_stream()
            leaf_norms_on_stream(flat, leaves, stream=stream.cuda_stream)
            if copies is not None:
                copies.wait_stream(stream)
                leaves.record_stream(copies)
        with torch.cuda.stream(copies or stream):
            self._host.copy_(leaves, non_blocking=True)
            self._copied = (copies or stream).record_event()

    def sum(self) -> float:
        """Waits for them."""
        self._copied.synchronize()
        return float(add_leaves(self._host))

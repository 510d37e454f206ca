"""What an optimizer's options may be, and how messages name a parameter."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..errors import usage
from ._records import Record

_NOT_DONE = ("amsgrad", "maximize", "differentiable", "dampening")


def refuse_options(groups: list[dict[str, Any]]) -> None:
    """Whatever of param_groups no update would heed. Parameters too: state is made as soon as they want gradients."""
    for group in groups:
        for option in _NOT_DONE:
            if group.get(option):
                raise usage(f"{option} is not done", measured=group[option], limit=0)
        for p in group["params"]:
            Record(-1, p, 0, name_of(groups, p))


def name_of(groups: list[dict[str, Any]], parameter: torch.Tensor) -> str:
    for g, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            if p is parameter:
                names = group.get("param_names")
                return names[i] if names else f"parameter {i} of group {g}, shape {tuple(p.shape)}"
    return "a parameter"


def default_threads(groups: list[dict[str, Any]]) -> int:
    """A thread a core. Where a GPU computes meanwhile, those that launch its work have two of them."""
    cores = len(os.sched_getaffinity(0))
    on_gpu = any(p.device.type == "cuda" for group in groups for p in group["params"])
    return max(1, cores - 2) if on_gpu else cores

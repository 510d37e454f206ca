"""What an optimizer's options may be, and how messages name a parameter."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .._core import Hyper, update
from ..errors import usage
from ._records import Record

_MOST_STEPS = 2.0**53
_NOT_DONE = ("amsgrad", "maximize", "differentiable", "dampening")


def refuse_options(groups: list[dict[str, Any]]) -> None:
    """Whatever of param_groups no update would heed. Parameters too: state is made as soon as they want gradients."""
    for group in groups:
        for option in _NOT_DONE:
            if group.get(option):
                raise usage(f"{option} is not done", measured=group[option], limit=0)
        for p in group["params"]:
            Record(-1, p, 0, name_of(groups, p))


def check_norm(max_norm: Any) -> None:
    if max_norm is not None and not (isinstance(max_norm, numbers.Real) and max_norm >= 0):
        raise usage("max_norm is no norm to clip to", measured=repr(max_norm), limit="0 or more; 0 and None clip nothing")


def check_whole(name: str, value: Any, least: int) -> None:
    if not (isinstance(value, numbers.Integral) and value >= least):
        raise usage(f"{name} is no such number", measured=repr(value), limit=f"a whole number of {least} or more")


def check_constants(method: str, constants: dict[str, Any]) -> None:
    """By an update of one element: a constant that defines none is refused before any state changes."""
    hyper = Hyper(method, **constants)
    gradient, *arrays = np.zeros((2 + hyper.moments, 1), np.float32)
    update(hyper, 1, gradient, **dict(zip(("p", "m", "v"), arrays)))


def steps_of(values: dict[str, Any], where: str) -> float:
    """Of a parameter's state that is to be loaded."""
    steps = float(values["step"]) if "step" in values else 1.0
    if not (0 <= steps < _MOST_STEPS and steps.is_integer()):
        raise usage("a state to load has no number of steps", where=where, measured=steps, limit="a whole number of 0 or more, below 2^53")
    return steps


def directories(nvme: Any) -> list[Any]:
    """One may stand for itself: of a str, every letter would be one."""
    given: Sequence[Any] = [nvme] if isinstance(nvme, (str, bytes, os.PathLike)) else nvme
    return list(given)


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

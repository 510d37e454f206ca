"""What a checkpoint of another program holds, before any of it is read: names, shapes, and where values lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import FerryError, error_of, message

# The kinds of array beside a weight, as files of the converted directory and as suffixes of a tensor's name.
MASTER, FIRST, SECOND = "master", "exp_avg", "exp_avg_sq"
# What optimizers call their moments. Adagrad's sum and SGD's momentum are the first; amsgrad's maximum has no place.
MOMENTS = {"exp_avg": FIRST, "exp_avg_sq": SECOND, "momentum_buffer": FIRST, "sum": FIRST}
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Parts = Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Array:
    """Values of one tensor: flat parts, one behind the other, that are read when asked for."""

    parts: Parts
    dtype: torch.dtype  # to be written, rounded once
    same_as: torch.Tensor | None = None  # what that comes to, where the checkpoint has it too


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]
    weight: Array
    state: dict[str, Array] = field(default_factory=dict)  # by MASTER, FIRST, SECOND; empty: it is frozen

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def arrays(self) -> dict[str, Array]:
        return {"model": self.weight, **self.state}


@dataclass
class State:
    tensors: list[Tensor]
    global_step: int
    optimizer_step: int
    about: dict[str, Any]  # format, and what is particular to it
    left_out: list[str] = field(default_factory=list)
    loss_scale: float | None = None  # of fp16


def kept_moments(names: Sequence[str], where: str) -> dict[str, str]:
    """Of an optimizer's state: which of its arrays goes where. What ferry has no place for is refused."""
    found: dict[str, str] = {}
    for name in names:
        if name == "step":
            continue
        if name not in MOMENTS:
            raise unsupported("the optimizer keeps what ferry's do not", where, name,
                              "moments of AdamW, Adam, Lion, SGD or Adagrad", "convert the weights alone: --no-moments")
        found[MOMENTS[name]] = name
    return found


def one_step(steps: set[int], where: str) -> int:
    """ferry counts updates once for all tensors."""
    if len(steps) > 1:
        raise unsupported("parameters have taken different numbers of steps", where,
                          ", ".join(str(step) for step in sorted(steps)), "one number for all",
                          "convert the weights alone: --no-moments")
    return steps.pop() if steps else 0


def unsupported(what: str, where: object = "", measured: object = "", limit: object = "", remedy: str = "") -> FerryError:
    return error_of(2, "usage", message(what, str(where), measured, limit, remedy))


def does_not_fit(what: str, where: object = "", measured: object = "", limit: object = "", remedy: str = "") -> FerryError:
    return error_of(3, "does_not_fit", message(what, str(where), measured, limit, remedy))


def damaged(what: str, where: object = "", measured: object = "", limit: object = "", remedy: str = "") -> FerryError:
    return error_of(4, "io", message(what, str(where), measured, limit, remedy))

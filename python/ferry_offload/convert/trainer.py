"""A checkpoint of transformers' Trainer: weights in safetensors, and optimizer.pt of a torch optimizer.

optimizer.pt numbers its parameters and does not name them. Their order is the module's, group by group, which is known for
ferry's families; every moment's shape is compared with the tensor's. Other orders are given as a file of names."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..text import shown
from .bounded_json import MOST_VALUES_OF_TENSORS
from .files import (
    MOST_BYTES_OF_A_RUN,
    MOST_BYTES_OF_TENSORS,
    is_there,
    of_system,
    open_regular,
    parse_json,
    read_json,
    shards_of,
)
from .model import Model
from .pickles import load, number
from .state import TYPES, Array, Parts, State, Tensor, damaged, kept_moments, one_step, unsupported

_DTYPES = {name: dtype for dtype, name in TYPES.items()}

# Which parameters the first group has, whose weights decay. The rest are the second's.
_DECAYS: tuple[Callable[[str, tuple[int, ...]], bool], ...] = (
    lambda _, shape: len(shape) > 1,                # neither biases nor norms
    lambda name, _: not name.endswith(".bias"),     # norms too
    lambda *_: True,                                # all, in one group
)


def is_trainer(folder: Path) -> bool:
    return is_there(folder / "optimizer.pt")


def read(folder: Path, model: Model, *, moments: bool, trust: bool, names: Path | None) -> State:
    weights = dict(_weights(folder))
    tensors = {}
    for name, (shape, dtype, parts) in weights.items():
        if not (model.tied and model.is_head(model.name_of(name))):
            plain = model.name_of(name)
            tensors[plain] = Tensor(plain, shape, Array(parts, dtype))
    model.require({name: tensor.shape for name, tensor in tensors.items()}, folder)
    step = _global_step(folder / "trainer_state.json")
    about = {"format": "trainer"}
    taken = step
    if moments:
        path = folder / "optimizer.pt"
        state = load(path, trust=trust)
        if not isinstance(state, dict) or not isinstance(state.get("state"), dict) or not isinstance(state.get("param_groups"), list):
            raise unsupported("a file holds no state of a torch optimizer", path)
        taken = _add_moments(state, tensors, model, path, names)
    ordered = [tensors[name] for name in model.tensors]
    return State(ordered, step, taken if taken is not None else step, about)


def _global_step(path: Path) -> int:
    step = read_json(path, dict, damaged, "a file of the checkpoint is no JSON object", most_bytes=MOST_BYTES_OF_A_RUN,
                     most_values=MOST_VALUES_OF_TENSORS).get("global_step")
    if number(step) is None:
        raise unsupported("the trainer's state does not say its step", f"{path}: global_step", shown(step), "a whole number")
    return int(step)


# ---------------------------------------------------------------- the optimizer


def _add_moments(state: dict[str, Any], tensors: dict[str, Tensor], model: Model, path: Path, names: Path | None) -> int | None:
    """Returns how many steps the optimizer has taken."""
    groups = [list(group["params"]) for group in state["param_groups"]]
    for kept in state["state"].values():
        kept_moments([key for key, value in kept.items() if value is not None], str(path))
    order = _order(state, groups, tensors, model, path, names)
    steps: set[int] = set()
    for name, index in order.items():
        kept = state["state"].get(index, {})
        kinds = kept_moments([key for key, value in kept.items() if value is not None], str(path))
        if state["state"] and not kinds:
            raise unsupported("a parameter has no moments", f"{path}: {shown(name)}", "", "",
                              "it was never trained; convert the weights alone: --no-moments")
        for kind, key in kinds.items():
            value = kept[key]
            if tuple(value.shape) != tensors[name].shape or value.dtype not in TYPES:
                raise unsupported("a moment is not of its parameter's shape", f"{path}: {name}, {key}",
                                  f"{list(value.shape)} of {value.dtype}", list(tensors[name].shape),
                                  "name the parameters in the optimizer's order: --names FILE")
            tensors[name].state[kind] = Array(_flat(value), value.dtype)
        if (step := number(kept.get("step"))) is not None:
            steps.add(step)
    return one_step(steps, str(path)) if steps else None


def _order(state: dict[str, Any], groups: list[list[int]], tensors: dict[str, Tensor], model: Model, path: Path,
           names: Path | None) -> dict[str, int]:
    """The optimizer's number of each parameter."""
    indices = [index for group in groups for index in group]
    said = _names_in(names) if names else [name for group in state["param_groups"] for name in group.get("param_names", ())]
    if said:
        found = [model.name_of(name) for name in said]
        unknown = [name for name in found if name not in tensors]
        if len(found) != len(indices) or len(set(found)) != len(found) or unknown:
            raise unsupported("the names are not those of the optimizer's parameters", names or path,
                              f"{len(found)} names" + (f", {shown(unknown[0])} unknown" if unknown else ""),
                              f"{len(indices)} different names of the model's tensors")
        return dict(zip(found, indices, strict=True))
    fitting = list({tuple(order): order for order in _candidates(groups, tensors, model)
                    if _fits(order, indices, state["state"], tensors)}.values())
    if len(fitting) != 1:
        raise unsupported("it is not known which parameter is which: optimizer.pt numbers them", path,
                          f"groups of {', '.join(str(len(group)) for group in groups)} parameters",
                          f"all {len(tensors)} of the model in transformers' order",
                          "name them in the optimizer's order, as a JSON list: --names FILE")
    return dict(zip(fitting[0], indices, strict=True))


def _candidates(groups: list[list[int]], tensors: dict[str, Tensor], model: Model) -> Iterator[list[str]]:
    for decays in _DECAYS:
        first = [name for name in model.tensors if decays(name, tensors[name].shape)]
        rest = [name for name in model.tensors if name not in set(first)]
        sizes = [len(group) for group in groups if group]
        if sizes == [len(part) for part in (first, rest) if part]:
            yield first + rest


def _fits(order: Sequence[str], indices: Sequence[int], state: dict[int, Any], tensors: dict[str, Tensor]) -> bool:
    for name, index in zip(order, indices, strict=True):
        for key, value in state.get(index, {}).items():
            if key != "step" and isinstance(value, torch.Tensor) and tuple(value.shape) != tensors[name].shape:
                return False
    return True


def _names_in(path: Path) -> list[str]:
    found = read_json(path, list)
    if not all(isinstance(name, str) for name in found):
        raise unsupported("the file of names is no JSON list of strings", path)
    return found


def _flat(value: torch.Tensor) -> Parts:
    return lambda: [value.detach().reshape(-1)]


# ---------------------------------------------------------------- the weights


def _weights(folder: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype, Parts]]]:
    index = folder / "model.safetensors.index.json"
    if is_there(index):
        names = sorted(set(shards_of(index).values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        path = folder / name
        if not is_there(path):
            raise damaged("a file of the weights is missing", path, "", "",
                          "save with save_safetensors=True, or copy the whole checkpoint")
        yield from _tensors_in(path)


def _tensors_in(path: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype, Parts]]]:
    header, begin = _header(path)
    size = path.stat().st_size
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        what = "the header of a file of weights is damaged"
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), list) for key in ("shape", "data_offsets")):
            raise damaged(what, f"{path}: {shown(name)}", shown(entry), "dtype, shape and data_offsets")
        shape, offsets, said = tuple(entry["shape"]), entry["data_offsets"], entry.get("dtype")
        if len(offsets) != 2 or not all(type(one) is int and one >= 0 for one in (*shape, *offsets)):
            raise damaged(what, f"{path}: {shown(name)}", shown(f"shape {list(shape)}, data_offsets {offsets}"), "whole numbers")
        dtype = _DTYPES.get(said) if isinstance(said, str) else None
        if dtype is None:
            raise unsupported("a weight of a type that ferry does not read", f"{path}: {shown(name)}", shown(said), "F32, BF16 or F16")
        first, last = begin + offsets[0], begin + offsets[1]
        if last > size:
            raise damaged("a file of weights is truncated", f"{path}: {shown(name)}", f"{size} bytes", f"{last} bytes")
        if last - first != math.prod(shape) * dtype.itemsize:
            raise damaged(what, f"{path}: {shown(name)}", f"{last - first} bytes", f"{math.prod(shape) * dtype.itemsize} bytes, as its shape says")
        yield name, (shape, dtype, _values(path, first, last, dtype))


def _values(path: Path, first: int, last: int, dtype: torch.dtype) -> Parts:
    """Read, not mapped: a file that is cut meanwhile is an error, and no signal."""

    def parts() -> list[torch.Tensor]:
        room = bytearray(last - first)
        if not room:
            return [torch.empty(0, dtype=dtype)]
        try:
            with open_regular(path) as file:
                file.seek(first)
                at = memoryview(room)
                while at and (count := file.readinto(at)):
                    at = at[count:]
        except OSError as error:
            raise of_system(error, path) from error
        if at:
            raise damaged("a file of weights ends while it is read", path, f"{len(at)} bytes are missing", f"{last} bytes")
        return [torch.frombuffer(room, dtype=dtype)]

    return parts


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if size < 8 or length > min(size - 8, MOST_BYTES_OF_TENSORS):
            raise damaged("a file of weights is truncated", path, f"{size} bytes", f"a header of {length}")
        text = file.read(length)
    return parse_json(text, path, dict, damaged, "the header of a file of weights is damaged",
                      most_values=MOST_VALUES_OF_TENSORS, binary=True), 8 + length

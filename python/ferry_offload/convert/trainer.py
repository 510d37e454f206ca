"""A checkpoint of transformers' Trainer: weights in safetensors, and optimizer.pt of a torch optimizer.

optimizer.pt numbers its parameters and does not name them. Their order is the module's, group by group, which is known for
ferry's families; every moment's shape is compared with the tensor's. Other orders are given as a file of names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .model import Model
from .pickles import load, number
from .state import TYPES, Array, Pieces, State, Tensor, damaged, kept_moments, one_step, unsupported

_DTYPES = {name: dtype for dtype, name in TYPES.items()}
_MOST_HEADER_BYTES = 100 << 20

# Which parameters the first group has, whose weights decay. The rest are the second's.
_DECAYS: tuple[Callable[[str, tuple[int, ...]], bool], ...] = (
    lambda _, shape: len(shape) > 1,                # neither biases nor norms
    lambda name, _: not name.endswith(".bias"),     # norms too
    lambda *_: True,                                # all, in one group
)


def is_trainer(folder: Path) -> bool:
    return (folder / "optimizer.pt").is_file()


def read(folder: Path, model: Model, *, moments: bool, trust: bool, names: Path | None) -> State:
    weights = dict(_weights(folder))
    tensors = {}
    for name, (shape, dtype, pieces) in weights.items():
        if not (model.tied and model.is_head(model.name_of(name))):
            plain = model.name_of(name)
            tensors[plain] = Tensor(plain, shape, Array(pieces, dtype))
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
    try:
        step = json.loads(path.read_text()).get("global_step")
    except OSError as error:
        raise damaged("a file of the checkpoint cannot be read", path, error.strerror) from error
    except (ValueError, AttributeError) as error:
        raise damaged("a file of the checkpoint is no JSON object", path, str(error)) from error
    if number(step) is None:
        raise unsupported("the trainer's state does not say its step", f"{path}: global_step", step, "a whole number")
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
            raise unsupported("a parameter has no moments", f"{path}: {name}", "", "",
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
                              f"{len(found)} names" + (f", {unknown[0]} unknown" if unknown else ""),
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
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise unsupported("the file of names cannot be read", path, str(error)) from error
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise unsupported("the file of names is no JSON list of strings", path)
    return found


def _flat(value: torch.Tensor) -> Pieces:
    return lambda: [value.detach().reshape(-1)]


# ---------------------------------------------------------------- the weights


def _weights(folder: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype, Pieces]]]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise damaged("the index of the weights cannot be read", index, str(error)) from error
    else:
        names = ["model.safetensors"]
    for name in names:
        path = folder / Path(name).name
        if not path.is_file():
            raise damaged("a file of the weights is missing", path, "", "",
                          "save with save_safetensors=True, or copy the whole checkpoint")
        yield from _tensors_in(path)


def _tensors_in(path: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype, Pieces]]]:
    header, begin = _header(path)
    size = path.stat().st_size
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            first, last = (begin + offset for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise damaged("the header of a file of weights is damaged", f"{path}: {name}", str(error)) from error
        if dtype not in _DTYPES:
            raise unsupported("a weight of a type that ferry does not read", f"{path}: {name}", dtype, "F32, BF16 or F16")
        if not begin <= first <= last <= size:
            raise damaged("a file of weights is truncated", f"{path}: {name}", f"{size} bytes", f"{last} bytes")
        yield name, (shape, _DTYPES[dtype], _values(mapped[first:last], _DTYPES[dtype]))


def _values(some: torch.Tensor, dtype: torch.dtype) -> Pieces:
    def pieces() -> list[torch.Tensor]:
        aligned = some.storage_offset() % dtype.itemsize == 0
        return [(some if aligned else some.clone()).view(dtype)]

    return pieces


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise damaged("a file of weights is truncated", path, f"{size} bytes", f"a header of {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise damaged("the header of a file of weights is damaged", path, str(error)) from error
    if not isinstance(header, dict):
        raise damaged("the header of a file of weights is damaged", path, type(header).__name__)
    return header, 8 + length

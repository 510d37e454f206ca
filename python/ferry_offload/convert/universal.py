"""DeepSpeed's universal format: a directory for each parameter, with files of its master and moments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from .files import is_there
from .model import Model
from .pickles import load, number
from .state import MASTER, MOMENTS, Parts, State, damaged, kept_moments, one_step, unsupported
from .zero import Flat, assemble, files_in, frozen_in, model_states

_NEWEST = 0.4  # universal_checkpoint_version


def is_universal(folder: Path) -> bool:
    return (folder / "zero").is_dir()


def read(folder: Path, model: Model, *, moments: bool, trust: bool) -> State:
    files = files_in(folder, several_models=True)
    models = model_states(files, max(files.model, default=0) + 1, trust)
    states = models[0]
    info = states.get("universal_checkpoint_info")
    version = info.get("universal_checkpoint_version") if isinstance(info, dict) else None
    if isinstance(version, (int, float)) and version > _NEWEST:
        raise unsupported("a universal checkpoint of a version that is not known", folder, version, f"at most {_NEWEST}")
    found = {path.name: path for path in sorted((folder / "zero").iterdir()) if path.is_dir()}
    shapes = {name: tuple(shape) for group in states["param_shapes"] for name, shape in group.items()}
    trained: dict[str, dict[str, Parts]] = {MASTER: {}}
    steps: set[int] = set()
    frozen = frozen_in(models, files)
    for name, place in found.items():
        # What no optimizer had is there as well, without moments.
        kind = {**({MASTER: "fp32"} if name in shapes else {}),
                **(kept_moments(_moments_in(place), str(place)) if moments else {})}
        shape = _shape(place / "fp32.pt", shapes.get(name), trust)
        if name not in shapes:
            value = states["module"].get(name)
            dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
            if not (name in (states.get("shared_params") or {}) or (model.tied and model.is_head(model.name_of(name)))):
                frozen[name] = (shape, _parts(place / "fp32.pt", shape, trust), dtype)
            continue
        shapes[name] = shape
        for what, file in kind.items():
            trained.setdefault(what, {})[name] = _parts(place / f"{file}.pt", shape, trust)
        if moments and is_there(place / "step.pt"):
            steps.add(_step(place / "step.pt", trust))
    _require_all(folder, shapes, trained)
    if moments and not steps:
        steps |= _common_steps(folder, trust)
    step, skipped = number(states.get("global_steps")) or 0, number(states.get("skipped_steps")) or 0
    about = {"format": "deepspeed universal", "version": str(states.get("ds_version", "unknown"))}
    states = {**states, "param_shapes": [{name: shapes[name] for name in trained[MASTER]}]}
    return assemble(states, model, trained, frozen, where=folder, about=about, global_step=step,
                    optimizer_step=one_step(steps, str(folder)) if steps else step - skipped)


def _moments_in(place: Path) -> list[str]:
    return [path.stem for path in sorted(place.glob("*.pt")) if path.stem not in ("fp32", "step")]


def _require_all(folder: Path, shapes: dict[str, Any], trained: dict[str, dict[str, Parts]]) -> None:
    for what, parts in trained.items():
        for name in shapes:
            if name not in parts:
                file = "fp32" if what == MASTER else next(key for key, kind in MOMENTS.items() if kind == what)
                raise damaged("a file of a parameter is missing", folder / "zero" / name / f"{file}.pt", "", "",
                              "make the universal checkpoint again")


def _value(path: Path, trust: bool) -> torch.Tensor:
    found = load(path, trust=trust)
    value = found.get("param") if isinstance(found, dict) else found
    if not isinstance(value, torch.Tensor):
        raise unsupported("a file holds no tensor of a parameter", path, type(value).__name__)
    return value


def _shape(path: Path, said: tuple[int, ...] | None, trust: bool) -> tuple[int, ...]:
    """As in the file, but of stage 3, where values are flat."""
    if not is_there(path):
        raise damaged("a file of a parameter is missing", path, "", "", "make the universal checkpoint again")
    value = _value(path, trust)
    return said if said is not None and value.numel() == math.prod(said) else tuple(value.shape)


def _parts(path: Path, shape: tuple[int, ...], trust: bool) -> Parts:
    def parts() -> list[torch.Tensor]:
        value = Flat([_value(path, trust)])
        if value.count != math.prod(shape):
            raise damaged("a file has not the elements of its parameter", path, f"{value.count} elements",
                          f"{math.prod(shape)}, as fp32.pt has", "make the universal checkpoint again")
        return value.parts

    return parts


def _step(path: Path, trust: bool) -> int:
    step = number(load(path, trust=trust))
    if step is None:
        raise unsupported("a step is a whole number", path)
    return step


def _common_steps(folder: Path, trust: bool) -> set[int]:
    """Where the parameters' directories do not say it."""
    path = folder / "zero" / "optimizer_state.pt"
    if not is_there(path):
        return set()
    common = load(path, trust=trust)
    if not isinstance(common, dict):
        return set()
    wrapped = common.get("optimizer_state_dict")
    said = [common.get("base_optimizer_state_step")]
    said += [group.get("step") for group in common.get("param_groups", []) if isinstance(group, dict)]
    if isinstance(wrapped, dict):
        said += [group.get("step") for group in wrapped.get("state", {}).values() if isinstance(group, dict)]
    return {step for step in map(number, said) if step is not None}

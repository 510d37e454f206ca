"""DeepSpeed's ZeRO checkpoints, stages 1 to 3.

What lies where. Each rank has a file of optimizer states, and rank 0 (of stage 3 each rank) one of model states, which
names the parameters in the order in which they were flattened. In stages 1 and 2 a group of parameters is one vector,
padded at its end, that the ranks hold in parts. In stage 3 each parameter is cut into as many equal parts as there are
ranks, the last one padded, and each rank flattens its own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .model import Model
from .pickles import attribute, load, number
from .state import MASTER, TYPES, Array, Parts, State, Tensor, damaged, kept_moments, one_step, unsupported

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_MASTER_KEYS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


class Flat:
    """A vector that lies in parts, one behind the other."""

    def __init__(self, parts: Iterable[torch.Tensor]) -> None:
        self.parts = [part.detach().reshape(-1) for part in parts]
        self.count = sum(part.numel() for part in self.parts)

    def cut(self, first: int, count: int) -> list[torch.Tensor]:
        found = []
        for part in self.parts:
            here = min(max(part.numel() - first, 0), count)
            if here > 0:
                found.append(part[first:first + here])
                count -= here
            first = max(first - part.numel(), 0)
        return found


@dataclass
class Files:
    """Those of one step, by rank."""

    folder: Path
    optimizer: dict[int, Path]
    model: dict[int, Path]


def files_in(folder: Path, *, several_models: bool = False) -> Files:
    """Throws usage where the checkpoint is of parallelism that cuts tensors in another way."""
    found = Files(folder, {}, {})
    for path in sorted(folder.iterdir()):
        of_optimizer, of_model = _OPTIMIZER_FILE.fullmatch(path.name), _MODEL_FILE.fullmatch(path.name)
        match = of_optimizer or of_model
        if path.name.endswith("_states.pt") and not match:
            raise unsupported("a checkpoint of pipeline or expert parallelism", path, "", "ZeRO alone",
                              "make it universal with DeepSpeed's ds_to_universal, and convert that")
        if not match:
            continue
        if int(match[2]) > 0 and not several_models:
            raise unsupported("a checkpoint of tensor or pipeline parallelism", path, "", "ZeRO alone",
                              "make it universal with DeepSpeed's ds_to_universal, and convert that")
        if int(match[2]) == 0:
            (found.optimizer if of_optimizer else found.model)[int(match[1] or 0)] = path
    return found


def is_zero(folder: Path) -> bool:
    return folder.is_dir() and any(path.name.endswith("_states.pt") for path in folder.iterdir())


def read(folder: Path, model: Model, *, moments: bool, trust: bool) -> State:
    files = files_in(folder)
    optimizers = _optimizer_states(files, trust)
    ranks = len(optimizers)
    stage = _stage_of(optimizers[0], files)
    models = model_states(files, ranks if stage == 3 else 1, trust)
    return _Reader(files, stage, models, optimizers, model, moments).state()


# ---------------------------------------------------------------- files


def _optimizer_states(files: Files, trust: bool) -> list[dict[str, Any]]:
    """Of each rank, in their order: all are there, and say the same of how many they are."""
    if not files.optimizer:
        raise unsupported("there are no optimizer states of ZeRO", files.folder, "", "",
                          "name a checkpoint of ZeRO stage 1, 2 or 3, or a directory with its `latest`")
    loaded: dict[int, dict[str, Any]] = {}
    for rank, path in sorted(files.optimizer.items()):
        whole = load(path, trust=trust)
        state = whole.get("optimizer_state_dict") if isinstance(whole, dict) else None
        if not isinstance(state, dict):
            raise unsupported("a file holds no optimizer state of ZeRO", path)
        loaded[rank] = state
    counts = {rank: _partitions(state, files.optimizer[rank]) for rank, state in loaded.items()}
    stages = {rank: _stage_of(state, files) for rank, state in loaded.items()}
    for what, said in (("ranks", counts), ("stage", stages)):
        if len(set(said.values())) > 1:
            first, other = next((a, b) for a in said for b in said if said[a] != said[b])
            raise unsupported("the ranks' files are not of one checkpoint", files.optimizer[other],
                              f"{what} {said[other]}", f"{said[first]}, as {files.optimizer[first].name} says")
    ranks = next(iter(counts.values()))
    _require_ranks(files.optimizer, ranks, files.folder)
    return [loaded[rank] for rank in range(ranks)]


def model_states(files: Files, ranks: int, trust: bool) -> list[dict[str, Any]]:
    if not files.model:
        raise unsupported("there are no model states", files.folder, "", "mp_rank_00_model_states.pt",
                          "take a whole checkpoint")
    if ranks > 1:
        _require_ranks(files.model, ranks, files.folder)
    found = []
    for rank in range(ranks):
        path = files.model[rank]
        state = load(path, trust=trust)
        if not isinstance(state, dict) or not isinstance(state.get("param_shapes"), list):
            version = state.get("ds_version") if isinstance(state, dict) else None
            raise unsupported("the layout of the model states is not known: they have no param_shapes", path,
                              f"DeepSpeed {version or 'of an unknown version'}", "DeepSpeed 0.3.17 or newer, ZeRO stage 1 to 3")
        if not isinstance(state.get("module"), dict):
            raise unsupported("the model states hold no module", path, "", "",
                              "of pipeline parallelism make it universal with DeepSpeed's ds_to_universal")
        found.append(state)
    return found


def _require_ranks(found: dict[int, Path], ranks: int, folder: Path) -> None:
    example = next(iter(found.values())).name
    missing = [rank for rank in range(ranks) if rank not in found]
    if missing:
        name = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{missing[0]}", example)
        raise damaged("the file of a rank is missing", folder / name, f"{len(found)} of {ranks} ranks' files are there", "",
                      "copy the files of all hosts into one directory")
    extra = [rank for rank in found if rank >= ranks]
    if extra:
        raise unsupported("a file is of more ranks than the checkpoint", found[extra[0]], f"rank {extra[0]}",
                          f"{ranks} ranks", "it is of an older checkpoint: take it away")


def _partitions(state: dict[str, Any], path: Path) -> int:
    said = state.get("partition_count")
    counts = {number(one) for one in (said if isinstance(said, (list, tuple)) else [said])}
    if len(counts) != 1 or (count := counts.pop()) is None or count < 1:
        raise unsupported("a checkpoint whose groups are of different numbers of ranks", f"{path}: partition_count", said,
                          "one number", "make it universal with DeepSpeed's ds_to_universal, and convert that")
    return count


def _stage_of(state: dict[str, Any], files: Files) -> int:
    if "zero_stage" not in state and "single_partition_of_fp32_groups" in state:
        return 1  # DeepSpeed's BF16_Optimizer, which does not say it
    stage = number(state.get("zero_stage"))
    if stage not in _MASTER_KEYS or _MASTER_KEYS[stage] not in state:
        raise unsupported("the stage of ZeRO is not known", files.folder, f"zero_stage {state.get('zero_stage')}", "1, 2 or 3")
    return stage


# ---------------------------------------------------------------- tensors


class _Reader:
    def __init__(self, files: Files, stage: int, models: Sequence[dict[str, Any]], optimizers: Sequence[dict[str, Any]],
                 model: Model, moments: bool) -> None:
        self.files, self.stage, self.models, self.optimizers = files, stage, models, optimizers
        self.model, self.moments = model, moments
        self.ranks, self.module = len(optimizers), models[0]["module"]
        self.groups = [{name: tuple(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]]

    def state(self) -> State:
        base = self._base_states()
        kinds = self._moments_of(base)
        vectors = {MASTER: [state[_MASTER_KEYS[self.stage]] for state in self.optimizers],
                   **{kind: [[group[name] for group in groups] for groups in base] for kind, name in kinds.items()}}
        cut = self._of_ranks if self.stage == 3 else self._of_groups
        trained = {kind: cut(kind, of_ranks) for kind, of_ranks in vectors.items()}
        step = number(self.models[0].get("global_steps")) or 0
        skipped = number(self.models[0].get("skipped_steps")) or 0
        taken = self._steps(base)
        about = {"format": "deepspeed", "stage": self.stage, "ranks": self.ranks,
                 "version": str(self.models[0].get("ds_version", "unknown"))}
        found = assemble(self.models[0], self.model, trained, frozen_in(self.models, self.files), where=self.files.folder, about=about,
                         global_step=step, optimizer_step=taken if taken is not None else step - skipped)
        if any(tensor.weight.dtype == torch.float16 for tensor in found.tensors):
            found.loss_scale = self._loss_scale()
        return found

    def _loss_scale(self) -> float | None:
        """None where it is not known, or none that ferry could go on with: it is then found anew."""
        scale = number(attribute(self.optimizers[0].get("loss_scaler"), "cur_scale"))
        return float(scale) if scale and scale > 0 and scale & (scale - 1) == 0 else None

    def _base_states(self) -> list[list[dict[str, Any]]]:
        """The wrapped optimizer's state: by rank, by group."""
        found = []
        for rank, state in enumerate(self.optimizers):
            base = state.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
            if isinstance(base, dict):
                by_group = base.get("state", {})
                base = [by_group.get(group, {}) for group in range(len(state[_MASTER_KEYS[self.stage]]))]
            if not isinstance(base, list):
                raise unsupported("the layout of the optimizer's state is not known", self.files.optimizer[rank],
                                  f"DeepSpeed {self.models[0].get('ds_version')}", "a state by group")
            found.append(base)
        return found

    def _moments_of(self, base: list[list[dict[str, Any]]]) -> dict[str, str]:
        """Which of the state's names is which of ferry's moments. None before the first step."""
        if not self.moments:
            return {}
        where = str(self.files.optimizer[0])
        kinds: dict[str, str] = {}
        for groups in base:
            for group in groups:
                tensors = [name for name, value in group.items() if isinstance(value, torch.Tensor) and value.dim() > 0]
                kinds.update(kept_moments(tensors, where))
        for rank, groups in enumerate(base):
            for index, group in enumerate(groups):
                for name in kinds.values():
                    if not isinstance(group.get(name), torch.Tensor):
                        raise unsupported("a group of parameters has no moments", f"{self.files.optimizer[rank]}: group {index}",
                                          f"{name} is missing", "", "convert the weights alone: --no-moments")
        return kinds

    def _steps(self, base: list[list[dict[str, Any]]]) -> int | None:
        if not self.moments:
            return None
        steps = {number(group["step"]) for groups in base for group in groups if "step" in group}
        for state in self.optimizers:
            steps.add(number(state.get("base_optimizer_state_step")))
            wrapped = state.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
            if isinstance(wrapped, dict):
                steps |= {number(group.get("step")) for group in wrapped.get("param_groups", []) if isinstance(group, dict)}
        known = {step for step in steps if step is not None}
        return one_step(known, str(self.files.folder)) if known else None

    def _of_groups(self, kind: str, of_ranks: Sequence[Sequence[torch.Tensor]]) -> dict[str, Parts]:
        """Stages 1 and 2: a group is one vector."""
        paddings = self.optimizers[0].get("param_alignment_paddings")
        found: dict[str, Parts] = {}
        for rank, groups in enumerate(of_ranks):
            self._require_groups(kind, rank, len(groups))
        for index, shapes in enumerate(self.groups):
            flat, at = Flat(groups[index] for groups in of_ranks), 0
            behind = paddings[index] if paddings else [0] * len(shapes)
            for (name, shape), padding in zip(shapes.items(), behind, strict=True):
                found[name] = _cut(flat, at, math.prod(shape))
                at += math.prod(shape) + number(padding)
            # Two elements of each rank are the most that a group is padded by.
            if not at <= flat.count < at + 2 * self.ranks + max(map(number, behind), default=0):
                self._refuse_count(kind, f"group {index}", flat.count, at)
        return found

    def _of_ranks(self, kind: str, of_ranks: Sequence[Sequence[torch.Tensor]]) -> dict[str, Parts]:
        """Stage 3: each rank has a part of each parameter, its groups one behind the other."""
        flats = [Flat(groups) for groups in of_ranks]
        found: dict[str, Parts] = {}
        at = 0
        for name, shape in (item for shapes in self.groups for item in shapes.items()):
            count = math.prod(shape)
            share = -(-count // self.ranks)
            found[name] = _cut_each(flats, at, share, count)
            at += share
        for rank, flat in enumerate(flats):
            if flat.count != at:
                self._refuse_count(kind, f"rank {rank}", flat.count, at)
        return found

    def _require_groups(self, kind: str, rank: int, groups: int) -> None:
        if groups != len(self.groups):
            raise unsupported("the ranks' files are not of one checkpoint", f"{self.files.optimizer[rank]}: {kind}",
                              f"{groups} groups of parameters", f"{len(self.groups)}, as the model states say")

    def _refuse_count(self, kind: str, where: str, measured: int, wanted: int) -> None:
        raise damaged("the optimizer's state has not the elements of its parameters", f"{self.files.folder}: {kind}, {where}",
                      f"{measured} elements", f"{wanted}, and its padding",
                      "files of several checkpoints are mixed, or state was on NVMe and is not in them")


Frozen = dict[str, tuple[tuple[int, ...], Parts, torch.dtype]]


def frozen_in(models: Sequence[dict[str, Any]], files: Files) -> Frozen:
    """What the optimizer does not have, of all ranks: whole, or (stage 3) each rank's part. Stage 1 has it in the module."""
    found: Frozen = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [state["frozen_param_fragments"][name] for state in models]
        flat, count = Flat(parts), math.prod(shape)
        if flat.count < count:
            raise damaged("a frozen tensor has not all of its elements", f"{files.folder}: {name}", f"{flat.count} elements", count)
        found[name] = (tuple(shape), _cut(flat, 0, count), parts[0].dtype)
    return found


def assemble(states: dict[str, Any], model: Model, trained: dict[str, dict[str, Parts]], frozen: Frozen, *, where: Path,
             about: dict[str, Any], global_step: int, optimizer_step: int) -> State:
    """The model's tensors, of what the optimizer has and of the module beside it. Where the module has a weight too
    (stages 1 and 2) it must be the master, rounded: whatever laid masters out in another way is found out."""
    module, buffers = states["module"], set(states.get("buffer_names") or ())
    shared = dict(states.get("shared_params") or {})
    shapes = {name: tuple(shape) for group in states["param_shapes"] for name, shape in group.items()}
    left_out, tensors = [], []
    for name in dict.fromkeys([*shapes, *frozen, *module]):
        plain = model.name_of(name)
        if name in trained[MASTER]:
            kept = module.get(name)
            dtype = _type(kept.dtype if isinstance(kept, torch.Tensor) else torch.float32, where, name)
            state = {kind: Array(parts[name], torch.float32) for kind, parts in trained.items()}
            whole = isinstance(kept, torch.Tensor) and tuple(kept.shape) == shapes[name]
            weight = Array(trained[MASTER][name], dtype, kept.detach().reshape(-1) if whole else None)
            if dtype == torch.float32:
                del state[MASTER]  # the weight itself
            tensors.append(Tensor(plain, shapes[name], weight, state))
        elif name in frozen:
            shape, parts, dtype = frozen[name]
            tensors.append(Tensor(plain, shape, Array(parts, _type(dtype, where, name))))
        elif name in shared or name in buffers or (model.tied and model.is_head(plain)):
            left_out.append(name)
        elif isinstance(module[name], torch.Tensor) and module[name].numel() > 0:
            value = module[name]
            tensors.append(Tensor(plain, tuple(value.shape), Array(_whole(value), _type(value.dtype, where, name))))
    _refuse_unsaid_ties(model, shared, where)
    order = {name: place for place, name in enumerate(model.tensors)}
    tensors.sort(key=lambda tensor: order.get(tensor.name, len(order)))
    return State(tensors, global_step, optimizer_step, about, left_out)


def _refuse_unsaid_ties(model: Model, shared: dict[str, str], where: Path) -> None:
    for name, kept in shared.items():
        if not (model.tied and model.is_head(model.name_of(name))):
            raise unsupported("two tensors share their values, which config.json does not say", f"{where}: {name} and {kept}",
                              f"tie_word_embeddings {str(model.tied).lower()}", "",
                              "correct tie_word_embeddings, or name the model's own config.json: --model DIR")


def _type(dtype: torch.dtype, where: Path, name: str) -> torch.dtype:
    if dtype not in TYPES:
        raise unsupported("a weight of a type that ferry does not read", f"{where}: {name}", dtype, "fp32, bf16 or fp16")
    return dtype


def _whole(value: torch.Tensor) -> Parts:
    return lambda: [value.detach().reshape(-1)]


def _cut(flat: Flat, first: int, count: int) -> Parts:
    return lambda: flat.cut(first, count)


def _cut_each(flats: Sequence[Flat], first: int, share: int, count: int) -> Parts:
    def parts() -> list[torch.Tensor]:
        """Of each rank its part, without the padding of the last."""
        return [part for rank, flat in enumerate(flats)
                for part in flat.cut(first, min(share, max(count - rank * share, 0)))]

    return parts

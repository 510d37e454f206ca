"""Checkpoints of DeepSpeed and of transformers' Trainer, as a directory that `ferry ckpt import` reads.

Needs torch 2.6 or newer, and neither DeepSpeed nor transformers. docs/checkpoints.md says what to run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FerryError, error_of, message, usage
from ..text import in_quotes, shown

if TYPE_CHECKING:
    from .state import State

SHARD_BYTES = 5 * 10**9
_FOREIGN = "DeepSpeed ZeRO (stages 1 to 3), DeepSpeed universal, or a Trainer's with optimizer.pt"


def convert(source: str | os.PathLike[str], output: str | os.PathLike[str], *, model: str | os.PathLike[str] | None = None,
            tag: str | None = None, names: str | os.PathLike[str] | None = None, moments: bool = True,
            trust_pickles: bool = False, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Writes the directory `output`, which must not be there, and says what it holds.

    `model` has config.json and the tokenizer, where the source has not. `tag` is DeepSpeed's name of a step. `names` is a
    JSON list of the parameters' names in the optimizer's order (optimizer.pt). Without `moments` the weights alone are
    converted, and their fp32 masters. Pickles run nothing, unless `trust_pickles` has torch load whatever they ask for."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise usage("torch is needed to read checkpoints of DeepSpeed or a Trainer", measured=str(error),
                    remedy="pip install torch; its CPU build is enough") from error
    except (MemoryError, OSError) as error:  # of its libraries
        raise error_of(3, "does_not_fit", message("torch cannot be loaded: too little memory, or a library that the system refuses", "",
                                                  shown(error) or "MemoryError", "", "raise the limit of memory: ulimit -v")) from error
    from .files import is_of_memory, of_system, watching
    from .state import damaged, does_not_fit

    source, output = Path(source), Path(os.path.abspath(output))
    if not source.is_dir():
        raise usage("there is nothing to convert: no such directory", where=str(source), limit=_FOREIGN)
    if os.path.lexists(output):
        raise usage("the directory to write is there already", where=str(output), remedy="name another, or take it away")
    with watching():
        try:
            return _convert(source, output, model=model, tag=tag, names=names, moments=moments, trust=trust_pickles,
                            shard_bytes=shard_bytes)
        except FerryError:
            raise
        except OSError as error:
            raise of_system(error, error.filename or source) from error
        except Exception as error:  # what is in the files decides which
            if is_of_memory(error):
                raise does_not_fit("there is too little memory to convert it", source, shown(error)) from error
            raise damaged("the checkpoint is not laid out as the programs do that write such", source,
                          shown(f"{type(error).__name__}: {error}".split("\n")[0], 300), "", "take another checkpoint, or copy this one again") from error


def _convert(source: Path, output: Path, *, model: str | os.PathLike[str] | None, tag: str | None,
             names: str | os.PathLike[str] | None, moments: bool, trust: bool, shard_bytes: int) -> dict[str, Any]:
    from . import directory, trainer, universal, zero
    from .model import Model, config_of

    folder = _step_folder(source, tag)
    of_model = Model(config_of([Path(model)] if model else [folder, source, folder.parent]))
    reading: dict[str, Any] = {"moments": moments, "trust": trust}
    if universal.is_universal(folder):
        state = universal.read(folder, of_model, **reading)
    elif zero.is_zero(folder):
        state = zero.read(folder, of_model, **reading)
    elif trainer.is_trainer(folder):
        state = trainer.read(folder, of_model, names=Path(names) if names else None, **reading)
    else:
        raise usage("it is not known what kind of checkpoint this is", where=str(folder), limit=_FOREIGN,
                    remedy="where it is of FSDP, save it with DeepSpeed or as one file first")
    of_model.require({tensor.name: tensor.shape for tensor in state.tensors}, folder)
    return {"source": str(folder), "output": str(output), **state.about, **_counts(state),
            **directory.write(state, of_model, output, shard_bytes=shard_bytes)}


def _step_folder(source: Path, tag: str | None) -> Path:
    """The directory of a step: the source, or one in it that `tag` or DeepSpeed's file `latest` names."""
    from .files import is_there

    if tag:
        return _existing(source / tag, "--tag")
    if any(source.glob("*_optim_states.pt")) or any(source.glob("*_model_states.pt")) or (source / "zero").is_dir():
        return source
    for latest in ("latest", "latest_universal"):
        if is_there(source / latest):
            return _existing(source / _name_in(source / latest), latest)
    steps = sorted(path.name for path in source.glob("global_step*") if path.is_dir())
    if len(steps) > 1:
        raise usage("there are several steps, and no file `latest`", where=str(source), measured=", ".join(steps),
                    remedy=f"say which: --tag {steps[-1]}")
    return source / steps[0] if steps else source


def _name_in(latest: Path) -> str:
    from .files import read_bytes

    name = read_bytes(latest, most=4096).decode(errors="backslashreplace").strip()
    if not name.isprintable() or name in ("", ".", "..") or "/" in name:
        raise usage("the file names no directory beside it", where=str(latest), measured=in_quotes(name), remedy="name a step: --tag")
    return name


def _existing(folder: Path, said_by: str) -> Path:
    if not folder.is_dir():
        raise usage("the step is not there", where=str(folder), measured=f"named by {said_by}", remedy="name another: --tag")
    return folder


def _counts(state: State) -> dict[str, Any]:
    kinds = sorted({kind for tensor in state.tensors for kind in tensor.state})
    types = sorted({str(tensor.weight.dtype).removeprefix("torch.") for tensor in state.tensors})
    return {"global_step": state.global_step, "optimizer_step": state.optimizer_step, "tensors": len(state.tensors),
            "parameters": sum(tensor.count for tensor in state.tensors),
            "frozen": [tensor.name for tensor in state.tensors if not tensor.state and kinds],
            "weights": ", ".join(types), "state": kinds, "left_out": state.left_out}

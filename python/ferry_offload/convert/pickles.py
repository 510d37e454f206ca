"""Reads files of torch.save without running what they hold.

A pickle can name any function and have it called. torch's weights-only reader calls none but those that rebuild tensors
and containers. Classes that it does not know, DeepSpeed's for instance, are replaced by Opaque here: they keep what the
file gave them and run nothing, so neither DeepSpeed nor a caller's own modules need be installed."""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..text import shown
from .files import is_of_memory, of_system, open_regular
from .state import damaged, does_not_fit, unsupported

_NEEDS = (2, 6)


class Opaque:
    """An object of a class that was not loaded."""

    def __new__(cls, *_arguments: Any, **_named: Any) -> Opaque:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.state = arguments, named

    def __setstate__(self, state: Any) -> None:
        self.arguments, self.state = (), state


def number(value: Any) -> int | None:
    """An integer as it was saved: plain, in a tensor, or as a member of an enumeration."""
    if isinstance(value, Opaque):
        value = value.arguments[0] if len(getattr(value, "arguments", ())) == 1 else None
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or int(value) != value:
        return None
    return int(value)


def attribute(value: Any, name: str) -> Any:
    """Of an object of a class that was loaded, or was not. None: it has no such attribute."""
    if isinstance(value, Opaque):
        state = getattr(value, "state", None)
        return state.get(name) if isinstance(state, dict) else None
    return getattr(value, name, None)


def load(path: Path, *, trust: bool = False) -> Any:
    """What the file holds, its tensors mapped and not yet read. Throws io where it is damaged."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _NEEDS:
        raise unsupported("this torch cannot read pickles safely", "torch", torch.__version__,
                          "2.6 or newer", "install a newer torch")
    _require_whole(path)
    try:
        if trust:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        with torch.serialization.safe_globals([(_stand_in(name), name) for name in unknown]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise unsupported("the pickle asks for more than tensors, and nothing of it was run", path,
                          str(error).split("\n")[0], "what torch.load reads with weights_only",
                          "if you trust whoever wrote it: --trust-pickles") from error
    except ModuleNotFoundError as error:  # trusted, and its classes are wanted
        raise unsupported("a class of the pickle is of a module that is not there", path, str(error), "",
                          "install it, or leave --trust-pickles out") from error
    except OSError as error:
        raise of_system(error, path) from error
    except Exception as error:  # what the bytes are decides which
        if is_of_memory(error):
            raise does_not_fit("there is too little memory to read a file of the checkpoint", path, shown(error)) from error
        raise damaged("a file of the checkpoint cannot be read", path, str(error).split("\n")[0], "",
                      "take another checkpoint, or copy this one again") from error


def _stand_in(name: str) -> type:
    return type(name.rpartition(".")[2], (Opaque,), {})


def _require_whole(path: Path) -> None:
    """The directory of a zip file is at its end: a file that was cut has none."""
    try:
        with open_regular(path) as file:
            if zipfile.is_zipfile(file):
                return
            size = os.fstat(file.fileno()).st_size
    except zipfile.BadZipFile as error:
        raise damaged("a file of the checkpoint is none of torch.save's", path, str(error), "",
                      "take another checkpoint, or copy this one again") from error
    except OSError as error:
        raise of_system(error, path) from error
    raise damaged("a file of the checkpoint is truncated, or none of torch.save's", path, f"{size} bytes without an end", "",
                  "take another checkpoint, or copy this one again")

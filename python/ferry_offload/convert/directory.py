"""Writes the directory that `ferry ckpt import` reads: aside, and published by one rename."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import FerryError
from ..text import one_line
from .files import open_regular, require_unchanged
from .model import Model
from .state import FIRST, MASTER, SECOND, TYPES, Array, State, Tensor, damaged, unsupported

_PART_ELEMENTS = 16 << 20  # at a time in memory
_ASIDE = ".converting"
KINDS = ("model", MASTER, FIRST, SECOND)


@dataclass
class Written:
    """One file: the arrays of one kind of some tensors."""

    kind: str
    entries: list[tuple[str, Tensor, Array]] = field(default_factory=list)
    bytes: int = 0
    name: str = ""


class Progress:
    """On a terminal a line that is written over, else a line every ten seconds."""

    def __init__(self, what: str, of: int) -> None:
        self.what, self.of, self.bytes = what, of, 0
        self.began = self.said = time.monotonic()
        self.terminal, self.shown = sys.stderr.isatty(), False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def add(self, count: int) -> None:
        self.bytes += count
        now = time.monotonic()
        if now - self.said < (10 if not self.terminal else 0.2 if self.shown else 1):
            return
        self.said, self.shown = now, True
        print(("\r\x1b[K" if self.terminal else "") + self.text(), end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def text(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9)
        text = f"{self.what}: {self.bytes / 1e9:.2f} of {self.of / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s"
        return text + (f", {(self.of - self.bytes) / rate:.0f} s left" if 0 < self.bytes < self.of else "")

    def done(self) -> None:
        if self.terminal and self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def write(state: State, model: Model, output: Path, *, shard_bytes: int) -> dict[str, Any]:
    """Throws usage where something has that name, and io where it cannot be written."""
    parent = output.parent
    if os.path.lexists(output):
        raise unsupported("the directory to write is there already", output, "", "", "name another, or take it away")
    if not parent.is_dir():
        raise unsupported("the directory to write in is not there", parent, "", "", "make it")
    files = list(_files(state, shard_bytes))
    total = sum(file.bytes for file in files)
    room = total + sum(_size_of(path) for path in model.files())
    try:
        _remove_leftovers(output)
        free = shutil.disk_usage(parent).free
        if free < room:
            raise damaged("no room for the converted checkpoint", parent, f"{free} bytes are free",
                          f"{room} bytes, {room - free} more", "make room, or name a directory on another disk")
        aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=_ASIDE, dir=parent))
        held = _hold(aside)
        try:
            progress = Progress(f"convert {one_line(output.name)}", total)
            for file in files:
                _write_file(aside / file.name, file, progress)
            progress.done()
            _write_texts(aside, state, model, files)
            require_unchanged()
            aside.chmod(0o777 & ~_umask())
            _sync(aside)
            if os.path.lexists(output):
                raise unsupported("the directory to write appeared meanwhile", output, "", "", "name another")
            aside.rename(output)
            _sync(parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        finally:
            os.close(held)
    except OSError as error:
        if isinstance(error, FerryError):
            raise
        raise damaged("the converted checkpoint cannot be written", error.filename or output, error.strerror or str(error), "",
                      "make room, or name a directory on another disk") from error
    return {"files": len(files), "bytes": total, "seconds": round(progress.seconds, 3)}


def _size_of(path: Path) -> int:
    """Of a file to be taken over. What cannot be is found out before anything is written."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


# ---------------------------------------------------------------- what goes where


def _files(state: State, shard_bytes: int) -> Iterator[Written]:
    for kind in KINDS:
        shards = [Written(kind)]
        for tensor in state.tensors:
            array = tensor.arrays().get(kind)
            if array is None:
                continue
            count = tensor.count * array.dtype.itemsize
            if shards[-1].entries and shards[-1].bytes + count > shard_bytes:
                shards.append(Written(kind))
            name = tensor.name if kind == "model" else f"{tensor.name}.{kind}"
            shards[-1].entries.append((name, tensor, array))
            shards[-1].bytes += count
        for number, shard in enumerate(shards, start=1):
            shard.name = f"{kind}.safetensors" if len(shards) == 1 else f"{kind}-{number:05}-of-{len(shards):05}.safetensors"
            if shard.entries:
                yield shard


def _write_file(path: Path, file: Written, progress: Progress) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor, array in file.entries:
        end = at + tensor.count * array.dtype.itemsize
        header[name] = {"dtype": TYPES[array.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, tensor, array in file.entries:
            written = _write_array(out, name, array, progress)
            if written != tensor.count:
                raise damaged("a tensor has not as many values as its shape says", name, written, tensor.count)
        out.flush()
        os.fsync(out.fileno())


def _write_array(out: BinaryIO, name: str, array: Array, progress: Progress) -> int:
    written = 0
    for part in array.parts():
        for some in part.split(_PART_ELEMENTS):
            rounded = some.to(array.dtype).contiguous()
            if array.same_as is not None:
                _require_same(rounded, array.same_as[written:written + rounded.numel()], name)
            out.write(rounded.view(torch.uint8).numpy().data)
            written += rounded.numel()
            progress.add(rounded.nbytes)
    return written


def _require_same(rounded: torch.Tensor, weight: torch.Tensor, name: str) -> None:
    differ = rounded.view(torch.uint8) != weight.contiguous().view(torch.uint8)
    if differ.any():
        raise damaged("a tensor's fp32 master, rounded, is not its weight", name,
                      f"{int(differ.reshape(rounded.numel(), -1).any(1).sum())} of {rounded.numel()} elements differ", "equal bits",
                      "files of several steps are mixed; or a universal checkpoint was made of one with "
                      "round_robin_gradients, which DeepSpeed lays out wrongly: convert the checkpoint itself")


def _write_texts(aside: Path, state: State, model: Model, files: list[Written]) -> None:
    for path in model.files():
        with open_regular(path) as file, open(aside / path.name, "wb") as out:
            shutil.copyfileobj(file, out)
    weights = [file for file in files if file.kind == "model"]
    if len(weights) > 1:
        _write_json(aside / "model.safetensors.index.json",
                    {"metadata": {"total_size": sum(file.bytes for file in weights)},
                     "weight_map": {name: file.name for file in weights for name, _, _ in file.entries}})
    scale = {} if state.loss_scale is None else {"loss_scale": state.loss_scale}
    _write_json(aside / "trainer_state.json", {"global_step": state.global_step, "optimizer_step": state.optimizer_step,
                                               **scale, "converted_from": state.about})


def _write_json(path: Path, what: Any) -> None:
    path.write_text(json.dumps(what, indent=2) + "\n")


# ---------------------------------------------------------------- aside


def _hold(aside: Path) -> int:
    """As long as the lock is held, nobody takes the directory for a leftover."""
    held = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


def _remove_leftovers(output: Path) -> None:
    """Of conversions to the same name that were killed, which is told by the name that mkdtemp() draws."""
    ours = re.compile(re.escape(f".{output.name}.") + "[a-z0-9_]{8}" + re.escape(_ASIDE))
    for left in output.parent.iterdir():
        if not ours.fullmatch(left.name) or left.is_symlink():
            continue
        try:
            held = _hold(left)
        except OSError:
            continue  # somebody writes it
        shutil.rmtree(left, ignore_errors=True)
        os.close(held)


def _sync(folder: Path) -> None:
    """The names in it, and what the texts hold."""
    for path in (*folder.glob("*.json"), folder):
        held = os.open(path, os.O_RDONLY)
        os.fsync(held)
        os.close(held)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

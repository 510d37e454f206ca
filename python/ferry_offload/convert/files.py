"""Files of others, before anything is believed that they say: JSON that is bounded, and sources that stay as they are."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import FerryError
from ..text import in_quotes, shown
from . import bounded_json
from .state import damaged, does_not_fit, unsupported

MOST_BYTES = 16 << 20  # of what people write
MOST_BYTES_OF_A_RUN = 256 << 20  # its state grows with its steps: as `ferry ckpt import` takes
MOST_BYTES_OF_TENSORS = 100_000_000  # their names and shapes: safetensors' own limit
_IRREGULAR = "a file of the checkpoint is no regular file"
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}
_NO_MEMORY = ("cannot allocate memory", "can't allocate memory", "not enough memory")
_watched: ContextVar[dict[Path, tuple[int, ...]] | None] = ContextVar("_watched", default=None)


def is_there(path: Path) -> bool:
    """Something that should be a file. Whatever it is, open_regular() says: a link that leads nowhere is not left out."""
    return os.path.lexists(path) and not path.is_dir()


def open_regular(path: Path) -> BinaryIO:
    """The one way in which a file of the source is opened. A pipe might never end or begin, a device has no end."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise unsupported(_IRREGULAR, path, error.strerror, "a regular file") from error
        raise of_system(error, path) from error
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind != stat.S_IFREG:
        os.close(file)
        raise unsupported(_IRREGULAR, path, _KINDS.get(kind, "a device"), "a regular file")
    watch(path)
    return open(file, "rb", buffering=0)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """All of it."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise unsupported("a file is too large for what it should hold", path, f"{size} bytes", f"{most} bytes")
            return file.read(most) or b""
    except OSError as error:
        raise of_system(error, path) from error


def read_json(path: Path, kind: type, fault: Callable[..., FerryError] = unsupported, what: str = "a file is no JSON", *,
              most_bytes: int = MOST_BYTES, most_values: int = bounded_json.MOST_VALUES) -> Any:
    """An object or a list, no key in it twice."""
    return parse_json(read_bytes(path, most_bytes), path, kind, fault, what, most_values=most_values)


def parse_json(text: bytes, path: Path, kind: type, fault: Callable[..., FerryError], what: str, *,
               most_values: int = bounded_json.MOST_VALUES, binary: bool = False) -> Any:
    try:
        found = bounded_json.parse(text, most_values)
    except bounded_json.JsonFault as error:
        place = f"byte {error.index + 1}" if binary else bounded_json.place_of(text, error.index)
        raise fault(error.what or what, f"{path}: {place}", shown(error.measured), error.limit) from error
    if not isinstance(found, kind):
        raise fault(what, path, f"it holds a {type(found).__name__}", f"a {kind.__name__}")
    return found


def shards_of(index: Path) -> dict[str, str]:
    """Of each tensor the file beside the index that has it."""
    what = "the index of the weights cannot be read"
    found = read_json(index, dict, damaged, what, most_bytes=MOST_BYTES_OF_TENSORS,
                      most_values=bounded_json.MOST_VALUES_OF_TENSORS).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise damaged(what, f"{index}: weight_map", type(found).__name__, "a file's name of each tensor")
    for tensor, name in found.items():
        if name in ("", ".", "..") or "/" in name or not name.isprintable():
            raise unsupported("the index of the weights names what is no file beside it", f"{index}: {shown(tensor)}", in_quotes(name))
    return found


def of_system(error: OSError, path: object) -> FerryError:
    """What the system refuses is damage only where neither a limit nor a right says so."""
    if isinstance(error, FerryError):
        return error
    reason = error.strerror or str(error)
    if is_of_memory(error):
        return does_not_fit("there is too little memory to convert it", path, reason)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return does_not_fit("a file cannot be opened", path, reason, "", "raise the limit of open files: ulimit -n")
    if error.errno in (errno.EACCES, errno.EPERM):
        return unsupported("a file may not be read", path, reason, "", "read it as its owner, or give the right to")
    return damaged("a file cannot be read", path, reason)


def is_of_memory(error: Exception) -> bool:
    """torch says it in words."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


# ---------------------------------------------------------------- sources


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Values are read when they are written, much later than the header that names them: what watch() is told of
    within, require_unchanged() compares."""
    token = _watched.set({})
    try:
        yield
    finally:
        _watched.reset(token)


def watch(path: Path) -> None:
    watched = _watched.get()
    if watched is not None:
        watched.setdefault(path, _state_of(path))


def require_unchanged() -> None:
    """Nobody writes to a file without the system taking down when: the time of change cannot be set back."""
    for path, before in (_watched.get() or {}).items():
        try:
            now = _state_of(path)
        except OSError as error:
            raise of_system(error, path) from error
        if now != before:
            raise damaged("a file of the checkpoint changed while it was read", path, f"{now[2]} bytes, written to or replaced since",
                          f"{before[2]} bytes as they were", "convert it again, and leave it alone meanwhile")


def _state_of(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

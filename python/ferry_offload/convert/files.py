"""Files of others, before anything is believed that they say: JSON that is bounded, and sources that stay as they are."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ..errors import FerryError
from .state import damaged, does_not_fit, unsupported

MOST_BYTES = 256 << 20  # of JSON: as `ferry ckpt import` takes of a trainer's state
_watched: ContextVar[dict[Path, tuple[int, ...]] | None] = ContextVar("_watched", default=None)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """All of a regular file. A pipe might never end, a device has no end."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(file, "rb") as opened:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise unsupported("a file of the checkpoint is no regular file", path)
            if found.st_size > most:
                raise unsupported("a file is too large for what it should hold", path, f"{found.st_size} bytes", f"{most} bytes")
            watch(path)
            return opened.read(most)
    except OSError as error:
        raise of_system(error, path) from error


def read_json(path: Path, kind: type, fault: Callable[..., FerryError] = unsupported, what: str = "a file is no JSON") -> Any:
    """An object or a list, no key in it twice."""
    return parse_json(read_bytes(path), path, kind, fault, what)


def parse_json(text: bytes, path: Path, kind: type, fault: Callable[..., FerryError], what: str) -> Any:
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise fault(what, path, str(error)) from error
    if not isinstance(found, kind):
        raise fault(what, path, f"it holds a {type(found).__name__}", f"a {kind.__name__}")
    return found


def shards_of(index: Path) -> dict[str, str]:
    """Of each tensor the file beside the index that has it."""
    what = "the index of the weights cannot be read"
    found = read_json(index, dict, damaged, what).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise damaged(what, f"{index}: weight_map", type(found).__name__, "a file's name of each tensor")
    for tensor, name in found.items():
        if name in ("", ".", "..") or "/" in name or not name.isprintable():
            raise unsupported("the index of the weights names what is no file beside it", f"{index}: {tensor}", repr(name)[:200])
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"a key is given twice: {next(key for key in keys if keys.count(key) > 1)!r}")
    return found


def of_system(error: OSError, path: object) -> FerryError:
    """What the system refuses is damage only where neither a limit nor a right says so."""
    if isinstance(error, FerryError):
        return error
    reason = error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return does_not_fit("a file cannot be opened", path, reason, "", "raise the limit of open files: ulimit -n")
    if error.errno in (errno.EACCES, errno.EPERM):
        return unsupported("a file may not be read", path, reason, "", "read it as its owner, or give the right to")
    return damaged("a file cannot be read", path, reason)


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

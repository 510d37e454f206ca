"""What goes wrong in ferry, as exceptions: the C side's message, and its parts by name."""

from __future__ import annotations

from .text import shown

_MOST_OF_A_PART = 1024
_MOST_OF_A_PLACE = 6 << 10  # a path, and what of the file
_LABELS = {"where": "where", "measured": "measured", "limit": "limit", "do": "remedy"}


class FerryError(Exception):
    """`code` and `status` are the C ABI's; what, where, measured, limit and remedy its message's parts."""

    code: int = 1
    status: str = "internal"
    what: str = ""
    where: str = ""
    measured: str = ""
    limit: str = ""
    remedy: str = ""

    def __reduce__(self):
        return (error_of, (self.code, self.status, str(self)))


class InternalError(FerryError):
    """A bug in ferry; the handle can only be closed."""


class UsageError(FerryError, ValueError):
    """An argument, a configuration or the order of calls."""


class DoesNotFitError(FerryError, MemoryError):
    """A budget is too small for what was asked."""


class StorageError(FerryError, OSError):
    """Storage failed, or bytes came back wrong."""


class DivergedError(FerryError, ArithmeticError):
    """NaN or Inf in loss or gradient."""


class ClosedError(FerryError, ValueError):
    """The handle was closed, or is of the process before fork()."""


class CancelledError(FerryError):
    """A transfer was cancelled before it began."""


class BusyError(FerryError, RuntimeError):
    """A callback calls with the handle whose call it is within."""


_KINDS = {1: InternalError, 2: UsageError, 3: DoesNotFitError, 4: StorageError, 5: DivergedError,
          7: ClosedError, 8: InternalError, 9: DoesNotFitError, 11: CancelledError, 12: BusyError}


def error_of(code: int, status: str, text: str) -> FerryError:
    """The exception of a status and a message of the C ABI."""
    error = _KINDS.get(code, FerryError)(text)
    error.code, error.status = code, status
    first, *lines = text.split("\n")
    error.what = first
    for line in lines:
        label, _, value = line.strip().partition(":")
        if label in _LABELS:
            setattr(error, _LABELS[label], value.strip())
    return error


def usage(what: str, *, where: str = "", measured: object = "", limit: object = "", remedy: str = "") -> UsageError:
    """An error of Python's own in the same form."""
    return error_of(2, "usage", message(what, where, measured, limit, remedy))  # type: ignore[return-value]


def message(what: str, where: str, measured: object, limit: object, remedy: str) -> str:
    """Of what others wrote no part steers the terminal, goes on in another line, or fills the screen."""
    parts = (("measured: ", measured), ("limit:    ", limit), ("do:       ", remedy))
    lines = [shown(what, _MOST_OF_A_PART), f"  where:    {shown(where, _MOST_OF_A_PLACE)}" if where else "",
             *(f"  {label}{shown(value, _MOST_OF_A_PART)}" for label, value in parts if str(value))]
    return "\n".join(line for line in lines if line)

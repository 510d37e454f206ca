"""What goes wrong in ferry, as exceptions: the C side's message, and its parts by name."""

from __future__ import annotations

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


_KINDS = {1: InternalError, 2: UsageError, 3: DoesNotFitError, 4: StorageError, 5: DivergedError,
          7: ClosedError, 8: InternalError, 9: DoesNotFitError, 11: CancelledError}


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
    parts = (("where:    ", where), ("measured: ", measured), ("limit:    ", limit), ("do:       ", remedy))
    return what + "".join(f"\n  {label}{value}" for label, value in parts if str(value))

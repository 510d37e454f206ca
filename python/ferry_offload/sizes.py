"""Byte counts as a person writes them, and reports as a person reads them."""

from __future__ import annotations

import math
import numbers
import re

from .errors import usage
from .text import in_quotes

_UNITS = {"": 1, "B": 1, **{letter + unit: base**power for power, letter in enumerate("KMGT", start=1)
                            for unit, base in (("iB", 1024), ("B", 1000))}}

_MOST_DIGITS = 19  # of 2^63


def to_bytes(size: int | str) -> int:
    """4096, "40GiB", "1.5 TB"."""
    if not isinstance(size, str):
        if not isinstance(size, numbers.Real) or not 0 <= size < math.inf:
            raise usage("a size is none", measured=repr(size), limit="a number of bytes, 0 or more")
        return int(size)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    unit = found and _UNITS.get(found[2][:1].upper() + found[2][1:])
    if not found or not unit:
        raise usage("a size is not understood", measured=in_quotes(size), limit="a number of bytes, or one with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    if len(found[1].partition(".")[0]) > _MOST_DIGITS:
        raise usage("a size is larger than any there is", measured=in_quotes(size))
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def shown(report: object) -> str:
    kind = type(report)
    fields = [name for name in vars(kind) if not name.startswith("_") and not callable(getattr(kind, name))]
    return f"{kind.__name__}({', '.join(f'{name}={getattr(report, name)!r}' for name in fields)})"

"""Text that others wrote, as an error shows it: on one line, not too long, and nothing in it that steers a terminal."""

from __future__ import annotations

import re

SHOWN = 160
_STEERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NAMED = {"\n": r"\n", "\t": r"\t"}


def shown(text: object, most: int = SHOWN) -> str:
    """Of more than `most` bytes the beginning, the end and how many there are. What is no printable UTF-8 is \\xff."""
    whole = _bytes(str(text))
    if len(whole) <= most:
        return _escaped(whole)
    first, last = _boundary(whole, most * 3 // 4), _boundary(whole, len(whole) - most // 4)
    return f"{_escaped(whole[:first])}...{_escaped(whole[last:])} ({len(whole)} bytes)"


def in_quotes(text: str, most: int = SHOWN) -> str:
    found = shown(text, most)
    return f'"{found}"' if len(_bytes(text)) <= most else found


def one_line(text: object) -> str:
    """All of it."""
    return _escaped(_bytes(str(text)))


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")  # a file's name
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _escaped(text: bytes) -> str:
    return _STEERS.sub(lambda found: _NAMED.get(found[0]) or "".join(f"\\x{byte:02x}" for byte in found[0].encode()),
                       text.decode("utf-8", "backslashreplace"))


def _boundary(text: bytes, index: int) -> int:
    """Not inside a character."""
    for _ in range(3):
        if index > 0 and text[index] & 0xc0 == 0x80:
            index -= 1
    return index

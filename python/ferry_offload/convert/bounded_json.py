"""JSON that others wrote, within bounds. json.loads() ends the process's stack or memory on what is nested deep or holds
many small values, keeps the last of two equal keys without a word, and takes texts that no file's name can hold."""

from __future__ import annotations

import json
import re
from json.decoder import JSONDecodeError, scanstring
from typing import Any

from ..text import in_quotes, shown

DEPTH = 64
MOST_VALUES = 1_000_000
MOST_VALUES_OF_TENSORS = 4_000_000  # of a header or an index: half a million tensors
_MARK = re.compile(r'["\[\]{},:]')
_NO_CHARACTER = re.compile("[\x00\ud800-\udfff]")


class JsonFault(Exception):
    """What of the text, of no `what`: it is no JSON. `index` is a byte's."""

    def __init__(self, what: str, measured: str, limit: str, index: int) -> None:
        super().__init__(what or measured)
        self.what, self.measured, self.limit, self.index = what, measured, limit, index


def parse(text: bytes, most_values: int = MOST_VALUES) -> Any:
    """Throws JsonFault."""
    if not text:
        raise JsonFault("", "it is empty", "", 0)
    if (nul := text.find(0)) >= 0:
        raise JsonFault("", "a NUL byte", "text in UTF-8", nul)
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        byte = shown(text[error.start:error.start + 1].decode(errors="surrogateescape"))
        raise JsonFault("", f"no UTF-8: the byte {byte}", "text in UTF-8", error.start) from error
    decoded = decoded.removeprefix("\ufeff")
    mark = len(text) - len(decoded.encode()) if text[:1] == b"\xef" else 0
    try:
        _require_bounds(decoded, most_values)
        return json.loads(decoded)
    except JSONDecodeError as error:
        raise JsonFault("", error.msg, "", mark + _bytes_before(decoded, error.pos)) from error
    except JsonFault as fault:
        fault.index = mark + _bytes_before(decoded, fault.index)
        raise
    except ValueError as error:  # a number of thousands of digits
        raise JsonFault("", str(error), "", 0) from error


def place_of(text: bytes, index: int) -> str:
    before = text[:index]
    return f"line {before.count(10) + 1}, column {index - before.rfind(10)}"


def _bytes_before(text: str, index: int) -> int:
    return index if text.isascii() else len(text[:index].encode())


def _require_bounds(text: str, most_values: int) -> None:
    """Goes over brackets, commas and strings alone. Where the text is no JSON json.loads() finds that out, no later."""
    open_: list[tuple[str, set[str]]] = []  # brackets, and the keys of each
    values, at, before, last = 1, 0, "", ""
    while found := _MARK.search(text, at):
        mark, index, at = found[0], found.start(), found.end()
        if mark == '"':
            try:
                last, at = scanstring(text, at, True)
            except JSONDecodeError:
                return
            if _NO_CHARACTER.search(last):
                _refuse_text(last, index)
        elif mark in "[{":
            if len(open_) == DEPTH:
                raise JsonFault("JSON nested too deep", "", f"{DEPTH} levels", index)
            open_.append((mark, set()))
        elif not open_:
            return
        elif mark == ":":
            if before == '"' and last in open_[-1][1]:
                raise JsonFault(f"the key {in_quotes(last)} is given twice", "", "", index)
            open_[-1][1].add(last)
        elif mark == ",":
            values += 1
        else:
            is_empty = before in ("[", "{") and not text[opened:index].strip()
            values += 0 if is_empty else 1
            open_.pop()
        if values > most_values:
            raise JsonFault("JSON of too many values", "", f"{most_values} values", index)
        before, opened = mark, at


def _refuse_text(text: str, index: int) -> None:
    if "\0" in text:
        raise JsonFault("a text holds a NUL character, where the system would cut it", in_quotes(text), "", index)
    raise JsonFault("a text holds half of a character", in_quotes(text), "text in UTF-8", index)

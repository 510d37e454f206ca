"""An error keeps the frames that it came through, and they keep their variables: arrays of ferry's memory among them, which
could not be closed as long as somebody holds on to the error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def let_go(error: BaseException | None) -> None:
    """Frames that have ended forget their variables: of this error, and of those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def holding_nothing(job: Callable[[], T]) -> T:
    """What `job` raises holds on to none of its variables, nor to those of what it called."""
    try:
        return job()
    except BaseException as error:
        let_go(error)
        raise

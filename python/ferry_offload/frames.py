"""An error keeps the frames that it came through, and they keep their variables: arrays of ferry's memory among them, which
could not be closed as long as somebody holds on to the error."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def let_go(error: BaseException | None, until: BaseException | None = None) -> None:
    """Frames that have ended forget their variables: of this error, and of those that it came from. Not those of
    `until`, nor what that came from: an error that the program was already handling."""
    seen: set[int] = set()
    while error is not None and error is not until and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def holding_nothing(job: Callable[[], T]) -> T:
    """What `job` raises holds on to none of its variables, nor to those of what it called."""
    handled = sys.exc_info()[1]
    try:
        return job()
    except BaseException as error:
        let_go(error, handled)
        raise

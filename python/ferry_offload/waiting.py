"""How asyncio waits for a transfer: it looks, less and less often, and the event loop does other things."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._core import Transfer

_SHORTEST, _LONGEST = 50e-6, 1e-3  # seconds


async def _until_done(transfer: Transfer) -> int:
    pause = _SHORTEST
    while not transfer.done():
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return transfer.result()


def of(transfer: Transfer) -> Generator[Any, None, int]:
    return _until_done(transfer).__await__()

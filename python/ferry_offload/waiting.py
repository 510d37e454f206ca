"""How asyncio waits for transfers: an event loop's are looked at together, and the loop does other things between two looks."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._core import Transfer

# Seconds. The loop's own timers have the grain of epoll, a millisecond, in which a drive reads megabytes: as long as
# transfers end, the loop is held for a moment instead, and goes round.
_MOMENT, _EAGER, _SELDOM = 20e-6, 10e-3, 1e-3


class _Looks:
    """Of one event loop, at all that is awaited in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._awaited: list[tuple[Transfer, asyncio.Future[None]]] = []
        self._ended = 0.0  # when one did, last

    def at(self, transfer: Transfer) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._awaited.append((transfer, future))
        if len(self._awaited) == 1:
            self._ended = time.perf_counter()
            loop.call_soon(self._look)
        return future

    def _look(self) -> None:
        awaited, self._awaited = self._awaited, []
        for transfer, future in awaited:
            if future.done():
                continue  # nobody waits any more
            try:
                if transfer.done():
                    future.set_result(None)
                else:
                    self._awaited.append((transfer, future))
            except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
                future.set_exception(error)
        loop = self._loop()
        if not self._awaited or loop is None:
            return
        now = time.perf_counter()
        if len(self._awaited) < len(awaited):
            self._ended = now
        elif now - self._ended < _EAGER:
            time.sleep(_MOMENT)
        else:
            loop.call_later(_SELDOM, self._look)
            return
        loop.call_soon(self._look)


_looks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Looks] = weakref.WeakKeyDictionary()


async def _until_done(transfer: Transfer) -> int:
    if not transfer.done():
        loop = asyncio.get_running_loop()
        if loop not in _looks:
            _looks[loop] = _Looks(loop)
        await _looks[loop].at(transfer)
    return transfer.result()


def of(transfer: Transfer) -> Generator[Any, None, int]:
    return _until_done(transfer).__await__()

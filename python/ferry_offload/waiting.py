"""How asyncio waits for transfers: their handle's descriptor wakes the event loop, which then looks at all that have ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._core import Transfer

Future = asyncio.Future[None]


class _Reader:
    """Of one event loop, at one handle whose transfers are awaited there."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transfer: Transfer) -> None:
        self.awaited: set[Future] = set()
        self._transfer = transfer
        # Its own: the handle's may be closed, and its number another's, before the loop lets go of it.
        self._descriptor = os.dup(transfer._fileno())
        try:
            loop.add_reader(self._descriptor, self._look)
        except BaseException:  # a loop that has none, or is closed
            os.close(self._descriptor)
            raise

    def _look(self) -> None:
        try:
            self._transfer._collect()
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            for future in list(self.awaited):
                if not future.done():
                    future.set_exception(error)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.remove_reader(self._descriptor)
        os.close(self._descriptor)


_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Reader]] = weakref.WeakKeyDictionary()


def resolve(futures: list[Future]) -> None:
    """Their transfers have ended. On any thread."""
    here = asyncio._get_running_loop()
    others: dict[asyncio.AbstractEventLoop, list[Future]] = {}
    for future in futures:
        loop = future.get_loop()
        if loop is not here:
            others.setdefault(loop, []).append(future)
        elif not future.done():  # or nobody waits any more
            future.set_result(None)
    for loop, its in others.items():
        with contextlib.suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(resolve, its)


def of(transfer: Transfer) -> Generator[Any, None, int]:
    """What `await transfer` walks: a generator, and not a coroutine of its own, of which a small read would feel the cost."""
    loop, number = asyncio.get_running_loop(), transfer._of
    future = loop.create_future()
    if not transfer._tell(future):  # it has ended, and its handle may be closed
        return transfer.result()
    readers = _readers.setdefault(loop, {})
    try:
        if number not in readers:
            readers[number] = _Reader(loop, transfer)
        readers[number].awaited.add(future)
        yield from future.__await__()
    except BaseException:
        transfer._forget(future)
        raise
    finally:
        if reader := readers.get(number):
            reader.awaited.discard(future)
            if not reader.awaited:
                del readers[number]
                reader.close(loop)
    return transfer.result()

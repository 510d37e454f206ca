"""The thread that updates: jobs in their order, and between them versions ahead of step()."""

from __future__ import annotations

import collections
import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import error_of, message
from ..frames import let_go


class Ahead(Protocol):
    """An update that nobody waits for yet."""

    job: concurrent.futures.Future[Any]

    def has_arrived(self) -> bool: ...
    def wait(self) -> None: ...
    def make(self) -> None: ...


class Worker:
    """Of what may be made ahead the newest that has arrived comes first: what is left over at step() is then what
    the next forward needs late, and the newest gradient is still in the cache."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ferry-optim")
        self._jobs: collections.deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = collections.deque()
        self._ahead: list[Ahead] = []
        self._lock = threading.Lock()
        self._process = os.getpid()

    def check_process(self) -> None:
        """A child of fork() has no such thread."""
        if os.getpid() != self._process:
            raise error_of(7, "closed", message("an optimizer does not outlive fork()", f"process {os.getpid()}", "",
                                                f"process {self._process}, which made it", "make another one in the child"))

    def submit(self, job: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Before all that is made ahead, and after jobs that were there."""
        self.check_process()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            self._jobs.append((future, job))
        self._thread.submit(self._run_one)
        return future

    def make_ahead(self, version: Ahead) -> None:
        version.job = concurrent.futures.Future()
        with self._lock:
            self._ahead.append(version)
        self._thread.submit(self._run_one)

    def take_back(self, version: Ahead) -> bool:
        """True: it will not be made. False: it is made, or is being made."""
        with self._lock:
            if version not in self._ahead:
                return False
            self._ahead.remove(version)
            return True

    def _run_one(self) -> None:
        while True:
            with self._lock:
                if self._jobs:
                    future, job = self._jobs.popleft()
                    break
                if not self._ahead:
                    return  # it was taken back
                # Gradients arrive in the order in which they left.
                arrived = 0
                while arrived < len(self._ahead) and self._ahead[arrived].has_arrived():
                    arrived += 1
                if arrived > 0:
                    version = self._ahead.pop(arrived - 1)
                    future, job = version.job, version.make
                    break
                oldest = self._ahead[0]
            oldest.wait()
        try:
            future.set_result(job())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
            let_go(error)  # it may live longer than the memory that its frames have arrays of
            future.set_exception(error)
            del error

    def shutdown(self, wait: bool = True) -> None:
        self._thread.shutdown(wait=wait)

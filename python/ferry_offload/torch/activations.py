"""What autograd saves for backward leaves for host memory, and for NVMe where there is more of it."""

from __future__ import annotations

import collections
import dataclasses
import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._core import Files, Pool
from ..errors import error_of, message, usage
from ..sizes import to_bytes
from ._options import directories

_PAGE = 4096


class _Extents:
    """Free runs of [0, size), first fit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size > 0 else []  # begin, end, in order

    def take(self, size: int) -> int | None:
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                if end - begin == size:
                    del self._free[i]
                else:
                    self._free[i] = begin + size, end
                return begin
        return None

    def give(self, begin: int, size: int) -> None:
        end, runs = begin + size, []
        for run in self._free:
            if run[1] == begin:
                begin = run[0]
            elif run[0] == end:
                end = run[1]
            else:
                runs.append(run)
        runs.append((begin, end))
        self._free = sorted(runs)


@dataclasses.dataclass
class ActivationStats:
    """Bytes, of all tensors saved so far; `host_peak` is the most in host memory at once."""

    to_host: int = 0
    to_nvme: int = 0
    kept: int = 0  # too small, parameters, or without room
    shared: int = 0  # saved again by another operation
    waits: int = 0  # reads that backward had to wait for
    host_peak: int = 0


class _Saved:
    """A tensor that has left. Its place is given back when the graph forgets it."""

    def __init__(self, owner: offload_activations, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
        self.bytes = -(-tensor.nbytes // _PAGE) * _PAGE
        self.count = tensor.nbytes
        self.at: int | None = None  # in host memory
        self.file: tuple[int, int] | None = None  # which one, and where it lies there
        self.copied: Any = None  # event: the copy to the host has ended
        self.writing: Any = None
        self.reading: Any = None
        self.loaded: torch.Tensor | None = None
        self.arrived: Any = None
        self.last: Any = lambda: None  # a weak reference to what unpack made
        self.index = 0
        weakref.finalize(self, owner._forget, self.__dict__).atexit = False


class offload_activations:  # noqa: N801 - a context, as torch's save_on_cpu
    """In this context what autograd saves of a GPU's tensors goes to pinned host memory of at most `budget` bytes,
    and what has no room there to files in `nvme`, if that names directories. Backward, in the context or after it, finds it
    brought back ahead of its use. Saved values are the same bits. Tensors on the CPU go to NVMe only.

        offload = offload_activations("8GiB", nvme=["/mnt/nvme"])
        with offload:
            loss = model(x).sum()
        loss.backward()

    min_bytes   smaller tensors stay
    nvme_bytes  of files, at most, over all directories; they have no name, and end with the object
    ahead       so many tensors are brought back before backward asks for them
    """

    def __init__(self, budget: int | str, nvme: Sequence[Any] = (), *, min_bytes: int | str = "64KiB",
                 nvme_bytes: int | str = "1TiB", ahead: int = 2) -> None:
        self.stats = ActivationStats()
        self._least, self._ahead = to_bytes(min_bytes), max(1, ahead)
        size = to_bytes(budget) // _PAGE * _PAGE
        if size <= 0:
            raise usage("the budget is too small", measured=budget, limit="4096 bytes or more")
        self._host = _Extents(size)
        self._slab = torch.frombuffer(Pool(size).reserve(size, "activations"), dtype=torch.uint8)
        self._registered = torch.cuda.is_available()
        if self._registered and int(torch.cuda.cudart().cudaHostRegister(self._slab.data_ptr(), size, 0)) != 0:
            raise error_of(3, "does not fit", message("memory for activations cannot be page-locked", "", f"{size} bytes", "",
                                                      "give a smaller budget"))
        nvme = directories(nvme)
        self._files = Files() if nvme else None
        self._open: list[tuple[int, _Extents]] = []
        for directory in nvme:
            descriptor, name = tempfile.mkstemp(prefix="ferry-activations-", dir=os.fspath(directory))
            os.unlink(name)
            assert self._files is not None
            self._open.append((self._files.open(descriptor, "write"), _Extents(to_bytes(nvme_bytes) // len(nvme) // _PAGE * _PAGE)))
            os.close(descriptor)
        self._order: list[Any] = []  # weak references to what left, as it left
        self._known: dict[Any, tuple[StorageWeakRef, Any]] = {}
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._ending: collections.deque[dict[str, Any]] = collections.deque()  # forgotten, by any thread
        self._lock = threading.RLock()  # backward has a thread a device
        self._hooks: list[Any] = []
        self._used, self._turn = 0, 0
        self._closes = weakref.finalize(self, _close, self._files, self._slab, self._registered)

    # ---- the context

    def __enter__(self) -> offload_activations:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.pop().__exit__(*error)
        self._known.clear()

    def close(self) -> None:
        """Gives back memory and files. What was saved must not be needed any more."""
        self._free_forgotten(all_of_them=True)
        self._closes()

    # ---- leaving

    def _pack(self, tensor: torch.Tensor) -> Any:
        with self._lock:
            saved = self._leave(tensor) if self._leaves(tensor) else None
            if saved is None:
                self.stats.kept += tensor.nbytes
                return tensor
            return saved

    def _leave(self, tensor: torch.Tensor) -> _Saved | None:
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        alive, saved = self._known.get(key, (None, None))
        same = saved() if saved is not None and alive is not None and not alive.expired() else None
        if same is not None:
            self.stats.shared += tensor.nbytes
            return same
        made = self._send(tensor.detach())
        if made is None:
            return None
        self._known[key] = StorageWeakRef(storage), weakref.ref(made)
        made.index = len(self._order)
        self._order.append(weakref.ref(made))
        return made

    def _leaves(self, tensor: torch.Tensor) -> bool:
        """Not parameters and views of them, which are there anyway, nor tensors that are larger than their memory."""
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        owner = tensor if tensor._base is None else tensor._base
        if not plain or tensor.nbytes < self._least or owner.is_leaf and owner.requires_grad:
            return False
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            return False
        return tensor.device.type == "cuda" or tensor.device.type == "cpu" and bool(self._open)

    def _send(self, tensor: torch.Tensor) -> _Saved | None:
        self._free_forgotten()
        saved = _Saved(self, tensor)
        flat = _flat(tensor if _is_dense(tensor) else tensor.contiguous())
        at = self._host.take(saved.bytes)
        if at is None and self._make_room(saved.bytes):
            at = self._host.take(saved.bytes)
        if at is None:
            return None
        saved.at = at
        self._note(saved.bytes)
        home = self._slab[at:at + saved.count]
        if tensor.device.type == "cuda":
            out, _ = self._streams_of(tensor.device)
            out.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(out):
                home.copy_(flat, non_blocking=True)
            flat.record_stream(out)
            saved.copied = out.record_event()
            self.stats.to_host += saved.count
            if self._open and self._used > self._host.size // 2:
                self._write_oldest()
        else:
            home.copy_(flat)
            self._write(saved)
        return saved

    def _note(self, bytes: int) -> None:
        self._used += bytes
        self.stats.host_peak = max(self.stats.host_peak, self._used)

    # ---- NVMe

    def _write(self, saved: _Saved) -> bool:
        """Begins to; its host memory is free when that has ended."""
        if saved.copied is not None:
            saved.copied.synchronize()
        assert self._files is not None and saved.at is not None
        for _ in self._open:
            self._turn = (self._turn + 1) % len(self._open)  # over the directories
            file, extents = self._open[self._turn]
            place = extents.take(saved.bytes)
            if place is None:
                continue
            saved.file = self._turn, place
            saved.writing = self._files.submit_write(file, self._slab[saved.at:saved.at + saved.bytes], place)
            self.stats.to_nvme += saved.count
            return True
        return False

    def _write_oldest(self) -> None:
        """What left first is needed last."""
        for reference in self._order:
            saved = reference()
            if saved is not None and saved.file is None and saved.at is not None and (saved.copied is None or saved.copied.query()):
                self._write(saved)
                return

    def _make_room(self, bytes: int) -> bool:
        """Waits for writes to NVMe that free host memory, and begins more of them. What left first is needed last."""
        if not self._open:
            return False
        self._free_forgotten(all_of_them=True)
        for reference in [None, *self._order]:
            saved = reference() if reference is not None else None
            if saved is not None and saved.at is not None:
                if saved.file is None and not self._write(saved):
                    return False
                self._leave_host(saved)
            at = self._host.take(bytes)
            if at is not None:
                self._host.give(at, bytes)
                return True
        return False

    def _leave_host(self, saved: _Saved) -> None:
        for transfer in (saved.writing, saved.reading):
            if transfer is not None:
                transfer.wait()
        saved.writing = saved.reading = None
        if saved.loaded is not None and saved.arrived is not None:
            saved.arrived.synchronize()
        assert saved.at is not None
        self._host.give(saved.at, saved.bytes)
        self._used -= saved.bytes
        saved.at = None

    # ---- coming back

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved
        with self._lock:
            again = saved.last()
            if again is None:
                again = self._bring(saved)
            self._look_ahead(saved.index)
            return again

    def _bring(self, saved: _Saved) -> torch.Tensor:
        if saved.loaded is None:
            self.stats.waits += saved.at is None or saved.reading is not None and not saved.reading.done()
            self._begin_to_load(saved, must=True)
        if saved.device.type == "cuda":
            torch.cuda.current_stream(saved.device).wait_event(saved.arrived)
        tensor = saved.loaded
        assert tensor is not None
        if saved.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(saved.device))
        saved.loaded = None
        saved.last = weakref.ref(tensor)
        return tensor

    def _look_ahead(self, index: int) -> None:
        wanted = self._ahead
        while wanted > 0 and index > 0:
            index -= 1
            saved = self._order[index]() if index < len(self._order) else None
            if saved is None:
                continue
            wanted -= 1
            if saved.loaded is None and saved.last() is None:
                self._begin_to_load(saved, must=False)
        while self._order and self._order[-1]() is None:
            self._order.pop()

    def _begin_to_load(self, saved: _Saved, must: bool) -> None:
        if not self._read_from_file(saved, must):
            return
        assert saved.at is not None
        tensor = torch.empty_strided(saved.shape, saved.stride, dtype=saved.dtype, device=saved.device)
        into, home = _flat(tensor), self._slab[saved.at:saved.at + saved.count]
        if saved.device.type == "cuda":
            _, back = self._streams_of(saved.device)
            back.wait_stream(torch.cuda.current_stream(saved.device))
            if saved.copied is not None:
                back.wait_event(saved.copied)
            with torch.cuda.stream(back):
                into.copy_(home, non_blocking=True)
            tensor.record_stream(back)
            saved.arrived = back.record_event()
        else:
            into.copy_(home)
        saved.loaded = tensor

    def _read_from_file(self, saved: _Saved, must: bool) -> bool:
        """False: it is not in host memory yet."""
        if saved.at is None:
            at = self._host.take(saved.bytes)
            if at is None and must and self._make_room(saved.bytes):
                at = self._host.take(saved.bytes)
            if at is None:
                if must:
                    raise error_of(3, "does not fit", message(
                        "host memory has no room to bring an activation back", "", f"{saved.bytes} bytes",
                        f"{self._host.size} bytes of budget", "give more, or a smaller `ahead`"))
                return False
            saved.at = at
            self._note(saved.bytes)
            assert self._files is not None and saved.file is not None
            number, place = saved.file
            saved.reading = self._files.submit_read(self._open[number][0], self._slab[at:at + saved.bytes], place)
        if saved.reading is not None:
            if not must and not saved.reading.done():
                return False
            saved.reading.wait()
            saved.reading = None
        return True

    # ---- the end of what was saved

    def _forget(self, saved: dict[str, Any]) -> None:
        self._ending.append(saved)

    def _free_forgotten(self, all_of_them: bool = False) -> None:
        """Gives back the places of what the graph has forgotten, once no transfer uses them."""
        for _ in range(len(self._ending)):
            saved = self._ending.popleft()
            busy = [one for one in (saved["writing"], saved["reading"]) if one is not None]
            events = [one for one in (saved["copied"], saved["arrived"]) if one is not None]
            if all_of_them:
                for one in busy:
                    one.wait()
                for one in events:
                    one.synchronize()
            elif not all(one.done() for one in busy) or not all(one.query() for one in events):
                self._ending.append(saved)
                continue
            if saved["at"] is not None:
                self._host.give(saved["at"], saved["bytes"])
                self._used -= saved["bytes"]
            if saved["file"] is not None:
                number, place = saved["file"]
                self._open[number][1].give(place, saved["bytes"])

    def _streams_of(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of one that is dense, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _close(files: Files | None, slab: torch.Tensor, registered: bool) -> None:
    if files is not None:
        files.close()
    if registered:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())

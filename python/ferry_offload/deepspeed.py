"""ferry in place of DeepSpeed's native operators: a script keeps its configuration, and says before
`deepspeed.initialize()`

    import ferry_offload.deepspeed
    ferry_offload.deepspeed.install()

`aio_handle` and what is beside it are async_io's call surface, `create_adam` and its like that of the CPU Adam, and
`pin_handle` that of pinned memory. What DeepSpeed's operators print and answer with -1, or end the process for, are
exceptions here."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from ._core import Files, Hyper, Pool, Team, Transfer, update
from .errors import error_of, message, usage

_ALIGNMENT = 4096
_ELEMENTS = 4 << 20  # of arrays that are widened for an update, at a time
_QUEUE_MAX = 4096


# ---------------------------------------------------------------- pinned memory

class pin_handle:  # noqa: N801 - DeepSpeed's name
    """Page-locked tensors, on huge pages where there are any. All handles know those of the others."""

    _tensors: dict[int, tuple[torch.Tensor, bool]] = {}  # by address; whether CUDA knows it

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Zeroed, of the example's type."""
        dtype = example_tensor.dtype
        if num_elem == 0:
            return torch.empty(0, dtype=dtype)
        bytes = -(-num_elem * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        tensor = torch.frombuffer(Pool(bytes).reserve(bytes, "a locked tensor"), dtype=dtype, count=num_elem)
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), bytes, 0))
            if failed != 0:
                raise error_of(3, "does not fit", message("memory cannot be page-locked", "cudaHostRegister",
                                                          f"{bytes} bytes, error {failed}", "", "free some memory"))
        self._tensors[tensor.data_ptr()] = tensor, on_gpu
        return tensor

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """False: it is none of these. Its memory goes with the last tensor that uses it."""
        return self.free_cpu_locked_tensor_by_ptr(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        tensor, on_gpu = self._tensors.pop(address, (None, False))
        if tensor is not None and on_gpu:
            torch.cuda.cudart().cudaHostUnregister(address)
        return tensor is not None

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        at = buffer.data_ptr()
        mine = any(address <= at < address + tensor.nbytes for address, (tensor, _) in self._tensors.items())
        return mine or (buffer.device.type == "cpu" and buffer.is_pinned())


# ---------------------------------------------------------------- files

class _Operation:
    """A transfer with the file that it needs open and the tensor that it is for."""

    def __init__(self, files: Files, buffer: torch.Tensor, file: Any, offset: int, reads: bool, validate: bool) -> None:
        self._files, self._buffer, self._name, self._offset, self._reads = files, buffer, file, offset, reads
        self._validate = validate
        direct = buffer.device.type == "cpu" and buffer.is_contiguous()
        data = buffer.detach() if direct else torch.empty(buffer.shape, dtype=buffer.dtype)
        if not direct and not reads:
            data.copy_(buffer)
        self._data = data
        self._bytes = data.reshape(-1).view(torch.uint8) if data.dim() else data.reshape(1).view(torch.uint8)
        self._file: int | None = None
        self._transfer: Transfer | None = None
        if self._bytes.numel() == 0:
            return
        self._file = files.open(file, "read" if reads else "write")
        try:
            begin = files.submit_read if reads else files.submit_write
            self._transfer = begin(self._file, self._bytes, offset)
        except BaseException:
            files.close_file(self._file)
            raise

    def finish(self) -> None:
        if self._transfer is None or self._file is None:
            return
        try:
            self._transfer.wait()
            if self._validate:
                self._compare()
        finally:
            self._files.close_file(self._file)
        if self._reads and self._data.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(self._data)

    def _compare(self) -> None:
        """Once more, through the page cache."""
        again = torch.empty_like(self._bytes)
        with open(os.dup(self._name) if isinstance(self._name, int) else self._name, "rb") as file:
            file.seek(self._offset)
            count = file.readinto(memoryview(again.numpy()))
        if count != again.numel() or not torch.equal(again, self._bytes):
            raise error_of(4, "io", message("bytes are not what was moved", str(self._name),
                                            f"{count} bytes from {self._offset} on", "the same ones",
                                            "see the kernel's log (dmesg) and the drive's health (smartctl)"))


class aio_handle:  # noqa: N801 - DeepSpeed's name
    """Reads and writes tensors from and to files. Any size, offset and memory will do; tensors of
    new_cpu_locked_tensor() at offsets that are multiples of get_alignment() go around the page cache."""

    def __init__(self, block_size: int = 1024 * 1024, queue_depth: int = 128, single_submit: bool = False,
                 overlap_events: bool = False, intra_op_parallelism: int = 1) -> None:
        for name, value in (("block_size", block_size), ("queue_depth", queue_depth),
                            ("intra_op_parallelism", intra_op_parallelism)):
            if value < 1:
                raise usage(f"{name} is too small", measured=value, limit="1 or more")
        self._block_size, self._queue_depth, self._parallelism = block_size, queue_depth, intra_op_parallelism
        self._single_submit, self._overlap_events = single_submit, overlap_events
        self._pinned = pin_handle()
        self._pending: list[_Operation] = []
        # One ring has what so many threads would have under way each.
        self._files = Files(block=max(_ALIGNMENT, block_size), operations_max=_QUEUE_MAX, files_max=_QUEUE_MAX,
                            queue_depth=min(_QUEUE_MAX, queue_depth * intra_op_parallelism))

    def get_block_size(self) -> int:
        return self._block_size

    def get_queue_depth(self) -> int:
        return self._queue_depth

    def get_single_submit(self) -> bool:
        return self._single_submit

    def get_overlap_events(self) -> bool:
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._parallelism

    def get_alignment(self) -> int:
        """Of offsets that go around the page cache. DeepSpeed's own needs it, of 512 bytes a thread."""
        return _ALIGNMENT

    # ---- at once

    def read(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """All of the file from there on. 0."""
        size = os.stat(filename).st_size - file_offset
        if size != buffer.nbytes:
            raise usage("the buffer is not as large as the file", where=str(filename), measured=f"{buffer.nbytes} bytes",
                        limit=f"{size} bytes from {file_offset} on", remedy="pread reads a part of a file")
        _Operation(self._files, buffer, filename, file_offset, True, validate).finish()
        return 0

    def write(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        _Operation(self._files, buffer, filename, file_offset, False, validate).finish()
        return 0

    # ---- together

    def _begin(self, buffer: torch.Tensor, file: Any, offset: int, reads: bool, validate: bool = False) -> int:
        if len(self._pending) == _QUEUE_MAX:
            raise usage("too many operations are under way", measured=len(self._pending), limit=_QUEUE_MAX,
                        remedy="wait() for them")
        self._pending.append(_Operation(self._files, buffer, file, offset, reads, validate))
        return 0

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, *later: bool, file_offset: int | None = None,
              **named: Any) -> int:
        """pread(buffer, filename, validate, async, file_offset=0)."""
        return self._begin_or_wait(buffer, filename, validate, True, later, file_offset, named)

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, *later: bool, file_offset: int | None = None,
               **named: Any) -> int:
        """pwrite(buffer, filename, validate, async, file_offset=0)."""
        return self._begin_or_wait(buffer, filename, validate, False, later, file_offset, named)

    def _begin_or_wait(self, buffer: torch.Tensor, filename: str, validate: bool, reads: bool, later: tuple[Any, ...],
                       file_offset: int | None, named: dict[str, Any]) -> int:
        """`async` is a word of Python's: it comes by its place, or in **named."""
        given = dict(zip(("async", "file_offset"), later)) | named
        if file_offset is not None:
            given["file_offset"] = file_offset
        if not {"async"} <= given.keys() <= {"async", "file_offset"} or len(later) > 2:
            raise TypeError(f"{'pread' if reads else 'pwrite'}(buffer, filename, validate, async, file_offset=0)")
        self._begin(buffer, filename, given.get("file_offset", 0), reads, validate)
        return 0 if given["async"] else self.wait()

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        self._begin(buffer, filename, file_offset, True)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        self._begin(buffer, filename, file_offset, False)
        return self.wait()

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self._begin(buffer, filename, file_offset, True)

    def async_pwrite(self, buffer: torch.Tensor, filename: Any = None, file_offset: int = 0, *, fd: int | None = None) -> int:
        """Also into a file that is open: its descriptor in place of the name."""
        return self._begin(buffer, filename if fd is None else fd, file_offset, False)

    def wait(self) -> int:
        """How many operations have ended since the last wait(): all that were under way. Raises the first error,
        when all have ended."""
        pending, self._pending = self._pending, []
        failed: BaseException | None = None
        for operation in pending:
            try:
                operation.finish()
            except Exception as error:  # noqa: BLE001 - raised below
                failed = failed or error
        if failed is not None:
            raise failed
        return len(pending)

    # ---- pinned memory

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor | None = None, *,
                              example_tenosr: torch.Tensor | None = None) -> torch.Tensor:
        """By either name: DeepSpeed spells it the second way."""
        example = example_tenosr if example_tensor is None else example_tensor
        if example is None:
            raise TypeError("new_cpu_locked_tensor(num_elem, example_tensor)")
        return self._pinned.new_cpu_locked_tensor(num_elem, example)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        return self._pinned.free_cpu_locked_tensor(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return self._pinned.is_pinned(buffer)


def aio_read(buffer: torch.Tensor, filename: str, block_size: int, queue_depth: int, single_submit: bool,
             overlap_events: bool, validate: bool) -> int:
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(buffer: torch.Tensor, filename: str, block_size: int, queue_depth: int, single_submit: bool,
              overlap_events: bool, validate: bool) -> int:
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    dest.copy_(src)
    return 0


# ---------------------------------------------------------------- Adam on the CPU

_adams: dict[int, bool] = {}  # whether it is AdamW
_team: list[Team] = []


def _threads() -> Team:
    if not _team:
        _team.append(Team(torch.get_num_threads()))
    return _team[0]


def create_adam(optimizer_id: int, alpha: float = 1e-3, betta1: float = 0.9, betta2: float = 0.999, eps: float = 1e-8,
                weight_decay: float = 0.0, adamw_mode: bool = True, should_log: bool = False) -> int:
    """Constants come with every update; only the mode is kept."""
    _adams[optimizer_id] = adamw_mode
    if should_log:
        print(f"Adam optimizer {optimizer_id} is ferry's: lr {alpha}, betas ({betta1}, {betta2}), eps {eps}, weight decay "
              f"{weight_decay}, {'AdamW' if adamw_mode else 'Adam'}")
    return 0


def destroy_adam(optimizer_id: int) -> int:
    _adams.pop(optimizer_id, None)
    return 0


def _adamw_of(optimizer_id: int) -> bool:
    if optimizer_id not in _adams:
        raise usage("there is no such Adam optimizer", measured=optimizer_id, limit=f"those created: {sorted(_adams)}")
    return _adams[optimizer_id]


def _runs(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """The same elements of all, flat, so many at a time; whole where nothing is to be widened."""
    count = tensors[0].numel()
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.numel() != count:
            raise usage("tensors of an update are not alike", measured=f"{tuple(tensor.shape)} on {tensor.device}",
                        limit=f"{count} elements on the CPU")
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        return [tuple(flat)]
    return list(zip(*(tensor.split(_ELEMENTS) for tensor in flat)))


def _apply(change: Callable[..., None], tensors: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
    """change(gradient, fp32...) of tensors that it writes, which may have 16 bits or gaps."""
    contiguous = tuple(tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors)
    for part, *values in _runs(gradient.contiguous(), *contiguous):
        wide = [value.float() for value in values]  # the tensor itself where it is fp32
        change(part, *wide)
        for value, new in zip(values, wide):
            if value.data_ptr() != new.data_ptr():
                value.copy_(new)
    for tensor, same in zip(tensors, contiguous):
        if tensor is not same:
            tensor.copy_(same)


@torch.no_grad()
def adam_update(optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, epsilon: float, weight_decay: float,
                bias_correction: bool, params: torch.Tensor, grads: torch.Tensor, exp_avg: torch.Tensor,
                exp_avg_sq: torch.Tensor) -> int:
    """In fp32 whatever the types are. 0."""
    method = "adamw" if _adamw_of(optimizer_id) else "adam"
    hyper = Hyper(method, lr=lr, beta1=beta1, beta2=beta2, eps=epsilon, weight_decay=weight_decay)
    # Both corrections are 1 from some step on: that one has none.
    counted = step if bias_correction else 1 << 40

    def change(gradient: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        update(hyper, counted, gradient, p, m, v, team=_threads())

    _apply(change, (params, exp_avg, exp_avg_sq), grads)
    return 0


@torch.no_grad()
def adam_rollback(optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, epsilon: float, weight_decay: float,
                  bias_correction: bool, params: torch.Tensor, grads: torch.Tensor, exp_avg: torch.Tensor,
                  exp_avg_sq: torch.Tensor) -> int:
    """Undoes that AdamW step, within rounding: the bits before are gone. 0."""
    if not _adamw_of(optimizer_id):
        raise usage("a step of Adam cannot be rolled back", measured="adamw_mode=False", limit="AdamW")
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0

    def change(gradient: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        g = gradient.float()
        p.addcdiv_(m, (v / correction2).sqrt_().add_(epsilon), value=lr / correction1).div_(1 - lr * weight_decay)
        m.sub_(g, alpha=1 - beta1).div_(beta1)
        v.sub_(g * g, alpha=1 - beta2).div_(beta2).clamp_(min=0)

    if any(not math.isfinite(value) or value <= 0 for value in (correction1, correction2, beta1, beta2)):
        raise usage("a step cannot be rolled back", measured=f"step {step}, betas ({beta1}, {beta2})", limit="steps from 1, betas above 0")
    _apply(change, (params, exp_avg, exp_avg_sq), grads)
    return 0


# ---------------------------------------------------------------- in place of DeepSpeed's

class _Operators(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(message(f"ferry has no {name} in place of DeepSpeed's", self.__name__, "", "",
                                     "use what needs it (ZenFlow) without ferry: uninstall() before it is loaded"))


def _module(name: str, *names: str) -> types.ModuleType:
    module = _Operators(f"ferry_offload.deepspeed.{name}", f"ferry in place of DeepSpeed's {name}")
    for one in names:
        setattr(module, one, globals()[one])
    return module


_OPERATORS = {
    "AsyncIOBuilder": _module("async_io", "aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"),
    "CPUAdamBuilder": _module("cpu_adam", "create_adam", "adam_update", "adam_rollback", "destroy_adam"),
    "PinMemoryBuilder": _module("pin_memory", "pin_handle"),
}
_replaced: list[tuple[type, dict[str, Any]]] = []


def install() -> list[str]:
    """From now on load() of DeepSpeed's builders gives ferry's operators: nothing is compiled, and libaio is not needed.
    The names of what was replaced. Operators that were loaded before stay."""
    from deepspeed.ops import op_builder
    done = []
    for name, module in _OPERATORS.items():
        builder = getattr(op_builder, name, None)
        if not isinstance(builder, type):
            continue  # of an older DeepSpeed
        done.append(name)
        if any(builder is one for one, _ in _replaced):
            continue
        before = {key: vars(builder).get(key) for key in ("load", "is_compatible")}
        _replaced.append((builder, before))
        _replace(builder, module)
    return done


def _replace(builder: Any, module: types.ModuleType) -> None:
    """Of this class alone: others may be derived from it."""
    load, is_compatible = builder.load, builder.is_compatible

    def ours(self: Any, *args: Any, **options: Any) -> Any:
        return module if type(self) is builder else load(self, *args, **options)

    def yes(self: Any, *args: Any, **options: Any) -> bool:
        return True if type(self) is builder else is_compatible(self, *args, **options)

    builder.load, builder.is_compatible = ours, yes


def uninstall() -> None:
    """DeepSpeed's own again, for what is loaded from now on."""
    while _replaced:
        builder, before = _replaced.pop()
        for name, value in before.items():
            if value is None:
                delattr(builder, name)
            else:
                setattr(builder, name, value)

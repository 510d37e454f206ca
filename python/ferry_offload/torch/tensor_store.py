"""Weights of frozen or layer-wise models on NVMe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .._core import Store
from ..errors import usage
from ..frames import holding_nothing
from ._options import directories

_LINE = 64  # bytes: each tensor of a group begins at a line of the cache
_PAGE = 4096

Group = Mapping[str, torch.Tensor]


class _Layout:
    """Where the tensors of a group lie in its object."""

    def __init__(self, group: Group) -> None:
        self.places: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        self.bytes = 0
        for name, tensor in group.items():
            self.places[name] = self.bytes, tensor.dtype, tensor.shape
            self.bytes += -(-tensor.nbytes // _LINE) * _LINE
        self.bytes = max(_PAGE, -(-self.bytes // _PAGE) * _PAGE)

    def require(self, name: Any, group: Group, *, all_of_them: bool) -> None:
        """That it can be copied to or from this group, before a byte is."""
        for one, tensor in group.items():
            if one not in self.places:
                raise usage("the group has no such tensor", where=f"{name}: {one}", limit=", ".join(map(str, self.places))[:200])
            if tensor.shape != self.places[one][2] or tensor.is_meta:
                raise usage("a tensor is not as it was when the store was made", where=f"{name}: {one}",
                            measured="a tensor without values" if tensor.is_meta else tuple(tensor.shape),
                            limit=tuple(self.places[one][2]))
        missing = [one for one in self.places if one not in group]
        if all_of_them and missing:
            raise usage("a group is written whole", where=f"{name}: {missing[0]}", measured=f"{len(missing)} tensors are missing")

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of the bytes of an object."""
        return {name: flat[at:at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
                for name, (at, dtype, shape) in self.places.items()}


class NVMeTensorStore:
    """Groups of tensors by name, say the weights of a block: a group is one object, and moves in one piece. It is
    read on demand or ahead (prefetch), into one of a bounded number of buffers in host memory, and its checksum is
    verified. `groups` may be on the meta device: then write() fills them before they are read."""

    def __init__(self, groups: Mapping[Any, Group], nvme: Sequence[Any], *, host: int | str = "4GiB", threads: int = 0) -> None:
        nvme = directories(nvme)
        if not nvme:
            raise usage("nvme names no directory", measured=nvme, limit="one or more")
        self._layouts = {name: _Layout(group) for name, group in groups.items()}
        self._store = Store(host, nvme, threads=threads)
        self._objects = {name: self._store.register(layout.bytes, "nvme") for name, layout in self._layouts.items()}
        self._store.open()
        for name, group in groups.items():
            if not any(tensor.is_meta for tensor in group.values()):
                self.write(name, group)

    def __contains__(self, name: Any) -> bool:
        return name in self._objects

    def _of(self, name: Any) -> int:
        if name not in self._objects:
            raise usage("there is no such group", measured=repr(name), limit=f"{len(self._objects)} groups")
        return self._objects[name]

    @torch.no_grad()
    def write(self, name: Any, group: Group) -> None:
        """All tensors of the group. It is stored when its buffer is needed, or by flush()."""
        object, given = self._of(name), dict(group)
        self._layouts[name].require(name, given, all_of_them=True)  # what it held goes with the first byte

        def write() -> None:
            with self._store.acquire(object, "overwrite") as lease:
                into = self._layouts[name].views(torch.frombuffer(lease, dtype=torch.uint8))
                for one, tensor in given.items():
                    into[one].copy_(tensor)

        holding_nothing(write)

    @contextlib.contextmanager
    def lease(self, name: Any) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors on the CPU, without a copy, until the end of the block. They are not to be changed."""
        with self._store.acquire(self._of(name)) as lease:
            yield self._layouts[name].views(_readable(lease))

    def load(self, name: Any, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Copies of the tensors."""

        def load() -> dict[str, torch.Tensor]:
            with self.lease(name) as tensors:
                return {one: tensor.to(device, copy=True) for one, tensor in tensors.items()}

        return holding_nothing(load)

    def load_into(self, name: Any, group: Group) -> None:
        """Into tensors that are there. On a GPU the copy has ended for the current stream."""
        self._of(name)
        self._layouts[name].require(name, group, all_of_them=False)

        def load() -> None:
            with self.lease(name) as tensors, torch.no_grad():
                for one, into in group.items():
                    into.copy_(tensors[one])

        holding_nothing(load)

    def prefetch(self, names: Sequence[Any]) -> None:
        """What is likely to be read soon, the first first. Never waits."""
        self._store.prefetch([self._of(name) for name in names])

    def flush(self) -> None:
        self._store.flush()

    @property
    def stats(self) -> Any:
        return self._store.stats()

    def close(self) -> None:
        """The files end with it."""
        self._store.close()

    def __enter__(self) -> NVMeTensorStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _readable(lease: Any) -> torch.Tensor:
    """torch knows no tensor that cannot be written, and says so once."""
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(lease, dtype=torch.uint8)

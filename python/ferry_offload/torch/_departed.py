"""What `.grad` holds once a gradient has left for host memory."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch.utils import _pytree

from ..errors import message, usage

_ops = torch.ops.aten
_ASIDE = (_ops.detach.default, _ops.alias.default)
_SCALES = (_ops.mul_.Tensor, _ops.mul_.Scalar, _ops._foreach_mul_.Tensor, _ops._foreach_mul_.Scalar)
_NO_MEMORY = message("a gradient that has left for host memory has no memory here", "", "its address or storage is asked for", "",
                     "p.grad.clone(), or keep_grads=True")


class Home(Protocol):
    """Where it is."""

    def fetch(self) -> torch.Tensor: ...
    def norm(self) -> float: ...
    def zero(self) -> None: ...
    def scale(self, factor: float) -> None: ...


class DepartedGradient(torch.Tensor):
    """Reading fetches it. What would change it in place is refused: the gradient is elsewhere, and the change
    would be lost. Passed on are zero_() and GradScaler's unscaling, and a product with 1 changes nothing:
    Trainer logs the norm by clip_grad_norm_(parameters, inf)."""

    home: Home

    @staticmethod
    def __new__(cls, like: torch.Tensor, home: Home) -> DepartedGradient:
        made = _without_memory(cls, like)
        made.home = home
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASIDE:
            return args[0]
        if func is _ops.zero_.default:
            args[0].home.zero()
            return args[0]
        if func is _ops._foreach_zero_.default:
            for gradient in args[0]:
                gradient.zero_()
            return None
        if func is _ops._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        if func in _SCALES and float(args[1]) == 1:
            return args[0]
        if func is _ops.linalg_vector_norm.default and len(args) == 1 and not kwargs:
            return torch.tensor(args[0].home.norm(), dtype=args[0].dtype, device=args[0].device)
        for argument, value in _arguments(func, args, kwargs):
            alias = argument.alias_info
            if alias is not None and any(isinstance(one, cls) for one in _pytree.tree_leaves(value)):
                _refuse(func, "changed in place" if alias.is_write else "viewed")
        fetched = _pytree.tree_map(lambda one: one.home.fetch() if isinstance(one, cls) else one, (args, kwargs))
        return func(*fetched[0], **fetched[1])

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self

    @data.setter
    def data(self, _: torch.Tensor) -> None:
        _refuse("data", "changed in place")

    # A copy of it, by copy or pickle, is an ordinary tensor.

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        if requires_grad:
            raise usage("a gradient that has left for host memory is made a leaf of a graph", where="requires_grad_",
                        remedy="p.grad.clone(), or keep_grads=True")
        return self

    def untyped_storage(self) -> Any:
        raise RuntimeError(_NO_MEMORY)

    def is_shared(self) -> bool:
        return False

    def share_memory_(self) -> torch.Tensor:
        raise usage("a gradient that has left for host memory is shared", where="share_memory_",
                    remedy="zero_grad() first, or keep_grads=True")

    # What torch does with the memory of a tensor, of which this one has none.

    def numpy(self, *, force: bool = False) -> Any:
        """A copy, which cannot be written: the change would be lost."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.clone().tolist()

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise usage("a gradient that has left for host memory is passed on", where="__dlpack__",
                    remedy="p.grad.clone(), or keep_grads=True")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DepartedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _without_memory(cls: type, like: torch.Tensor) -> torch.Tensor:
    """Without storage torch raises our words wherever it would give an address away: it would be 0. Its builds without
    CUDA have no such call. There one NaN stands for all elements, for whoever gets past the methods of the stand-in."""
    if take := getattr(torch._C, "_set_storage_access_error_msg", None):
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
        take(made, _NO_MEMORY)
        return made
    nothing = torch.full((), math.nan, dtype=like.dtype, device=like.device).expand(like.shape)
    made = torch.Tensor._make_subclass(cls, nothing)  # type: ignore[attr-defined]
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def _unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    factor = float(inverse_scale)
    for gradient in gradients:
        if not isinstance(gradient, DepartedGradient):
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, inverse_scale)
            continue
        if factor != 1:
            gradient.home.scale(factor)
        if not math.isfinite(gradient.home.norm()):
            found_inf.fill_(1.0)


def _arguments(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    schema = func._schema.arguments
    named = {argument.name: argument for argument in schema}
    return [*zip(schema, args), *((named[name], value) for name, value in kwargs.items())]


def _refuse(func: Any, how: str) -> None:
    raise usage(f"a gradient that has left for host memory is {how}", where=str(func),
                measured="overlap=True: gradients leave .grad in backward",
                limit="reading, zero_grad() and step()",
                remedy="to clip, give the optimizer max_norm=... and switch off what clips outside (Trainer: "
                       "max_grad_norm=0); for whatever else changes .grad, keep_grads=True or overlap=False")

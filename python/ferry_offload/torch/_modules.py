"""`model=`: new weights of a module are there when it runs, and not before."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .optimizer import OffloadOptimizer


def land_before_use(model: torch.nn.Module, optimizer: OffloadOptimizer) -> list[Any]:
    """Hooks: a module waits for its own parameters when it is called, and the whole model for all of them when it is
    saved, loaded, or has ended its forward."""
    me = weakref.ref(optimizer)

    def before(module: torch.nn.Module, _: Any) -> None:
        mine = me()
        if mine is not None:
            mine._land_parameters(module._parameters.values())

    def all_of_it(*_: Any) -> None:
        mine = me()
        if mine is not None:
            mine.synchronize()

    hooks = [module.register_forward_pre_hook(before) for module in model.modules() if module._parameters]
    hooks.append(model.register_forward_hook(all_of_it))
    for module in model.modules():
        hooks.append(module.register_state_dict_pre_hook(all_of_it))
        hooks.append(module.register_load_state_dict_pre_hook(all_of_it))
    return hooks

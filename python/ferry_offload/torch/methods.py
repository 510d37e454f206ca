"""The methods of update: Adam and its like, each with torch.optim's options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .optimizer import OffloadOptimizer


class OffloadAdamW(OffloadOptimizer):
    """torch.optim.AdamW on fp32 masters."""

    method = "adamw"
    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, *, max_norm: float | None = None, host: int | str = "40GiB",
                 nvme: Sequence[Any] = (), overlap: bool = True, accumulation_steps: int = 1, keep_grads: bool = False,
                 model: torch.nn.Module | None = None, gpu_state: int | str = 0, moments: str = "fp32",
                 master: str = "fp32", threads: int = 0, chunk_elements: int | None = None) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, max_norm=max_norm,
                         host=host, nvme=nvme, overlap=overlap, accumulation_steps=accumulation_steps,
                         keep_grads=keep_grads, model=model, gpu_state=gpu_state, moments=moments, master=master,
                         threads=threads, chunk_elements=chunk_elements)

    def _constants(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {"lr": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2), "eps": group["eps"],
                "weight_decay": group["weight_decay"]}


class OffloadAdam(OffloadAdamW):
    """torch.optim.Adam on fp32 masters: weight_decay is a term of the gradient."""

    method = "adam"

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, **options: Any) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


class OffloadLion(OffloadOptimizer):
    """Lion (Chen et al. 2023) on fp32 masters."""

    method = "lion"
    _moments = ("exp_avg",)

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
                 **options: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options)

    def _constants(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {"lr": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2), "weight_decay": group["weight_decay"]}


class OffloadSGD(OffloadOptimizer):
    """torch.optim.SGD on fp32 masters; dampening is not done."""

    method = "sgd"
    _moments = ("momentum_buffer",)

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0, *,
                 nesterov: bool = False, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}, **options)

    def _constants(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"lr": float(group["lr"]), "momentum": group["momentum"], "weight_decay": group["weight_decay"],
                "nesterov": group["nesterov"]}

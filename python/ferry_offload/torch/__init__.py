"""ferry for PyTorch: optimizers whose state lies in host memory and on NVMe."""

from .optimizer import OffloadAdam, OffloadAdamW, OffloadLion, OffloadOptimizer, OffloadSGD, Stats

__all__ = ["OffloadAdam", "OffloadAdamW", "OffloadLion", "OffloadOptimizer", "OffloadSGD", "Stats"]

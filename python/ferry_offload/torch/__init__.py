"""ferry for PyTorch: optimizers whose state lies in host memory and on NVMe, and what else of a training may lie there."""

from .activations import ActivationStats, offload_activations
from .methods import OffloadAdam, OffloadAdamW, OffloadLion, OffloadSGD
from .optimizer import OffloadOptimizer, Stats
from .streaming import StreamedModel, StreamStats, stream_model
from .tensor_store import NVMeTensorStore

__all__ = ["ActivationStats", "NVMeTensorStore", "OffloadAdam", "OffloadAdamW", "OffloadLion", "OffloadOptimizer", "OffloadSGD",
           "Stats", "StreamStats", "StreamedModel", "offload_activations", "stream_model"]

"""ferry for Python: file I/O, pinned memory, tensors over host memory and NVMe, optimizers and the engine.

Everything here works without torch. `ferry_offload.torch` has what PyTorch programs use."""

import atexit

from . import _core
from ._core import (Aio, Engine, Evaluation, Files, Hyper, Lease, Memory, Path, PathStats, Pool, RunReport, StepReport,
                    Store, StoreStats, Team, Transfer, add_leaves, clip_factor, leaf_norms_on_stream, log_to_stderr, moment_shares,
                    recast, square_sum, update, update_on_stream)
from .errors import (BusyError, CancelledError, ClosedError, DivergedError, DoesNotFitError, FerryError, InternalError,
                     StorageError, UsageError)
from .planning import plan

__version__ = _core.version()
__all__ = ["Aio", "BusyError", "CancelledError", "ClosedError", "DivergedError", "DoesNotFitError", "Engine", "Evaluation",
           "FerryError", "Files", "Hyper", "InternalError", "Lease", "Memory", "Path", "PathStats", "Pool", "RunReport",
           "StepReport", "StorageError", "Store", "StoreStats", "Team", "Transfer", "UsageError", "add_leaves",
           "clip_factor", "leaf_norms_on_stream", "log_to_stderr", "moment_shares", "plan", "recast", "square_sum", "update",
           "update_on_stream"]

# Buffers of transfers are Python's memory, and files are to be removed.
atexit.register(_core.close_all)

"""Communication for training across uneven machines.

`torch.distributed.init_process_group("pycomm")` is all that most programs need; importing this
package is not required. Without torch, `pycomm.Communicator` does the same on NumPy arrays and
anything with DLPack. See README.md.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from pycomm._register import register
from pycomm.errors import (
    AbortedError,
    Error,
    InternalError,
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
    SystemFailureError,
)

if TYPE_CHECKING:
    from pycomm.communicator import Communicator
    from pycomm.shard_barrier import ShardBarrier
    from pycomm.shared import shared_empty, shared_memory, shared_memory_stats
    from pycomm.work import Work

__version__ = "0.1.0"
__all__ = [
    "AbortedError",
    "Communicator",
    "Error",
    "InternalError",
    "InvalidUsageError",
    "OperationTimeoutError",
    "PeerLostError",
    "ShardBarrier",
    "SystemFailureError",
    "Work",
    "__version__",
    "register",
    "shared_empty",
    "shared_memory",
    "shared_memory_stats",
]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: torch imports this package while it is imported itself.
    if name in ("Communicator", "Work"):
        from pycomm import communicator

        return getattr(communicator, name)
    if name == "ShardBarrier":
        from pycomm import shard_barrier

        return shard_barrier.ShardBarrier
    if name in ("shared_empty", "shared_memory", "shared_memory_stats"):
        from pycomm import shared

        return getattr(shared, name)
    raise AttributeError(f"module 'pycomm' has no attribute '{name}'")


# torch registers the backend by itself as it is imported, unless it was told not to. Who needs no
# torch does not wait for its import.
if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
    register()

"""Tensors and arrays in memory that the host's other ranks reach.

    with pycomm.shared_memory():
        model = DistributedDataParallel(net)   # its gradient buckets are made here

Collectives among ranks of one host then work on them where they lie, without a copy.
PYCOMM_SHM_TENSORS=1 does it for every CPU tensor of 16 KiB and more from the first group on, in all
threads. When shared memory is short, tensors lie in private memory as always; a warning says so
once, and shared_memory_stats() counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


@contextmanager
def shared_memory() -> Iterator[None]:
    """torch CPU tensors of 16 KiB and more that this thread makes inside lie in shared memory.

    They stay there for as long as they live. A forked child reads them, and keeps what it writes to
    itself; what its parent writes it may see. It nests.
    """
    from pycomm._loader import torch_module

    module = torch_module()
    module.begin_sharing_tensors()
    try:
        yield
    finally:
        module.end_sharing_tensors()


def shared_memory_stats() -> dict[str, int]:
    """Of torch tensors in shared memory: their bytes now, how many there were, and how many lie in
    private memory because it was short."""
    from pycomm._loader import torch_module

    stats: dict[str, int] = torch_module().allocator_stats()
    return stats


def shared_empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Any:
    """A NumPy array in shared memory, for pycomm.Communicator; its contents are zeros.

    Raises:
        pycomm.SystemFailureError: shared memory is short.
    """
    from pycomm import _core

    size = int(np.prod(shape, dtype=np.int64))
    memory: Any = _core.SharedBuffer(max(size * np.dtype(dtype).itemsize, 1))
    return np.frombuffer(memory, dtype, size).reshape(shape)

"""What each operation is given and must return, in NumPy alone.

Elements are small whole numbers, exact in every element type and in any order of addition. `count`
is elements of one rank's part; the size column is, as nccl-tests counts, all parts together where
there are several.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "sendrecv",
    "barrier",
)
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# The size column counts a part for every rank.
IN_PARTS = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
REDUCE_OPS = ("sum", "avg", "prod", "min", "max")

Array = np.ndarray[Any, Any]


def part_elements(operation: str, size_bytes: int, element_bytes: int, num_ranks: int) -> int:
    """Elements of one rank's part for a size column of `size_bytes`."""
    count = size_bytes // element_bytes
    return count // num_ranks if operation in IN_PARTS else count


_HUGE_PAGE = 2 << 20


def new_array(count: int, dtype: Any, pages: str) -> Array:
    """Zeroed memory in pages of one kind, so that everyone works on the same: an allocator's own
    choice would compare allocators. `pages` is "small" or "huge"."""
    size = count * np.dtype(dtype).itemsize
    if size < _HUGE_PAGE:
        return np.zeros(count, dtype)
    memory = mmap.mmap(-1, size + 2 * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skew = -whole.ctypes.data % _HUGE_PAGE
    array: Array = whole[skew : skew + size].view(dtype)
    array[:] = 0
    return array


def _pattern(rank: int, count: int, op: str) -> Array:
    places = np.arange(count) % 7
    if op == "prod":
        return np.where(places == rank % 7, 2.0, 1.0)
    return np.multiply(rank + 1.0, 1 + places)


def num_inputs(operation: str, num_ranks: int) -> int:
    """Parts in one rank's input; of the root's, where only it has one."""
    return num_ranks if operation in ("reduce_scatter", "all_to_all", "scatter") else 1


def num_outputs(operation: str, num_ranks: int) -> int:
    """Parts in one rank's output; of the root's, where only it has one."""
    return num_ranks if operation in ("all_gather", "all_to_all", "gather") else 1


def contribution(operation: str, rank: int, num_ranks: int, count: int, op: str = "sum") -> Array:
    """What a rank gives, in float64."""
    return _pattern(rank, num_inputs(operation, num_ranks) * count, op)


def expected(
    operation: str, rank: int, num_ranks: int, count: int, op: str = "sum", root: int = 0
) -> Array | None:
    """What a rank must hold afterwards, in float64; None where it gets nothing."""
    everyone = [contribution(operation, r, num_ranks, count, op) for r in range(num_ranks)]
    mine = slice(rank * count, (rank + 1) * count)
    if operation in REDUCTIONS:
        stack = np.stack(everyone)
        folds: dict[str, Callable[..., Array]] = {
            "sum": np.sum,
            "avg": np.mean,
            "prod": np.prod,
            "min": np.min,
            "max": np.max,
        }
        total = folds[op](stack, axis=0)
        if operation == "reduce":
            return total if rank == root else None
        return total[mine] if operation == "reduce_scatter" else total
    if operation == "all_gather" or (operation == "gather" and rank == root):
        return np.concatenate(everyone)
    moved: dict[str, Array] = {
        "broadcast": everyone[root],
        "scatter": everyone[root][mine],
        "all_to_all": np.concatenate([part[mine] for part in everyone]),
        "sendrecv": everyone[(rank - 1) % num_ranks],
    }
    return moved.get(operation)


def count_wrong(got: Array, want: Array | None) -> int:
    """Elements that differ."""
    return 0 if want is None else int((got.astype(np.float64) != want).sum())

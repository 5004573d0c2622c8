"""What is measured: sizes, element types, and the bandwidth arithmetic of nccl-tests.

Source for algbw and busbw: nccl-tests, doc/PERFORMANCE.md. busbw is the bandwidth that the busiest
link must have carried, so that it compares with hardware whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "barrier")

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}

SUFFIXES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bytes(text: str) -> int:
    """Bytes from "8", "64K", "16M" or "1G" (powers of 1024, as nccl-tests).

    Raises:
        ValueError: the text is not a size.
    """
    lowered = text.strip().lower().removesuffix("ib")
    digits = lowered.rstrip("bkmg")
    suffix = lowered[len(digits) :]
    if not digits.isdigit() or suffix not in SUFFIXES:
        raise ValueError(f"'{text}' is not a size; write for example 8, 64K, 16M or 1G")
    return int(digits) * SUFFIXES[suffix]


def sizes_between(first: int, last: int, factor: int, step: int) -> list[int]:
    """Sizes in bytes from `first` to `last`, times `factor`, or plus `step` if step > 0."""
    if first < 0 or last < first or (factor < 2 and step <= 0):
        raise ValueError("sizes need first <= last and a factor of at least 2 or a step")
    sizes = []
    size = first
    while size <= last:
        sizes.append(size)
        size = size + step if step > 0 else max(size * factor, 8)
    return sizes


@dataclass(frozen=True)
class Bandwidth:
    """GB/s (10^9 bytes) of one operation."""

    algbw: float
    busbw: float


def bandwidth(operation: str, size_bytes: int, seconds: float, world_size: int) -> Bandwidth:
    """`size_bytes` is the size column: for all_gather the whole output, as nccl-tests counts."""
    if seconds <= 0 or operation == "barrier":
        return Bandwidth(0.0, 0.0)
    n = world_size
    factor = {
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": (n - 1) / n,
        "broadcast": 1.0,
    }[operation]
    algbw = size_bytes / seconds / 1e9
    return Bandwidth(algbw, algbw * factor)

"""What is measured: sizes, element types, and the bandwidth arithmetic of nccl-tests.

Source for algbw and busbw: nccl-tests, doc/PERFORMANCE.md. busbw is the bandwidth that the busiest
link must have carried, so that it compares with hardware whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

# nccl-tests' names of element types: bytes, and NumPy's name where it has one.
DTYPES = {
    "float": (4, "float32"),
    "double": (8, "float64"),
    "half": (2, "float16"),
    "bfloat16": (2, None),
    "int8": (1, "int8"),
    "uint8": (1, "uint8"),
    "int32": (4, "int32"),
    "int64": (8, "int64"),
}

# Contestants that are no backend: pycomm on tensors in shared memory, and the barest loops, which
# take turns with the rest.
SHARED = "shared"
FAKE = "fake"  # torch's backend that does nothing: what a call costs above any backend
BOUND = "bound"
BOUND_SHARED = "bound-shared"
BOUNDS = (BOUND, BOUND_SHARED)

SUFFIXES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Settings:
    """What to run; names follow nccl-tests."""

    operation: str
    sizes: list[int]
    dtype: str = "float"
    op: str = "sum"
    root: int = 0
    iterations: int = 20
    warmup: int = 5
    rounds: int = 9
    check: bool = True
    blocking: bool = True
    api: str = "torch"  # pycomm's front end: torch or numpy
    pages: str = "small"  # of everyone's private tensors: small (4 KiB, torch's) or huge
    backends: tuple[str, ...] = ("pycomm",)
    timeout_s: int = 120


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
    """`size_bytes` is the size column: all parts together, where there are several."""
    if seconds <= 0 or operation == "barrier":
        return Bandwidth(0.0, 0.0)
    n = world_size
    in_parts = (n - 1) / n
    factor = {
        "all_reduce": 2 * in_parts,
        "all_gather": in_parts,
        "reduce_scatter": in_parts,
        "all_to_all": in_parts,
        "gather": in_parts,
        "scatter": in_parts,
    }.get(operation, 1.0)
    algbw = size_bytes / seconds / 1e9
    return Bandwidth(algbw, algbw * factor)

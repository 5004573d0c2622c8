"""Times operations in one rank: several backends interleaved in the same rounds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from pycomm.bench.plan import DTYPES
from pycomm.launch import Place

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


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
    backends: tuple[str, ...] = ("pycomm",)
    timeout_s: int = 120


@dataclass
class Row:
    """One size. Seconds per operation and round, the slowest rank's, by backend."""

    size_bytes: int
    count: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)


def open_groups(settings: Settings, place: Place) -> dict[str, dist.ProcessGroup]:
    """The default group on the first backend, one more group for each other."""
    first, *others = settings.backends
    timeout = timedelta(seconds=settings.timeout_s)
    dist.init_process_group(
        first,
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    groups = {first: dist.group.WORLD}
    for name in others:
        groups[name] = dist.new_group(backend=name, timeout=timeout)
    return {name: group for name, group in groups.items() if group is not None}


def elements_for(settings: Settings, size_bytes: int, world_size: int) -> int:
    """Elements of one rank's contribution for a size column of `size_bytes`."""
    count = size_bytes // DTYPES[settings.dtype].itemsize
    return count // world_size if settings.operation == "all_gather" else count


def make_call(
    settings: Settings, count: int, group: dist.ProcessGroup, place: Place
) -> tuple[Callable[[], None], Callable[[], int]]:
    """The operation on fresh tensors, and a check of one run: the number of wrong elements."""
    dtype = DTYPES[settings.dtype]
    mine = torch.full((count,), place.rank + 1, dtype=dtype)
    n = place.world_size
    if settings.operation == "barrier":
        return lambda: dist.barrier(group=group), lambda: 0
    if settings.operation == "all_gather":
        gathered = torch.zeros(count * n, dtype=dtype)
        expected = torch.arange(1, n + 1).repeat_interleave(count).to(dtype)

        def check_gather() -> int:
            gathered.zero_()
            dist.all_gather_into_tensor(gathered, mine, group=group)
            return int((gathered != expected).sum())

        return lambda: dist.all_gather_into_tensor(gathered, mine, group=group), check_gather
    if settings.operation == "broadcast":

        def check_broadcast() -> int:
            mine.fill_(place.rank + 1)
            dist.broadcast(mine, settings.root, group=group)
            return int((mine != settings.root + 1).sum())

        return lambda: dist.broadcast(mine, settings.root, group=group), check_broadcast

    ranks = torch.arange(1, n + 1, dtype=torch.float64)
    total = {
        "sum": ranks.sum(),
        "avg": ranks.mean(),
        "prod": ranks.prod(),
        "min": ranks.min(),
        "max": ranks.max(),
    }[settings.op]
    data = torch.zeros(count, dtype=dtype)
    reduce_op = REDUCE_OPS[settings.op]

    def check_reduce() -> int:
        data.fill_(place.rank + 1)
        dist.all_reduce(data, reduce_op, group=group)
        return int((data != total.to(dtype)).sum())

    return lambda: dist.all_reduce(data, reduce_op, group=group), check_reduce


def measure_size(
    settings: Settings, size_bytes: int, groups: dict[str, dist.ProcessGroup], place: Place
) -> Row:
    """Rounds in which every backend has its turn; the order alternates."""
    count = elements_for(settings, size_bytes, place.world_size)
    row = Row(size_bytes, count, {name: [] for name in groups}, dict.fromkeys(groups, 0))
    calls: dict[str, Callable[[], None]] = {}
    for name, group in groups.items():
        calls[name], check = make_call(settings, count, group, place)
        if settings.check:
            row.wrong[name] = check()
        for _ in range(settings.warmup):
            calls[name]()
    default = next(iter(groups.values()))
    names = list(groups)
    for round_ in range(settings.rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            dist.barrier(group=default)
            start = time.perf_counter()
            for _ in range(settings.iterations):
                calls[name]()
            row.seconds[name].append((time.perf_counter() - start) / settings.iterations)
    for name in names:
        slowest = torch.tensor([*row.seconds[name], row.wrong[name]], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=default)
        row.seconds[name] = slowest[:-1].tolist()
        row.wrong[name] = int(slowest[-1].item())
    return row


def measure(settings: Settings, place: Place, report: Callable[[Row], None]) -> None:
    """Runs all sizes; rank 0 reports each row as it is done."""
    torch.set_num_threads(1)
    place.pin_to_cpu()
    groups = open_groups(settings, place)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    for size_bytes in settings.sizes:
        if size_bytes > 0 and elements_for(settings, size_bytes, place.world_size) == 0:
            continue  # less than one element
        row = measure_size(settings, size_bytes, groups, place)
        if place.rank == 0:
            report(row)
    dist.barrier()
    dist.destroy_process_group()

"""Times contestants in interleaved rounds: gangs here, or the ranks that torchrun started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycomm.bench.gang import Gang
from pycomm.bench.peer.operations import part_elements
from pycomm.bench.peer.serve import Contestant, time_round
from pycomm.bench.peers import PEERS
from pycomm.bench.plan import BOUND_SHARED, BOUNDS, DTYPES, SHARED, Settings
from pycomm.launch import Place


@dataclass
class Row:
    """One size. Seconds are the slowest rank's, by contestant."""

    size_bytes: int
    count: int
    seconds: dict[str, list[float]] = field(default_factory=dict)  # mean of each round
    laps: dict[str, list[float]] = field(default_factory=dict)  # of single operations
    wrong: dict[str, int] = field(default_factory=dict)


def sizes_of(settings: Settings, num_ranks: int) -> Iterator[tuple[int, int]]:
    """(size column, elements of a part); sizes below one element are left out."""
    element_bytes = DTYPES[settings.dtype][0]
    for size_bytes in settings.sizes:
        count = part_elements(settings.operation, size_bytes, element_bytes, num_ranks)
        if count > 0 or size_bytes == 0:
            yield size_bytes, count


def turns(settings: Settings) -> Iterator[str]:
    """Whose turn it is: everyone in every round, the order alternates."""
    names = list(settings.backends)
    for round_ in range(settings.rounds):
        yield from names if round_ % 2 == 0 else reversed(names)


def _slowest(laps_by_rank: list[list[float]]) -> list[float]:
    return [max(laps) for laps in zip(*laps_by_rank, strict=True)]


def _bare_seconds(settings: Settings, name: str, size_bytes: int) -> float:
    """Of the barest loop, in this process and a child, right now."""
    from pycomm import _core

    if name == BOUND_SHARED:
        return _core.bare_shared_seconds(size_bytes)
    return _core.bare_seconds(settings.operation, size_bytes, settings.pages == "huge")


def _add_round(row: Row, name: str, laps: list[float]) -> None:
    row.seconds.setdefault(name, []).append(sum(laps) / len(laps))
    row.laps.setdefault(name, []).extend(laps)


@contextmanager
def open_gangs(settings: Settings, num_ranks: int, *, pin: bool) -> Iterator[dict[str, Gang]]:
    """One gang for each contestant; all ranks have come together."""
    from pycomm.bench.contestants import open_numpy, open_torch

    def maker(name: str) -> Callable[[int, Path], Contestant]:
        def make(rank: int, folder: Path) -> Contestant:
            meet = f"file://{folder}/meet"
            if name in ("pycomm", SHARED) and settings.api == "numpy":
                return open_numpy(settings, name, rank, num_ranks, meet)
            return open_torch(settings, name, rank, num_ranks, meet)

        return make

    with ExitStack() as stack:
        gangs = {
            name: stack.enter_context(Gang(name, num_ranks))
            for name in settings.backends
            if name not in BOUNDS
        }
        # Forks first, while this process has no other children that hold its sockets.
        for name, gang in gangs.items():
            if name not in PEERS:
                gang.fork(maker(name), pin=pin)
        chosen: dict[str, Any] = {
            "operation": settings.operation,
            "root": settings.root,
            "op": settings.op,
            "dtype": DTYPES[settings.dtype][1],
            "pages": settings.pages,
            "pin": pin,
        }
        for name, gang in gangs.items():
            if name in PEERS:
                gang.launch(PEERS[name], chosen)
        for gang in gangs.values():
            gang.await_ranks()
        yield gangs


def measure_gangs(
    settings: Settings, num_ranks: int, *, pin: bool, report: Callable[[Row], None]
) -> None:
    """Runs all sizes with gangs of this host."""
    with open_gangs(settings, num_ranks, pin=pin) as gangs:
        for size_bytes, count in sizes_of(settings, num_ranks):
            row = Row(size_bytes, count)
            for name, gang in gangs.items():
                answers = gang.ask(
                    do="prepare",
                    size_bytes=size_bytes,
                    count=count,
                    check=settings.check,
                    warmup=settings.warmup,
                )
                row.wrong[name] = sum(answer["wrong"] for answer in answers)
            for name in turns(settings):
                if name in BOUNDS:
                    _add_round(row, name, [_bare_seconds(settings, name, size_bytes)])
                    continue
                answers = gangs[name].ask(
                    do="round", times=settings.iterations, blocking=settings.blocking
                )
                _add_round(row, name, _slowest([answer["seconds"] for answer in answers]))
            report(row)


def measure_here(settings: Settings, place: Place, report: Callable[[Row], None]) -> None:
    """Runs all sizes in the ranks that another launcher started; rank 0 reports."""
    import torch
    import torch.distributed as dist

    from pycomm.bench.contestants import TorchContestant, open_torch

    place.pin_to_cpu()
    first, *others = settings.backends
    contestants = {
        first: open_torch(settings, first, place.rank, place.world_size, place.init_method)
    }
    for name in others:
        contestants[name] = TorchContestant(settings, dist.new_group(backend=name))
    for size_bytes, count in sizes_of(settings, place.world_size):
        row = Row(size_bytes, count)
        for name, contestant in contestants.items():
            row.wrong[name] = contestant.prepare(size_bytes, count, settings.check)
            for _ in range(settings.warmup):
                contestant.call()
        for name in turns(settings):
            laps = time_round(contestants[name], settings.iterations, settings.blocking)
            slowest = torch.tensor([*laps, float(row.wrong[name])], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            _add_round(row, name, slowest[:-1].tolist())
            row.wrong[name] = int(slowest[-1].item())
        if place.rank == 0:
            report(row)
    dist.barrier()
    dist.destroy_process_group()

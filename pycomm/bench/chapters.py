"""What the performance page is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pycomm.bench.peer.operations import OPERATIONS
from pycomm.bench.plan import BOUND, BOUND_SHARED, FAKE, SHARED, Settings

MPIS = ("openmpi", "mpich", "impi")
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Chapter:
    """Operations that are measured alike, and shown as one table."""

    name: str
    title: str
    text: str
    settings: Settings
    operations: tuple[str, ...] = ("all_reduce",)
    num_ranks: int = 2


def settings(contestants: tuple[str, ...], sizes: list[int], **changes: Any) -> Settings:
    """Of a chapter: pycomm by its NumPy interface beside `contestants`, and what it changes."""
    chosen = Settings("", sizes, backends=("pycomm", *contestants), api="numpy", rounds=15)
    return replace(chosen, **changes)


def chapters(rounds: int) -> list[Chapter]:
    """What is measured, in the order of the page."""
    moves = tuple(name for name in OPERATIONS if name != "barrier")
    sizes = [64 * KIB, MIB, 16 * MIB]
    large = {"iterations": 2, "warmup": 3, "rounds": rounds}
    return [
        Chapter(
            "small",
            "Small messages, from Python",
            "`Communicator` beside mpi4py.",
            settings((*MPIS, BOUND), [8, KIB, 16 * KIB], rounds=rounds, iterations=200),
        ),
        Chapter(
            "dispatch",
            "Small messages, by torch.distributed",
            "`fake` is torch's backend that does nothing: what a call costs above any backend.",
            settings((FAKE, "gloo"), [8], rounds=rounds, iterations=200, api="torch", check=False),
            ("all_reduce", "barrier"),
        ),
        Chapter(
            "private",
            "Private tensors",
            "In pages of 4 KiB, as torch's are, for everyone.",
            settings((*MPIS, BOUND), sizes, rounds=rounds),
            moves,
        ),
        Chapter(
            "huge",
            "Private tensors in huge pages",
            "As NumPy's are from 4 MiB on. The kernel reads them faster, as the MPIs have it do.",
            settings((*MPIS, BOUND), [16 * MIB], rounds=rounds, pages="huge"),
            moves,
        ),
        Chapter(
            "large",
            "256 MiB",
            "Private tensors in pages of 4 KiB.",
            settings(MPIS, [256 * MIB], **large),
            moves,
        ),
        Chapter(
            "shared",
            "Tensors in shared memory",
            "`shared` is pycomm on them; pycomm and the MPIs work on private ones.",
            settings((SHARED, *MPIS, BOUND_SHARED), [MIB, 16 * MIB], rounds=rounds),
        ),
        Chapter(
            "shared256",
            "Tensors in shared memory, 256 MiB",
            "",
            settings((SHARED, *MPIS, BOUND_SHARED), [256 * MIB], **large),
        ),
        Chapter(
            "torch",
            "By torch.distributed, beside gloo",
            "Nine rounds.",
            settings((SHARED, "gloo"), sizes, rounds=min(rounds, 9), api="torch"),
            moves,
        ),
        Chapter(
            "four",
            "Four ranks on these processors",
            "",
            settings(MPIS, [8, KIB, 8 * KIB, 64 * KIB], rounds=rounds, iterations=100),
            num_ranks=4,
        ),
    ]

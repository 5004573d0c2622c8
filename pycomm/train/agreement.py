"""Faults of one rank that all ranks know of, so that none waits for it in a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


class AgreedError(ValueError):
    """A fault of one rank that every rank raises."""


@contextlib.contextmanager
def alike(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Makes a ValueError or OSError of one rank one of all. What runs inside does not communicate.

    Raises:
        AgreedError: the first rank's fault.
    """
    fault: str | None = None
    try:
        yield
    except (ValueError, OSError) as error:
        fault = str(error)
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault, group=group)
    for rank, one in enumerate(faults):
        if one is not None:
            everyone = all(other == one for other in faults)
            raise AgreedError(one if everyone else f"rank {rank}: {one}")

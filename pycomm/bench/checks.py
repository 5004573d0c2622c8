"""What of the benchmark's command line cannot be compared, told before anything is started."""

from __future__ import annotations

import click

from pycomm.bench.peers import PEERS
from pycomm.bench.plan import BOUND_SHARED, BOUNDS, DTYPES, SHARED


def check_contestants(names: list[str], api: str, datatype: str, op: str) -> None:
    """Refuses what cannot be compared, before anything is started."""
    mpis = [name for name in names if name in PEERS]
    if mpis and op == "avg":
        raise click.BadParameter("MPI has no average", param_hint="-o")
    if (mpis or api == "numpy") and DTYPES[datatype][1] is None:
        raise click.BadParameter(f"NumPy, and so mpi4py, has no {datatype}", param_hint="-d")
    others = [name for name in names if name not in (*PEERS, *BOUNDS, SHARED)]
    if api == "torch" or others:
        check_backends(others)


def check_bounds(names: list[str], operation: str, num_ranks: int, datatype: str) -> None:
    """Refuses bare loops for what has none."""
    if not any(name in BOUNDS for name in names):
        return
    if num_ranks != 2 or datatype != "float":
        raise click.BadParameter("the barest loops are for 2 ranks and float")
    if BOUND_SHARED in names and operation != "all_reduce":
        raise click.BadParameter(f"{BOUND_SHARED} is for all_reduce")


def check_backends(names: list[str]) -> None:
    """Refuses a backend that this torch has not, before anything is started."""
    import torch.distributed as dist

    for name in names:
        is_known = name.lower() in dist.Backend.backend_list
        if not is_known or not getattr(dist, f"is_{name}_available", lambda: True)():
            raise click.BadParameter(f"this torch has no backend '{name}' here")

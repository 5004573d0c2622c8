"""Registers the backend with torch.distributed.

torch calls `register` while it is being imported, so it does nothing that could fail or take time:
the compiled module loads when the first group is created.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Makes "pycomm" a backend name; harmless when called twice or without torch.distributed."""
    try:
        import torch.distributed as dist
    except ImportError:
        return
    if not dist.is_available() or hasattr(dist.Backend, "PYCOMM"):
        return
    dist.Backend.register_backend("pycomm", _create, extended_api=True, devices=["cpu"])


def _fresh(store: Any) -> Any:
    """The store without what ranks that have died wrote to it.

    torchrun's agent keeps one store for all its restarts, and torch 2.13 no longer sets them apart.
    """
    import os

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        return store
    import torch.distributed as dist

    return dist.distributed_c10d.PrefixStore(f"pycomm_attempt_{attempt}", store)


def _create(options: Any, backend_options: Any) -> Any:
    """Creates a group's backend; the signature is torch's extended API."""
    from pycomm._loader import torch_module

    del backend_options
    return torch_module().create_process_group(
        _fresh(options.store),
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),
    )

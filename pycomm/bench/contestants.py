"""The operations over torch.distributed backends, and over pycomm.Communicator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

import pycomm
from pycomm.bench.peer import operations
from pycomm.bench.plan import DTYPES, FAKE, SHARED, Settings


class TorchContestant:
    """A torch.distributed backend; `group` is made by the caller."""

    def __init__(self, settings: Settings, group: Any, *, is_shared: bool = False) -> None:
        import torch.distributed as dist

        self._is_shared = is_shared

        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        self._settings, self._group, self._dist = settings, group, dist
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._issue: Callable[[bool], Any] = lambda is_async: None

    def prepare(self, size_bytes: int, count: int, is_checked: bool) -> int:
        """Makes the buffers of a size; returns the number of wrong elements of one run."""
        import torch

        del size_bytes
        s, rank, size = self._settings, self.rank, self.size
        dtype = {"bfloat16": torch.bfloat16}.get(s.dtype) or getattr(torch, str(DTYPES[s.dtype][1]))
        given = operations.contribution(s.operation, rank, size, count, s.op)
        mine = self._new(given.size, dtype)
        mine.copy_(torch.from_numpy(given))
        out = self._new(operations.num_outputs(s.operation, size) * count, dtype)
        self._issue = self._make_issue(mine, out)
        if not is_checked or s.operation == "barrier":
            return 0
        self._wait(self._issue(False))
        got = mine if s.operation in ("all_reduce", "reduce", "broadcast") else out
        want = operations.expected(s.operation, rank, size, count, s.op, s.root)
        wrong = operations.count_wrong(got.double().numpy(), want)
        mine.zero_()
        return wrong

    def _new(self, count: int, dtype: Any) -> Any:
        import torch

        if self._is_shared:
            with pycomm.shared_memory():
                return torch.zeros(count, dtype=dtype)
        size = max(count, 1) * dtype.itemsize
        memory = operations.new_array(size, np.uint8, self._settings.pages)
        return torch.from_numpy(memory).view(dtype)[:count]

    def _make_issue(self, mine: Any, out: Any) -> Callable[[bool], Any]:
        dist, group, root = self._dist, self._group, self._settings.root
        op = {"prod": dist.ReduceOp.PRODUCT}.get(self._settings.op) or getattr(
            dist.ReduceOp, self._settings.op.upper()
        )
        at_root = self.rank == root
        outs = list(out.chunk(self.size)) if self._settings.operation == "gather" else []
        ins = list(mine.chunk(self.size)) if self._settings.operation == "scatter" else []
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size

        def sendrecv(is_async: bool) -> Any:
            works = [
                dist.irecv(out, group=group, group_src=left),
                dist.isend(mine, group=group, group_dst=right),
            ]
            return works if is_async else self._wait(works)

        return {
            "barrier": lambda a: dist.barrier(group, a),
            "all_reduce": lambda a: dist.all_reduce(mine, op, group, a),
            "reduce": lambda a: dist.reduce(mine, root, op, group, a),
            "reduce_scatter": lambda a: dist.reduce_scatter_tensor(out, mine, op, group, a),
            "all_gather": lambda a: dist.all_gather_into_tensor(out, mine, group, a),
            "all_to_all": lambda a: dist.all_to_all_single(out, mine, group=group, async_op=a),
            "broadcast": lambda a: dist.broadcast(mine, root, group, a),
            "gather": lambda a: dist.gather(mine, outs if at_root else None, root, group, a),
            "scatter": lambda a: dist.scatter(out, ins if at_root else None, root, group, a),
            "sendrecv": sendrecv,
        }[self._settings.operation]

    def _wait(self, work: Any) -> None:
        for one in work if isinstance(work, list) else [work]:
            if one is not None:
                one.wait()

    def call(self) -> None:
        """Runs the operation once."""
        self._issue(False)

    def call_many(self, times: int) -> None:
        """Issues the operation `times` times, then waits for all."""
        for work in [self._issue(True) for _ in range(times)]:
            self._wait(work)

    def barrier(self) -> None:
        """Lines the ranks up."""
        self._dist.barrier(self._group)


class NumpyContestant:
    """pycomm.Communicator on NumPy arrays."""

    def __init__(self, settings: Settings, comm: Any, *, is_shared: bool = False) -> None:
        self._settings, self._comm, self._is_shared = settings, comm, is_shared
        self.call: Callable[[], Any] = comm.barrier
        self._start: Callable[[], list[Any]] = list

    def prepare(self, size_bytes: int, count: int, is_checked: bool) -> int:
        """Makes the buffers of a size; returns the number of wrong elements of one run."""
        del size_bytes
        s, comm = self._settings, self._comm
        dtype = np.dtype(DTYPES[s.dtype][1])
        op: Any = "product" if s.op == "prod" else s.op
        given = operations.contribution(s.operation, comm.rank, comm.size, count, s.op)
        mine = self._new(given.size, dtype)
        mine[:] = given
        out = self._new(operations.num_outputs(s.operation, comm.size) * count, dtype)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        root = s.root
        # As a program would write it, like the MPIs' calls.
        self.call = {
            "barrier": comm.barrier,
            "all_reduce": lambda: comm.all_reduce(mine, op),
            "reduce": lambda: comm.reduce(mine, op, root=root),
            "reduce_scatter": lambda: comm.reduce_scatter(mine, op, out=out),
            "all_gather": lambda: comm.all_gather(mine, out=out),
            "all_to_all": lambda: comm.all_to_all(mine, out=out),
            "broadcast": lambda: comm.broadcast(mine, root=root),
            "gather": lambda: comm.gather(mine, root=root, out=out),
            "scatter": lambda: comm.scatter(mine, out, root=root),
            "sendrecv": lambda: comm.sendrecv(mine, right, out, left),
        }[s.operation]
        later: Any = {"async_op": True}
        self._start = {
            "barrier": lambda: [comm.barrier(**later)],
            "all_reduce": lambda: [comm.all_reduce(mine, op, **later)],
            "reduce": lambda: [comm.reduce(mine, op, root=root, **later)],
            "reduce_scatter": lambda: [comm.reduce_scatter(mine, op, out=out, **later)],
            "all_gather": lambda: [comm.all_gather(mine, out=out, **later)],
            "all_to_all": lambda: [comm.all_to_all(mine, out=out, **later)],
            "broadcast": lambda: [comm.broadcast(mine, root=root, **later)],
            "gather": lambda: [comm.gather(mine, root=root, out=out, **later)],
            "scatter": lambda: [comm.scatter(mine, out, root=root, **later)],
            "sendrecv": lambda: [comm.recv(out, left, **later), comm.send(mine, right, **later)],
        }[s.operation]
        if not is_checked or s.operation == "barrier":
            return 0
        self.call()
        got = mine if s.operation in ("all_reduce", "reduce", "broadcast") else out
        want = operations.expected(s.operation, comm.rank, comm.size, count, s.op, s.root)
        wrong = operations.count_wrong(got, want)
        mine[:] = 0
        return wrong

    def _new(self, count: int, dtype: Any) -> Any:
        if self._is_shared:
            return pycomm.shared_empty(count, dtype)
        return operations.new_array(count, dtype, self._settings.pages)

    def call_many(self, times: int) -> None:
        """Issues the operation `times` times, then waits for all."""
        for works in [self._start() for _ in range(times)]:
            for work in works:
                work.wait()

    def barrier(self) -> None:
        """Lines the ranks up."""
        self._comm.barrier()


def open_torch(
    settings: Settings, backend: str, rank: int, world_size: int, init_method: str
) -> TorchContestant:
    """The default group on `backend`, in this process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == FAKE:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(FAKE, rank=rank, world_size=world_size, store=FakeStore())
        return TorchContestant(settings, dist.group.WORLD)
    dist.init_process_group(
        "pycomm" if backend == SHARED else backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=settings.timeout_s),
    )
    return TorchContestant(settings, dist.group.WORLD, is_shared=backend == SHARED)


def open_numpy(
    settings: Settings, name: str, rank: int, world_size: int, rendezvous: str
) -> NumpyContestant:
    """A communicator, in this process."""
    from pycomm.communicator import Communicator

    comm = Communicator(rank, world_size, rendezvous=rendezvous, timeout=settings.timeout_s)
    return NumpyContestant(settings, comm, is_shared=name == SHARED)

"""Collectives among processes, without torch.

    import numpy as np
    import pycomm

    with pycomm.Communicator() as comm:        # under `pycomm run --np 4 -- python this.py`
        x = np.full(1000, comm.rank, dtype=np.float32)
        comm.all_reduce(x)                     # in place
        parts = comm.all_gather(x)             # shape (comm.size, 1000)

Arrays are NumPy's, or anything with the buffer protocol, DLPack or the array interface: torch
tensors, CuPy arrays (which are staged through the host), memoryviews. What is contiguous is worked
on where it lies.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Unpack

import numpy as np

from pycomm import _core
from pycomm.arrays import Flat, check_divides, new_like
from pycomm.rendezvous import Place, Store, find_place, open_store
from pycomm.work import SOURCE, Call, Work

ReduceOp = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
_REDUCE_OPS = _core.REDUCE_OPS
_ALL_GATHER = _core.OP_KINDS["all_gather"]
_ALL_REDUCE = _core.OP_KINDS["all_reduce"]
_ALL_TO_ALL = _core.OP_KINDS["all_to_all"]
_ALL_TO_ALL_UNEVEN = _core.OP_KINDS["all_to_all_uneven"]
_BARRIER = _core.OP_KINDS["barrier"]
_BROADCAST = _core.OP_KINDS["broadcast"]
_GATHER = _core.OP_KINDS["gather"]
_RECV = _core.OP_KINDS["recv"]
_REDUCE = _core.OP_KINDS["reduce"]
_REDUCE_SCATTER = _core.OP_KINDS["reduce_scatter"]
_SCATTER = _core.OP_KINDS["scatter"]
_SEND = _core.OP_KINDS["send"]
# How often this process has met others under (rendezvous, name).
_names_met: dict[tuple[str, str], int] = {}


class Communicator:
    """A group of processes. All methods but send and recv are collective: every rank calls the
    same ones in the same order; `Call` is what each takes besides. Errors name the rank at fault
    (pycomm.errors); after one that ends the group, make a new one.

    Args:
        rank: of this process; None: from the launcher's environment.
        size: number of processes; None likewise.
        rendezvous: "tcp://HOST:PORT", where rank 0 listens, or "file:///FOLDER" that all see.
        name: for messages; groups with different names may meet at one rendezvous.
        timeout: seconds for one operation, and for coming together.
        settings: by the names of the environment without PYCOMM_, for example
            {"TRANSPORT": "tcp"}; they count for more than the environment (`pycomm doctor`).
    """

    def __init__(
        self,
        rank: int | None = None,
        size: int | None = None,
        *,
        rendezvous: str | None = None,
        name: str = "default",
        timeout: float | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        place = find_place(rank, size, rendezvous)
        values = {f"PYCOMM_{key}": str(value) for key, value in (settings or {}).items()}
        if timeout is not None:
            values["PYCOMM_TIMEOUT_SEC"] = str(max(int(timeout), 1))
        # A name is met under once: the next communicator of this name, on every rank, is another.
        times = _names_met.get((place.url, name), 0) + 1
        _names_met[place.url, name] = times
        store = open_store(place, timeout or 1800.0)
        unique = name if times == 1 else f"{name}#{times}"
        self._join(place, store, unique, values, list(range(place.size)))

    def _join(
        self, place: Place, store: Store, name: str, values: dict[str, str], job_ranks: list[int]
    ) -> None:
        self.rank, self.size, self.name = place.rank, place.size, name
        self._store, self._values, self._job_ranks = store, values, job_ranks
        self._num_splits = 0
        self._group = _core.Group(store, place.rank, place.size, name, values, job_ranks)
        self._run_thin, self._exchange_thin = self._group.thin_entries()

    # ------------------------------------------------------------ reductions

    def all_reduce(
        self, array: Any, op: ReduceOp = "sum", *, out: Any = None, **call: Unpack[Call]
    ) -> Any:
        """Reduces over ranks, in place unless `out` is given; every rank has the result, with the
        same bits. 16-bit floats are added in float32."""
        return self._run(_ALL_REDUCE, array, array if out is None else out, call, op)

    def reduce(
        self,
        array: Any,
        op: ReduceOp = "sum",
        *,
        root: int = 0,
        out: Any = None,
        **call: Unpack[Call],
    ) -> Any:
        """Like all_reduce, for `root` only, in place there unless `out` is given."""
        target = (array if out is None else out) if self.rank == root else None
        return self._run(_REDUCE, array, target, call, op, root)

    def reduce_scatter(
        self, array: Any, op: ReduceOp = "sum", *, out: Any = None, **call: Unpack[Call]
    ) -> Any:
        """Reduces, and gives rank r the r-th of `size` equal parts along the first axis."""
        out = self._new_part(array, "reduce_scatter") if out is None else out
        return self._run(_REDUCE_SCATTER, array, out, call, op)

    # ------------------------------------------------------------ moves

    def broadcast(self, array: Any, *, root: int = 0, **call: Unpack[Call]) -> Any:
        """Overwrites `array` with the root's."""
        return self._run(_BROADCAST, array, array, call, "sum", root)

    def all_gather(self, array: Any, *, out: Any = None, **call: Unpack[Call]) -> Any:
        """Everyone's arrays, stacked along a new first axis, on every rank."""
        out = self._new_stack(array, "all_gather") if out is None else out
        return self._run(_ALL_GATHER, array, out, call)

    def gather(self, array: Any, *, root: int = 0, out: Any = None, **call: Unpack[Call]) -> Any:
        """Like all_gather, on `root` only; elsewhere None."""
        if self.rank != root:
            out = None
        elif out is None:
            out = self._new_stack(array, "gather")
        return self._run(_GATHER, array, out, call, "sum", root)

    def scatter(self, array: Any, out: Any, *, root: int = 0, **call: Unpack[Call]) -> Any:
        """Gives rank r the r-th of `size` equal parts of the root's `array` (elsewhere None)."""
        source = array if self.rank == root else None
        return self._run(_SCATTER, source, out, call, "sum", root)

    def all_to_all(
        self,
        array: Any,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        out: Any = None,
        **call: Unpack[Call],
    ) -> Any:
        """Sends the r-th part of `array` along its first axis to rank r, and returns what they
        sent. Parts are equal unless both counts (rows for, and from, each rank) are given."""
        if (send_counts is None) != (recv_counts is None):
            raise ValueError("pycomm: all_to_all needs both send_counts and recv_counts, or none")
        if send_counts is None or recv_counts is None:
            check_divides(array, self.size, "all_to_all")
            out = new_like(array, np.shape(array), "all_to_all") if out is None else out
            return self._run(_ALL_TO_ALL, array, out, call)
        row = np.shape(array)[1:]
        if out is None:
            out = new_like(array, (sum(recv_counts), *row), "all_to_all")
        return self._run_any(
            _ALL_TO_ALL_UNEVEN,
            array,
            out,
            call,
            send_counts=list(send_counts),
            recv_counts=list(recv_counts),
            row_elements=int(np.prod(row, dtype=np.int64)),
        )

    def barrier(self, **call: Unpack[Call]) -> Any:
        """Returns when every rank has called it."""
        return self._run(_BARRIER, None, None, call)

    # ------------------------------------------------------------ between two ranks

    def send(self, array: Any, to: int, *, tag: int = 0, **call: Unpack[Call]) -> Any:
        """Sends to one rank; messages of a pair and tag arrive in the order of the calls."""
        return self._run_any(_SEND, array, None, call, root=to, tag=tag)

    def recv(
        self, array: Any, source: int | None = None, *, tag: int = 0, **call: Unpack[Call]
    ) -> Any:
        """Receives into `array` from `source`, or from whoever sends first (None). Returns the
        rank that sent."""
        peer = _core.ANY_SOURCE if source is None else source
        later: Call = {**call, "async_op": True}
        work = self._run_any(_RECV, None, array, later, root=peer, tag=tag, result=SOURCE)
        return work if call.get("async_op") else work.wait()

    def sendrecv(
        self,
        array: Any,
        to: int,
        out: Any,
        source: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """Sends `array` to one rank and receives `out` from `source` (None: from the same), at the
        same time. Returns `out`."""
        source = to if source is None else source
        if timeout is None and self._exchange_thin(array, to, out, source, tag):
            return out
        receiving = self.recv(out, source, tag=tag, timeout=timeout, async_op=True)
        sending = self.send(array, to, tag=tag, timeout=timeout, async_op=True)
        receiving.wait()
        sending.wait()
        return out

    # ------------------------------------------------------------ groups

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """New groups of the ranks with equal `color`, ordered by `key`, then rank; collective.
        None for a rank whose color is None."""
        mine = np.array([-1 if color is None else color, key, color is not None], dtype=np.int64)
        places = self.all_gather(mine)
        self._num_splits += 1
        if color is None:
            return None
        members = [r for r in range(self.size) if places[r][2] and places[r][0] == color]
        members.sort(key=lambda r: (int(places[r][1]), r))
        child = Communicator.__new__(Communicator)
        child._join(
            Place(members.index(self.rank), len(members), ""),
            self._store,
            f"{self.name}/split{self._num_splits}/{color}",
            self._values,
            [self._job_ranks[r] for r in members],
        )
        return child

    def set_timeout(self, seconds: float) -> None:
        """Of later operations that name none."""
        self._group.set_timeout_ms(int(seconds * 1000))

    def abort(self, reason: str = "aborted by this process") -> None:
        """Ends every pending and later operation of the group, here and on its other ranks."""
        self._group.abort(reason)

    def close(self) -> None:
        """Leaves the group. Ranks that still need this one get an error; others go on."""
        self._group.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ what happened

    def peer_stats(self) -> list[dict[str, Any]]:
        """For each other rank: transport, bytes sent, received, copied on the way, and direct.

        Over QUIC `paths` (docs/wan.md), over RDMA `rdma` (docs/rdma.md) says more."""
        return self._group.peer_stats()

    def flight_records(self) -> list[dict[str, Any]]:
        """The last operations of the group, oldest first."""
        return self._group.flight_records()

    def dump_flight_records(self, folder: str) -> str:
        """Writes them in torch's flight recorder format, and returns the file's path."""
        return self._group.dump_flight_records(folder)

    # ------------------------------------------------------------ arrays

    def _new_stack(self, array: Any, what: str) -> Any:
        return new_like(array, (self.size, *np.shape(array)), what)

    def _new_part(self, array: Any, what: str) -> Any:
        rows = check_divides(array, self.size, what)
        return new_like(array, (rows // self.size, *np.shape(array)[1:]), what)

    def _run(
        self, kind: int, array: Any, out: Any, call: Call, op: ReduceOp = "sum", root: int = 0
    ) -> Any:
        code = _REDUCE_OPS.get(op)
        if code is None:
            raise ValueError(f"pycomm: op '{op}' is none of {', '.join(_REDUCE_OPS)}")
        is_plain = not call or (call.get("timeout") is None and not call.get("async_op"))
        if is_plain and self._run_thin(kind, array, out, code, root):
            return out
        return self._run_any(kind, array, out, call, op=code, root=root)

    def _run_any(
        self, kind: int, array: Any, out: Any, call: Call, *, result: Any = None, **more: Any
    ) -> Any:
        flat_out = Flat(out, is_output=True)
        flat_in = flat_out if array is out else Flat(array, is_output=False)
        timeout, is_async = call.get("timeout"), call.get("async_op", False)
        returned = (self._group.start if is_async else self._group.run)(
            kind,
            flat_in.memory,
            flat_out.memory,
            timeout_ms=-1 if timeout is None else int(timeout * 1000),
            **more,
        )
        result = out if result is None else result
        if is_async:
            assert returned is not None  # start() returns a handle, run() does not
            return Work(returned, result, flat_out.finish)
        flat_out.finish()
        return result


# A script that ends without closing its groups leaves with a goodbye all the same.
atexit.register(_core.shutdown_process)

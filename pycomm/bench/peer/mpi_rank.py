"""One rank of an MPI gang. mpirun starts this file in an environment that has mpi4py and NumPy."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import operations
import serve
from mpi4py import MPI

_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class MpiContestant:
    """The operations by mpi4py's calls on buffers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._world = MPI.COMM_WORLD
        self._settings = settings
        self.call = self._world.Barrier

    def prepare(self, size_bytes: int, count: int, is_checked: bool) -> int:
        """Makes the buffers of a size; returns the number of wrong elements of one run."""
        del size_bytes
        what, root = self._settings["operation"], self._settings["root"]
        dtype, op = np.dtype(self._settings["dtype"]), self._settings["op"]
        world, rank, size = self._world, self._world.rank, self._world.size
        if what == "barrier":
            self.call = world.Barrier
            return 0
        given = operations.contribution(what, rank, size, count, op).astype(dtype)
        pages = self._settings["pages"]
        mine = operations.new_array(given.size, dtype, pages)
        mine[:] = given
        out = operations.new_array(operations.num_outputs(what, size) * count, dtype, pages)
        in_place, reduce_op = MPI.IN_PLACE, _OPS[op]
        right, left = (rank + 1) % size, (rank - 1) % size
        at_root = rank == root
        self.call = {
            "all_reduce": lambda: world.Allreduce(in_place, mine, reduce_op),
            "reduce": lambda: world.Reduce(in_place if at_root else mine, mine, reduce_op, root),
            "reduce_scatter": lambda: world.Reduce_scatter_block(mine, out, reduce_op),
            "all_gather": lambda: world.Allgather(mine, out),
            "all_to_all": lambda: world.Alltoall(mine, out),
            "broadcast": lambda: world.Bcast(mine, root),
            "gather": lambda: world.Gather(mine, out if at_root else None, root),
            "scatter": lambda: world.Scatter(mine if at_root else None, out, root),
            "sendrecv": lambda: world.Sendrecv(mine, right, 0, out, left, 0),
        }[what]
        if not is_checked:
            return 0
        self.call()
        got = mine if what in ("all_reduce", "reduce", "broadcast") else out
        want = operations.expected(what, rank, size, count, op, root)
        wrong: int = operations.count_wrong(got, want)
        mine[:] = 0
        return wrong

    def call_many(self, times: int) -> None:
        """One after the other: mpi4py's blocking calls are what people use."""
        for _ in range(times):
            self.call()

    def barrier(self) -> None:
        """Lines the ranks up."""
        self._world.Barrier()


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    this_rank = MPI.COMM_WORLD.rank
    if chosen["pin"]:
        serve.pin_to_cpu(this_rank)
    serve.serve(MpiContestant(chosen), this_rank, chosen["address"])

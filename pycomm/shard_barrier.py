"""A barrier for each shard of a gradient.

    barrier = pycomm.ShardBarrier(comm, num_shards=32)     # collective
    barrier.arrive(7)                                      # my part of shard 7 is ready
    if barrier.is_complete(7): ...                         # so is everyone's
    barrier.wait(7)

Ranks arrive at shards in any order. Counters go up for ever, so a barrier serves every step without
a reset. Over RDMA an arrival is one atomic at each peer, done by its NIC; among ranks that share
memory it is one store.
"""

from __future__ import annotations

from pycomm.communicator import Communicator


class ShardBarrier:
    """Collective to make: every rank with the same number of shards, in the same order as other
    calls on the group.

    Args:
        comm: the group.
        num_shards: 1 to 65536; each takes 64 bytes for this rank and for every peer.

    Errors: InvalidUsageError (ranks ask for different numbers), SystemFailureError.
    """

    def __init__(self, comm: Communicator, num_shards: int) -> None:
        self._barrier = comm._group.create_shard_barrier(num_shards)

    @property
    def num_shards(self) -> int:
        return self._barrier.num_shards

    def arrive(self, shard: int) -> None:
        """This rank's part of the shard is ready, once more. Does not wait.

        Errors: InvalidUsageError (no such shard), or what ended the group."""
        self._barrier.arrive(shard)

    def is_complete(self, shard: int) -> bool:
        """Whether every rank has arrived at the shard as often as this one."""
        return self._barrier.is_complete(shard)

    def wait(self, shard: int, timeout: float | None = None) -> None:
        """Until `is_complete(shard)`.

        Args:
            timeout: seconds; None: the group's.

        Errors: OperationTimeoutError naming the ranks that are late, PeerLostError."""
        self._barrier.wait(shard, -1 if timeout is None else int(timeout * 1000))

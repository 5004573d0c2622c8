"""pycomm.ShardBarrier on the NIC's atomics."""

from __future__ import annotations

import time
from pathlib import Path

import pycomm
from tests.rdma.ranks import Ranks, packets, run, sh

SHARDS, STEPS = 32, 10


def _steps(comm: pycomm.Communicator, barrier: pycomm.ShardBarrier, steps: int) -> None:
    for _ in range(steps):
        for shard in range(SHARDS):
            barrier.arrive(shard)
        for shard in reversed(range(SHARDS)):
            barrier.wait(shard)


def test_an_arrival_is_one_atomic_each_way() -> None:
    def body(comm: pycomm.Communicator) -> int:
        barrier = pycomm.ShardBarrier(comm, SHARDS)
        before = comm.peer_stats()[0]["rdma"]["atomics"]
        _steps(comm, barrier, STEPS)
        return int(comm.peer_stats()[0]["rdma"]["atomics"] - before)

    assert run(body) == {0: STEPS * SHARDS, 1: STEPS * SHARDS}


def test_three_ranks_count_each_other() -> None:
    def body(comm: pycomm.Communicator) -> int:
        _steps(comm, pycomm.ShardBarrier(comm, SHARDS), 3)
        return sum(row["rdma"]["atomics"] for row in comm.peer_stats())

    assert set(run(body, 3).values()) == {2 * 3 * SHARDS}


def test_a_path_that_breaks_under_arrivals_loses_and_doubles_none(tmp_path: Path) -> None:
    """A counter that was added to twice would let a later step through too early; one that was not
    added to would hold it for ever."""

    def rounds(comm: pycomm.Communicator) -> int:
        barrier = pycomm.ShardBarrier(comm, SHARDS)
        _steps(comm, barrier, 2)
        (tmp_path / f"ready{comm.rank}").touch()
        for step in range(400):
            for shard in range(SHARDS):
                barrier.arrive(shard)
            for shard in range(SHARDS):
                barrier.wait(shard)
            if step % 20 == 0:
                comm.barrier()
        # Nobody is ahead: with one arrival of one rank alone nothing is complete.
        comm.barrier()
        if comm.rank == 0:
            for shard in range(SHARDS):
                barrier.arrive(shard)
            time.sleep(0.5)
            assert not any(barrier.is_complete(shard) for shard in range(SHARDS))
        comm.barrier()
        if comm.rank == 1:
            for shard in range(SHARDS):
                barrier.arrive(shard)
        for shard in range(SHARDS):
            barrier.wait(shard)
        return int(comm.peer_stats()[0]["rdma"]["path_resets"])

    with Ranks(rounds) as ranks:
        while not (tmp_path / "ready1").exists():
            time.sleep(0.01)
        other = packets("vc")
        sh("ip link set va down")
        try:
            results = ranks.results(within_s=90)
        finally:
            sh("ip link set va up")
    for resets in results.values():
        assert not isinstance(resets, BaseException), resets
        assert resets > 0
    assert packets("vc") > other

"""pycomm.ShardBarrier: shards in any order, steps without a reset, errors that name who is late."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

import pycomm
from pycomm import errors
from tests.python.test_communicator import run_ranks
from tests.ranks import certificates

SHARDS = 16


def settings(transport: str) -> dict[str, str]:
    certs = {"CERTS": str(certificates())} if transport == "quic" else {}
    return {"TRANSPORT": transport} | certs


@pytest.mark.parametrize("transport", ["shm", "tcp", "quic"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_are_complete_when_all_have_arrived_and_not_before(
    size: int, transport: str, tmp_path: Path
) -> None:
    """Each rank notes its arrivals in a file of its own before it arrives, so that whoever sees a
    shard complete can hold that against what everyone had noted."""

    def body(comm: pycomm.Communicator) -> int:
        barrier = pycomm.ShardBarrier(comm, SHARDS)
        order = random.Random(comm.rank)
        steps = 40
        notes = [tmp_path / f"notes{rank}" for rank in range(size)]
        mine = notes[comm.rank].open("ab", buffering=0)
        comm.barrier()
        early = 0
        for step in range(steps):
            shards = order.sample(range(SHARDS), SHARDS)
            for shard in shards:
                mine.write(bytes([shard]))
                barrier.arrive(shard)
                early += barrier.is_complete(shard)
            for shard in order.sample(range(SHARDS), SHARDS):
                barrier.wait(shard)
                assert all(n.read_bytes().count(shard) > step for n in notes), (step, shard)
        return early

    results = run_ranks(body, size, tmp_path, settings=settings(transport))
    assert all(isinstance(early, int) for early in results), results
    if size == 1:
        assert results == [40 * SHARDS]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_is_late_is_named_and_may_still_come(transport: str, tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        barrier = pycomm.ShardBarrier(comm, 4)
        if comm.rank == 2:
            time.sleep(1)
            barrier.arrive(3)
            barrier.wait(3)
            return "late"
        barrier.arrive(3)
        assert not barrier.is_complete(3)
        with pytest.raises(
            errors.OperationTimeoutError, match=r"shard 3 .* rank 2 did not"
        ) as late:
            barrier.wait(3, timeout=0.2)
        assert late.value.rank == 2
        barrier.wait(3)
        return "in time"

    assert run_ranks(body, 3, tmp_path, settings=settings(transport)) == [
        "in time",
        "in time",
        "late",
    ]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_rank_ends_the_wait(transport: str, tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> float:
        barrier = pycomm.ShardBarrier(comm, 4)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier.arrive(0)
        start = time.monotonic()
        with pytest.raises(errors.PeerLostError, match="rank 1"):
            barrier.wait(0)
        with pytest.raises(errors.Error):
            barrier.arrive(1)
        return time.monotonic() - start

    results = run_ranks(body, 2, tmp_path, settings=settings(transport))
    assert isinstance(results[0], float) and results[0] < 5, results


def test_ranks_must_agree_on_the_number_of_shards(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        with pytest.raises(errors.InvalidUsageError) as refused:
            pycomm.ShardBarrier(comm, 4 + comm.rank)
        barrier = pycomm.ShardBarrier(comm, 4)
        for shard in (-1, 4):
            with pytest.raises(errors.InvalidUsageError, match="of a barrier of 4"):
                barrier.arrive(shard)
            with pytest.raises(errors.InvalidUsageError, match="of a barrier of 4"):
                barrier.wait(shard)
        barrier.arrive(0)
        barrier.wait(0)
        return str(refused.value)

    results = run_ranks(body, 2, tmp_path)
    assert all(" 5" in text and " 4" in text for text in results), results


def test_a_barrier_outlives_its_group_without_harm(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        barrier = pycomm.ShardBarrier(comm, 4)
        barrier.arrive(1)
        barrier.wait(1)
        comm.barrier()
        comm.close()
        with pytest.raises(errors.Error) as ended:
            barrier.arrive(1)
        return type(ended.value).__name__

    for transport in ("shm", "tcp"):
        results = run_ranks(body, 2, tmp_path / transport, settings=settings(transport))
        assert results == ["AbortedError"] * 2

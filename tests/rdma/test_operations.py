"""Collectives over the kernel's verbs: right results, and bytes that nobody copied."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import errors
from tests.rdma.ranks import devices, packets, run

ROOT = Path(__file__).parents[2]
BINARIES = ROOT / "build/release/tests/cpp"


@pytest.mark.parametrize("binary", ["transport_conformance_test", "rdma_test"])
def test_the_core_holds_the_contract_on_real_devices(binary: str) -> None:
    env = os.environ | {"TEST_IB_DEVICES": "rxe0,rxe2;rxe1,rxe3"}
    pattern = "*verbs*" if binary == "transport_conformance_test" else "*Freed*"
    done = subprocess.run(
        [BINARIES / binary, f"--gtest_filter={pattern}", "--gtest_brief=1"],
        env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "PASSED" in done.stdout and " 0 tests" not in done.stdout


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_operation(world: int) -> None:
    def body(comm: pycomm.Communicator) -> set[str]:
        rank = comm.rank
        rng = np.random.default_rng(7)
        for count in (1, 700, 300_000):
            parts = rng.standard_normal((world, count)).astype(np.float32)
            mine = parts[rank].copy()
            comm.all_reduce(mine)
            np.testing.assert_allclose(mine, parts.astype(np.float64).sum(0), rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(comm.all_gather(parts[rank]), parts)
            got = parts[1].copy() if rank == 1 else np.zeros_like(parts[1])
            comm.broadcast(got, root=1)
            np.testing.assert_array_equal(got, parts[1])
            whole = np.tile(parts[rank], world)
            share = comm.reduce_scatter(whole)
            np.testing.assert_allclose(share, parts.astype(np.float64).sum(0), rtol=1e-4, atol=1e-4)
            sent = np.concatenate([parts[rank] + peer for peer in range(world)])
            np.testing.assert_allclose(
                comm.all_to_all(sent).reshape(world, count), parts + rank, rtol=1e-6
            )
            comm.barrier()
            right, left = (rank + 1) % world, (rank - 1) % world
            pending = comm.send(parts[rank], right, async_op=True)
            got = np.empty_like(parts[left])
            assert comm.recv(got, left) == left
            np.testing.assert_array_equal(got, parts[left])
            pending.wait()
        return {row["transport"] for row in comm.peer_stats()}

    assert set().union(*run(body, world).values()) == {"rdma"}


def test_a_large_all_reduce_copies_nothing() -> None:
    def body(comm: pycomm.Communicator) -> dict[str, Any]:
        data = np.ones(4 << 20, dtype=np.float32)
        before = comm.peer_stats()[0]
        comm.all_reduce(data)
        after = comm.peer_stats()[0]
        assert (data == 2).all()
        return {k: after[k] - before[k] for k in ("bytes_staged", "bytes_direct", "bytes_sent")}

    received = packets("va"), packets("vc")
    for moved in run(body).values():
        assert moved["bytes_staged"] == 0
        assert moved["bytes_sent"] == 16 << 20  # half of it reduced there, half of the result back
        assert moved["bytes_direct"] == 2 * moved["bytes_sent"]
    # Both links carried their part.
    assert min(packets("va") - received[0], packets("vc") - received[1]) > 2_000


def test_registrations_are_kept_and_freed_memory_is_seen() -> None:
    def body(comm: pycomm.Communicator) -> tuple[int, int, int]:
        kept = np.empty(1 << 20, dtype=np.float32)
        rdma = comm.peer_stats()[0]["rdma"]
        for step in range(5):
            kept[:] = step + comm.rank
            comm.all_reduce(kept)
            assert (kept == 2 * step + 1).all()
            if step == 0:
                first = comm.peer_stats()[0]["rdma"]["registrations"] - rdma["registrations"]
        again = comm.peer_stats()[0]["rdma"]["registrations"] - rdma["registrations"] - first
        for step in range(6):  # the same addresses, other pages
            region = mmap.mmap(-1, 1 << 20)
            data = np.frombuffer(region, dtype=np.float32)
            data[:] = step + comm.rank
            comm.all_reduce(data)
            assert (data == 2 * step + 1).all()
            del data
            region.close()
        return first, again, comm.peer_stats()[0]["rdma"]["cache_hits"]

    for first, again, hits in run(body).values():
        # Scratch of the ring comes from a pool, which may still grow a little.
        assert first > 0 and again <= first // 4 and hits > 4 * again


def test_little_memory_may_be_locked() -> None:
    """8 MB, as distributions have it: what does not fit is copied, and arrives."""
    program = """
import os, sys, numpy as np, pycomm
rank = int(sys.argv[1])
with pycomm.Communicator(rank=rank, size=2, rendezvous="file://" + sys.argv[2]) as comm:
    data = np.arange(8 << 20, dtype=np.float32) + rank
    comm.all_reduce(data)
    assert (data == 2 * np.arange(8 << 20, dtype=np.float32) + 1).all()
    row = comm.peer_stats()[0]
    print(row["transport"], row["rdma"]["bytes_registered"], row["bytes_direct"])
"""
    folder = f"/tmp/memlock-{os.getpid()}"
    os.makedirs(folder)
    ranks = [
        subprocess.Popen(
            ["setpriv", "--bounding-set=-ipc_lock,-sys_admin", "--inh-caps=-ipc_lock,-sys_admin",
             "sh", "-c", 'ulimit -l 8192; exec "$@"', "-",
             sys.executable, "-c", program, str(rank), folder],
            env=os.environ
            | {"PYCOMM_TRANSPORT": "rdma", "PYCOMM_IB_HCA": devices(rank, 1)}
            | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, _ = rank.communicate(timeout=90)
        assert rank.returncode == 0
        transport, registered, direct = out.split()
        assert transport == "rdma" and int(registered) <= 8 << 20 and int(direct) > 0


def test_a_forked_child_leaves_the_parents_group_alone() -> None:
    def body(comm: pycomm.Communicator) -> None:
        data = np.full(500_000, 1.0, dtype=np.float32)
        comm.all_reduce(data)
        child = os.fork()
        if child == 0:
            data[:] = 9  # its own pages
            refused = False
            try:
                comm.all_reduce(data)
            except errors.Error:
                refused = True
            os._exit(0 if refused else 1)
        for _ in range(5):
            data[:] = 1
            comm.all_reduce(data)
            assert (data == 2).all()
        assert os.waitpid(child, 0)[1] == 0
        comm.all_reduce(data)
        assert (data == 4).all()

    run(body)

"""What ranks of one host have besides: shared arrays, both ways at once, the thin way, tuning."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import pycomm
from tests.python.test_communicator import run_ranks


def test_sendrecv_goes_both_ways_at_once(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for count in (1, 1_000, 3_000_000):
            mine = np.full(count, comm.rank, np.float32)
            out = comm.sendrecv(mine, right, np.zeros_like(mine), left, tag=3)
            assert (out == left).all()
        strided = np.zeros((40, 3), np.float64)[:, 1]
        comm.sendrecv(np.full(40, 7.0 + comm.rank), right, strided, left, timeout=20)
        assert (strided == 7.0 + left).all()

    assert run_ranks(body, 3, tmp_path) == [None] * 3


def test_sendrecv_with_a_killed_peer_names_it(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.sendrecv(np.zeros(500_000), 1, np.zeros(500_000))

    results = run_ranks(body, 2, tmp_path)
    assert "rank 1" in str(results[0]) and "PeerLostError" in str(results[0])


def test_arrays_in_shared_memory_are_not_copied(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> None:
        x = pycomm.shared_empty((300, 1_000), np.float32)
        assert x.shape == (300, 1_000) and not x.any()
        x += comm.rank + 1
        comm.all_reduce(x)
        assert (x == 3).all()
        assert comm.peer_stats()[0]["bytes_staged"] == 0
        assert comm.peer_stats()[0]["bytes_direct"] > 0

    assert run_ranks(body, 2, tmp_path) == [None, None]


def test_a_stopped_peer_writes_into_no_array_that_came_later(tmp_path: Path) -> None:
    count = 16 << 20

    def body(comm: pycomm.Communicator) -> bool:
        x = pycomm.shared_empty(count)
        if comm.rank == 1:
            with pytest.raises(pycomm.Error):
                while True:
                    comm.all_reduce(x)
            return True
        with pytest.raises(pycomm.Error):
            while True:
                comm.all_reduce(x, timeout=0.4)
        del x
        later = pycomm.shared_empty(count)
        (tmp_path / "go-on").touch()
        time.sleep(0.3)
        return not later.any()

    def meanwhile(pids: list[int]) -> None:
        time.sleep(0.6)
        os.kill(pids[1], signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while not (tmp_path / "go-on").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(pids[1], signal.SIGCONT)

    assert run_ranks(body, 2, tmp_path, meanwhile) == [True, True]


def test_what_the_thin_way_cannot_take_goes_the_other(tmp_path: Path) -> None:
    """Strided, read-only, of other libraries: the same results, the same errors."""

    def body(comm: pycomm.Communicator) -> None:
        whole = np.ones((50, 4))
        comm.all_reduce(whole[:, 2])
        assert (whole[:, 2] == 2).all() and (whole[:, :2] == 1).all()
        fixed = np.ones(5)
        fixed.flags.writeable = False
        with pytest.raises(TypeError, match="cannot be written to"):
            comm.all_reduce(fixed)
        assert (comm.all_gather(fixed) == 1).all()
        with pytest.raises(TypeError, match="Python objects"):
            comm.all_reduce(np.array([None, 1], dtype=object))
        with pytest.raises(ValueError, match="is none of"):
            comm.all_reduce(np.ones(3), "mean")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="do not fit"):
            comm.all_gather(np.ones(3), out=np.ones(7))
        comm.barrier()

    assert run_ranks(body, 2, tmp_path) == [None, None]


@pytest.mark.parametrize("setting", ["0", "1"])
def test_tuning_changes_no_result_and_its_file_is_private(tmp_path: Path, setting: str) -> None:
    learnt = tmp_path / "learnt.txt"

    def body(comm: pycomm.Communicator) -> None:
        for round_ in range(60):
            x = np.full(50_000, comm.rank + round_, np.float32)
            comm.all_reduce(x)
            assert (x == 3 * round_ + 3).all()

    settings = {"TUNE": setting, "TUNE_FILE": str(learnt)}
    assert run_ranks(body, 3, tmp_path, settings=settings) == [None] * 3
    assert learnt.exists() == (setting == "1")
    if learnt.exists():
        assert learnt.stat().st_mode & 0o777 == 0o600
        assert learnt.read_text().startswith("all_reduce ")


@pytest.mark.parametrize("short_ranks", [(0, 1), (1,)])
def test_without_room_for_a_window_operations_go_over_messages(
    tmp_path: Path, short_ranks: tuple[int, ...]
) -> None:
    """A group fits into this limit, and no window: the caller hands over to the engine."""

    def body(comm: pycomm.Communicator) -> int:
        for count in (50_000, 1_000_000):
            x = np.full(count, comm.rank + 1.0, np.float32)
            comm.all_reduce(x)
            assert (x == 3).all()
            assert (comm.all_gather(x) == 3).all()
            moved = comm.all_to_all(np.full(2 * count, comm.rank, np.float32))
            assert moved[0] == 0 and moved[-1] == 1
            x[:] = comm.rank + 1.0
            comm.all_reduce(x, async_op=True).wait()
            assert (x == 3).all()
        return int(comm.peer_stats()[0]["messages_sent"])

    def limit(rank: int) -> None:
        if rank in short_ranks:
            os.environ["PYCOMM_SHM_BYTES_MAX"] = "2500000"

    results = run_ranks(body, 2, tmp_path, before=limit)
    assert all(isinstance(sent, int) and sent > 0 for sent in results), results


def test_a_signal_ends_a_large_operation_that_waits(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> float:
        x = np.ones(2_000_000, np.float32)
        comm.all_reduce(x)
        if comm.rank == 1:
            time.sleep(1.5)
            with pytest.raises(pycomm.Error, match="rank 0"):
                comm.all_reduce(x)
            return 0.0
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(x)
        return time.monotonic() - start

    results = run_ranks(body, 2, tmp_path)
    assert results[1] == 0.0 and 0.2 < float(results[0]) < 1.0, results


def test_a_full_disk_costs_what_was_learnt_and_nothing_else(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as good as full
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for _ in range(30):
            comm.all_reduce(np.ones(50_000, np.float32))

    learnt = tmp_path / "kept" / "learnt.txt"
    learnt.parent.mkdir()
    queued = run_ranks(body, 2, tmp_path, settings={"TUNE_FILE": str(learnt)})
    assert queued == [None, None]
    assert list(learnt.parent.iterdir()) == []

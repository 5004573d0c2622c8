"""pycomm.Communicator: every operation on NumPy and other arrays, groups, failures, no torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import errors

DTYPES = ["f8", "f4", "f2", "i1", "i2", "i4", "i8", "u1", "?", "c8", "c16"]


def run_ranks(
    body: Callable[[pycomm.Communicator], Any],
    size: int,
    tmp_path: Path,
    meanwhile: Callable[[list[int]], None] | None = None,
    before: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Any]:
    """What `body` returned on each rank, or the exception's text; None for one that was killed."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    options.setdefault("rendezvous", f"file://{tmp_path}/meet")

    def entry(rank: int) -> None:
        if before is not None:
            before(rank)
        try:
            with pycomm.Communicator(rank, size, timeout=30, **options) as comm:
                queue.put((rank, body(comm)))
        except BaseException as error:
            queue.put((rank, f"{type(error).__name__}: {error}"))
        queue.close()
        queue.join_thread()

    ranks = [context.Process(target=entry, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    if meanwhile is not None:
        meanwhile([process.pid or 0 for process in ranks])
    results: list[Any] = [None] * size
    deadline = time.monotonic() + 60
    while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
        while not queue.empty():
            rank, value = queue.get()
            results[rank] = value
        time.sleep(0.005)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    while not queue.empty():
        rank, value = queue.get()
        results[rank] = value
    return results


def values(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    generator = np.random.default_rng(rank)
    return generator.integers(0, 3, shape).astype(dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_operation_equals_numpy(size: int, transport: str, tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        r, n = comm.rank, comm.size
        for dtype in DTYPES:
            for rows in (1, 37, 5000):
                one = [values(p, (rows, 2), dtype) for p in range(n)]
                every = [values(10 + p, (n * rows, 2), dtype) for p in range(n)]
                total = np.sum(np.stack(one), axis=0, dtype=one[0].dtype)
                np.testing.assert_array_equal(comm.all_reduce(one[r].copy()), total)
                kept = one[r].copy()
                np.testing.assert_array_equal(comm.all_reduce(kept, out=np.empty_like(kept)), total)
                np.testing.assert_array_equal(kept, one[r])
                root = rows % n
                reduced = comm.reduce(one[r].copy(), root=root)
                assert (reduced is not None) == (r == root)
                if r == root:
                    np.testing.assert_array_equal(reduced, total)
                sums = np.sum(np.stack(every), axis=0, dtype=every[0].dtype)
                np.testing.assert_array_equal(
                    comm.reduce_scatter(every[r]), sums[r * rows : (r + 1) * rows]
                )
                np.testing.assert_array_equal(comm.all_gather(one[r]), np.stack(one))
                gathered = comm.gather(one[r], root=root)
                if r == root:
                    np.testing.assert_array_equal(gathered, np.stack(one))
                out = np.empty_like(one[r])
                comm.scatter(every[root] if r == root else None, out, root=root)
                np.testing.assert_array_equal(out, every[root][r * rows : (r + 1) * rows])
                np.testing.assert_array_equal(comm.broadcast(one[r].copy(), root=root), one[root])
                part = slice(r * rows, (r + 1) * rows)
                np.testing.assert_array_equal(
                    comm.all_to_all(every[r]), np.concatenate([e[part] for e in every])
                )
                comm.barrier()
        return "ok"

    assert run_ranks(body, size, tmp_path, settings={"TRANSPORT": transport}) == ["ok"] * size


def test_uneven_all_to_all_sends_rows(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        r, n = comm.rank, comm.size
        send = [(r + 2 * p) % 3 for p in range(n)]
        recv = [(p + 2 * r) % 3 for p in range(n)]
        mine = np.repeat(np.arange(n) + 100 * r, send)[:, None] * np.ones(4)
        got = comm.all_to_all(mine, send_counts=send, recv_counts=recv)
        expected = np.repeat(r + 100 * np.arange(n), recv)[:, None] * np.ones(4)
        np.testing.assert_array_equal(got, expected)
        with pytest.raises(ValueError, match="add up"):
            comm.all_to_all(mine[1:], send_counts=send, recv_counts=recv)
        return "ok"

    assert run_ranks(body, 4, tmp_path) == ["ok"] * 4


def test_sends_receives_and_async_work(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        r, n = comm.rank, comm.size
        box = np.empty(50_000)
        work = comm.recv(box, (r - 1) % n, tag=3, async_op=True)
        sums = [comm.all_reduce(np.full(10_000, 1.0), async_op=True) for _ in range(20)]
        comm.send(np.full(50_000, float(r)), (r + 1) % n, tag=3)
        assert work.wait() == (r - 1) % n and work.is_done()
        assert (box == (r - 1) % n).all()
        assert all((w.wait() == n).all() for w in sums)
        if r == 0:
            small = np.empty(1)
            assert sorted(comm.recv(small, tag=9) for _ in range(n - 1)) == list(range(1, n))
        else:
            comm.send(np.ones(1), 0, tag=9)
        return "ok"

    assert run_ranks(body, 3, tmp_path) == ["ok"] * 3


class OnDevice:
    """CuPy arrays as seen from outside, but in host memory: get and set show what is staged."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host
        self.__cuda_array_interface__ = {"shape": host.shape, "typestr": host.dtype.str}

    def get(self) -> np.ndarray:
        return self.host.copy()

    def set(self, host: np.ndarray) -> None:
        self.host[...] = host


def test_arrays_of_every_kind_are_taken_as_they_lie(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def body(comm: pycomm.Communicator) -> str:
        n = comm.size
        columns = np.ones((6, 8))[:, ::2]
        comm.all_reduce(columns)
        assert (columns == n).all()
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.ones(5000, dtype=dtype)
            comm.all_reduce(tensor)
            assert (tensor == n).all()
        scalar = np.array(1.5)
        assert comm.all_reduce(scalar) == 1.5 * n
        raw = bytearray(b"\1\2\3")
        comm.all_reduce(raw)
        assert raw == bytes([n, 2 * n, 3 * n])
        device = OnDevice(np.ones(7))
        comm.all_reduce(device)
        assert (device.host == n).all()
        words = np.arange(4, dtype=np.uint32)  # moved, without arithmetic
        assert (comm.all_gather(words) == np.arange(4)).all()
        for wrong, text in (
            (lambda: comm.all_reduce(words), "no reduction"),
            (lambda: comm.all_reduce("text"), "no array"),
            (lambda: comm.all_reduce(b"text"), "written"),
            (lambda: comm.all_reduce(np.ones(3), "mean"), "none of sum"),
            (lambda: comm.all_gather(torch.ones(2)), "out="),
            (lambda: comm.all_gather(np.ones(3), out=np.empty(7)), "do not fit"),
            (lambda: comm.reduce_scatter(np.ones(2 * n + 1)), "divides"),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                wrong()
        return "ok"

    assert run_ranks(body, 2, tmp_path) == ["ok"] * 2


def test_split_makes_groups_by_color_and_key(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        r = comm.rank
        half = comm.split(None if r == 4 else r % 2, key=-r)
        if r == 4:
            assert half is None
            return "ok"
        assert half is not None and (half.rank, half.size) == ([1, 1, 0, 0][r], 2)
        assert half.all_gather(np.array([r])).ravel().tolist() == [r % 2 + 2, r % 2]
        half.close()
        return "ok"

    assert run_ranks(body, 5, tmp_path) == ["ok"] * 5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ranks_meet_over_tcp_in_any_order(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> int:
        child = comm.split(0)
        assert child is not None
        return int(child.all_reduce(np.ones(1))[0])

    assert run_ranks(body, 3, tmp_path, rendezvous=f"tcp://127.0.0.1:{free_port()}") == [3] * 3


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> tuple[int, float]:
        comm.barrier()
        (tmp_path / f"ready{comm.rank}").touch()
        start = time.monotonic()
        try:
            while True:
                comm.all_reduce(np.ones(100_000))
        except errors.PeerLostError as error:
            assert "rank 1" in str(error)
            return error.rank, time.monotonic() - start

    def kill(pids: list[int]) -> None:
        while not all((tmp_path / f"ready{r}").exists() for r in range(3)):
            time.sleep(0.002)
        time.sleep(0.05)
        os.kill(pids[1], signal.SIGKILL)

    results = run_ranks(body, 3, tmp_path, meanwhile=kill)
    assert results[1] is None
    assert all(results[r][0] == 1 and results[r][1] < 1.5 for r in (0, 2)), results


def test_a_timeout_names_ranks_and_leaves_a_flight_record(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        comm.all_reduce(np.ones(3))
        if comm.rank == 0:
            with pytest.raises(errors.OperationTimeoutError, match="ranks 1, 2 until"):
                comm.barrier(timeout=0.3)
            with pytest.raises(errors.Error, match="barrier #2"):
                comm.all_reduce(np.ones(3))
        else:
            time.sleep(1.0)
        return "ok"

    folder = tmp_path / "flight"
    settings = {"FLIGHT_RECORDER": str(folder)}
    assert run_ranks(body, 3, tmp_path, settings=settings) == ["ok"] * 3
    dumps = sorted(path.name for path in folder.glob("group-*/rank_*"))
    assert dumps == ["rank_0", "rank_1", "rank_2"]
    analyser = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.flight_recorder.fr_trace",
            str(next(folder.iterdir())),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    told = analyser.stdout + analyser.stderr
    assert analyser.returncode == 0, told
    assert "barrier" in told and "1, 2" in told, told


def test_settings_count_over_the_environment_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pycomm import _core

    config = tmp_path / "pycomm.conf"
    config.write_text("# a comment\nPYCOMM_TIMEOUT_SEC = 7\nPYCOMM_CHUNK_BYTES=8192\n")
    monkeypatch.setenv("PYCOMM_CONFIG_FILE", str(config))
    monkeypatch.setenv("PYCOMM_CHUNK_BYTES", "16384")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("PYCOMM_TIMOUT_SEC", "5")
    resolved = _core.resolve_settings({"PYCOMM_TRANSPORT": "tcp"})
    found = {row["name"]: (row["value"], row["source"]) for row in resolved["settings"]}
    assert found["PYCOMM_TRANSPORT"] == ("tcp", "argument")
    assert found["PYCOMM_CHUNK_BYTES"] == ("16384", "environment")
    assert found["PYCOMM_TIMEOUT_SEC"] == ("7", str(config))
    assert found["PYCOMM_SOCKET_IFNAME"] == ("lo", "environment, NCCL_SOCKET_IFNAME")
    assert found["PYCOMM_SHM_DISABLE"] == ("0", "default")
    assert resolved["complaint"] == ""
    assert any("PYCOMM_TIMEOUT_SEC?" in warning for warning in resolved["warnings"])
    monkeypatch.setenv("PYCOMM_PORT_RANGE", "many")
    assert "20000-20100" in _core.resolve_settings()["complaint"]


def test_it_works_where_torch_is_absent(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        sys.modules["torch"] = None  # an import of it fails
        import numpy as np, pycomm
        with pycomm.Communicator() as comm:
            assert comm.all_reduce(np.ones(1000))[7] == comm.size
        print("done")
        """
    )
    path = tmp_path / "sums.py"
    path.write_text(script)
    ran = subprocess.run(
        [sys.executable, "-m", "pycomm", "run", "--np", "3", "--", sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0 and ran.stdout.count("done") == 3, ran.stdout + ran.stderr


def test_a_wait_that_ends_early_neither_succeeds_nor_finishes(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        strided = np.ones((100, 100))[:, ::2]
        comm.barrier()
        if comm.rank == 0:
            work = comm.all_reduce(strided, async_op=True)
            for timeout in (0, 0.0005, 0.05):
                with pytest.raises(errors.OperationTimeoutError):
                    work.wait(timeout)
            comm.send(np.ones(1), 1)
        else:
            comm.recv(np.ones(1), 0)
            work = comm.all_reduce(strided, async_op=True)
        work.wait()
        assert (strided == 2).all()
        return "ok"

    assert run_ranks(body, 2, tmp_path) == ["ok"] * 2


def test_what_means_nothing_elsewhere_is_refused() -> None:
    with pycomm.Communicator(0, 1) as comm:
        for array, words in (
            (np.array([{}, []], dtype=object), "Python objects"),
            (np.zeros(3, dtype="V0"), "no size"),
        ):
            with pytest.raises(TypeError, match=words):
                comm.broadcast(array)
        with pytest.raises(ValueError, match="group of one"):
            comm.recv(np.ones(1))
        with pytest.raises(ValueError, match="to itself"):
            comm.all_to_all(np.ones(5), send_counts=[5], recv_counts=[1], out=np.ones(1))


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_groups_of_one_name_one_after_the_other_and_of_two_at_once(
    scheme: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/again" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"

    def body(comm: pycomm.Communicator) -> str:
        for _ in range(3):
            with pycomm.Communicator(comm.rank, comm.size, rendezvous=url, timeout=20) as again:
                assert again.all_reduce(np.ones(1))[0] == comm.size
        with (
            pycomm.Communicator(comm.rank, comm.size, rendezvous=url, name="a", timeout=20) as a,
            pycomm.Communicator(comm.rank, comm.size, rendezvous=url, name="b", timeout=20) as b,
        ):
            assert a.all_reduce(np.ones(1))[0] == b.all_reduce(np.ones(1))[0]
        return "ok"

    assert run_ranks(body, 3, tmp_path) == ["ok"] * 3


def test_threads_may_create_groups_in_any_order(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        failures: list[str] = []

        def create(name: str) -> None:
            try:
                url = f"file://{tmp_path}/threads"
                with pycomm.Communicator(
                    comm.rank, comm.size, rendezvous=url, name=name, timeout=20
                ) as group:
                    group.all_reduce(np.ones(5000))
            except Exception as error:
                failures.append(str(error))

        names = ["x", "y", "z"] if comm.rank == 0 else ["z", "y", "x"]
        threads = []
        for name in names:
            threads.append(threading.Thread(target=create, args=(name,)))
            threads[-1].start()
            time.sleep(0.05)
        while any(thread.is_alive() for thread in threads):
            comm.dump_flight_records(str(tmp_path / f"dumps{comm.rank}"))
        for thread in threads:
            thread.join()
        return "; ".join(failures) or "ok"

    assert run_ranks(body, 3, tmp_path) == ["ok"] * 3


def test_rank_0_that_dies_while_others_meet_it_ends_their_wait(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"

    def body(comm: pycomm.Communicator) -> float:
        if comm.rank == 0:
            from pycomm.rendezvous import TcpStore

            TcpStore("127.0.0.1", int(url.rsplit(":", 1)[1]), serves=True, timeout_s=5)
            comm.recv(np.ones(1))
            time.sleep(0.5)  # by now they have asked it for rank 0's hello
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        pending = comm.send(np.ones(1), 0, async_op=True) if comm.rank == 1 else None
        with pytest.raises((errors.SystemFailureError, errors.OperationTimeoutError), match="rank"):
            pycomm.Communicator(comm.rank, 3, rendezvous=url, timeout=30)
        assert pending is None or pending.is_done()
        return time.monotonic() - start

    results = run_ranks(body, 3, tmp_path)
    assert all(isinstance(results[r], float) and results[r] < 8 for r in (1, 2)), results


def test_a_setting_that_does_not_parse_on_one_rank_ends_it_for_all(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        settings = {"CHUNK_BYTES": "many"} if comm.rank == 1 else {}
        start = time.monotonic()
        try:
            pycomm.Communicator(
                comm.rank, 2, rendezvous=f"file://{tmp_path}/odd", timeout=20, settings=settings
            )
        except errors.Error as error:
            assert time.monotonic() - start < 5
            return str(error)
        return "came together"

    texts = run_ranks(body, 2, tmp_path)
    assert all("PYCOMM_CHUNK_BYTES 'many'" in text for text in texts), texts


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_interrupted_while_ranks_meet_ends_with_all_its_ranks(
    how: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "lonely.py"
    path.write_text(
        "import os, pycomm, pathlib\n"
        f"place = pathlib.Path({str(tmp_path)!r}, 'pid' + os.environ['RANK'])\n"
        "place.write_text(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1': import time; time.sleep(60)\n"
        "pycomm.Communicator(timeout=60)\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "pycomm", "run", "--np", "2", "--", sys.executable, str(path)],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    pids = [tmp_path / f"pid{rank}" for rank in range(2)]
    while not all(pid.exists() and pid.read_text() for pid in pids):
        time.sleep(0.02)
    time.sleep(0.7)
    start = time.monotonic()
    if how == signal.SIGINT:
        os.killpg(job.pid, how)  # as a terminal does
    else:
        os.kill(job.pid, how)
    job.wait(30)
    assert time.monotonic() - start < 8
    assert job.returncode == 128 + how
    for pid in pids:
        assert not Path(f"/proc/{pid.read_text()}").exists()

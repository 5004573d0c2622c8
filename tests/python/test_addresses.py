"""How ranks find each other: interfaces, ports, addresses that lead nowhere, and who says so."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import _core

CLONE_NEWNET = 0x40000000
SECRET = "s" * 32


def meet(
    tmp_path: Path, settings: list[dict[str, str]], *, other_hosts: tuple[int, ...] = ()
) -> list[tuple[str, float]]:
    """For each rank: "ok" or the error's text, and after how many seconds. Ranks in `other_hosts`
    live in a network namespace of their own, which is another host to everyone else."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def entry(rank: int) -> None:
        start = time.monotonic()
        try:
            if rank in other_hosts:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.unshare(CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "unshare")
            with pycomm.Communicator(
                rank,
                len(settings),
                rendezvous=f"file://{tmp_path}/meet",
                timeout=20,
                settings=settings[rank],
            ) as comm:
                comm.all_reduce(np.ones(10_000))
            result = "ok"
        except Exception as error:
            result = str(error)
        queue.put((rank, result, time.monotonic() - start))

    ranks = [context.Process(target=entry, args=(rank,)) for rank in range(len(settings))]
    for process in ranks:
        process.start()
    results: list[Any] = [None] * len(settings)
    for _ in ranks:
        rank, text, seconds = queue.get(timeout=60)
        results[rank] = (text, seconds)
    for process in ranks:
        process.join()
    return results


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")


@needs_root
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1", ["127.0.0.1, a loopback address", "PYCOMM_ADVERTISE_ADDR"]),
        ("10.255.255.1", ["10.255.255.1", "PYCOMM_SOCKET_IFNAME", "PYCOMM_PORT_RANGE"]),
    ],
)
def test_an_address_that_leads_nowhere_is_told_by_all_ranks_at_once(
    address: str, words: list[str], tmp_path: Path
) -> None:
    common = {"SECRET": SECRET, "CONNECT_TIMEOUT_SEC": "1"}
    settings = [{**common, "ADVERTISE_ADDR": address}, common]
    results = meet(tmp_path, settings, other_hosts=(1,))
    for rank, (text, seconds) in enumerate(results):
        assert all(word in text for word in words), f"rank {rank}: {text}"
        assert seconds < 4, text
    assert "connecting to rank 0" in results[1][0]
    assert "rank 1 could not join" in results[0][0]


def test_a_port_range_that_is_taken_is_told_by_all_ranks_at_once(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        tcp = {"TRANSPORT": "tcp"}
        results = meet(tmp_path, [tcp, {**tcp, "PORT_RANGE": f"{port}-{port}"}])
    assert f"PYCOMM_PORT_RANGE {port}-{port}" in results[1][0]
    assert "rank 1 could not join" in results[0][0] and results[0][1] < 4


def test_a_port_of_the_range_is_used(tmp_path: Path) -> None:
    settings = {"TRANSPORT": "tcp", "PORT_RANGE": "23400-23480", "DEBUG": "INFO"}
    assert [text for text, _ in meet(tmp_path, [settings] * 3)] == ["ok"] * 3


@pytest.mark.parametrize("spec", ["lo", "=lo", "^eth,docker"])
def test_interfaces_are_named_as_nccl_does(spec: str, tmp_path: Path) -> None:
    settings = {"TRANSPORT": "tcp", "SOCKET_IFNAME": spec}
    assert [text for text, _ in meet(tmp_path, [settings] * 2)] == ["ok"] * 2


def test_an_interface_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    results = meet(tmp_path, [{"SOCKET_IFNAME": "warp0"}] * 2)
    for text, _ in results:
        assert "'warp0'" in text and "lo (127.0.0.1)" in text


def test_shared_memory_can_be_bounded_or_done_without(tmp_path: Path) -> None:
    assert meet(tmp_path, [{"SHM_DISABLE": "1"}] * 2)[0][0] == "ok"
    # A link of two ranks takes 2 MiB: too little is an error that says what to do.
    results = meet(tmp_path / "small", [{"SHM_BYTES_MAX": str(1 << 20)}] * 2)
    for text, _ in results:
        assert "PYCOMM_SHM_BYTES_MAX=1048576" in text and "PYCOMM_SHM_DISABLE=1" in text, text
    enough = [{"SHM_BYTES_MAX": str(64 << 20)}] * 2
    assert [text for text, _ in meet(tmp_path / "enough", enough)] == ["ok"] * 2


def test_logs_go_to_a_file_by_subsystem(tmp_path: Path) -> None:
    log = tmp_path / "log.%h.%p"
    settings = {"DEBUG": "TRACE", "DEBUG_SUBSYS": "INIT,COLL", "DEBUG_FILE": str(log)}
    assert [text for text, _ in meet(tmp_path, [settings] * 2)] == ["ok"] * 2
    files = list(tmp_path.glob(f"log.{socket.gethostname()}.*"))
    assert len(files) == 2
    for file in files:
        told = file.read_text()
        assert "all_reduce(sum, float64, 10000 elements)" in told
        assert "VERSION pycomm " in told
        assert "shm to rank" in told
        assert "PYCOMM_DEBUG" not in told  # that is ENV


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PYCOMM_TRANSPORT", "smoke", "none of auto, shm, tcp"),
        ("PYCOMM_TIMEOUT_SEC", "soon", "from 1 to"),
        ("PYCOMM_DEBUG", "LOUD", "VERSION, WARN, INFO, TRACE"),
        ("PYCOMM_DEBUG_SUBSYS", "COLLS", "INIT, COLL"),
        ("PYCOMM_SHM_DISABLE", "yes", "neither 0 nor 1"),
        ("PYCOMM_SECRET", "hunter2", "16 bytes"),
        ("PYCOMM_CONFIG_FILE", "/nowhere/at/all", "cannot be read"),
    ],
)
def test_a_value_that_means_nothing_is_refused(name: str, value: str, words: str) -> None:
    complaint = _core.resolve_settings({name: value})["complaint"]
    assert words in complaint
    assert "hunter2" not in complaint  # a secret is not told


def test_the_doctor_tells_what_is_wrong(tmp_path: Path) -> None:
    environment = {**os.environ, "PYCOMM_TRANSPORTS": "tcp", "PYCOMM_SHM_DISABLE": "0"}
    ran = subprocess.run(
        [sys.executable, "-m", "pycomm", "doctor", "-J", str(tmp_path / "doctor.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "shared memory: all_reduce of 8 B" in ran.stdout
    assert "did you mean PYCOMM_TRANSPORT?" in ran.stdout
    assert (tmp_path / "doctor.json").read_text().startswith("[")

"""What breaks on a fabric: paths, peers, packets, and hosts that have no RDMA at all.

Each fault is seen at an interface before anything is concluded from it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import errors
from tests.rdma.ranks import Ranks, packets, run, sh


@pytest.fixture(autouse=True)
def _links_are_whole() -> Iterator[None]:
    yield
    for interface in ("va", "vb", "vc", "vd"):
        sh(f"ip link set {interface} up; tc qdisc del dev {interface} root 2>/dev/null; true")
    deadline = time.monotonic() + 10
    for device in range(4):
        state = Path(f"/sys/class/infiniband/rxe{device}/ports/1/state")
        while "ACTIVE" not in state.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _reduce(comm: pycomm.Communicator, rounds: int, count: int = 500_000) -> None:
    for step in range(rounds):
        data = np.full(count, step + comm.rank, dtype=np.float32)
        comm.all_reduce(data)
        assert (data == 2 * step + 1).all(), step


def _signal(path: Path) -> None:
    path.write_text("x")


def _await(path: Path, within_s: float = 40) -> None:
    deadline = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_a_killed_peer_is_named(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> None:
        _reduce(comm, 2)
        _signal(tmp_path / f"ready{comm.rank}")
        _reduce(comm, 10_000)

    with Ranks(body) as ranks:
        _await(tmp_path / "ready0")
        time.sleep(0.3)
        start = time.monotonic()
        ranks.kill(1)
        error = ranks.results([0])[0]
    assert isinstance(error, errors.PeerLostError) and error.rank == 1, error
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("interface", ["va", "vc"])
def test_a_link_that_goes_down_is_left_and_taken_up_again(tmp_path: Path, interface: str) -> None:
    other = "vc" if interface == "va" else "va"

    def body(comm: pycomm.Communicator) -> list[dict[str, Any]]:
        rows = []
        _reduce(comm, 3)
        _signal(tmp_path / f"ready{comm.rank}")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            _reduce(comm, 1)
            row = comm.peer_stats()[0]["rdma"]
            is_down = any("down" in path for path in row["paths"])
            # The two ranks look at the same moment's outcome.
            seen = np.array([is_down, row["path_resets"] > 0, (tmp_path / "up").exists()], np.int32)
            comm.all_reduce(seen)
            if len(rows) == 0 and seen[0] == 2:
                rows.append(row)
                _signal(tmp_path / f"down{comm.rank}")
            if len(rows) == 1 and seen[2] == 2 and seen[0] == 0:
                rows.append(row)
                return rows
        raise AssertionError(f"the path did not come back: {row}")

    with Ranks(body) as ranks:
        _await(tmp_path / "ready0")
        sh(f"ip link set {interface} down")
        before = packets(interface), packets(other)
        _await(tmp_path / "down0")
        _await(tmp_path / "down1")
        time.sleep(0.5)
        assert packets(interface) == before[0] and packets(other) > before[1] + 500
        sh(f"ip link set {interface} up")
        _signal(tmp_path / "up")
        results = ranks.results(within_s=90)
    for rows in results.values():
        assert not isinstance(rows, BaseException), rows
        assert rows[0]["path_resets"] > 0 and rows[0]["messages_again"] >= 0
        assert all(path.endswith("up") for path in rows[1]["paths"])


def test_without_a_second_link_a_clear_error_and_tcp_when_the_group_is_rebuilt(
    tmp_path: Path,
) -> None:
    def body(comm: pycomm.Communicator) -> tuple[str, int, str]:
        _reduce(comm, 2)
        _signal(tmp_path / f"ready{comm.rank}")
        try:
            _reduce(comm, 10_000)
        except errors.PeerLostError as error:
            text, rank = str(error), error.rank
        # Where it is down nobody offers it any more.
        with pycomm.Communicator(
            rank=comm.rank, size=2, rendezvous=f"file://{tmp_path}/again", timeout=40,
            settings={"TRANSPORT": "auto", "SHM_DISABLE": "1"},
        ) as anew:  # fmt: skip
            _reduce(anew, 2)
            return text, rank, anew.peer_stats()[0]["transport"]

    (tmp_path / "again").mkdir()
    with Ranks(body, paths=1) as ranks:
        _await(tmp_path / "ready0")
        sh("ip link set va down")
        start = time.monotonic()
        results = ranks.results()
    assert time.monotonic() - start < 30
    for rank, (text, at_fault, transport) in results.items():
        assert at_fault == 1 - rank and transport == "tcp"
        assert "rxe" in text and "IBV_WC_" in text, text


def test_different_calls_are_an_error_that_shows_both() -> None:
    def body(comm: pycomm.Communicator) -> str:
        with pytest.raises(errors.InvalidUsageError) as seen:
            comm.all_reduce(np.ones(300_000 + 5 * comm.rank, dtype=np.float32))
        return str(seen.value)

    for text in run(body).values():
        assert "300000 elements" in text and "300005 elements" in text, text


def test_a_signal_ends_a_wait_for_a_peer(tmp_path: Path) -> None:
    def body(comm: pycomm.Communicator) -> str:
        _reduce(comm, 1)
        _signal(tmp_path / f"ready{comm.rank}")
        if comm.rank == 1:
            _await(tmp_path / "interrupted")
            return "left"
        try:
            comm.all_reduce(np.ones(2_000_000, dtype=np.float32))
        except KeyboardInterrupt:
            _signal(tmp_path / "interrupted")
            return "interrupted"
        return "not interrupted"

    with Ranks(body) as ranks:
        _await(tmp_path / "ready0")
        _await(tmp_path / "ready1")
        time.sleep(0.3)
        os.kill(ranks.processes[0].pid, 2)
        results = ranks.results()
    assert results == {0: "interrupted", 1: "left"}


def test_another_secret_is_refused_before_any_memory_is_shown(
    tmp_path: Path, two_hosts: None
) -> None:
    secrets = [tmp_path / "a", tmp_path / "b"]
    for number, secret in enumerate(secrets):
        secret.write_text(f"a secret of thirty-two characters {number}")
        secret.chmod(0o600)

    with Ranks(
        lambda comm: "joined",
        settings={"PYCOMM_TRANSPORT": "auto"},
        settings_of=lambda rank: {"PYCOMM_SECRET_FILE": str(secrets[rank])},
        before=lambda rank: _enter_namespace(f"h{rank}"),
        timeout_s=15,
    ) as ranks:
        results = ranks.results()
    for result in results.values():
        assert isinstance(result, errors.Error) and "secret" in str(result), results


@pytest.mark.parametrize("fault", ["loss 2%", "delay 20ms"])
def test_a_poor_link_only_takes_longer(fault: str) -> None:
    for interface in ("va", "vb"):
        sh(f"tc qdisc add dev {interface} root netem {fault}")

    def body(comm: pycomm.Communicator) -> str:
        _reduce(comm, 3, 300_000)
        return comm.peer_stats()[0]["transport"]

    start = time.monotonic()
    results = run(body, paths=1)
    assert set(results.values()) == {"rdma"}
    if fault.startswith("loss"):
        dropped = sum(
            int(line.split("dropped ")[1].split(",")[0])
            for interface in ("va", "vb")
            for line in sh(f"tc -s qdisc show dev {interface}").splitlines()
            if "dropped" in line
        )
        assert dropped > 0
    else:
        assert time.monotonic() - start > 0.2


def test_a_rank_that_restarts_meets_the_old_ones(tmp_path: Path) -> None:
    """Packets for the old rank are under way while the new one connects from the same port."""
    for interface in ("va", "vb"):
        sh(f"tc qdisc add dev {interface} root netem delay 20ms")

    def group(rank: int, folder: Path) -> pycomm.Communicator:
        folder.mkdir(exist_ok=True)
        return pycomm.Communicator(rank=rank, size=2, rendezvous=f"file://{folder}", timeout=40)

    def survivor(comm: pycomm.Communicator) -> int:
        lost = 0
        for life in range(3):
            with group(0, tmp_path / f"life{life}") as again:
                _signal(tmp_path / f"meeting{life}")
                try:
                    _reduce(again, 3 if life == 2 else 10_000)
                except errors.PeerLostError:
                    lost += 1
        return lost

    def body(comm: pycomm.Communicator) -> int:
        if comm.rank == 0:
            return survivor(comm)
        for life in range(3):
            child = os.fork()
            if child == 0:
                with group(1, tmp_path / f"life{life}") as again:
                    _reduce(again, 3)
                    _signal(tmp_path / f"over{life}")
                    if life < 2:
                        _reduce(again, 10_000)
                os._exit(0)
            _await(tmp_path / f"over{life}")
            if life < 2:
                time.sleep(0.2)
                os.kill(child, 9)
            os.waitpid(child, 0)
        return 0

    with Ranks(body, paths=1) as ranks:
        results = ranks.results()
    assert results[0] == 2, results


def _enter_namespace(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    assert libc.setns(fd, 0) == 0, os.strerror(ctypes.get_errno())
    os.close(fd)


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Two network namespaces, hosts to each other, with a wire; both see all RDMA devices."""
    sh(
        "ip netns add h0; ip netns add h1; ip link add w0 netns h0 type veth peer name w1 netns h1;"
        "ip -n h0 addr add 10.8.0.1/24 dev w0; ip -n h1 addr add 10.8.0.2/24 dev w1;"
        "for h in 0 1; do ip -n h$h link set lo up; ip -n h$h link set w$h up; done"
    )
    yield
    sh("ip netns del h0; ip netns del h1")


@pytest.mark.parametrize(("without", "expected"), [(None, "rdma"), (0, "tcp"), (1, "tcp")])
def test_pairs_take_the_best_that_both_have(
    tmp_path: Path, two_hosts: None, without: int | None, expected: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of thirty-two characters")
    secret.chmod(0o600)

    def body(comm: pycomm.Communicator) -> str:
        _reduce(comm, 2)
        return comm.peer_stats()[0]["transport"]

    results = run(
        body,
        settings={"PYCOMM_TRANSPORT": "auto", "PYCOMM_SECRET_FILE": str(secret)},
        settings_of=lambda rank: {"PYCOMM_IB_DISABLE": "1"} if rank == without else {},
        before=lambda rank: _enter_namespace(f"h{rank}"),
    )
    assert set(results.values()) == {expected}

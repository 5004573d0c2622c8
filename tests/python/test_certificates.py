"""Identity between hosts: who is let in, who is refused, and that both sides say why."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

import pycomm
from pycomm import errors
from pycomm.cli import main
from pycomm.control import certificates, handshake
from pycomm.control.certificates import Authority, CertificateError
from tests.python.test_communicator import run_ranks


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", "vision")


def reduce_once(comm: pycomm.Communicator) -> str:
    assert (comm.all_reduce(np.full(100_000, comm.rank + 1.0)) == 3).all()
    return str(comm.peer_stats()[0]["transport"])


def run_two(
    tmp_path: Path,
    zero: Path | None,
    one: Path | None,
    body: Callable[..., Any] = reduce_once,
    transport: str = "tcp",
) -> list[Any]:
    """Two ranks on loopback, each with its folder of certificates, or none."""

    def before(rank: int) -> None:
        folder = zero if rank == 0 else one
        os.environ["PYCOMM_TRANSPORT"] = transport
        os.environ["PYCOMM_TIMEOUT_SEC"] = "8"
        if folder is not None:
            os.environ["PYCOMM_CERTS"] = str(folder)
        log = os.open(tmp_path / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 2)

    meet = tmp_path / f"meet{len(list(tmp_path.glob('meet*')))}"
    return run_ranks(body, 2, tmp_path, before=before, rendezvous=f"file://{meet}")


def said(tmp_path: Path, results: list[Any], rank: int) -> str:
    """What a rank raised or logged."""
    return f"{results[rank]}\n{(tmp_path / f'log{rank}').read_text()}"


BOTH = pytest.mark.parametrize(("transport", "name"), [("tcp", "tls"), ("quic", "quic")])


@BOTH
def test_ranks_with_certificates_of_the_job_are_encrypted(
    authority: Authority, tmp_path: Path, transport: str, name: str
) -> None:
    authority.issue(tmp_path / "a", [0])
    authority.issue(tmp_path / "b", [1, 2])
    authority.issue(tmp_path / "any")
    a, b, any_rank = tmp_path / "a", tmp_path / "b", tmp_path / "any"
    assert run_two(tmp_path, a, b, transport=transport) == [name, name]
    assert run_two(tmp_path, any_rank, any_rank, transport=transport) == [name, name]


@BOTH
def test_large_and_small_messages_pass_unharmed(
    authority: Authority, tmp_path: Path, transport: str, name: str
) -> None:
    authority.issue(tmp_path / "any")

    def body(comm: pycomm.Communicator) -> str:
        rng = np.random.default_rng(1)
        for count in (1, 7, 1_000, 4_097, 300_001, 5_000_000):
            both = [rng.integers(-9, 9, count).astype(np.float32) for _ in range(2)]
            out = comm.sendrecv(both[comm.rank], 1 - comm.rank, np.empty(count, np.float32))
            np.testing.assert_array_equal(out, both[1 - comm.rank])
            total = both[0] + both[1]
            np.testing.assert_array_equal(comm.all_reduce(both[comm.rank]), total)
        return str(comm.peer_stats()[0]["transport"])

    folder = tmp_path / "any"
    assert run_two(tmp_path, folder, folder, body, transport) == [name, name]


def spoiled(authority: Authority, tmp_path: Path, fault: str) -> Path | None:
    """A folder for rank 1 that rank 0 must refuse."""
    folder = tmp_path / "bad"
    if fault == "missing":
        return None
    if fault == "another CA":
        Authority.create(tmp_path / "rogue", "vision").issue(folder)
        shutil.copy(authority.folder / "ca.pem", folder / "ca.pem")
        return folder
    if fault == "another name":
        authority.issue(folder, [5])
        return folder
    authority.issue(folder)
    if fault == "expired":
        expire(authority, folder)
    elif fault == "denied":
        authority.deny(folder)
    return folder


def expire(authority: Authority, folder: Path) -> None:
    """Signs the folder's certificate again, with dates that are over."""
    before = certificates.load_certificate(folder)
    key = serialization.load_pem_private_key((authority.folder / "ca.key").read_bytes(), None)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(before.subject)
        .issuer_name(before.issuer)
        .public_key(before.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now - timedelta(days=1))
    )
    for extension in before.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    fresh = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    (folder / "certificate.pem").write_bytes(fresh.public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize("transport", ["tcp", "quic"])
@pytest.mark.parametrize("swapped", [False, True], ids=["connector", "acceptor"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", ["certificate"]),
        ("another CA", ["local issuer|self-signed|unknown ca", "local issuer|unknown ca"]),
        ("expired", ["expired|no longer valid"]),
        ("another name", ["rank-[01].vision|hostname mismatch", "made out|certificate|match"]),
        ("denied", ["denied", "denied|revoked"]),
    ],
)
def test_who_is_refused_hears_why_on_both_sides(
    authority: Authority,
    tmp_path: Path,
    fault: str,
    words: list[str],
    swapped: bool,
    transport: str,
) -> None:
    bad = spoiled(authority, tmp_path, fault)
    authority.issue(tmp_path / "good")
    folders: tuple[Path | None, Path | None] = (tmp_path / "good", bad)
    zero, one = reversed(folders) if swapped else folders
    results = run_two(tmp_path, zero, one, transport=transport)
    bad_rank = 0 if swapped else 1
    assert all(isinstance(r, str) and "Error" in r for r in results), results
    refuser = said(tmp_path, results, 1 - bad_rank)
    assert re.search(words[0], refuser), refuser
    refused = said(tmp_path, results, bad_rank)
    assert re.search(words[-1], refused), refused
    # Who refuses says so of the other, and not of itself.
    assert "the peer refused this rank" not in refuser or "the peer refused" in refused


def test_ranks_that_prove_themselves_differently_are_told_so(
    authority: Authority, tmp_path: Path
) -> None:
    authority.issue(tmp_path / "good")
    results = run_two(tmp_path, tmp_path / "good", None)
    assert "PYCOMM_CERTS" in results[1] and "by certificate" in results[1]


def test_files_with_keys_are_private_and_a_loose_one_is_refused(
    authority: Authority, tmp_path: Path
) -> None:
    folder = tmp_path / "good"
    authority.issue(folder)
    for path in (authority.folder / "ca.key", folder / "key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (folder / "key.pem").chmod(0o644)
    results = run_two(tmp_path, folder, folder)
    assert all("chmod 600" in str(result) for result in results), results


def test_a_renewed_certificate_counts_at_the_next_connection(
    authority: Authority, tmp_path: Path
) -> None:
    authority.issue(tmp_path / "any")
    folder = tmp_path / "any"

    def body(comm: pycomm.Communicator) -> str:
        comm.barrier()
        if comm.rank == 0:
            authority.renew(folder)
            authority.issue(tmp_path / "old")
        comm.barrier()
        comm.all_reduce(np.ones(10))  # the link goes on
        return certificates.fingerprint(certificates.load_certificate(folder))

    before = certificates.fingerprint(certificates.load_certificate(folder))
    results = run_two(tmp_path, folder, folder, body)
    assert results[0] == results[1] != before
    assert run_two(tmp_path, folder, folder) == ["tls", "tls"]


def test_a_killed_peer_is_named_soon(authority: Authority, tmp_path: Path) -> None:
    authority.issue(tmp_path / "any")

    def body(comm: pycomm.Communicator) -> float:
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(errors.PeerLostError, match="rank 1"):
            for _ in range(100):
                comm.all_reduce(np.ones(1_000_000))
        return time.monotonic() - begin

    folder = tmp_path / "any"
    assert run_two(tmp_path, folder, folder, body, "quic")[0] < 3


def test_ctrl_c_ends_a_handshake_and_tells_the_other(authority: Authority, tmp_path: Path) -> None:
    authority.issue(tmp_path / "any")
    ended = [0.0, 0.0]

    def before(rank: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(PYCOMM_TRANSPORT="quic", PYCOMM_CERTS=str(tmp_path / "any"))
        if rank == 0:  # it gets what is sent, and answers nothing
            handshake.Handshaker.receive = lambda *_: None  # type: ignore[method-assign]

    def interrupt(pids: list[int]) -> None:
        time.sleep(1)
        ended[0] = time.monotonic()
        os.kill(pids[1], signal.SIGINT)
        while Path(f"/proc/{pids[1]}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
        ended[1] = time.monotonic()

    results = run_ranks(lambda _: None, 2, tmp_path, interrupt, before)
    assert results[1].startswith("KeyboardInterrupt"), results
    assert "interrupted" in results[0], results
    assert ended[1] - ended[0] < 1.5  # of the four that a blocked path is waited for


def test_a_job_secret_binds_a_quic_connection_too(authority: Authority, tmp_path: Path) -> None:
    authority.issue(tmp_path / "any")

    def run(secrets: tuple[str, str]) -> list[Any]:
        def before(rank: int) -> None:
            os.environ.update(
                PYCOMM_TRANSPORT="quic",
                PYCOMM_CERTS=str(tmp_path / "any"),
                PYCOMM_SECRET=secrets[rank],
                PYCOMM_TIMEOUT_SEC="8",
            )

        meet = f"file://{tmp_path}/meet-{secrets[1][:3]}"
        return run_ranks(reduce_once, 2, tmp_path, before=before, rendezvous=meet)

    assert run(("one secret of 16+", "one secret of 16+")) == ["quic", "quic"]
    assert all("secret" in result for result in run(("one secret of 16+", "two secret of 16+")))


def test_a_forked_child_may_start_anew_and_disturbs_nobody(
    authority: Authority, tmp_path: Path
) -> None:
    authority.issue(tmp_path / "any")

    def body(comm: pycomm.Communicator) -> float:
        child = os.fork()
        if child == 0:
            time.sleep(0.5)
            os._exit(0)
        for _ in range(50):
            total = comm.all_reduce(np.ones(10_000))
        os.waitpid(child, 0)
        return float(total[0])

    folder = tmp_path / "any"
    assert run_two(tmp_path, folder, folder, body, "quic") == [2, 2]


def test_a_disk_that_is_full_leaves_the_old_pair_whole(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "any"
    authority.issue(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    num_synced = 0

    def full_at_the_last(handle: int) -> None:
        nonlocal num_synced
        num_synced += 1
        if num_synced == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_at_the_last)
    with pytest.raises(OSError, match="No space"):
        authority.renew(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_settings_that_are_not_whole_are_named(tmp_path: Path) -> None:
    def before(rank: int) -> None:
        os.environ["PYCOMM_TLS_CA"] = "/nowhere/ca.pem"

    results = run_ranks(reduce_once, 2, tmp_path, before=before)
    assert all("PYCOMM_TLS_CERT" in r and "PYCOMM_TLS_PEERS" in r for r in results), results


def test_the_commands_make_show_renew_and_deny(tmp_path: Path) -> None:
    def call(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(main, ["certs", *map(str, arguments)])
        assert result.exit_code == status, result.output
        return result.output

    ca, host = str(tmp_path / "ca"), str(tmp_path / "host")
    assert "there is no CA" in call("issue", ca, host, status=1)
    call("init", ca, "--job", "vision")
    assert "holds a CA already" in call("init", ca, status=1)
    call("issue", ca, host, "--ranks", "0-2,7")
    shown = call("show", host)
    assert "rank-7.vision.pycomm.internal" in shown and "89 days" in shown
    first = certificates.fingerprint(certificates.load_certificate(Path(host)))
    call("renew", ca, host, "--days", "5")
    again = call("show", host)
    assert "rank-7.vision" in again and "4 days" in again and first not in again
    denied = call("deny", ca, host)
    assert denied.split()[0] in (Path(ca) / "denied").read_text()
    assert "cannot name a job" in call("init", str(tmp_path / "x"), "--job", "No Good", status=1)
    with contextlib.suppress(CertificateError):
        Authority.create(tmp_path / "ca2", "speech").renew(Path(host))
        raise AssertionError("another job's certificate was renewed")


def test_who_comes_before_its_group_is_known_there_comes_again(
    authority: Authority, tmp_path: Path
) -> None:
    authority.issue(tmp_path / "any")
    context = multiprocessing.get_context("fork")
    sums = context.Queue()

    def join(name: str, rank: int) -> float:
        meet = f"file://{tmp_path}/{name}"
        with pycomm.Communicator(rank, 2, rendezvous=meet, name=name, timeout=20) as comm:
            return float(comm.all_reduce(np.ones(3))[0])

    def entry(rank: int) -> None:
        os.environ.update(PYCOMM_TRANSPORT="quic", PYCOMM_CERTS=str(tmp_path / "any"))
        if rank == 0:  # busy with one group while the other's member knocks
            sums.put(join("first", 0) + join("second", 0))
        elif rank == 1:
            time.sleep(1.5)
            sums.put(join("first", 1))
        else:
            sums.put(join("second", 1))

    processes = [context.Process(target=entry, args=(rank,)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(sums.get() for _ in range(3)) == [2, 2, 4]

"""Who is refused, by whom and why; and what a program gets when nobody is."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import aioquic
import aioquic_private
import handshake
import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic_private import ConnectionState
from certificates import Issued, issue_leaf, make_ca, make_certificates, rank_name, write_private
from cryptography import x509
from handshake import CertificateRefusedError, Credentials, Handshake, HandshakeError

pytestmark = pytest.mark.timeout(60)

SCRIPT = Path(handshake.__file__)
SERVER, CLIENT = 0, 1
NO_CERTIFICATE = "no certificate"
UNKNOWN_CA = "unable to get local issuer certificate"
EXPIRED = "no longer valid"
INVALID_CA = "invalid CA certificate"

# A stand-in for the program that takes over: prints what it got.
PROGRAM = """
import json, os, socket, sys
state_fd, socket_fd = (int(sys.argv[sys.argv.index(n) + 1]) for n in ("--state-fd", "--socket-fd"))
text = os.fdopen(state_fd).read()
udp = socket.socket(fileno=socket_fd)
print(json.dumps({
    "state": dict(line.split("=") for line in text.splitlines()),
    "argv": sys.argv, "environment": dict(os.environ),
    "peer": udp.getpeername(), "own": udp.getsockname(), "is_blocking": os.get_blocking(socket_fd),
}))
"""


class Job:
    """A job's CA and a folder for the files of its ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = make_ca()
        self.rogue_ca = make_ca()  # the same name, another key

    def good(self, rank: int) -> Issued:
        """What `rank` should show."""
        return issue_leaf(self.ca, rank_name(rank))

    def bad(self, rank: int, fault: str) -> tuple[Issued, list[Issued]]:
        """What `rank` should not show, and the chain that it sends along."""
        name = rank_name(rank)
        match fault:
            case "rogue CA":
                return issue_leaf(self.rogue_ca, name), []
            case "rogue CA in the chain":
                return issue_leaf(self.rogue_ca, name), [self.rogue_ca]
            case "self-made":
                return make_ca(name), []
            case "expired":
                return issue_leaf(self.ca, name, expired=True), []
            case "wrong name":
                return self.good(7), []
            case "name of the other rank":
                return self.good(1 - rank), []
            case "issued by a leaf":
                leaf = self.good(7)
                return issue_leaf(leaf, name), [leaf]
        raise AssertionError(fault)

    def credentials(self, rank: int, fault: str | None) -> Credentials:
        """Files of `rank`, good ones when `fault` is None."""
        if fault == NO_CERTIFICATE:
            return Credentials(self.ca.certificate_pem(), None, None)
        shown, chain = (self.good(rank), []) if fault is None else self.bad(rank, fault)
        certificate, key = self.directory / f"rank-{rank}.pem", self.directory / f"rank-{rank}.key"
        write_private(certificate, b"".join(i.certificate_pem() for i in [shown, *chain]))
        write_private(key, shown.key_pem())
        return Credentials(self.ca.certificate_pem(), certificate, key)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A fresh job."""
    return Job(tmp_path)


FAULTS = [
    ("rogue CA", UNKNOWN_CA),
    ("rogue CA in the chain", "self-signed certificate in certificate chain"),
    ("self-made", "does not contain any `subjectAltName`s"),
    ("expired", EXPIRED),
    ("wrong name", "doesn't match"),
    ("name of the other rank", "doesn't match"),
    ("issued by a leaf", INVALID_CA),
]


def run_both(job: Job, credentials: list[Credentials]) -> list[Future[ConnectionState]]:
    """Both ranks' handshakes, side by side."""
    sides = [Handshake(rank, credentials[rank], timeout_s=5) for rank in (SERVER, CLIENT)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(side.run, job.directory) for side in sides]
    for side in sides:
        side.socket.close()
    return futures


def refusals(job: Job, faulty_rank: int, fault: str) -> tuple[BaseException, BaseException]:
    """The errors of the side that refuses and of the side that is refused."""
    faults = [fault if rank == faulty_rank else None for rank in (SERVER, CLIENT)]
    both = run_both(job, [job.credentials(rank, f) for rank, f in enumerate(faults)])
    errors = [future.exception() for future in both]
    refuser, refused = errors[1 - faulty_rank], errors[faulty_rank]
    assert refuser is not None, "the side that must refuse returned a state"
    assert refused is not None, "the refused side returned a state"
    return refuser, refused


@pytest.mark.parametrize(("fault", "reason"), [*FAULTS, (NO_CERTIFICATE, NO_CERTIFICATE)])
def test_server_refuses_client(job: Job, fault: str, reason: str) -> None:
    """Here aioquic itself would accept every one of them."""
    refuser, refused = refusals(job, CLIENT, fault)
    with pytest.raises(CertificateRefusedError, match=f"certificate of rank-1.job.*({reason})"):
        raise refuser
    with pytest.raises(HandshakeError, match=f"rank-0.job ended: .*({reason})"):
        raise refused


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_client_refuses_server(job: Job, fault: str, reason: str) -> None:
    """Here aioquic refuses first."""
    refuser, refused = refusals(job, SERVER, fault)
    for error in (refuser, refused):
        assert isinstance(error, HandshakeError)
        assert error.args[0]
    with pytest.raises(HandshakeError, match=f"rank-0.job ended: .*({reason})"):
        raise refuser
    with pytest.raises(HandshakeError, match=f"rank-1.job ended: .*({reason})"):
        raise refused


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_client_refuses_server_without_the_help_of_aioquic(
    job: Job, fault: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own check is enough by itself."""
    make: Callable[[int, Credentials], QuicConfiguration] = handshake.make_configuration

    def make_unverified(rank: int, credentials: Credentials) -> QuicConfiguration:
        configuration = make(rank, credentials)
        configuration.verify_mode = 0  # ssl.CERT_NONE
        return configuration

    monkeypatch.setattr(handshake, "make_configuration", make_unverified)
    refuser, refused = refusals(job, SERVER, fault)
    with pytest.raises(CertificateRefusedError, match=f"certificate of rank-0.job.*({reason})"):
        raise refuser
    with pytest.raises(HandshakeError, match=f"rank-1.job ended: .*({reason})"):
        raise refused


def test_no_ca_is_not_every_public_ca(job: Job) -> None:
    """An empty CA file must not fall back to the authorities of the web."""
    certificate: x509.Certificate = job.good(CLIENT).certificate
    with pytest.raises(CertificateRefusedError, match="no CA to trust"):
        handshake.check_certificate(certificate, [], b"\n", rank_name(CLIENT))


def test_good_certificates_give_matching_states(job: Job) -> None:
    """What one side sends with is what the other receives with."""
    both = run_both(job, [job.credentials(rank, None) for rank in (SERVER, CLIENT)])
    server, client = (future.result() for future in both)
    for ours, theirs in ((server, client), (client, server)):
        assert ours.send_secret == theirs.recv_secret
        assert ours.peer_cid == theirs.own_cid
        assert ours.largest_received_packet_number < theirs.next_packet_number
        assert ours.key_phase == 0
    assert server.send_secret != client.send_secret
    assert server.send_secret.hex() not in repr(server)


def test_another_release_of_aioquic_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The private attributes were read in one release only."""
    monkeypatch.setattr(aioquic, "__version__", "1.7.3")
    with pytest.raises(aioquic_private.ContractError, match=r"1\.7\.3"):
        handshake.make_connection(CLIENT, job.credentials(CLIENT, None))


def run_programs(directory: Path, certificates: Path) -> list[subprocess.CompletedProcess[str]]:
    """Both ranks on the command line, with PROGRAM to hand over to."""
    program = directory / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    ports = directory / "ports"
    ports.mkdir()

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        files = ["--certs", str(certificates), "--port-file", str(ports)]
        command = [sys.executable, str(SCRIPT), "--rank", str(rank), *files]
        command += ["--program", sys.executable, str(program)]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (SERVER, CLIENT)))


def test_programs_inherit_state_and_socket(tmp_path: Path) -> None:
    """Secrets arrive by the pipe and by nothing else."""
    make_certificates(tmp_path / "certs")
    results = run_programs(tmp_path, tmp_path / "certs")
    assert [result.returncode for result in results] == [0, 0], results
    server, client = (json.loads(result.stdout) for result in results)
    for ours, theirs in ((server, client), (client, server)):
        secret = ours["state"]["send_secret"]
        assert secret == theirs["state"]["recv_secret"]
        assert secret not in json.dumps([ours["argv"], ours["environment"]])
        assert ours["peer"] == theirs["own"]
        assert ours["is_blocking"]


def test_no_program_starts_after_a_refusal(tmp_path: Path) -> None:
    """On the command line the reason is on stderr and the exit status is 1."""
    make_certificates(tmp_path / "certs")
    make_certificates(tmp_path / "rogue")
    for suffix in ("pem", "key"):
        rogue = tmp_path / "rogue" / f"rank-1.{suffix}"
        rogue.replace(tmp_path / "certs" / f"rank-1.{suffix}")
    server, client = run_programs(tmp_path, tmp_path / "certs")
    for result in (server, client):
        assert (result.returncode, result.stdout) == (1, "")
        assert UNKNOWN_CA in result.stderr
    assert "certificate of rank-1.job refused" in server.stderr


def test_private_files_are_private(tmp_path: Path) -> None:
    """No key of the CA is written, and nothing that others can read."""
    make_certificates(tmp_path / "certs")
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "certs").iterdir()}
    names = ["ca.pem", "rank-0.key", "rank-0.pem", "rank-1.key", "rank-1.pem"]
    assert sorted(files) == names
    assert set(files.values()) == {0o600}

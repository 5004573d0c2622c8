"""Handshakes without sockets: floods, noise, reset tokens, certificates of another use."""

from __future__ import annotations

import os
import random
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from aioquic.quic import connection
from aioquic.tls import AlertDescription
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from pycomm.control import aioquic_private as private
from pycomm.control.certificates import Authority, load_certificate
from pycomm.control.handshake import Handshaker
from pycomm.control.identity import Identity, RefusedError

SERVER, CLIENT = ("127.0.0.1", 1), ("127.0.0.1", 2)
PROCESS = {"server": "a" * 32, "client": "b" * 32}


def options_of(certs: Path, who: str, **more: Any) -> dict[str, Any]:
    return {
        "process_id": PROCESS[who],
        "ca_file": str(certs / "ca.pem"),
        "certificate_file": str(certs / "certificate.pem"),
        "key_file": str(certs / "key.pem"),
        "denied_file": "",
        "secret": b"",
        "reset_key": b"the key of " + who.encode(),
        "expected": [
            (PROCESS["server"], "rank-0.shake.pycomm.internal"),
            (PROCESS["client"], "rank-1.shake.pycomm.internal"),
        ],
        **more,
    }


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    Authority.create(tmp_path / "ca", "shake").issue(tmp_path / "certs")
    return tmp_path / "certs"


def connect(client: Handshaker) -> None:
    client.connect(*SERVER, PROCESS["server"], "rank-0.shake.pycomm.internal")


def converse(client: Handshaker, server: Handshaker) -> tuple[list[Any], list[Any]]:
    """Until both have established, or five seconds are over; what each has."""
    mine: list[Any] = []
    theirs: list[Any] = []
    until = time.monotonic() + 5
    while time.monotonic() < until and not (mine and theirs):
        for sender, receiver, address in ((client, server, CLIENT), (server, client, SERVER)):
            for datagram, host, port in sender.take_datagrams():
                if (host, port) in (SERVER, CLIENT):
                    receiver.receive(datagram, *address)
        mine += client.take_established()
        theirs += server.take_established()
        time.sleep(0.001)
    return mine, theirs


def test_a_flood_of_strangers_meets_retry_and_members_still_get_in(certs: Path) -> None:
    server = Handshaker(options_of(certs, "server"))
    for number in range(300):
        stranger = Handshaker(options_of(certs, "client"))
        connect(stranger)
        for datagram, _, _ in stranger.take_datagrams():
            server.receive(datagram, "127.0.0.9", 1000 + number)
    # Whoever came after the first eight got a short Retry (long header, type 0 in version 2), and
    # one that was slow enough to ask twice got two.
    retried = {
        port
        for answer, host, port in server.take_datagrams()
        if host == "127.0.0.9" and answer[0] & 0xF0 == 0xC0 and len(answer) < 200
    }
    assert retried == set(range(1008, 1300))
    client = Handshaker(options_of(certs, "client"))
    connect(client)
    mine, theirs = converse(client, server)
    assert mine[0]["peer_process_id"] == PROCESS["server"]
    assert theirs[0]["peer_process_id"] == PROCESS["client"]
    assert mine[0]["sending_secret"] == theirs[0]["receiving_secret"]


def test_noise_and_spoilt_handshakes_end_nothing(certs: Path) -> None:
    rng = random.Random(4)
    server = Handshaker(options_of(certs, "server"))
    client = Handshaker(options_of(certs, "client"))
    connect(client)
    datagrams = [datagram for datagram, _, _ in client.take_datagrams()]
    for _ in range(500):
        spoilt = bytearray(rng.choice(datagrams))
        for _ in range(rng.randrange(1, 5)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        server.receive(bytes(spoilt[: rng.randrange(len(spoilt) + 1)]), *CLIENT)
        server.receive(rng.randbytes(rng.randrange(1500)), *CLIENT)
    for datagram in datagrams:
        server.receive(datagram, *CLIENT)
    mine, theirs = converse(client, server)
    assert mine and theirs


def test_reset_tokens_of_both_sides_follow_from_their_keys(certs: Path) -> None:
    server = Handshaker(options_of(certs, "server"))
    client = Handshaker(options_of(certs, "client"))
    connect(client)
    mine, theirs = converse(client, server)
    for own, peer, who in ((theirs[0], mine[0], "server"), (mine[0], theirs[0], "client")):
        told = {cid: token for _, cid, token in peer["peer_ids"] if token}
        assert len(told) >= 7
        for cid, token in told.items():
            assert token == private.reset_token(b"the key of " + who.encode(), cid)
        assert set(told) <= {cid for _, cid, _ in own["own_ids"]}


def test_a_key_log_is_a_plain_file_of_this_users_alone(certs: Path, tmp_path: Path) -> None:
    def log_to(path: Path) -> Handshaker:
        return Handshaker(options_of(certs, "client", keylog_file=str(path)))

    link, pipe, twice = tmp_path / "link", tmp_path / "pipe", tmp_path / "twice"
    link.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(pipe)
    (tmp_path / "once").touch()
    twice.hardlink_to(tmp_path / "once")
    before = Path("/dev/null").stat().st_mode
    for path in (link, pipe, twice, Path("/dev/null"), tmp_path / "nowhere" / "keys"):
        with pytest.raises((OSError, ValueError)):
            log_to(path)
    assert Path("/dev/null").stat().st_mode == before
    assert not (tmp_path / "elsewhere").exists()
    loose = tmp_path / "keys"
    loose.touch(0o644)
    client, server = log_to(loose), Handshaker(options_of(certs, "server"))
    connect(client)
    mine, theirs = converse(client, server)
    assert mine and theirs
    assert stat.S_IMODE(loose.stat().st_mode) == 0o600
    lines = loose.read_text().splitlines()
    assert any(line.startswith("CLIENT_TRAFFIC_SECRET_0 ") for line in lines), lines


def test_the_largest_payload_that_a_peer_takes_is_handed_over(certs: Path) -> None:
    server = Handshaker(options_of(certs, "server"))
    client = Handshaker(options_of(certs, "client"))
    # aioquic says none itself: the server's parameters are given one on their way to the client.
    limit = 1_300
    encode = connection.push_quic_transport_parameters

    def encode_with_limit(buffer: Any, parameters: Any) -> None:
        parameters.max_udp_payload_size = limit
        encode(buffer, parameters)

    with pytest.MonkeyPatch.context() as patch:
        connect(client)
        patch.setattr(connection, "push_quic_transport_parameters", encode_with_limit)
        mine, theirs = converse(client, server)
    assert mine[0]["udp_payload_max"] == limit
    assert theirs[0]["udp_payload_max"] == 0


def test_a_certificate_for_clients_alone_is_refused(certs: Path, tmp_path: Path) -> None:
    before = load_certificate(certs)
    key = serialization.load_pem_private_key((tmp_path / "ca/ca.key").read_bytes(), None)
    builder = (
        x509.CertificateBuilder()
        .subject_name(before.subject)
        .issuer_name(before.issuer)
        .public_key(before.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(before.not_valid_before_utc)
        .not_valid_after(before.not_valid_after_utc)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    )
    narrow = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    identity = Identity.load(options_of(certs, "server"))
    identity.judge(before, [])
    with pytest.raises(RefusedError, match="client and server") as refusal:
        identity.judge(narrow, [])
    assert refusal.value.alert == AlertDescription.unsupported_certificate


def test_a_list_of_the_denied_with_a_malformed_line_is_an_error(
    certs: Path, tmp_path: Path
) -> None:
    (tmp_path / "denied").write_text("# none yet\nnot a fingerprint\n")
    with pytest.raises(ValueError, match="no SHA-256 fingerprint"):
        Identity.load(options_of(certs, "server", denied_file=str(tmp_path / "denied")))

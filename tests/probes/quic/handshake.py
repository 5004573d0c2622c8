"""QUIC v2 handshake between two processes, after which another program owns the connection.

Rank 0 is the server, rank 1 the client. aioquic does TLS 1.3 with certificates on both sides and
AES-128-GCM; this file brings the UDP socket. Each side judges the certificate of the other before
anything further is sent, waits until aioquic is quiet, and then replaces itself (exec) by PROGRAM:

    handshake.py --make-certs DIR
    handshake.py --rank 0|1 --certs DIR --port-file DIR --program PATH [ARGS...]

PROGRAM gets `--state-fd N --socket-fd M`: a pipe with the connection's state as `key=value` lines
(ConnectionState in aioquic_private.py), and the UDP socket, blocking and connected to the peer.
Secrets go through that pipe only. The exec also ends aioquic, so that two stacks can never use
one packet number twice, and drops the private key from memory.

The two sides become quiet a few milliseconds apart, so PROGRAM has two duties. Its first packets
may be swallowed by a peer that still reads with aioquic: nothing of value may be sent before the
peer's PROGRAM has answered. And our last acknowledgement may be lost: what the peer's aioquic then
repeats has to be acknowledged, or it never becomes quiet and times out.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aioquic_private
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, QuicProtocolVersion
from aioquic.tls import Alert, AlertDescription, CipherSuite, verify_certificate
from certificates import make_certificates, rank_name, write_private
from cryptography import x509

ALPN = "pycomm-probe"
CONNECTION_ID_SIZE = 8
DATAGRAM_SIZE_MAX = 65535
LOOPBACK = "127.0.0.1"
PORT_FILE = "port"
POLL_INTERVAL_S = 0.01
TIMEOUT_S = 10.0

Address = tuple[str, int]


class HandshakeError(RuntimeError):
    """The connection was not handed over; the message says why."""


@dataclass(frozen=True)
class Credentials:
    """What one rank shows and trusts; `certificate` None shows nothing."""

    ca_pem: bytes = field(repr=False)
    certificate: Path | None
    key: Path | None

    @classmethod
    def load(cls, directory: Path, rank: int) -> "Credentials":
        """The files that `make_certificates` wrote for `rank`."""
        name = f"rank-{rank}"
        ca_pem = (directory / "ca.pem").read_bytes()
        return cls(ca_pem, directory / f"{name}.pem", directory / f"{name}.key")


class CertificateRefusedError(HandshakeError):
    """The peer's certificate is missing or not acceptable; `alert` is the TLS alert to send."""

    def __init__(self, peer_name: str, reason: str, alert: AlertDescription) -> None:
        super().__init__(f"certificate of {peer_name} refused: {reason}")
        self.alert = alert


def check_certificate(
    certificate: x509.Certificate | None,
    chain: list[x509.Certificate],
    ca_pem: bytes,
    peer_name: str,
) -> None:
    """Accepts only a valid certificate for `peer_name` that chains to `ca_pem`.

    Errors: CertificateRefusedError. Source: RFC 8446 section 4.4.2.4, RFC 5280 section 6.
    """
    if certificate is None:
        alert = AlertDescription.certificate_required
        raise CertificateRefusedError(peer_name, "no certificate", alert)
    if not ca_pem.strip():  # verify_certificate would trust the public web CAs instead
        alert = AlertDescription.internal_error
        raise CertificateRefusedError(peer_name, "no CA to trust", alert)
    try:
        verify_certificate(certificate, chain, server_name=peer_name, cadata=ca_pem)
    except Alert as error:
        raise CertificateRefusedError(peer_name, str(error), error.description) from error


def make_configuration(rank: int, credentials: Credentials) -> QuicConfiguration:
    """QUIC v2 with AES-128-GCM and nothing else; no session tickets, hence no resumption."""
    configuration = QuicConfiguration(
        alpn_protocols=[ALPN],
        cadata=credentials.ca_pem,
        cipher_suites=[CipherSuite.AES_128_GCM_SHA256],
        connection_id_length=CONNECTION_ID_SIZE,
        is_client=rank == 1,
        max_datagram_frame_size=DATAGRAM_SIZE_MAX,
        server_name=rank_name(0) if rank == 1 else None,
        supported_versions=[QuicProtocolVersion.VERSION_2],
    )
    if credentials.certificate is not None:
        configuration.load_cert_chain(credentials.certificate, credentials.key)
    return configuration


def make_connection(
    rank: int, credentials: Credentials, original_cid: bytes | None = None
) -> QuicConnection:
    """A connection that has sent nothing; a server needs the `original_cid` that the client chose.

    Errors: ContractError when aioquic is not the pinned release.
    """
    aioquic_private.check_contract()
    connection = QuicConnection(
        configuration=make_configuration(rank, credentials),
        original_destination_connection_id=original_cid,
    )
    if rank == 0:
        aioquic_private.request_client_certificate(connection)
    return connection


class Handshake:
    """One side's handshake over its own UDP socket, which is left connected to the peer."""

    def __init__(self, rank: int, credentials: Credentials, timeout_s: float = TIMEOUT_S) -> None:
        self._rank = rank
        self._credentials = credentials
        self._peer_name = rank_name(1 - rank)
        self._deadline = time.monotonic() + timeout_s
        self._is_trusted = False
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def run(self, port_directory: Path) -> aioquic_private.ConnectionState:
        """Returns the state to hand over.

        Errors: HandshakeError for a refused certificate, a peer that refused us, and a timeout;
        the socket is closed then.
        """
        try:
            make_side = self._accept if self._rank == 0 else self._connect
            connection, peer = make_side(port_directory)
            self._drive(connection, peer)
            self.socket.setblocking(True)
            return aioquic_private.export_state(connection)
        except BaseException:
            self.socket.close()
            raise

    def _accept(self, port_directory: Path) -> tuple[QuicConnection, Address]:
        """Publishes the port and takes the sender of the first QUIC v2 Initial as the peer."""
        self.socket.bind((LOOPBACK, 0))
        publish_port(port_directory, self.socket.getsockname()[1])
        while True:
            received = self._receive(self._deadline)
            if received is None:
                continue
            datagram, address = received
            cid = aioquic_private.initial_cid(datagram, CONNECTION_ID_SIZE)
            if cid is not None:
                self.socket.connect(address)
                connection = make_connection(0, self._credentials, cid)
                connection.receive_datagram(datagram, address, time.monotonic())
                return connection, address

    def _connect(self, port_directory: Path) -> tuple[QuicConnection, Address]:
        path = port_directory / PORT_FILE
        while not path.exists():
            self._check_deadline()
            time.sleep(POLL_INTERVAL_S)
        address = (LOOPBACK, int(path.read_text(encoding="ascii")))
        self.socket.connect(address)
        connection = make_connection(1, self._credentials)
        connection.connect(address, time.monotonic())
        return connection, address

    def _drive(self, connection: QuicConnection, peer: Address) -> None:
        """Moves datagrams and timers until the peer is trusted and aioquic is quiet."""
        while True:
            self._handle_events(connection)
            self._send(connection)
            if self._is_trusted and aioquic_private.is_quiet(connection):
                return
            wake_at = min(connection.get_timer() or self._deadline, self._deadline)
            received = self._receive(wake_at)
            if received is None:
                connection.handle_timer(time.monotonic())
            elif received[1] == peer:  # others may have been queued before connect()
                connection.receive_datagram(*received, time.monotonic())

    def _handle_events(self, connection: QuicConnection) -> None:
        """Judges the peer as soon as TLS is done, before anything more is sent to it."""
        while (event := connection.next_event()) is not None:
            if isinstance(event, ConnectionTerminated):
                reason = event.reason_phrase or f"error {event.error_code:#x}"
                raise HandshakeError(f"connection with {self._peer_name} ended: {reason}")
            if isinstance(event, HandshakeCompleted):
                certificate, chain = aioquic_private.peer_certificate(connection)
                try:
                    check_certificate(certificate, chain, self._credentials.ca_pem, self._peer_name)
                except CertificateRefusedError as error:
                    connection.close(  # with a frame type, as TLS alerts are transport errors
                        error_code=QuicErrorCode.CRYPTO_ERROR + error.alert,
                        frame_type=QuicFrameType.CRYPTO,
                        reason_phrase=str(error),
                    )
                    self._send(connection)
                    raise
                self._is_trusted = True

    def _send(self, connection: QuicConnection) -> None:
        for datagram, _ in connection.datagrams_to_send(time.monotonic()):
            with contextlib.suppress(ConnectionRefusedError):  # an ICMP error proves nothing
                self.socket.send(datagram)

    def _receive(self, wake_at: float) -> tuple[bytes, Address] | None:
        """One datagram and its sender, or None at `wake_at`."""
        self._check_deadline()
        self.socket.settimeout(max(wake_at - time.monotonic(), 0.0001))
        with contextlib.suppress(TimeoutError, ConnectionRefusedError):
            return self.socket.recvfrom(DATAGRAM_SIZE_MAX)
        return None

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._deadline:
            raise HandshakeError(f"no connection with {self._peer_name} within the time limit")


def publish_port(directory: Path, port: int) -> None:
    """Lets the port file appear complete or not at all; one left by another run is an error."""
    partial = directory / f"{PORT_FILE}.{os.getpid()}"
    write_private(partial, f"{port}\n".encode("ascii"))
    try:
        os.link(partial, directory / PORT_FILE)
    except FileExistsError as error:
        raise HandshakeError(f"a port file is already in {directory}") from error
    finally:
        partial.unlink()


def hand_over(
    state: aioquic_private.ConnectionState, udp_socket: socket.socket, command: list[str]
) -> None:
    """Replaces this process by `command`, which inherits the socket and the state's pipe."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, state.to_lines())  # far below the capacity of a pipe
    os.close(write_fd)
    for fd in (read_fd, udp_socket.fileno()):
        os.set_inheritable(fd, True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec keeps that
    fds = ["--state-fd", str(read_fd), "--socket-fd", str(udp_socket.fileno())]
    os.execv(command[0], [*command, *fds])


def main() -> int:
    """The command line described at the top of this file."""
    parser = argparse.ArgumentParser(description="QUIC v2 handshake with hand-over")
    parser.add_argument("--make-certs", type=Path, metavar="DIR")
    parser.add_argument("--rank", type=int, choices=(0, 1))
    parser.add_argument("--certs", type=Path, metavar="DIR")
    parser.add_argument("--port-file", type=Path, metavar="DIR")
    parser.add_argument("--program", nargs=argparse.REMAINDER, metavar="PATH [ARGS...]")
    options = parser.parse_args()
    if options.make_certs is not None:
        make_certificates(options.make_certs)
        return 0
    if None in (options.rank, options.certs, options.port_file) or not options.program:
        parser.error("--rank, --certs, --port-file and --program are required")
    if not os.access(options.program[0], os.X_OK):
        parser.error(f"{options.program[0]} is not a program")
    try:
        handshake = Handshake(options.rank, Credentials.load(options.certs, options.rank))
        state = handshake.run(options.port_file)
    except (HandshakeError, aioquic_private.ContractError) as error:
        print(f"rank {options.rank}: {error}", file=sys.stderr)
        return 1
    hand_over(state, handshake.socket, options.program)
    return 1


if __name__ == "__main__":
    sys.exit(main())

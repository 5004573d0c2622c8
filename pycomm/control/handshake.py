"""QUIC v2 handshakes for the core: aioquic does TLS 1.3, the core moves the datagrams.

Both sides show certificates and judge each other's: chain, dates, use, the list of the denied, and
the name for the rank that the peer says it is. Then they introduce themselves on the first stream,
bound to both certificates and, where there is one, to the job's secret. When aioquic has nothing
left to send the connection is handed to the core, once, and forgotten here.

Sans-IO: datagrams in, datagrams out, and `time.monotonic`.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    HandshakeCompleted,
    QuicEvent,
    StreamDataReceived,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, QuicProtocolVersion, encode_quic_retry
from aioquic.quic.retry import QuicRetryTokenHandler
from aioquic.tls import CipherSuite
from cryptography.hazmat.primitives import hashes

from pycomm.control import aioquic_private as private
from pycomm.control import key_log
from pycomm.control.identity import Identity, RefusedError

ALPN = "pycomm/1"
Address = tuple[str, int]

_STREAM_ID = 0
_HELLO_BYTES_MAX = 2048
_REASON_CHARS_MAX = 250
_IDLE_S = 60.0
_HANDSHAKE_S = 15.0
_WINDOW_BYTES = 4 << 20
_DATAGRAM_BYTES_MAX = 65_535
# More that are half open than this, and a stranger has to show that it is where it says it is.
_HALF_OPEN_MAX = 8
_STRANGERS_MAX = 64
_LINGER_S = 0.5


@dataclass
class _Connection:
    quic: QuicConnection
    address: Address
    process_id: str  # of the peer; "" until it said so
    path: int  # which of this process's connections to it; -1 if the peer connected
    began_at: float
    original_cid: bytes = b""
    is_heard: bool = False
    is_judged: bool = False
    is_accepted: bool = False
    inbox: bytearray = field(default_factory=bytearray)
    over_at: float | None = None  # closing: kept a moment, so that the reason arrives


class Handshaker:
    """What the core drives; see pycomm/handshaker.h."""

    def __init__(self, options: dict[str, Any]) -> None:
        private.check_contract()
        self._me = Identity.load(options)
        self._connections: list[_Connection] = []
        self._out: list[tuple[bytes, str, int]] = []
        self._established: list[dict[str, Any]] = []
        self._failures: list[tuple[str, str, int]] = []
        self._retry = QuicRetryTokenHandler()
        self._keylog = key_log.open_key_log(options.get("keylog_file", ""))
        self._configuration(is_client=True, name="none")  # files that do not fit are told now

    def _configuration(self, *, is_client: bool, name: str | None) -> QuicConfiguration:
        configuration = QuicConfiguration(
            alpn_protocols=[ALPN],
            cadata=self._me.ca_pem,
            cipher_suites=[CipherSuite.AES_128_GCM_SHA256, CipherSuite.CHACHA20_POLY1305_SHA256],
            connection_id_length=private.CID_BYTES,
            idle_timeout=_IDLE_S,
            is_client=is_client,
            max_data=_WINDOW_BYTES,
            max_stream_data=_WINDOW_BYTES,
            max_datagram_frame_size=_DATAGRAM_BYTES_MAX,
            secrets_log_file=self._keylog,
            server_name=name,
            supported_versions=[QuicProtocolVersion.VERSION_2],
        )
        configuration.load_cert_chain(self._me.certificate_file, self._me.key_file)
        return configuration

    # ---------------------------------------------------------------- the core's calls
    def connect(self, host: str, port: int, process_id: str, name: str, path: int = 0) -> None:
        """Begins a handshake with the process at an address, whose certificate carries `name`.

        `path` tells several connections to one process apart.
        """
        now = time.monotonic()
        quic = QuicConnection(configuration=self._configuration(is_client=True, name=name))
        private.derive_reset_tokens(quic, self._me.reset_key)
        quic.connect((host, port), now)
        self._connections.append(_Connection(quic, (host, port), process_id, path, now))
        self._pump(self._connections[-1], now)

    def receive(self, datagram: bytes, host: str, port: int) -> None:
        """Takes a datagram that belongs to no connection of the core's."""
        now = time.monotonic()
        address = (host, port)
        cid = private.destination_cid(datagram)
        if cid is None:
            return
        connection = self._find(cid) or self._accept(datagram, address, now)
        if connection is None:
            return
        connection.is_heard = True
        connection.address = address
        connection.quic.receive_datagram(datagram, address, now)
        self._pump(connection, now)

    def take_datagrams(self) -> list[tuple[bytes, str, int]]:
        """What has to be sent, timers included."""
        now = time.monotonic()
        for connection in list(self._connections):
            timer = connection.quic.get_timer()
            if timer is not None and timer <= now:
                connection.quic.handle_timer(now)
                self._pump(connection, now)
            if connection.over_at is not None and now > connection.over_at:
                self._drop(connection)
            elif connection.over_at is None and now > connection.began_at + _HANDSHAKE_S:
                self._fail(connection, "the QUIC handshake took too long")
                self._drop(connection)
        out, self._out = self._out, []
        return out

    def has_heard(self, process_id: str, path: int = 0) -> bool:
        """Whether anything came back from a process that connect() is after."""
        wanted = (process_id, path)
        return any((c.process_id, c.path) == wanted and c.is_heard for c in self._connections)

    def take_established(self) -> list[dict[str, Any]]:
        """Connections for the core to carry on."""
        established, self._established = self._established, []
        return established

    def take_failures(self) -> list[tuple[str, str, int]]:
        """Process ids ("" for strangers), reasons, and the paths of connect()."""
        failures, self._failures = self._failures, []
        return failures

    # ---------------------------------------------------------------- connections
    def _find(self, cid: bytes) -> _Connection | None:
        for connection in self._connections:
            if cid == connection.original_cid or cid in private.own_cids(connection.quic):
                return connection
        return None

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def _fail(self, connection: _Connection, reason: str) -> None:
        if connection.over_at is None:
            self._failures.append((connection.process_id, reason, connection.path))
        connection.over_at = time.monotonic() + _LINGER_S

    def _accept(self, datagram: bytes, address: Address, now: float) -> _Connection | None:
        initial = private.Initial.of(datagram)
        if initial is None or len(datagram) < 1200:  # RFC 9000 section 14.1
            return None
        half_open = sum(not c.is_accepted for c in self._connections)
        original: bytes = initial.destination_cid
        retry_source: bytes | None = None
        if initial.token:
            try:
                original = self._retry.validate_token(
                    address=address,
                    destination_cid=initial.destination_cid,
                    now=now,
                    token=initial.token,
                )
            except ValueError:
                return None
            retry_source = initial.destination_cid
        elif half_open >= _HALF_OPEN_MAX:
            self._send_retry(initial, address, now)
            return None
        if len(self._connections) >= _STRANGERS_MAX + len(self._me.expected):
            return None
        quic = QuicConnection(
            configuration=self._configuration(is_client=False, name=None),
            original_destination_connection_id=original,
            retry_source_connection_id=retry_source,
        )
        private.request_client_certificate(quic)
        private.derive_reset_tokens(quic, self._me.reset_key)
        connection = _Connection(quic, address, "", -1, now, initial.destination_cid)
        self._connections.append(connection)
        return connection

    def _send_retry(self, initial: private.Initial, address: Address, now: float) -> None:
        """Makes a stranger prove its address before it costs us much (RFC 9000 section 8.1)."""
        source = secrets.token_bytes(private.CID_BYTES)
        token = self._retry.create_token(
            address=address,
            original_destination_connection_id=initial.destination_cid,
            retry_source_connection_id=source,
            now=now,
        )
        retry = encode_quic_retry(
            QuicProtocolVersion.VERSION_2,
            source,
            initial.source_cid,
            initial.destination_cid,
            token,
        )
        self._out.append((retry, *address))

    def _pump(self, connection: _Connection, now: float) -> None:
        """Handles events, sends, and hands the connection over if it is ready."""
        while (event := connection.quic.next_event()) is not None:
            try:
                self._on_event(connection, event)
            except RefusedError as error:
                self._refuse(connection, error)
        if (ending := private.ending(connection.quic)) is not None and connection.over_at is None:
            by_peer, reason = ending
            words = "the peer refused this rank" if by_peer else "the peer's certificate is refused"
            self._fail(connection, f"{words}: {reason}")
        for datagram, address in connection.quic.datagrams_to_send(now):
            self._out.append((datagram, address[0], address[1]))
        if connection.is_accepted and private.is_quiet(connection.quic):
            state = private.export_state(connection.quic)
            state["peer"] = connection.address
            state["peer_process_id"] = connection.process_id
            state["path"] = connection.path
            self._established.append(state)
            self._drop(connection)

    def _refuse(self, connection: _Connection, error: RefusedError) -> None:
        who = "" if not connection.process_id else f"process {connection.process_id[:8]}: "
        connection.quic.close(
            error_code=QuicErrorCode.CRYPTO_ERROR + error.alert,
            frame_type=QuicFrameType.CRYPTO,
            reason_phrase=str(error)[:_REASON_CHARS_MAX],
        )
        self._fail(connection, f"{who}the peer's certificate is refused: {error}")

    # ---------------------------------------------------------------- events
    def _on_event(self, connection: _Connection, event: QuicEvent) -> None:
        if isinstance(event, HandshakeCompleted):
            self._me.judge(*private.peer_certificate(connection.quic))
            connection.is_judged = True
            if connection.process_id:  # we connected: the name was checked by TLS already
                self._send_message(connection, self._introduction(connection))
        elif isinstance(event, StreamDataReceived) and event.stream_id == _STREAM_ID:
            if not connection.is_judged:
                raise RefusedError("it speaks before it is known")
            connection.inbox += event.data
            if len(connection.inbox) > _HELLO_BYTES_MAX:
                raise RefusedError("its introduction has no end")
            line, found, _ = bytes(connection.inbox).partition(b"\n")
            if found and not connection.is_accepted:
                self._on_message(connection, line)

    def _prints(self, connection: _Connection, *, is_client: bool) -> list[bytes]:
        """Fingerprints of the client's certificate and the server's."""
        peer, _ = private.peer_certificate(connection.quic)
        assert peer is not None
        mine = connection.quic.configuration.certificate
        both = [mine, peer] if is_client else [peer, mine]
        return [certificate.fingerprint(hashes.SHA256()) for certificate in both]

    def _send_message(self, connection: _Connection, message: dict[str, Any]) -> None:
        connection.quic.send_stream_data(_STREAM_ID, json.dumps(message).encode() + b"\n")

    def _introduction(self, connection: _Connection) -> dict[str, Any]:
        me, you = self._me.process_id, connection.process_id
        prints = self._prints(connection, is_client=True)
        mac = self._me.mac("client", me.encode(), you.encode(), *prints)
        return {"from": me, "to": you, "mac": mac}

    def _on_message(self, connection: _Connection, line: bytes) -> None:
        try:
            message = {str(key): str(value) for key, value in json.loads(line).items()}
            peer_mac = message["mac"]
            sender, receiver = message["from"], message["to"]
        except (ValueError, KeyError, AttributeError) as error:
            raise RefusedError("its introduction cannot be read") from error
        is_client = bool(connection.process_id)
        if receiver != self._me.process_id:
            raise RefusedError("it is looking for another process")
        if is_client and sender != connection.process_id:
            raise RefusedError("it is another process than the one that was sought")
        label = "server" if is_client else "client"
        prints = self._prints(connection, is_client=is_client)
        expected = self._me.mac(label, sender.encode(), receiver.encode(), *prints)
        if not hmac.compare_digest(expected, peer_mac):
            raise RefusedError("it does not hold this job's secret (PYCOMM_SECRET_FILE)")
        if not is_client:
            certificate, _ = private.peer_certificate(connection.quic)
            assert certificate is not None
            self._me.judge_name(certificate, sender)
            connection.process_id = sender
            mac = self._me.mac("server", receiver.encode(), sender.encode(), *prints)
            self._send_message(connection, {"from": receiver, "to": sender, "mac": mac})
        connection.is_accepted = True


def make(options: dict[str, Any]) -> Handshaker:
    """The core's factory."""
    return Handshaker(options)

"""Every private attribute of aioquic that pycomm touches, in one place.

aioquic has no public way to ask a client for its certificate, to read the peer's, or to take a
connection over. `check_contract` refuses any release but the one this file was written against, so
that an upgrade fails loudly instead of exporting a wrong state.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import aioquic
from aioquic._buffer import Buffer
from aioquic.quic.connection import QuicConnection, QuicConnectionState
from aioquic.quic.packet import (
    QuicPacketType,
    QuicProtocolVersion,
    pull_quic_header,
    pull_quic_transport_parameters,
)
from aioquic.tls import CipherSuite, Epoch, ExtensionType
from cryptography import x509

AIOQUIC_VERSION = "1.7.2"
CID_BYTES = 8
# The first stream of a client is the handshake's own; the core uses the second.
CORE_STREAM_ID = 4
_RESET_TOKEN_BYTES = 16
_CIPHERS = (CipherSuite.AES_128_GCM_SHA256, CipherSuite.CHACHA20_POLY1305_SHA256)


class ContractError(RuntimeError):
    """aioquic is not the release, or not in the state, that this file was written for."""


def check_contract() -> None:
    """Raises: ContractError when aioquic is not exactly the pinned release."""
    if aioquic.__version__ != AIOQUIC_VERSION:
        raise ContractError(
            f"aioquic {aioquic.__version__} is here, and pycomm needs {AIOQUIC_VERSION}: "
            f"pip install aioquic=={AIOQUIC_VERSION}"
        )


class Initial:
    """A QUIC v2 Initial packet's header; `of` gives None for anything else."""

    def __init__(self, header: Any) -> None:
        self.destination_cid: bytes = header.destination_cid
        self.source_cid: bytes = header.source_cid
        self.token: bytes = header.token

    @staticmethod
    def of(datagram: bytes) -> Initial | None:
        """Of a datagram's first packet."""
        try:
            header = pull_quic_header(Buffer(data=datagram), host_cid_length=CID_BYTES)
        except ValueError:
            return None
        is_v2 = header.version == QuicProtocolVersion.VERSION_2
        return Initial(header) if is_v2 and header.packet_type == QuicPacketType.INITIAL else None


def destination_cid(datagram: bytes) -> bytes | None:
    """That a datagram's first packet is for, or None."""
    if len(datagram) < 1 + CID_BYTES:
        return None
    if not datagram[0] & 0x80:
        return datagram[1 : 1 + CID_BYTES]
    try:
        return pull_quic_header(Buffer(data=datagram), host_cid_length=CID_BYTES).destination_cid
    except ValueError:
        return None


def own_cids(connection: QuicConnection) -> list[bytes]:
    """Connection IDs that the peer may use."""
    private: Any = connection
    return [cid.cid for cid in private._host_cids]


def reset_token(key: bytes, cid: bytes) -> bytes:
    """Of a connection ID (RFC 9000 section 10.3.2), as csrc/transport/quic/endpoint.cc has it."""
    return hmac.digest(key, cid, hashlib.sha256)[:_RESET_TOKEN_BYTES]


def derive_reset_tokens(connection: QuicConnection, key: bytes) -> None:
    """Makes stateless reset tokens a function of connection IDs (RFC 9000 section 10.3.2)."""
    private: Any = connection

    def derive() -> None:
        for cid in private._host_cids:
            if cid.stateless_reset_token is not None:
                cid.stateless_reset_token = reset_token(key, cid.cid)

    replenish: Callable[[], None] = private._replenish_connection_ids

    def replenish_and_derive() -> None:
        replenish()
        derive()

    derive()
    private._replenish_connection_ids = replenish_and_derive


def request_client_certificate(connection: QuicConnection) -> None:
    """Makes a server ask for a client certificate (RFC 8446 section 4.3.2).

    The TLS context is made while the first Initial packet is received, and the ClientHello is
    handled in that same call, so the flag has to be set from within. aioquic then checks only that
    a client holds the key of the certificate it shows: an unrelated CA passes, and so does no
    certificate at all. The caller must judge `peer_certificate` itself.
    """
    private: Any = connection
    initialize: Callable[[bytes], None] = private._initialize

    def initialize_and_request(peer_cid: bytes) -> None:
        initialize(peer_cid)
        private.tls._request_client_certificate = True

    private._initialize = initialize_and_request


def peer_certificate(
    connection: QuicConnection,
) -> tuple[x509.Certificate | None, list[x509.Certificate]]:
    """The certificate that the peer proved to own, or None, and the chain it sent along."""
    tls: Any = connection.tls
    return tls._peer_certificate, list(tls._peer_certificate_chain)


def ending(connection: QuicConnection) -> tuple[bool, str] | None:
    """Whether the peer closed it (else this side did), and why; None while it goes on."""
    private: Any = connection
    event = private._close_event
    if event is None:
        return None
    by_peer = private._state == QuicConnectionState.DRAINING
    return by_peer, event.reason_phrase or f"error {event.error_code:#x}"


def is_quiet(connection: QuicConnection) -> bool:
    """Whether the handshake is confirmed and aioquic has nothing left to send or to repeat.

    That covers CRYPTO, HANDSHAKE_DONE, NEW_CONNECTION_ID and stream bytes of ours without an
    acknowledgement, an acknowledgement that we owe, and the connection IDs that the peer has yet to
    give us. Only the peer's last acknowledgement of an acknowledgement is not waited for, since
    there is none: should ours be lost, the peer repeats its packet and the core acknowledges it.
    """
    private: Any = connection
    if not private._handshake_confirmed:
        return False
    space = private._spaces[Epoch.ONE_RTT]
    spare_cids_expected = private._local_active_connection_id_limit - 1
    return bool(
        space.ack_eliciting_in_flight == 0
        and space.ack_at is None
        and len(private._peer_cid_available) == spare_cids_expected
        and all(cid.was_sent for cid in private._host_cids)
        and private._crypto_streams[Epoch.ONE_RTT].sender.buffer_is_empty
        and all(stream.sender.buffer_is_empty for stream in private._streams.values())
        and not private._handshake_done_pending
        and not private._retire_connection_ids
        and not private._ping_pending
        and not private._probe_pending
        and not private._datagrams_pending
        and not private._close_pending
    )


def udp_payload_max(connection: QuicConnection) -> int:
    """The largest UDP payload that the peer takes (RFC 9000 section 18.2); 0: it did not say."""
    tls: Any = connection.tls
    for kind, data in tls.received_extensions or []:
        if kind == ExtensionType.QUIC_TRANSPORT_PARAMETERS:
            return pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size or 0
    return 0


def export_state(connection: QuicConnection) -> dict[str, Any]:
    """What the core needs to carry the connection on (pycomm/handshaker.h); aioquic must never send
    on it again.

    Raises:
        ContractError: it is not quiet, not QUIC v2, or its keys were updated already.
    """
    private: Any = connection
    if not is_quiet(connection):
        raise ContractError("the connection is not quiet")
    if private._version != QuicProtocolVersion.VERSION_2:
        raise ContractError(f"the connection is not QUIC v2 but {private._version:#x}")
    keys = private._cryptos[Epoch.ONE_RTT]
    for direction in (keys.send, keys.recv):
        if direction.cipher_suite not in _CIPHERS:
            raise ContractError(f"the cipher suite is {direction.cipher_suite!r}")
        if direction.key_phase != 0 or keys._update_key_requested:
            raise ContractError("a key update was made before the hand-over")
    is_client = private._is_client
    local_stream = (
        private._local_max_stream_data_bidi_local
        if is_client
        else private._local_max_stream_data_bidi_remote
    )
    remote_stream = (
        private._remote_max_stream_data_bidi_remote
        if is_client
        else private._remote_max_stream_data_bidi_local
    )

    def ids(cids: list[Any]) -> list[tuple[int, bytes, bytes]]:
        return [(c.sequence_number, c.cid, c.stateless_reset_token or b"") for c in cids]

    idle_s = min(private._configuration.idle_timeout, private._remote_max_idle_timeout or 1e9)
    return {
        "is_client": is_client,
        "is_chacha20": keys.send.cipher_suite == CipherSuite.CHACHA20_POLY1305_SHA256,
        "sending_secret": keys.send.secret,
        "receiving_secret": keys.recv.secret,
        "own_ids": ids(private._host_cids),
        "peer_ids": ids([private._peer_cid, *private._peer_cid_available]),
        "next_packet_number": private._packet_number,
        "received": [(span.start, span.stop) for span in private._spaces[Epoch.ONE_RTT].ack_queue],
        "stream_id": CORE_STREAM_ID,
        "receive_max": private._local_max_data.value,
        "received_bytes": private._local_max_data.used,
        "stream_receive_max": local_stream,
        "send_max": private._remote_max_data,
        "sent_bytes": private._remote_max_data_used,
        "stream_send_max": remote_stream,
        "datagram_bytes_max": private._remote_max_datagram_frame_size or 0,
        "udp_payload_max": udp_payload_max(connection),
        "idle_timeout_ms": round(1000 * idle_s),
        "ack_delay_exponent": private._remote_ack_delay_exponent,
        "ack_delay_max_ms": round(1000 * private._loss.max_ack_delay),
        "rtt_us": round(1e6 * private._loss._rtt_smoothed),
    }

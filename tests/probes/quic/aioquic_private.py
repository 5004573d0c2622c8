"""Every private attribute of aioquic that the probe touches, in one place.

aioquic has no public way to ask a client for its certificate, to read the peer's certificate, or
to take a connection over. `check_contract` refuses any release other than the one these functions
were written against, so that an upgrade fails loudly instead of exporting the wrong state.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import aioquic
from aioquic._buffer import Buffer
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicPacketType, QuicProtocolVersion, pull_quic_header
from aioquic.tls import CipherSuite, Epoch
from cryptography import x509

AIOQUIC_VERSION = "1.7.2"


class ContractError(RuntimeError):
    """aioquic is not the release, or not in the state, that this file was written for."""


@dataclass(frozen=True)
class ConnectionState:
    """What another implementation needs to carry on with a connection's 1-RTT packets.

    Attributes:
        send_secret: The traffic secret of our packets, 32 bytes (RFC 9001 section 5.1).
        recv_secret: The traffic secret of the peer's packets, 32 bytes.
        own_cid: Destination connection ID of the packets that the peer sends to us.
        peer_cid: Destination connection ID of the packets that we send.
        next_packet_number: The lowest number never used; a lower one would repeat an AEAD nonce.
        largest_received_packet_number: Base of packet number decoding (RFC 9000 appendix A.3).
        key_phase: The Key Phase bit of both directions (RFC 9001 section 6).
    """

    send_secret: bytes
    recv_secret: bytes
    own_cid: bytes
    peer_cid: bytes
    next_packet_number: int
    largest_received_packet_number: int
    key_phase: int

    def __repr__(self) -> str:
        """Names no secret, so that a log or a traceback cannot hold one."""
        return f"ConnectionState(own_cid={self.own_cid.hex()}, peer_cid={self.peer_cid.hex()})"

    def to_lines(self) -> bytes:
        """One `key=value` line a field: bytes in hexadecimal, numbers in decimal."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        lines = (f"{k}={v.hex() if isinstance(v, bytes) else v}\n" for k, v in pairs)
        return "".join(lines).encode("ascii")


def check_contract() -> None:
    """Errors: ContractError when aioquic is not exactly the pinned release."""
    if aioquic.__version__ != AIOQUIC_VERSION:
        raise ContractError(f"aioquic {aioquic.__version__} is not {AIOQUIC_VERSION}")


def initial_cid(datagram: bytes, cid_size: int) -> bytes | None:
    """Destination connection ID of a QUIC v2 Initial packet, or None for anything else."""
    try:
        header = pull_quic_header(Buffer(data=datagram), host_cid_length=cid_size)
    except ValueError:
        return None
    is_v2 = header.version == QuicProtocolVersion.VERSION_2
    is_initial = header.packet_type == QuicPacketType.INITIAL
    return header.destination_cid if is_v2 and is_initial else None


def request_client_certificate(connection: QuicConnection) -> None:
    """Makes a server ask for a client certificate (RFC 8446 section 4.3.2).

    The TLS context is made while the first Initial packet is received, and the ClientHello is
    handled in that same call, so the flag has to be set from within. aioquic then checks only
    that a client holds the key of the certificate it shows: an unrelated CA passes, and so does
    no certificate at all. The caller must judge `peer_certificate` itself.
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


def is_quiet(connection: QuicConnection) -> bool:
    """Whether the handshake is confirmed and aioquic has nothing left to send or to repeat.

    That covers CRYPTO, HANDSHAKE_DONE and NEW_CONNECTION_ID of ours without an acknowledgement,
    an acknowledgement that we owe, and the connection IDs that the peer has yet to give us. Only
    the peer's last acknowledgement of an acknowledgement is not waited for, since there is none:
    should ours be lost, the peer repeats its packet and the successor has to acknowledge it.
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
        and not private._handshake_done_pending
        and not private._retire_connection_ids
        and not private._ping_pending
        and not private._probe_pending
        and not private._datagrams_pending
        and not private._close_pending
    )


def export_state(connection: QuicConnection) -> ConnectionState:
    """Takes over a quiet connection; aioquic must never send on it again.

    Errors: ContractError when the connection is not quiet, or not QUIC v2 with AES-128-GCM in
    its first key phase.
    """
    private: Any = connection
    if not is_quiet(connection):
        raise ContractError("the connection is not quiet")
    if private._version != QuicProtocolVersion.VERSION_2:
        raise ContractError(f"the connection is not QUIC v2 but {private._version:#x}")
    keys = private._cryptos[Epoch.ONE_RTT]
    for direction in (keys.send, keys.recv):
        if direction.cipher_suite != CipherSuite.AES_128_GCM_SHA256:
            raise ContractError(f"the cipher suite is {direction.cipher_suite!r}")
        if direction.key_phase != 0 or keys._update_key_requested:
            raise ContractError("a key update was made before the hand-over")
    return ConnectionState(
        send_secret=keys.send.secret,
        recv_secret=keys.recv.secret,
        own_cid=connection.host_cid,
        peer_cid=private._peer_cid.cid,
        next_packet_number=private._packet_number,
        largest_received_packet_number=private._spaces[Epoch.ONE_RTT].largest_received_packet,
        key_phase=keys.send.key_phase,
    )

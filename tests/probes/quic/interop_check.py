"""Proof that a stock aioquic peer and packet_protection.cc understand each other.

Both ends shake hands in this process. One end's state then goes to `packet_tool`, which seals
PING, STREAM and DATAGRAM frames into one packet for the end that stays with aioquic, and opens
the packet that this one answers with. Done for either end:

    interop_check.py --tool PATH
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aioquic_private
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import DatagramFrameReceived, QuicEvent, StreamDataReceived
from aioquic_private import ConnectionState
from certificates import make_certificates, rank_name
from handshake import (
    CONNECTION_ID_SIZE,
    DATAGRAM_SIZE_MAX,
    LOOPBACK,
    Address,
    Credentials,
    check_certificate,
    make_connection,
)

TIMEOUT_S = 5.0
STREAM_DATA = b"stream data sealed outside aioquic"
DATAGRAM_DATA = b"datagram sealed outside aioquic"
REPLY_DATA = b"datagram sealed by aioquic"
# Addresses that the two connections believe in; the handshake needs no socket.
ADDRESSES: tuple[Address, Address] = (("192.0.2.1", 1), ("192.0.2.2", 2))


class InteropError(AssertionError):
    """The two implementations did not understand each other."""


def expect(is_true: bool, message: str) -> None:
    """Errors: InteropError with `message`."""
    if not is_true:
        raise InteropError(message)


def events_of(connection: QuicConnection) -> list[QuicEvent]:
    """Takes every queued event."""
    return list(iter(connection.next_event, None))


def shake_hands(credentials: tuple[Credentials, Credentials]) -> list[QuicConnection]:
    """The connections of rank 0 and rank 1, both quiet, each having judged the other."""
    client = make_connection(1, credentials[1])
    client.connect(ADDRESSES[0], time.monotonic())
    first, _ = client.datagrams_to_send(time.monotonic())[0]
    cid = aioquic_private.initial_cid(first, CONNECTION_ID_SIZE)
    ends = [make_connection(0, credentials[0], cid), client]
    ends[0].receive_datagram(first, ADDRESSES[1], time.monotonic())
    deadline = time.monotonic() + TIMEOUT_S
    while not all(aioquic_private.is_quiet(end) for end in ends):
        expect(time.monotonic() < deadline, "the handshake did not end")
        for rank, end in enumerate(ends):
            for datagram, _ in end.datagrams_to_send(time.monotonic()):
                ends[1 - rank].receive_datagram(datagram, ADDRESSES[rank], time.monotonic())
        time.sleep(0.001)  # aioquic delays acknowledgements by about as much
    for rank, end in enumerate(ends):
        certificate, chain = aioquic_private.peer_certificate(end)
        check_certificate(certificate, chain, credentials[rank].ca_pem, rank_name(1 - rank))
        events_of(end)
    return ends


def make_frames(stream_id: int) -> bytes:
    """PING, a whole STREAM and a DATAGRAM. Source: RFC 9000 section 19, RFC 9221 section 4."""
    ping = bytes([0x01])
    stream = bytes([0x0B, stream_id, len(STREAM_DATA)]) + STREAM_DATA  # with length and FIN
    return ping + stream + bytes([0x31, len(DATAGRAM_DATA)]) + DATAGRAM_DATA


@dataclass
class Tool:
    """A running `packet_tool` and the socket that leads to it."""

    process: subprocess.Popen[str]
    socket: socket.socket

    @classmethod
    def start(cls, path: Path, state: ConnectionState, frames: bytes) -> "Tool":
        """Hands `state` over as handshake.py does."""
        ours, theirs = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        for end in (ours, theirs):
            end.bind((LOOPBACK, 0))
        ours.connect(theirs.getsockname())
        theirs.connect(ours.getsockname())
        ours.settimeout(TIMEOUT_S)
        read_fd, write_fd = os.pipe()
        os.write(write_fd, state.to_lines())
        os.close(write_fd)
        wanted = ["--send", frames.hex(), "--expect", REPLY_DATA.hex()]
        fds = ["--state-fd", str(read_fd), "--socket-fd", str(theirs.fileno())]
        process = subprocess.Popen(
            [str(path), *wanted, *fds],
            pass_fds=(read_fd, theirs.fileno()),
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(read_fd)
        theirs.close()
        return cls(process, ours)


def check_events(events: list[QuicEvent], stream_id: int) -> None:
    """Errors: InteropError unless the frames of `make_frames` arrived, each once."""
    streams = [e for e in events if isinstance(e, StreamDataReceived)]
    datagrams = [e for e in events if isinstance(e, DatagramFrameReceived)]
    wanted = StreamDataReceived(data=STREAM_DATA, end_stream=True, stream_id=stream_id)
    expect(streams == [wanted], f"STREAM not accepted: {events}")
    expect([e.data for e in datagrams] == [DATAGRAM_DATA], f"DATAGRAM not accepted: {events}")


def run_case(tool_path: Path, credentials: tuple[Credentials, Credentials], rank: int) -> None:
    """Lets `packet_tool` play `rank` against aioquic. Errors: InteropError."""
    ends = shake_hands(credentials)
    state = aioquic_private.export_state(ends[rank])
    stock = ends[1 - rank]
    stock_state = aioquic_private.export_state(stock)  # only looked at: this end stays with aioquic
    expect(state.send_secret == stock_state.recv_secret, "the secrets do not match")
    expect(state.peer_cid == stock_state.own_cid, "the connection IDs do not match")

    stream_id = 0 if rank == 1 else 1  # the first bidirectional one of the sender
    tool = Tool.start(tool_path, state, make_frames(stream_id))
    packet = tool.socket.recv(DATAGRAM_SIZE_MAX)
    tampered = packet[:-1] + bytes([packet[-1] ^ 1])
    stock.receive_datagram(tampered, ADDRESSES[rank], time.monotonic())
    expect(not events_of(stock), "aioquic accepted a tampered packet")
    stock.receive_datagram(packet, ADDRESSES[rank], time.monotonic())
    check_events(events_of(stock), stream_id)

    time.sleep(0.01)  # so that the acknowledgement is due as well
    stock.send_datagram_frame(REPLY_DATA)
    for datagram, _ in stock.datagrams_to_send(time.monotonic()):
        tool.socket.send(datagram)
    output, _ = tool.process.communicate(timeout=TIMEOUT_S)
    tool.socket.close()
    expect(tool.process.returncode == 0, f"packet_tool failed: {output}")
    check_output(output, state, stock_state)
    print(f"rank {rank} outside aioquic: accepted, acknowledged and answered")


def check_output(output: str, state: ConnectionState, stock_state: ConnectionState) -> None:
    """Errors: InteropError unless the answer has the right number and acknowledges our packet."""
    opened = re.search(r"^opened packet_number=(\d+) payload=([0-9a-f]+)$", output, re.MULTILINE)
    if opened is None:
        raise InteropError(f"nothing was opened: {output}")
    number = stock_state.next_packet_number
    expect(int(opened[1]) == number, f"opened packet {opened[1]} is not {number}")
    payload = bytes.fromhex(opened[2])
    expect(REPLY_DATA in payload, "the answer does not hold the reply")
    # ACK, with the Largest Acknowledged in one byte. Source: RFC 9000 section 19.3.
    expect(payload[:1] == b"\x02", f"the answer does not begin with ACK: {payload.hex()}")
    expect(payload[1] == state.next_packet_number, f"packet {payload[1]} is acknowledged")


def main() -> int:
    """The command line described at the top of this file."""
    parser = argparse.ArgumentParser(description="packet_protection.cc against aioquic")
    parser.add_argument("--tool", type=Path, required=True, metavar="PATH")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        certificates = Path(directory) / "certificates"
        make_certificates(certificates)
        credentials = (Credentials.load(certificates, 0), Credentials.load(certificates, 1))
        for rank in (0, 1):
            run_case(options.tool, credentials, rank)
    return 0


if __name__ == "__main__":
    sys.exit(main())

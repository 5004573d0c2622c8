"""The engine against a stock QUIC implementation: aioquic keeps its end, publicly."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import StreamDataReceived
from aioquic.quic.packet import QuicProtocolVersion
from cryptography.hazmat.primitives import hashes

from pycomm.control import aioquic_private as private
from pycomm.control.certificates import Authority
from pycomm.control.handshake import ALPN, Handshaker
from pycomm.control.identity import Identity

TOOL = Path(__file__).resolve().parents[2] / "build/release/tests/cpp/quic_tool"
PROCESS = {"engine": "e" * 32, "stock": "5" * 32}
DATAGRAM_BYTES_MAX = 65_535


def pattern(begin: int, count: int) -> bytes:
    return bytes(
        ((offset * 2654435761) & 0xFFFFFFFF) >> 11 & 0xFF for offset in range(begin, begin + count)
    )


def udp_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    return made


@dataclass
class Stock:
    """An aioquic server: introduces itself as a rank would, takes a pattern of bytes, sends one."""

    certs: Path
    bytes_out: int
    updates: bool
    socket: socket.socket = field(default_factory=udp_socket)
    received: bytearray = field(default_factory=bytearray)
    num_updates: int = 0
    is_stopping: bool = False

    def run(self) -> None:
        configuration = QuicConfiguration(
            is_client=False,
            alpn_protocols=[ALPN],
            supported_versions=[QuicProtocolVersion.VERSION_2],
            connection_id_length=8,
            max_datagram_frame_size=DATAGRAM_BYTES_MAX,
        )
        configuration.load_cert_chain(self.certs / "certificate.pem", self.certs / "key.pem")
        quic: QuicConnection | None = None
        self.socket.settimeout(0.01)
        next_update = time.monotonic() + 0.2
        while not self.is_stopping:
            now = time.monotonic()
            try:
                data, address = self.socket.recvfrom(65_536)
                if quic is None:
                    initial = private.Initial.of(data)
                    assert initial is not None
                    quic = QuicConnection(
                        configuration=configuration,
                        original_destination_connection_id=initial.destination_cid,
                    )
                    private.request_client_certificate(quic)
                quic.receive_datagram(data, address, now)
            except TimeoutError:
                if quic is None:
                    continue
            timer = quic.get_timer()
            if timer is not None and timer <= now:
                quic.handle_timer(now)
            while (event := quic.next_event()) is not None:
                if isinstance(event, StreamDataReceived):
                    self.on_data(quic, event)
            if self.updates and self.received and now > next_update:
                quic.request_key_update()
                self.num_updates += 1
                next_update = now + 0.2
            for out, to in quic.datagrams_to_send(now):
                self.socket.sendto(out, to)

    def on_data(self, quic: QuicConnection, event: StreamDataReceived) -> None:
        if event.stream_id == private.CORE_STREAM_ID:
            if not self.received:
                quic.send_stream_data(event.stream_id, pattern(0, self.bytes_out))
            self.received += event.data
            return
        hello = json.loads(event.data)
        client, _ = private.peer_certificate(quic)
        assert client is not None and quic.configuration.certificate is not None
        prints = [
            certificate.fingerprint(hashes.SHA256())
            for certificate in (client, quic.configuration.certificate)
        ]
        me = Identity("", Path(), Path(), b"", frozenset(), b"", b"", {})
        mac = me.mac("server", hello["to"].encode(), hello["from"].encode(), *prints)
        answer = {"from": hello["to"], "to": hello["from"], "mac": mac}
        quic.send_stream_data(event.stream_id, json.dumps(answer).encode() + b"\n")


def shake_hands(certs: Path, here: socket.socket, port: int) -> dict[str, Any]:
    handshaker = Handshaker(
        {
            "process_id": PROCESS["engine"],
            "ca_file": str(certs / "ca.pem"),
            "certificate_file": str(certs / "certificate.pem"),
            "key_file": str(certs / "key.pem"),
            "denied_file": "",
            "secret": b"",
            "reset_key": b"key",
            "expected": [],
        }
    )
    handshaker.connect("127.0.0.1", port, PROCESS["stock"], "rank-0.interop.pycomm.internal")
    return await_hand_over(handshaker, here)


def await_hand_over(handshaker: Handshaker, here: socket.socket) -> dict[str, Any]:
    """Until the connection can be handed over."""
    here.settimeout(0.01)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for data, host, to in handshaker.take_datagrams():
            here.sendto(data, (host, to))
        if established := handshaker.take_established():
            return established[0]
        assert not (failures := handshaker.take_failures()), failures
        try:
            data, (host, sender) = here.recvfrom(65_536)
            handshaker.receive(data, host, sender)
        except TimeoutError:
            pass
    raise AssertionError("no handshake")


def to_lines(state: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, bytes):
            return value.hex()
        return str(int(value))

    def ids(rows: list[tuple[int, bytes, bytes]]) -> str:
        return ",".join(f"{number}:{cid.hex()}:{token.hex()}" for number, cid, token in rows)

    fields = {
        name: text(value) for name, value in state.items() if isinstance(value, bool | int | bytes)
    }
    fields["own_ids"], fields["peer_ids"] = ids(state["own_ids"]), ids(state["peer_ids"])
    fields["received"] = ",".join(f"{begin}-{end}" for begin, end in state["received"])
    fields["peer_port"] = str(state["peer"][1])
    return "".join(f"{name}={value}\n" for name, value in fields.items())


@pytest.mark.skipif(not TOOL.exists(), reason="build/release is not built; make core-tests")
@pytest.mark.parametrize("who_updates", ["nobody", "engine", "stock", "both"])
def test_a_stock_peer_and_the_engine_understand_each_other(
    tmp_path: Path, who_updates: str
) -> None:
    Authority.create(tmp_path / "ca", "interop").issue(tmp_path / "certs")
    count, back = 3_000_000, 1_000_000
    stock = Stock(tmp_path / "certs", back, who_updates in ("stock", "both"))
    thread = threading.Thread(target=stock.run)
    thread.start()
    try:
        with udp_socket() as here:
            state = shake_hands(tmp_path / "certs", here, stock.socket.getsockname()[1])
            here.set_inheritable(True)
            update = ["update"] if who_updates in ("engine", "both") else []
            tool = subprocess.run(
                [str(TOOL), str(here.fileno()), str(count), str(back), *update],
                input=to_lines(state),
                pass_fds=[here.fileno()],
                capture_output=True,
                text=True,
                check=False,
                timeout=80,
            )
    finally:
        stock.is_stopping = True
        thread.join()
        stock.socket.close()
    said = dict(line.split("=", 1) for line in tool.stdout.splitlines())
    assert tool.returncode == 0, said
    assert bytes(stock.received) == pattern(0, count)
    if who_updates != "nobody":
        assert int(said["updates"]) > 0, said
    assert said["forged"] == "0"

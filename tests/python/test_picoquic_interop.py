"""The engine against picoquic, which is built outside of git by tests/picoquic/build.sh."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from pycomm.control.certificates import Authority
from pycomm.control.handshake import Handshaker
from pycomm.control.identity import Identity
from tests.python.test_quic_interop import (
    PROCESS,
    TOOL,
    await_hand_over,
    to_lines,
    udp_socket,
)

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / "build/picoquic/peer"
NAME = "rank-0.interop.pycomm.internal"
# Long enough for a few key updates.
BYTES_OUT, BYTES_IN = 150_000_000, 100_000_000
RUN_S = 18

BUILD_S = 240
CANNOT_BUILD = 77

pytestmark = [
    pytest.mark.skipif(not TOOL.exists(), reason="build/release is not built; make core-tests"),
    pytest.mark.timeout(BUILD_S + 60),  # the first one builds
]


@pytest.fixture(scope="module")
def picoquic() -> None:
    """Its end of a connection, as a program; building it takes a minute."""
    build = subprocess.run(
        [ROOT / "tests/picoquic/build.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=BUILD_S,
    )
    if build.returncode == CANNOT_BUILD:
        error = re.search(r"(ERROR|CMake Error|error:).*", build.stdout, re.DOTALL)
        reason = " ".join((error[0] if error else build.stdout).split())[:200]
        pytest.skip(f"picoquic cannot be downloaded or built here: {reason}")
    assert build.returncode == 0, build.stdout


@dataclass
class Certificates:
    """Folders of the two ends, from one CA."""

    engine: Path
    stock: Path

    def hello(self, *, stock_is_client: bool) -> str:
        """What picoquic's end has to say for itself (pycomm/control/handshake.py)."""
        ends = (self.stock, self.engine) if stock_is_client else (self.engine, self.stock)
        prints = [
            x509.load_pem_x509_certificate((end / "certificate.pem").read_bytes()).fingerprint(
                hashes.SHA256()
            )
            for end in ends
        ]
        me = Identity("", Path(), Path(), b"", frozenset(), b"", b"", {})
        label = "client" if stock_is_client else "server"
        mac = me.mac(label, PROCESS["stock"].encode(), PROCESS["engine"].encode(), *prints)
        return json.dumps({"from": PROCESS["stock"], "to": PROCESS["engine"], "mac": mac})


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    authority = Authority.create(tmp_path / "ca", "interop")
    folders = Certificates(tmp_path / "engine", tmp_path / "stock")
    authority.issue(folders.engine)
    authority.issue(folders.stock)
    return folders


class Peer:
    """picoquic's end, a process."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [str(PEER), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def port(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline().removeprefix("port "))

    def finish(self) -> dict[str, Any]:
        """Ends it; gives its last words."""
        said, _ = self.process.communicate(timeout=5)
        return dict(json.loads(said.splitlines()[-1]))


@contextmanager
def running(*arguments: object) -> Iterator[Peer]:
    peer = Peer(*arguments)
    try:
        yield peer
    finally:
        peer.process.kill()
        peer.process.wait()


def make_handshaker(certificates: Certificates) -> Handshaker:
    return Handshaker(
        {
            "process_id": PROCESS["engine"],
            "ca_file": str(certificates.engine / "ca.pem"),
            "certificate_file": str(certificates.engine / "certificate.pem"),
            "key_file": str(certificates.engine / "key.pem"),
            "denied_file": "",
            "secret": b"",
            "reset_key": b"key",
            "expected": {PROCESS["stock"]: NAME},
        }
    )


def carry_on(
    state: dict[str, Any], here: socket.socket, bytes_out: int, bytes_in: int, *, updates: bool
) -> dict[str, str]:
    """Lets the engine take the connection over; gives what it said in the end."""
    here.set_inheritable(True)
    tool = subprocess.run(
        [str(TOOL), str(here.fileno()), str(bytes_out), str(bytes_in)]
        + (["update"] if updates else []),
        input=to_lines(state),
        pass_fds=[here.fileno()],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    said = dict(line.split("=", 1) for line in tool.stdout.splitlines())
    assert tool.returncode == 0, (tool.returncode, said)
    return said


def check(engine: dict[str, str], stock: dict[str, Any], who_updates: str) -> None:
    assert stock["is_done"] and stock["is_right"] and stock["failure"] == "", stock
    assert engine["failure"] == "" and engine["forged"] == "0", engine
    # Both count the updates that they followed, whoever asked for them.
    if who_updates == "nobody":
        assert engine["updates"] == "0" and stock["updates"] == 0, (engine, stock)
    else:
        assert int(engine["updates"]) > 0 and stock["updates"] > 0, (engine, stock)
    if who_updates in ("stock", "both"):
        assert stock["updates_asked"] > 0, stock


@pytest.mark.parametrize("who_updates", ["nobody", "engine", "stock", "both"])
def test_the_engine_is_the_client(
    picoquic: None, certificates: Certificates, who_updates: str
) -> None:
    peer_arguments: list[object] = [
        "server", 0, BYTES_IN, BYTES_OUT,
        certificates.stock / "certificate.pem", certificates.stock / "key.pem",
        f"ca={certificates.stock / 'ca.pem'}",
        f"hello={certificates.hello(stock_is_client=False)}",
    ]  # fmt: skip
    if who_updates in ("stock", "both"):
        peer_arguments.append("update")
    with running(*peer_arguments) as peer, udp_socket() as here:
        handshaker = make_handshaker(certificates)
        handshaker.connect("127.0.0.1", peer.port(), PROCESS["stock"], NAME)
        state = await_hand_over(handshaker, here)
        updates = who_updates in ("engine", "both")
        engine = carry_on(state, here, BYTES_OUT, BYTES_IN, updates=updates)
        check(engine, peer.finish(), who_updates)


@pytest.mark.parametrize("who_updates", ["nobody", "engine", "stock", "both"])
def test_the_engine_is_the_server(
    picoquic: None, certificates: Certificates, who_updates: str
) -> None:
    with udp_socket() as here:
        peer_arguments: list[object] = [
            "client", here.getsockname()[1], BYTES_IN, BYTES_OUT,
            f"certificate={certificates.stock / 'certificate.pem'}",
            f"key={certificates.stock / 'key.pem'}",
            f"ca={certificates.stock / 'ca.pem'}", f"name={NAME}",
            f"hello={certificates.hello(stock_is_client=True)}",
        ]  # fmt: skip
        if who_updates in ("stock", "both"):
            peer_arguments.append("update")
        with running(*peer_arguments) as peer:
            state = await_hand_over(make_handshaker(certificates), here)
            updates = who_updates in ("engine", "both")
            engine = carry_on(state, here, BYTES_OUT, BYTES_IN, updates=updates)
            check(engine, peer.finish(), who_updates)

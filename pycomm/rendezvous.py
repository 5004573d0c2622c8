"""Where the ranks of a group meet while it is created: a few keys and values.

Nothing that a store returns is trusted: ranks prove membership to each other afterwards.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
import urllib.parse
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, Protocol

_VALUE_BYTES_MAX = 64 * 1024
_KEYS_MAX = 1_000_000
_LONG_POLL_S = 2.0
_GONE_S = 2.0


class Store(Protocol):
    """What a group needs of a store."""

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value."""

    def get(self, key: str, timeout_ms: int) -> bytes:
        """Waits for a value; raises TimeoutError."""

    def has(self, key: str) -> bool:
        """Whether the key is there now."""


class FileStore:
    """One file a key in a folder that all ranks see."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / urllib.parse.quote(key, safe="")

    def set(self, key: str, value: bytes) -> None:
        """Writes aside and renames, so that readers see whole values."""
        aside = self._folder / f".{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        aside.write_bytes(value)
        aside.rename(self._path(key))

    def get(self, key: str, timeout_ms: int) -> bytes:
        """Waits for a value; raises TimeoutError."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"key '{key}' did not appear in {self._folder}") from None
                time.sleep(0.001)

    def has(self, key: str) -> bool:
        """Whether the key is there now."""
        return self._path(key).exists()


class _Keys:
    """The server's memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    keys: _Keys

    def do_PUT(self) -> None:
        size = int(self.headers.get("Content-Length", "0"))
        if not 0 <= size <= _VALUE_BYTES_MAX or len(self.keys.values) >= _KEYS_MAX:
            self._answer(413, b"")
            return
        value = self.rfile.read(size)
        with self.keys.changed:
            self.keys.values[self.path] = value
            self.keys.changed.notify_all()
        self._answer(200, b"")

    def do_GET(self) -> None:
        path, _, wait = self.path.partition("?wait=")
        seconds = min(float(wait or 0), _LONG_POLL_S)
        with self.keys.changed:
            self.keys.changed.wait_for(lambda: path in self.keys.values, timeout=seconds)
            value = self.keys.values.get(path)
        self._answer(404 if value is None else 200, value or b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024


class TcpStore:
    """Keys and values over HTTP; rank 0 serves them."""

    # By address: groups of this process that meet at one share its server, which lives as long as
    # the process, since a rank that is late may still have to ask.
    _servers: ClassVar[dict[tuple[str, int], _Server]] = {}
    _servers_lock = threading.Lock()

    def __init__(self, host: str, port: int, *, serves: bool, timeout_s: float) -> None:
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._has_met = self._is_gone = False
        self._local = threading.local()
        if serves:
            self._serve()

    def _serve(self) -> None:
        key = (self._host, self._port)
        with self._servers_lock:
            if key in self._servers:
                return
            handler = type("Handler", (_Handler,), {"keys": _Keys()})
            try:
                server = _Server(key, handler)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"rank 0 cannot serve the rendezvous on {self._host}:{self._port}: "
                    f"{error.strerror}; give an address of this host and a port that is free",
                ) from None
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._servers[key] = server

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        # Rank 0 may start late; once it was there and is no more, it does not come back.
        patience_s = 0 if self._is_gone else _GONE_S if self._has_met else self._timeout_s
        deadline = time.monotonic() + patience_s
        while True:
            connection = getattr(self._local, "connection", None)
            try:
                if connection is None:
                    connection = http.client.HTTPConnection(self._host, self._port, timeout=30)
                    self._local.connection = connection
                connection.request(method, path, body)
                answer = connection.getresponse()
                content = answer.read()
                self._has_met = True
                return answer.status, content
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None
                if time.monotonic() > deadline:
                    self._is_gone = True
                    raise TimeoutError(
                        f"http://{self._host}:{self._port} did not answer within "
                        f"{patience_s:.0f} s ({error}): is rank 0 running, and is that its address?"
                    ) from None
                time.sleep(0.02)

    @staticmethod
    def _path(key: str) -> str:
        return "/" + urllib.parse.quote(key, safe="")

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value."""
        status, _ = self._ask("PUT", self._path(key), value)
        if status != 200:
            raise OSError(f"the store refused key '{key}' (HTTP {status})")

    def get(self, key: str, timeout_ms: int) -> bytes:
        """Waits for a value; raises TimeoutError."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            left = max(deadline - time.monotonic(), 0)
            status, value = self._ask("GET", f"{self._path(key)}?wait={left:.3f}")
            if status == 200:
                return value
            if left == 0:
                raise TimeoutError(f"key '{key}' did not appear")

    def has(self, key: str) -> bool:
        """Whether the key is there now."""
        return self._ask("GET", self._path(key))[0] == 200


@dataclass(frozen=True)
class Place:
    """A rank's place in a job."""

    rank: int
    size: int
    url: str


# Of torchrun, Open MPI, MPICH and Slurm.
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZE_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def _first(names: tuple[str, ...]) -> int | None:
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def find_place(rank: int | None, size: int | None, url: str | None) -> Place:
    """This process's place, from arguments or the launcher's environment.

    Raises:
        ValueError: neither tells; the text says what to give.
    """
    rank = _first(_RANK_NAMES) if rank is None else rank
    size = _first(_SIZE_NAMES) if size is None else size
    if rank is None and size is None and url is None:
        return Place(0, 1, "")
    if rank is None or size is None:
        raise ValueError(
            "pycomm: rank and size are unknown: start with `pycomm run --np N -- COMMAND`, "
            "torchrun, mpirun or srun, or give rank= and size="
        )
    url = url or os.environ.get("PYCOMM_RENDEZVOUS")
    if url is None and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        # torchrun's own store holds the port that it tells; the next one is ours.
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = int(os.environ["MASTER_PORT"]) + (1 if held else 0)
        url = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
    if url is None and size > 1:
        raise ValueError(
            "pycomm: where do the ranks meet? Give rendezvous='tcp://HOST:PORT' (rank 0 listens "
            "there) or 'file:///FOLDER' (that all see), or set PYCOMM_RENDEZVOUS"
        )
    return Place(rank, size, url or "")


def open_store(place: Place, timeout_s: float) -> Store:
    """The store that the place's URL names.

    Raises:
        ValueError: the URL is none of tcp://HOST:PORT and file:///FOLDER.
    """
    if place.size == 1 and not place.url:
        return _OwnStore()
    parsed = urllib.parse.urlparse(place.url)
    if parsed.scheme == "file" and parsed.path:
        return FileStore(parsed.path)
    if parsed.scheme == "tcp" and parsed.hostname and parsed.port is not None:
        host = socket.gethostbyname(parsed.hostname)
        return TcpStore(host, parsed.port, serves=place.rank == 0, timeout_s=timeout_s)
    raise ValueError(
        f"pycomm: rendezvous '{place.url}' is none of tcp://HOST:PORT and file:///FOLDER"
    )


class _OwnStore:
    """Of a group of one."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str, timeout_ms: int) -> bytes:
        del timeout_ms
        return self._values[key]

    def has(self, key: str) -> bool:
        return key in self._values

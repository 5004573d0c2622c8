"""What encryption costs inside a host: QUIC beside TLS over TCP, picoquic and a bare pipe."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from pycomm import _core
from pycomm.control.certificates import Authority

PAYLOAD_BYTES = 1452
# What is sent lies in the processor's caches, or in memory beyond them.
CACHED, LARGE = (4_000_000, 1), (8_000_000, 16)
_SECONDS = 1.5
_WARMUP_S = 0.4
# tests/picoquic/build.sh makes it, of a source archive that is not part of pycomm.
PICOQUIC = Path(__file__).resolve().parents[2] / "build" / "picoquic" / "peer"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _pinned(cpu: int, command: list[str]) -> list[str]:
    return ["taskset", "-c", str(cpu), *command]


def _pair() -> list[int]:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise RuntimeError("two processes are to be pinned, and only one processor is allowed")
    return allowed[:2]


def _last_json(said: str) -> dict[str, Any]:
    return dict(json.loads(said.splitlines()[-1]))


def pour(certs: Path, transport: str, crypto: str, source: tuple[int, int]) -> float:
    """Gbit/s of the user's bytes from one pinned process to another, encrypted."""
    port = _free_port()
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "PYCOMM_RENDEZVOUS": f"tcp://127.0.0.1:{port}",
        "PYCOMM_CERTS": str(certs),
        "PYCOMM_TRANSPORT": transport,
        "PYCOMM_QUIC_CRYPTO": crypto,
        "PYCOMM_QUIC_MTU_MAX": str(PAYLOAD_BYTES),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pycomm.bench.wan_rank", "pour", str(_SECONDS), str(_WARMUP_S)]
    ranks = [
        subprocess.Popen(
            _pinned(cpu, [*command, *map(str, source)]),
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, cpu in enumerate(_pair())
    ]
    said = [process.communicate(timeout=60)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"{transport}: {said[0][-800:]}\n{said[1][-800:]}")
    return float(_last_json(said[0])["bits_per_s"]) / 1e9


def picoquic(certs: Path) -> float:
    """Gbit/s of a picoquic stream between two pinned processes."""
    port = _free_port()
    files = [str(certs / "certificate.pem"), str(certs / "key.pem")]
    commands = [["sink", str(port), *files], ["source", str(port), str(_SECONDS)]]
    ends = [
        subprocess.Popen(
            _pinned(cpu, [str(PICOQUIC), *command, "congestion=prague"]),
            stdout=subprocess.PIPE,
            text=True,
        )
        for command, cpu in zip(commands, _pair(), strict=True)
    ]
    said = [end.communicate(timeout=60)[0] for end in ends]
    if any(end.returncode for end in ends):
        raise RuntimeError(f"picoquic: {said}")
    return float(_last_json(said[0])["gbit_per_s"])


def _pipe(library: str, source: tuple[int, int]) -> float:
    num_bytes = source[0] * source[1]
    return 8e-9 * _core.udp_pipe_bytes_per_s(PAYLOAD_BYTES, num_bytes, library)


def measure(rounds: int, place: Path) -> dict[str, list[float]]:
    """Gbit/s by contestant, a value a round; contestants take turns."""
    certs = place / "loopback"
    Authority.create(place / "loopback_ca", "bench").issue(certs)
    libraries = [
        name for name in ("ipsec-mb", "openssl") if _core.udp_pipe_bytes_per_s(1452, 4096, name) > 0
    ]
    contestants: dict[str, Callable[[], float]] = {}
    for library in libraries:
        for where, source in (("cache", CACHED), ("memory", LARGE)):

            def quic(library: str = library, source: tuple[int, int] = source) -> float:
                return pour(certs, "quic", library, source)

            def pipe(library: str = library, source: tuple[int, int] = source) -> float:
                return _pipe(library, source)

            contestants[f"pipe, {library}, {where}"] = pipe
            contestants[f"QUIC, {library}, {where}"] = quic
    contestants["TLS over TCP"] = lambda: pour(certs, "tcp", "auto", LARGE)
    if PICOQUIC.exists() and shutil.which(str(PICOQUIC)):
        contestants["picoquic"] = lambda: picoquic(certs)
    result: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            result[name].append(run())
    return result


# Numerator, denominator and the ratio that is aimed at.
_GOALS = [
    ("QUIC, ipsec-mb, cache", "pipe, ipsec-mb, cache", 0.7),
    ("QUIC, ipsec-mb, memory", "pipe, ipsec-mb, memory", 0.7),
    ("QUIC, openssl, cache", "pipe, openssl, cache", 0.7),
    ("QUIC, openssl, memory", "pipe, openssl, memory", 0.7),
    ("QUIC, ipsec-mb, memory", "TLS over TCP", 1.2),
    ("QUIC, ipsec-mb, cache", "picoquic", 5.0),
]


def section(measured: dict[str, list[float]]) -> list[str]:
    """The page's lines about `measured`."""
    rounds = len(next(iter(measured.values())))
    lines = [
        "",
        "## Inside a host",
        "",
        f"Over loopback from one pinned process to another, UDP payloads of {PAYLOAD_BYTES} bytes,",
        f"{_SECONDS:g} s each, {rounds} interleaved rounds. The pipe seals, sends, receives and",
        "opens with the same cipher, in batches, and nothing else (bench/udp_pipe.cc); its figure",
        "counts UDP payload, QUIC's and TLS's the user's bytes. What is sent comes from a source",
        "of 4 MB (cache) or 128 MB (memory).",
        "",
        "| | Gbit/s, median | range |",
        "|---|---|---|",
    ]
    for name, values in measured.items():
        lines.append(f"| {name} | {median(values):.1f} | {min(values):.1f}-{max(values):.1f} |")
    if "picoquic" not in measured:
        lines.append("| picoquic | not built here (tests/picoquic/build.sh) | |")
    lines += ["", "| ratio within a round | median | quartiles | goal |", "|---|---|---|---|"]
    for top, bottom, goal in _GOALS:
        if top in measured and all(measured.get(bottom, [0])):
            ratios = [a / b for a, b in zip(measured[top], measured[bottom], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            lines.append(
                f"| {top} / {bottom} | {median(ratios):.2f} | {low:.2f}-{high:.2f} | {goal:g} |"
            )
    return lines

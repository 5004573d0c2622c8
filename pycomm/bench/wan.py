"""Writes docs/wan_performance.md: QUIC beside TCP over long and lossy paths, all in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import Progress

from pycomm.bench import loopback
from pycomm.bench.report import machine, other_load
from pycomm.control.certificates import Authority
from pycomm.lab import Lab, LabPlan, Wan
from pycomm.lab.job import job_environments

# Of an IP packet of 1500 bytes: IP 20, UDP 8, QUIC's header 1 + 8 + 3, tag 16, frame 14.
NET_OF_HEADERS = (1500 - 20 - 8 - 12 - 16 - 14) / 1500
_WARMUP_S = 5.0
_STREAMS = ("quic", "tcp cubic", "tcp bbr")
_REDUCE_MB = 64


@dataclass(frozen=True)
class PathCase:
    """A path, and the share of its rate that a stream has to reach."""

    wan: Wan
    goal: float


PATHS = [
    PathCase(Wan(rtt_ms=40, rate_mbit=1000), 0.97),
    PathCase(Wan(rtt_ms=40, loss=0.01, rate_mbit=1000), 0.85),
    PathCase(Wan(rtt_ms=200, loss=0.001, rate_mbit=1000), 0.80),
    PathCase(Wan(rtt_ms=40, loss=0.01, rate_mbit=200), 0.85),
]
SHARED = Wan(rtt_ms=40, rate_mbit=200)


def start_pair(
    lab: Lab, command: list[str], hosts: tuple[int, int] = (0, 1), **settings: str
) -> list[subprocess.Popen[bytes]]:
    """Starts wan_rank on two hosts."""
    ranks = []
    for host, environment in job_environments(lab, 1, hosts):
        env = {**os.environ, **environment, "OMP_NUM_THREADS": "1", **settings}
        if "PYCOMM_CERTS" in settings:
            del env["PYCOMM_SECRET_FILE"]
        arguments = [sys.executable, "-m", "pycomm.bench.wan_rank", *command]
        ranks.append(
            lab.start(host, arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    return ranks


def result_of(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> dict[str, Any]:
    """What rank 0 printed last, and as its `other` what rank 1 did.

    Raises:
        RuntimeError: a rank failed; with what it said.
    """
    said = [process.communicate(timeout=timeout_s)[0].decode() for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"{ranks[0].args!r}: {said[0][-1000:]}\n{said[1][-1000:]}")
    mine, other = (json.loads(text.splitlines()[-1]) for text in said)
    return {**mine, "other": other}


def run_pair(lab: Lab, command: list[str], timeout_s: float, **settings: str) -> dict[str, Any]:
    """Runs wan_rank on both hosts; what rank 0 printed last."""
    return result_of(start_pair(lab, command, (0, 1), **settings), timeout_s)


def _quic(certs: Path) -> dict[str, str]:
    return {"PYCOMM_CERTS": str(certs), "PYCOMM_TRANSPORT": "quic"}


def _tcp_pour(wan: Wan, total: float, algorithm: str) -> list[str]:
    """With two bandwidth-delay products of buffer at each end."""
    buffer = round(2 * wan.rate_mbit * 1e6 / 8 * wan.rtt_ms / 1e3)
    return ["tcp-pour", str(total), str(_WARMUP_S), algorithm, str(buffer)]


def measure_sharing(rounds: int, seconds: float, certs: Path) -> dict[str, list[list[float]]]:
    """Mbit/s of two streams that share a path, each between two hosts of its own, by kinds."""
    total = seconds + _WARMUP_S
    pour = ["pour", str(total), str(_WARMUP_S)]
    result: dict[str, list[list[float]]] = {}
    for name in ("QUIC and QUIC", "QUIC and TCP CUBIC", "TCP BBR and TCP CUBIC"):
        for _ in range(rounds):
            with Lab(LabPlan(hosts=4, sites=2, wan=SHARED)) as lab:
                kinds = name.split(" and ")
                streams = []
                for kind, hosts in zip(kinds, ((0, 2), (1, 3)), strict=True):
                    if kind == "QUIC":
                        streams.append(start_pair(lab, pour, hosts, **_quic(certs)))
                    else:
                        command = _tcp_pour(SHARED, total, kind.split()[1].lower())
                        streams.append(start_pair(lab, command, hosts))
                rates = [result_of(ranks, total + 60)["bits_per_s"] / 1e6 for ranks in streams]
                result.setdefault(name, []).append(rates)
    return result


def measure_path(case: PathCase, rounds: int, seconds: float, certs: Path) -> dict[str, Any]:
    """Goodput of each kind of stream, Mbit/s, a value a round; the longest queue under QUIC."""
    result: dict[str, Any] = {name: [] for name in _STREAMS}
    result["queue_ms"] = []
    result["queue_at_end_ms"] = []
    for _ in range(rounds):
        for name in _STREAMS:
            with Lab(LabPlan(hosts=2, wan=case.wan)) as lab:
                total = seconds + _WARMUP_S
                if name == "quic":
                    command = ["pour", str(total), str(_WARMUP_S)]
                    said = run_pair(lab, command, total + 60, **_quic(certs))
                    towards = next(row for row in lab.report() if row["from"] == 1)
                    result["queue_ms"].append(towards["queue_ns_max"] / 1e6)
                    rtt_ms = said["other"]["paths"][0]["rtt_s"] * 1e3
                    result["queue_at_end_ms"].append(rtt_ms - case.wan.rtt_ms)
                else:
                    command = _tcp_pour(case.wan, total, name.split()[1])
                    said = run_pair(lab, command, total + 60)
                result[name].append(said["bits_per_s"] / 1e6)
    return result


def measure_reduce(rounds: int, certs: Path) -> dict[str, list[float]]:
    """Seconds of an all_reduce of 64 MiB between two hosts at 40 ms and 1 %, by backend."""
    wan = Wan(rtt_ms=40, loss=0.01, rate_mbit=1000)
    result: dict[str, list[float]] = {}
    for name, tcp, backend, count in (
        ("pycomm over QUIC", "bbr", "pycomm", rounds),
        ("gloo over BBR", "bbr", "gloo", rounds),
        ("gloo over CUBIC", "cubic", "gloo", 1),
    ):
        with Lab(LabPlan(hosts=2, wan=wan, tcp=tcp)) as lab:
            command = ["reduce", str(count), backend, str(_REDUCE_MB)]
            result[name] = run_pair(lab, command, 900, **_quic(certs))["seconds"]
    return result


def _path_row(case: PathCase, result: dict[str, Any]) -> str:
    wan = case.wan
    net = wan.rate_mbit * NET_OF_HEADERS
    quic = median(result["quic"])
    return (
        f"| {wan.rate_mbit:g} | {wan.rtt_ms:g} | {wan.loss * 100:g} | {quic:.0f} "
        f"| {median(result['tcp cubic']):.0f} | {median(result['tcp bbr']):.0f} "
        f"| {quic / net:.2f} ({min(result['quic']) / net:.2f}-{max(result['quic']) / net:.2f}) "
        f"| {case.goal:.2f} | {median(result['queue_ms']):.0f} "
        f"| {median(result['queue_at_end_ms']):.0f} |"
    )


def _sharing_lines(shared: dict[str, list[list[float]]]) -> list[str]:
    lines = [_SHARING_HEAD]
    for name, values in shared.items():
        first, second = (median(row[i] for row in values) for i in range(2))
        share = [row[0] / sum(row) for row in values]
        lines.append(
            f"| {name} | {first:.0f} | {second:.0f} "
            f"| {100 * median(share):.0f} % ({100 * min(share):.0f}-{100 * max(share):.0f}) |"
        )
    return lines


def write(folder: Path, rounds: int, seconds: float = 30) -> int:
    """Measures everything and writes the page and its numbers; returns the exit status."""
    raw: dict[str, Any] = {"machine": machine(), "load_before": other_load()}
    lines = [_head(rounds, seconds)]
    with tempfile.TemporaryDirectory() as place, Progress(transient=True) as progress:
        certs = Path(place) / "certs"
        Authority.create(Path(place) / "ca", "bench").issue(certs)
        task = progress.add_task("measuring", total=len(PATHS) + 3)
        for case in PATHS:
            progress.update(
                task, description=f"{case.wan.rate_mbit:g} Mbit/s, {case.wan.rtt_ms:g} ms"
            )
            result = measure_path(case, rounds, seconds, certs)
            raw[f"path {case}"] = result
            lines.append(_path_row(case, result))
            progress.advance(task)
        progress.update(task, description="two streams on one path")
        raw["sharing"] = measure_sharing(rounds, seconds, certs)
        progress.advance(task)
        progress.update(task, description="inside a host")
        raw["loopback"] = loopback.measure(max(rounds, 9), Path(place))
        progress.advance(task)
        progress.update(task, description="all_reduce of 64 MiB")
        reduced = measure_reduce(max(rounds, 3), certs)
        raw["reduce"] = reduced
    lines += _sharing_lines(raw["sharing"])
    lines.append(_REDUCE_HEAD)
    ours = median(reduced["pycomm over QUIC"])
    for name, values in reduced.items():
        lines.append(
            f"| {name} | {len(values)} | {median(values):.2f} | {median(values) / ours:.1f} |"
        )
    lines += loopback.section(raw["loopback"])
    (folder / "wan_performance.md").write_text("\n".join(lines) + "\n")
    (folder / "wan_performance.json").write_text(json.dumps(raw))
    return 0


def _head(rounds: int, seconds: float) -> str:
    facts = machine()
    return f"""# Performance over wide areas

Written by `pycomm performance --wan` on {time.strftime("%Y-%m-%d")}, on {facts["cpu"]}
with {facts["cpus_allowed"]} processors under Linux {facts["kernel"]}. Two hosts of the lab
(docs/lab.md): network namespaces, with a relay between them that shares the processors with both
ranks.

## Streams

One way, Mbit/s of the user's bytes over {seconds:g} s after {_WARMUP_S:g} s of warm-up, the median
of {rounds} rounds. The path's rate counts whole IP packets, its queue holds one round trip. TCP is
a plain stream without encryption, with two bandwidth-delay products of socket buffer at each end.
"share" is QUIC's over what the rate leaves for the user's bytes after IP's, UDP's and QUIC's
headers, with the range over rounds. The longest queue is the relay's, start-up included; "at
end" is what the sender's smoothed round trip then has above the path's.

| rate | RTT ms | loss % | QUIC | TCP CUBIC | TCP BBR | share | goal | longest queue, ms | at end |
|---|---|---|---|---|---|---|---|---|---|"""


_SHARING_HEAD = f"""
## Two streams on one path

{SHARED.rate_mbit:g} Mbit/s, {SHARED.rtt_ms:g} ms, no loss, a queue of one round trip; Mbit/s of
each, the median over rounds, and the first one's part with its range.

| streams | first | second | first's part |
|---|---|---|---|"""

_REDUCE_HEAD = f"""
## all_reduce

{_REDUCE_MB} MiB through torch.distributed between two hosts at 1 Gbit/s, 40 ms and 1 % loss;
seconds, median. gloo runs over the kernel's TCP, unencrypted, with the congestion control named.

| backend | rounds | seconds | over pycomm's |
|---|---|---|---|"""

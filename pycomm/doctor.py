"""What of pycomm is usable on this machine, and for each thing that is not, why and what to do."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pycomm import _core
from pycomm.errors import SystemFailureError
from pycomm.rdma_devices import list_ports
from pycomm.shared import shared_empty

Verdict = Literal["ok", "limited", "absent"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    name: str
    verdict: Verdict
    text: str
    remedy: str = ""


def examine() -> Iterator[Finding]:
    """Looks at everything, cheap things first; the transports run a job of two ranks."""
    yield from _software()
    yield from _processor()
    yield from _transports()
    yield from _devices()
    yield from _limits()
    yield from _settings()


def _software() -> Iterator[Finding]:
    yield Finding("software", "pycomm", "ok", f"{_core.version()}, Python {sys.version.split()[0]}")
    if importlib.util.find_spec("torch") is None:
        yield Finding(
            "software",
            "torch backend",
            "absent",
            "torch is not installed here",
            "pip install torch==2.13.0 and build pycomm again; pycomm.Communicator needs none",
        )
        return
    import torch

    from pycomm._loader import torch_module

    try:
        torch_module()
    except ImportError as error:
        yield Finding("software", "torch backend", "absent", str(error))
        return
    auto = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"
    yield Finding(
        "software",
        "torch backend",
        "ok" if auto else "limited",
        f"init_process_group('pycomm') works with torch {torch.__version__}",
        "" if auto else "TORCH_DEVICE_BACKEND_AUTOLOAD=0: write `import pycomm` before it",
    )


def _processor() -> Iterator[Finding]:
    sets = _core.kernel_sets()
    best = sets[0]
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown processor",
    )
    yield Finding(
        "processor",
        "reductions",
        "limited" if best == "portable" else "ok",
        f"{best} kernels on {model}",
        "no AVX2 here, or the build left it out: reductions of 16-bit floats are slow"
        if best == "portable"
        else "",
    )
    cpus = len(os.sched_getaffinity(0))
    yield Finding(
        "processor",
        "processors",
        "ok" if cpus > 1 else "limited",
        f"{cpus} may be used",
        "" if cpus > 1 else "ranks that share a processor take turns: latency is milliseconds",
    )


def _two_ranks(body: Callable[[Any], dict[str, Any]], settings: dict[str, str]) -> dict[str, Any]:
    """What `body` returns on rank 0 of two, or {"error": text}."""
    from pycomm.communicator import Communicator

    with tempfile.TemporaryDirectory(prefix="pycomm-doctor-") as folder:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)

        def entry(rank: int, pipe: Connection) -> None:
            try:
                with Communicator(
                    rank, 2, rendezvous=f"file://{folder}", timeout=10, settings=settings
                ) as comm:
                    result = body(comm)
            except Exception as error:
                result = {"error": str(error)}
            if rank == 0:
                pipe.send(result)

        ranks = [context.Process(target=entry, args=(rank, there)) for rank in range(2)]
        for process in ranks:
            process.start()
        result = here.recv() if here.poll(30) else {"error": "no answer within 30 s"}
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        return dict(result)


def _shared_array() -> tuple[Any, str]:
    try:
        return shared_empty(1 << 20), ""
    except SystemFailureError as error:
        return None, str(error)


def _exercise(comm: Any) -> dict[str, Any]:
    small, large = np.ones(2, np.float32), np.ones(1 << 20, np.float32)

    def seconds(array: np.ndarray[Any, Any], times: int) -> float:
        laps = []
        for _ in range(times):
            start = time.perf_counter()
            comm.all_reduce(array, "max")
            laps.append(time.perf_counter() - start)
        return float(np.median(laps))

    seconds(large, 3)
    result: dict[str, Any] = {"small_s": seconds(small, 200), "large_s": seconds(large, 10)}
    before = comm.peer_stats()[0]["bytes_direct"]
    comm.sendrecv(large[: 1 << 18], 1 - comm.rank, np.empty(1 << 18, np.float32))
    result.update(comm.peer_stats()[0])
    result["bytes_direct"] -= before
    shared, result["shared_refusal"] = _shared_array()
    has_all = np.array([shared is not None], np.int32)
    comm.all_reduce(has_all, "min")
    if has_all[0] and shared is not None:
        result["shared_s"] = seconds(shared, 10)
    return result


def _transports() -> Iterator[Finding]:
    for name, settings in (("shared memory", "shm"), ("TCP", "tcp")):
        seen = _two_ranks(_exercise, {"TRANSPORT": settings, "SHM_DISABLE": "0"})
        if "error" in seen:
            yield Finding(
                "transports",
                name,
                "absent",
                seen["error"],
                "ranks of this host fall back to TCP" if settings == "shm" else "",
            )
            continue
        small, large = seen["small_s"] * 1e6, seen["large_s"] * 1e3
        figures = f"all_reduce of 8 B {small:.1f} us, 4 MiB {large:.2f} ms"
        if settings == "shm" and seen["bytes_direct"] == 0:
            yield Finding(
                "transports",
                name,
                "limited",
                figures + "; large messages between two ranks take two copies, since "
                "process_vm_readv is refused",
                "allow it: sysctl kernel.yama.ptrace_scope=0, or --cap-add SYS_PTRACE for a "
                "container",
            )
        else:
            yield Finding("transports", name, "ok", figures)
        if settings == "shm":
            yield _shared_tensors(seen)
    crypto = _core.crypto_refusal()
    yield Finding(
        "transports",
        "TCP between hosts",
        "absent" if crypto else "ok",
        crypto or "libcrypto proves membership; set PYCOMM_SECRET_FILE on every host",
        "apt-get install libssl3" if crypto else "",
    )
    yield from _rdma()
    yield _quic()


def _quic() -> Finding:
    from pycomm.control import aioquic_private

    try:
        aioquic_private.check_contract()
    except aioquic_private.ContractError as error:
        return Finding("transports", "QUIC", "absent", str(error), "TLS over TCP serves instead")
    settings = {row["name"]: row["value"] for row in _core.resolve_settings()["settings"]}
    if not any(settings[name] for name in ("PYCOMM_CERTS", "PYCOMM_TLS_CERT")):
        return Finding(
            "transports",
            "QUIC",
            "limited",
            "no certificates are set, so nothing is encrypted between hosts",
            "pycomm certs init ca; pycomm certs issue ca HOST; set PYCOMM_CERTS (docs/wan.md)",
        )
    return Finding("transports", "QUIC", "ok", f"sealed by {_core.packet_crypto()}")


def _shared_tensors(seen: dict[str, Any]) -> Finding:
    name = "tensors in shared memory"
    if "shared_s" in seen:
        text = f"all_reduce of 4 MiB {seen['shared_s'] * 1e3:.2f} ms"
        return Finding("transports", name, "ok", text)
    return Finding(
        "transports",
        name,
        "limited",
        seen["shared_refusal"] or "the other rank has none",
        "tensors lie in private memory; raise PYCOMM_SHM_BYTES_MAX or the container's limit",
    )


def _rdma() -> Iterator[Finding]:
    ports, refusal = list_ports()
    if not ports:
        yield Finding("transports", "RDMA", "absent", refusal, "hosts are joined by QUIC or TCP")
        return
    for port in ports:
        yield Finding(
            "transports",
            f"RDMA {port.device}:{port.number}",
            "ok" if port.usable else "absent",
            port.describe(),
            port.reason,
        )
    lockable = _core.lockable_bytes()
    if lockable < 1 << 30:
        yield Finding(
            "transports",
            "memory that a NIC may use",
            "limited",
            f"{lockable >> 20} MiB may be locked; what does not fit is copied",
            "ulimit -l unlimited, or memlock in /etc/security/limits.conf",
        )


def _devices() -> Iterator[Finding]:
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    yield Finding(
        "devices",
        "GPUs",
        "limited" if gpus else "absent",
        f"{len(gpus)} NVIDIA devices" if gpus else "none here",
        "groups move memory of the host: use 'cpu:pycomm,cuda:nccl'; CuPy arrays are staged"
        if gpus
        else "",
    )


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding(
        "limits",
        "open files",
        "ok" if soft >= 4096 else "limited",
        f"{soft} (hard limit {hard}); a rank takes about five for each peer",
        "" if soft >= 4096 else f"ulimit -n {min(hard, 65536)} for groups above {soft // 6} ranks",
    )
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
    }
    gib = 1 << 30
    yield Finding(
        "limits",
        "memory",
        "ok",
        f"{memory['MemAvailable'] / gib:.1f} of {memory['MemTotal'] / gib:.1f} GiB available; "
        "shared tensors and queues come from it (PYCOMM_SHM_BYTES_MAX bounds them)",
    )
    for address in _core.interfaces():
        yield Finding("limits", "interface", "ok", f"{address[0]}: {address[1]}")


def _settings() -> Iterator[Finding]:
    resolved = _core.resolve_settings()
    for row in resolved["settings"]:
        if row["source"] != "default":
            yield Finding("settings", row["name"], "ok", f"{row['value']} ({row['source']})")
    if resolved["complaint"]:
        yield Finding("settings", "refused", "absent", resolved["complaint"])
    for warning in resolved["warnings"]:
        yield Finding("settings", "unknown", "limited", warning)


def as_json(findings: list[Finding]) -> list[dict[str, str]]:
    """For machines to read."""
    return [asdict(finding) for finding in findings]

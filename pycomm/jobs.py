"""Starts a command as the ranks of a job on this host: what `pycomm run` does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

_GRACE_S = 3.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_job(command: Sequence[str], num_ranks: int, *, pin: bool = False) -> int:
    """Runs `command` once per rank and returns the first bad exit status, or 0.

    Ranks find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (for torch's env://) and
    PYCOMM_RENDEZVOUS (for pycomm.Communicator) in their environment. When one fails the others get
    a moment to tell their own errors, then they are ended; ctrl-C goes to all of them.
    """
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="pycomm-run-") as folder:
        shared = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "PYCOMM_RENDEZVOUS": f"file://{folder}",
        }

        def start() -> Iterator[subprocess.Popen[bytes]]:
            for rank in range(num_ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = subprocess.Popen(command, env={**os.environ, **shared, **own})
                if pin:
                    os.sched_setaffinity(process.pid, {cpus[rank % len(cpus)]})
                yield process

        return attend(start())


def attend(starting: Iterator[subprocess.Popen[bytes]]) -> int:
    """Sees processes to their end, as `run_job` says, while and after they are started."""
    ranks: list[subprocess.Popen[bytes]] = []

    def on_terminate(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # through the finally below, not past it

    before = signal.signal(signal.SIGTERM, on_terminate)
    try:
        for process in starting:
            ranks.append(process)
        return _await_all(ranks)
    except KeyboardInterrupt:  # the terminal has sent it to the ranks too
        _end_all(ranks)
        return 130
    finally:
        _end_all(ranks)
        signal.signal(signal.SIGTERM, before)


def _await_all(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Returns the first bad exit status, with the other ranks ended, or 0."""
    while True:
        codes = [process.poll() for process in ranks]
        bad = next((code for code in codes if code), None)
        if bad is not None:
            _end_all(ranks)
            return bad if bad > 0 else 128 - bad
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.02)


def _end_all(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Waits a moment, ends what is left, waits again, and kills."""

    def is_over(until: float) -> bool:
        while any(process.poll() is None for process in ranks):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    if is_over(time.monotonic() + _GRACE_S):
        return
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    if is_over(time.monotonic() + _GRACE_S):
        return
    for process in ranks:
        process.kill()
        process.wait()

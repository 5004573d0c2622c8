"""A run over several hosts: torchrun on each of them, started by ssh from here."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_END_S = 30.0


@dataclass(frozen=True)
class HostsPlan:
    """What runs where."""

    hosts: tuple[str, ...]
    ranks_per_host: int
    arguments: tuple[str, ...]  # of `pycomm train`, without hosts
    max_restarts: int

    def __post_init__(self) -> None:
        if not self.hosts or any(not h or h.startswith("-") for h in self.hosts):
            raise ValueError(f"--hosts: '{','.join(self.hosts)}' is no list of hosts")

    def command(self, port: int) -> str:
        """The line for every host's shell."""
        words = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(self.hosts))),
            *("--nproc-per-node", str(self.ranks_per_host)),
            *("--rdzv-backend", "c10d", "--rdzv-id", f"pycomm-{port}"),
            *("--rdzv-endpoint", f"{self.hosts[0].rpartition('@')[2]}:{port}"),
            *("--max-restarts", str(self.max_restarts)),
            *("-m", "pycomm", "train", *self.arguments),
        ]
        passed = {k: v for k, v in sorted(os.environ.items()) if k.startswith("PYCOMM_")}
        passed.pop("PYCOMM_SSH", None)
        return (
            shlex.join(["cd", str(Path.cwd())])
            + " && exec "
            + shlex.join(["env", *(f"{k}={v}" for k, v in passed.items()), *words])
        )


def run_on_hosts(plan: HostsPlan) -> int:
    """Starts all, shows their lines with the host in front, and returns the first bad status.

    `PYCOMM_SSH` may name another command than `ssh -tt -o BatchMode=yes`. Settings of pycomm's
    (`PYCOMM_...`) go along. When one host ends badly, or on ctrl-C and SIGTERM, the others are told
    to save and end.

    Raises:
        OSError: there is no ssh here.
    """
    port = random.SystemRandom().randrange(20000, 30000)
    ssh = shlex.split(os.environ.get("PYCOMM_SSH", "ssh -tt -o BatchMode=yes"))
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []

    def pass_on(number: int, frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    before = [(n, signal.signal(n, pass_on)) for n in (signal.SIGTERM, signal.SIGINT)]
    try:
        for i, host in enumerate(plan.hosts):
            process = subprocess.Popen(
                [*ssh, host, plan.command(port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            processes.append(process)
            assert process.stdout is not None
            reader = threading.Thread(target=_show, args=(process.stdout, host, i))
            reader.start()
            readers.append(reader)
        return _await_all(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in readers:
            reader.join(1)
        for number, handler in before:
            signal.signal(number, handler)


def _show(stream: IO[str], host: str, index: int) -> None:
    for line in stream:
        text = line.rstrip()
        # The ranks' own progress is rank 0's, on the first host.
        sys.stderr.write(f"{text}\n" if index == 0 else f"[{host}] {text}\n")
        sys.stderr.flush()


def _await_all(processes: Sequence[subprocess.Popen[str]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        bad = next((code for code in codes if code), None)
        if bad is not None:
            return bad if bad > 0 else 128 - bad
        if all(code == 0 for code in codes):
            return 0
        for process in processes:
            if process.poll() is None:
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    break

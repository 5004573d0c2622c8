"""Ranks with RDMA devices, forked from a process that has imported what they need.

Rank r has the devices rxe(r % 2) and, over the second link, rxe(r % 2 + 2): even ranks are on one
end of both links, odd ranks on the other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pycomm
from pycomm import errors

Body = Callable[[pycomm.Communicator], Any]


def devices(rank: int, paths: int) -> str:
    names = [f"rxe{rank % 2}", f"rxe{rank % 2 + 2}"]
    return ",".join(names[:paths])


class Ranks:
    """Starts them; `with Ranks(body) as ranks: ...; ranks.results()`."""

    def __init__(
        self,
        body: Body,
        world: int = 2,
        *,
        paths: int = 2,
        settings: dict[str, str] | None = None,
        settings_of: Callable[[int], dict[str, str]] | None = None,
        before: Callable[[int], None] | None = None,
        timeout_s: float = 60,
    ) -> None:
        self._body = body
        self._world = world
        self._paths = paths
        self._settings = {"PYCOMM_TRANSPORT": "rdma"} | (settings or {})
        self._settings_of = settings_of or (lambda rank: {})
        self._before = before
        self._timeout_s = timeout_s
        self._context = multiprocessing.get_context("fork")
        self._queue: Any = self._context.Queue()
        self.processes: list[Any] = []
        self._found: dict[int, Any] = {}

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory(prefix="pycomm-rdma-")
        self.processes = [
            self._context.Process(target=self._entry, args=(rank,)) for rank in range(self._world)
        ]
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._folder.cleanup()

    def _entry(self, rank: int) -> None:
        os.environ.update(self._settings | {"PYCOMM_IB_HCA": devices(rank, self._paths)})
        os.environ.update(self._settings_of(rank))
        if self._before is not None:
            self._before(rank)
        try:
            with pycomm.Communicator(
                rank=rank,
                size=self._world,
                rendezvous=f"file://{self._folder.name}",
                timeout=self._timeout_s,
            ) as comm:
                self._queue.put((rank, self._body(comm)))
        except BaseException as error:
            traceback.print_exc()
            is_ours = isinstance(error, errors.Error)
            self._queue.put((rank, error if is_ours else AssertionError(repr(error))))
        self._queue.close()
        self._queue.join_thread()

    def results(self, ranks: list[int] | None = None, within_s: float = 60) -> dict[int, Any]:
        """What the bodies returned, or the errors that ended them; waits for `ranks` (all)."""
        wanted = range(self._world) if ranks is None else ranks
        deadline = time.monotonic() + within_s
        while not all(rank in self._found for rank in wanted):
            left = deadline - time.monotonic()
            assert left > 0, f"no word from some of {list(wanted)}; heard {sorted(self._found)}"
            try:
                rank, result = self._queue.get(timeout=min(left, 0.5))
            except Exception:
                continue
            self._found[rank] = result
        return self._found

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)


def run(body: Body, world: int = 2, **options: Any) -> dict[int, Any]:
    """All results; fails with the first error of a rank."""
    with Ranks(body, world, **options) as ranks:
        results = ranks.results()
    for rank, result in results.items():
        assert not isinstance(result, BaseException), f"rank {rank}: {result}"
    return results


def sh(command: str) -> str:
    """A shell command's output; fails with its errors."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def packets(interface: str) -> int:
    """Received so far: what proves that traffic, or a fault, went over it."""
    return int(Path(f"/sys/class/net/{interface}/statistics/rx_packets").read_text())

"""Runs functions in forked ranks over a torch.distributed backend, for tests."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycomm.control.certificates import Authority


@dataclass
class Outcome:
    """What became of each rank: its result, or the text of its exception; exit codes."""

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    exit_codes: list[int | None] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)

    def expect_all_ok(self) -> None:
        assert not self.errors, "\n".join(f"rank {r}: {e}" for r, e in self.errors.items())
        assert all(code == 0 for code in self.exit_codes), self.exit_codes


TRANSPORTS = ["shm", "tcp", "quic"]


@functools.cache
def certificates() -> Path:
    """A folder of certificates for any rank, made once a test run and removed after it."""
    folder = Path(tempfile.mkdtemp(prefix="pycomm-test-certs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Authority.create(folder / "ca", "tests").issue(folder / "any")
    return folder / "any"


def run_ranks(
    body: Callable[[int, int], Any],
    world_size: int,
    *,
    backend: str = "pycomm",
    env: dict[str, str] | None = None,
    timeout_s: float = 60,
    group_timeout_s: float = 40,
    meanwhile: Callable[[list[int]], None] | None = None,
    before: Callable[[int], None] | None = None,
    destroy: bool = True,
) -> Outcome:
    """Forks ranks, opens the default group in each, runs `body(rank, world_size)`."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory(prefix="pycomm-test-") as folder:
        store = str(Path(folder) / "store")

        settings = dict(env or {})
        if settings.get("PYCOMM_TRANSPORT") == "quic":
            settings["PYCOMM_CERTS"] = str(certificates())

        def entry(rank: int) -> None:
            os.environ.update(settings)
            if before is not None:
                before(rank)
            torch.set_num_threads(1)
            start = time.monotonic()
            try:
                dist.init_process_group(
                    backend,
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=group_timeout_s),
                )
                result = body(rank, world_size)
                queue.put((rank, "ok", result, time.monotonic() - start))
                if destroy:
                    dist.destroy_process_group()
            except BaseException as error:
                text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
                queue.put((rank, "error", text, time.monotonic() - start))
            queue.close()
            queue.join_thread()

        processes = [context.Process(target=entry, args=(rank,)) for rank in range(world_size)]
        for process in processes:
            process.start()
        if meanwhile is not None:
            meanwhile([process.pid or 0 for process in processes])
        outcome = Outcome()
        deadline = time.monotonic() + timeout_s
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            _drain(queue, outcome)
            time.sleep(0.01)
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
                outcome.errors.setdefault(-1, "some ranks did not end in time")
            process.join()
        _drain(queue, outcome)
        outcome.exit_codes = [process.exitcode for process in processes]
        return outcome


def _drain(queue: Any, outcome: Outcome) -> None:
    while not queue.empty():
        rank, kind, value, seconds = queue.get()
        (outcome.results if kind == "ok" else outcome.errors)[rank] = value
        outcome.seconds[rank] = seconds

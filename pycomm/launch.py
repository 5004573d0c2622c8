"""Runs a function in several ranks on this host, or in the ranks that torchrun started."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Place:
    """Where this process stands: its rank, and how to meet the others."""

    rank: int
    world_size: int
    init_method: str
    pin: bool

    @staticmethod
    def from_environment(*, pin: bool) -> Place:
        """Of a process that torchrun, or one like it, started."""
        return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", pin)

    def pin_to_cpu(self) -> None:
        """Pins this process to one of the allowed processors, by rank."""
        cpus = sorted(os.sched_getaffinity(0))
        if self.pin:
            os.sched_setaffinity(0, {cpus[self.rank % len(cpus)]})


def run_ranks(
    body: Callable[[Place], None],
    world_size: int,
    *,
    pin: bool = True,
    passes_signals_on: bool = False,
) -> int:
    """Runs `body` in every rank and returns an exit status: 0 if all ended well.

    Ranks are forked, so `body` may be a closure and imports are paid once. When torchrun started
    this process, `body` runs here as the rank that the environment names. When a rank fails the
    others are ended, and the first failure's traceback is what remains on the screen.

    Args:
        passes_signals_on: SIGTERM and the first ctrl-C are left to the ranks, which end in their
            own time; a second ctrl-C ends them.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        body(Place.from_environment(pin=pin))
        return 0
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        init_method = f"file://{Path(folder) / 'store'}"
        context = multiprocessing.get_context("fork")
        ranks: list[BaseProcess] = []
        for rank in range(world_size):
            place = Place(rank, world_size, init_method, pin)
            process = context.Process(target=_run_one, args=(body, place))
            process.start()
            ranks.append(process)
        try:
            with _PassedOn(ranks) if passes_signals_on else contextlib.nullcontext():
                return _await_all(ranks)
        except KeyboardInterrupt:
            _end(ranks)
            return 130


class _PassedOn:
    """Sends SIGTERM, for a hang-up too, to all ranks, and forgives one ctrl-C, which the terminal
    has sent to them."""

    def __init__(self, ranks: list[BaseProcess]) -> None:
        self._ranks, self._interrupts = ranks, 0

    def __enter__(self) -> _PassedOn:
        self._before = [
            (signal.SIGTERM, signal.signal(signal.SIGTERM, self._on_terminate)),
            (signal.SIGHUP, signal.signal(signal.SIGHUP, self._on_terminate)),
            (signal.SIGINT, signal.signal(signal.SIGINT, self._on_interrupt)),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _on_terminate(self, number: int, frame: object) -> None:
        for process in self._ranks:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)

    def _on_interrupt(self, number: int, frame: object) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt


def _run_one(body: Callable[[Place], None], place: Place) -> None:
    _end_with_parent()
    try:
        body(place)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit:
        raise
    except BaseException as error:
        text = str(error)
        # Errors of the backend say what happened; where in Python it did is noise.
        # So does the system's word about a file or a full disk.
        is_explained = text.startswith("pycomm: ") or (
            isinstance(error, OSError) and error.errno is not None
        )
        told = text + "\n" if is_explained else "\n" + traceback.format_exc()
        sys.stderr.write(f"--- rank {place.rank} failed: {told}")
        sys.stderr.flush()
        sys.exit(1)


def _end_with_parent() -> None:
    """A rank whose launcher was killed gets SIGTERM, so that none is left behind (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _await_all(ranks: list[BaseProcess]) -> int:
    while True:
        codes = [process.exitcode for process in ranks]
        bad = next((code for code in codes if code not in (None, 0)), None)
        if bad is not None:
            _end(ranks)
            return bad if bad > 0 else 128 - bad
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.02)


def _end(ranks: list[BaseProcess]) -> None:
    """Gives ranks a moment to tell their own errors, then ends them."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
        time.sleep(0.02)
    for process in ranks:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()

"""Gangs of ranks that take turns: one for each contestant, started and led from here."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from pycomm.bench.peer.serve import Contestant, pin_to_cpu, serve
from pycomm.bench.peers import Peer

_START_S = 60.0
Maker = Callable[[int, Path], Contestant]  # of a rank and its gang's folder


class GangError(RuntimeError):
    """A rank of a gang ended, or did not come; its own words are on stderr."""


class Gang:
    """The ranks of one contestant. They answer in the order of their ranks."""

    def __init__(self, name: str, num_ranks: int) -> None:
        self.name, self.num_ranks = name, num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="pycomm-bench-")
        self.folder = Path(self._folder.name)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / "socket"))
        self._listener.listen(num_ranks)
        self.address = str(self.folder / "socket")
        self._streams: list[Any] = []
        self._forked: list[BaseProcess] = []
        self._launcher: subprocess.Popen[bytes] | None = None

    def fork(self, make: Maker, *, pin: bool) -> None:
        """Forks the ranks; each makes its contestant and serves it."""

        def entry(rank: int) -> None:
            try:
                if pin:
                    pin_to_cpu(rank)
                serve(make(rank, self.folder), rank, self.address)
                os._exit(0)  # measured is measured; groups need no farewell
            except BaseException:
                sys.stderr.write(f"--- {self.name}, rank {rank}: {traceback.format_exc()}")
                sys.stderr.flush()
                os._exit(1)

        context = multiprocessing.get_context("fork")
        for rank in range(self.num_ranks):
            process = context.Process(target=entry, args=(rank,))
            process.start()
            self._forked.append(process)

    def launch(self, peer: Peer, settings: dict[str, Any]) -> None:
        """Has an MPI start the ranks."""
        program = Path(__file__).parent / "peer" / "mpi_rank.py"
        words = json.dumps({**settings, "address": self.address})
        self._launcher = subprocess.Popen(
            [*peer.launch_command(self.num_ranks), str(program), words],
            env=peer.environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def await_ranks(self) -> None:
        """Until all ranks have come together.

        Raises:
            GangError: one ended, or they take longer than a minute.
        """
        by_rank: dict[int, Any] = {}
        deadline = time.monotonic() + _START_S
        self._listener.settimeout(0.2)
        while len(by_rank) < self.num_ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._has_ended() or time.monotonic() > deadline:
                    raise GangError(f"{self.name}: its ranks did not come together") from None
                continue
            connection.settimeout(None)
            stream = connection.makefile("rw")
            by_rank[json.loads(stream.readline())["rank"]] = stream
        self._streams = [by_rank[rank] for rank in range(self.num_ranks)]

    def _has_ended(self) -> bool:
        if self._launcher is not None and self._launcher.poll() is not None:
            return True
        return any(process.exitcode is not None for process in self._forked)

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Gives all ranks one request, and returns their answers.

        Raises:
            GangError: a rank ended instead.
        """
        for stream in self._streams:
            stream.write(json.dumps(request) + "\n")
            stream.flush()
        answers = []
        for rank, stream in enumerate(self._streams):
            line = stream.readline()
            if not line:
                raise GangError(f"{self.name}: rank {rank} ended during {request['do']}")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        """Ends the ranks, by a word, then by force."""
        for stream in self._streams:
            try:
                stream.write(json.dumps({"do": "quit"}) + "\n")
                stream.flush()
            except OSError:
                pass
        for process in self._forked:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        if self._launcher is not None:
            try:
                self._launcher.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._launcher.pid, signal.SIGKILL)
                self._launcher.wait()
        self._listener.close()
        self._folder.cleanup()

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class StepContestant:
    """A rank of torch.distributed whose call is a step; nothing depends on a message's size."""

    def prepare(self, size_bytes: int, count: int, is_checked: bool) -> int:
        """Nothing to prepare."""
        del size_bytes, count, is_checked
        return 0

    def call(self) -> None:
        """One step."""
        raise NotImplementedError

    def call_many(self, times: int) -> None:
        """One after the other."""
        for _ in range(times):
            self.call()

    def barrier(self) -> None:
        """Lines the ranks up."""
        import torch.distributed as dist

        dist.barrier()


def take_turns(
    makers: dict[str, Maker], num_ranks: int, *, rounds: int, warmup: int, times: dict[str, int]
) -> dict[str, list[float]]:
    """Seconds of a call by contestant: of the slowest rank, the median of `times` calls, one value
    a round. Gangs of pinned ranks take turns, in the other order every second round."""
    names = list(makers)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        gangs = {name: stack.enter_context(Gang(name, num_ranks)) for name in names}
        for name, gang in gangs.items():
            gang.fork(makers[name], pin=True)
        for gang in gangs.values():
            gang.await_ranks()
            gang.ask(do="prepare", size_bytes=0, count=0, check=False, warmup=warmup)
        for round_ in range(rounds):
            for name in names if round_ % 2 == 0 else reversed(names):
                answers = gangs[name].ask(do="round", times=times[name], blocking=True)
                laps = zip(*[answer["seconds"] for answer in answers], strict=True)
                seconds[name].append(median(max(lap) for lap in laps))
    return seconds

"""The rank's side of a benchmark gang: obeys a coordinator over a local socket.

A request is one line of JSON, so is the answer. Between requests a rank waits in the kernel, so
that gangs which take turns do not disturb each other.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any, Protocol


class Contestant(Protocol):
    """One implementation of the operations, in one rank."""

    def prepare(self, size_bytes: int, count: int, is_checked: bool) -> int:
        """Makes the buffers of a size; returns the number of wrong elements of one run."""

    def call(self) -> None:
        """Runs the operation once."""

    def call_many(self, times: int) -> None:
        """Issues the operation `times` times, then waits for all."""

    def barrier(self) -> None:
        """Lines the ranks up."""


def time_round(contestant: Contestant, times: int, is_blocking: bool) -> list[float]:
    """Seconds of each of `times` operations; their mean, where they are not waited for singly."""
    contestant.barrier()
    clock = getattr(contestant, "clock", time.perf_counter)
    if not is_blocking:
        start = clock()
        contestant.call_many(times)
        return [(clock() - start) / times]
    laps = []
    last = clock()
    for _ in range(times):
        contestant.call()
        now = clock()
        laps.append(now - last)
        last = now
    return laps


def pin_to_cpu(rank: int) -> None:
    """Pins this process to one of the allowed processors, by rank."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})


def serve(contestant: Contestant, rank: int, address: str) -> None:
    """Until the coordinator says that it is enough, or goes away."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        stream = connection.makefile("rw")

        def answer(**fields: Any) -> None:
            stream.write(json.dumps(fields) + "\n")
            stream.flush()

        answer(rank=rank)
        for line in stream:
            request = json.loads(line)
            if request["do"] == "prepare":
                wrong = contestant.prepare(
                    request["size_bytes"], request["count"], request["check"]
                )
                for _ in range(request["warmup"]):
                    contestant.call()
                answer(wrong=wrong)
            elif request["do"] == "round":
                answer(seconds=time_round(contestant, request["times"], request["blocking"]))
            else:
                return

"""What a training job sees of its communication: steps of data-parallel training, the processor
time of a rank that waits, and how long a group takes to come together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import pycomm
from pycomm.bench.gang import Gang, Maker, StepContestant, take_turns
from pycomm.bench.plan import SHARED

ALONE = "alone"  # the same step without communication
_WIDTH, _LAYERS, _BATCH = 2240, 5, 8


class TrainingContestant(StepContestant):
    """Steps of a 100 MB multilayer perceptron under DistributedDataParallel."""

    def __init__(self, name: str, rank: int, num_ranks: int, init_method: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        torch.set_num_threads(1)
        torch.manual_seed(0)
        backend = "gloo" if name == "gloo" else "pycomm"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=num_ranks)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
        with pycomm.shared_memory() if name == SHARED else nullcontext():
            self._model = DistributedDataParallel(
                torch.nn.Sequential(*layers), gradient_as_bucket_view=True
            )
        self._input = torch.randn(_BATCH, _WIDTH)
        self._communicates = name != ALONE

    def call(self) -> None:
        """One forward and backward pass."""
        with nullcontext() if self._communicates else self._model.no_sync():
            self._model(self._input).sum().backward()


def measure_steps(rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step of two pinned ranks, by contestant: gloo, pycomm, pycomm on shared buckets,
    and the step alone; one value a round, interleaved."""

    def maker(name: str) -> Maker:
        return lambda rank, folder: TrainingContestant(name, rank, 2, f"file://{folder}/meet")

    makers = {name: maker(name) for name in ("gloo", "pycomm", SHARED, ALONE)}
    return take_turns(makers, 2, rounds=rounds, warmup=3, times=dict.fromkeys(makers, steps))


def measure_waiting(seconds: float = 3.0) -> dict[str, float]:
    """Processor time that pycomm takes in a rank while its peer computes for `seconds`, as a share
    of one core: of its threads beside an idle group, beside an operation that was started, and of
    everything in a rank that waits inside a blocking call."""
    with Gang("waiting", 2) as gang:
        gang.fork(lambda rank, folder: _WaitingContestant(rank, folder, seconds), pin=True)
        gang.await_ranks()
        answers = gang.ask(do="round", times=3, blocking=True)
    idle, started, blocked = (lap / seconds for lap in answers[0]["seconds"])
    return {"idle": idle, "started": started, "blocked": blocked}


class _WaitingContestant:
    """Its laps are processor seconds, not seconds."""

    def __init__(self, rank: int, folder: Path, seconds: float) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "pycomm", init_method=f"file://{folder}/meet", rank=rank, world_size=2
        )
        self._dist, self._tensor, self._seconds = dist, torch.ones(1 << 20), seconds
        self._is_late = rank == 1
        self._modes = iter(("idle", "started", "blocked"))

    def prepare(self, size_bytes: int, count: int, is_checked: bool) -> int:
        """Nothing to prepare."""
        del size_bytes, count, is_checked
        return 0

    def call(self) -> None:
        """One of the three ways to wait, in turn."""
        mode = next(self._modes)
        work = None
        if mode == "started" and not self._is_late:
            work = self._dist.all_reduce(self._tensor, async_op=True)
        if mode == "blocked" and not self._is_late:
            self._dist.all_reduce(self._tensor)
            return
        time.sleep(self._seconds)
        if mode != "idle" and self._is_late:
            self._dist.all_reduce(self._tensor)
        if work is not None:
            work.wait()

    def call_many(self, times: int) -> None:
        """Not used."""
        raise NotImplementedError(times)

    def barrier(self) -> None:
        """Lines the ranks up."""
        self._dist.barrier()

    def clock(self) -> float:
        """Processor seconds of this process."""
        return time.process_time()


_FIRST_USE = """
import sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")  # so that both are there
x = torch.ones(1 << 20)
dist.all_reduce(x)
start = time.perf_counter()
group = dist.new_group(backend="pycomm")
for _ in range(5):
    dist.all_reduce(x, group=group)
if dist.get_rank() == 0:
    print(time.perf_counter() - start)
dist.destroy_process_group()
"""


def measure_first_use(repeats: int) -> dict[str, list[float]]:
    """Seconds to create a group and reduce 4 MiB five times, with nothing learnt about this host
    and with what the run before has learnt."""
    seconds: dict[str, list[float]] = {"first": [], "second": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="pycomm-first-") as cache:
            for name in ("first", "second"):
                command = [sys.executable, "-m", "pycomm", "run", "--np", "2", "--"]
                out = subprocess.run(
                    [*command, sys.executable, "-c", _FIRST_USE],
                    env={**os.environ, "XDG_CACHE_HOME": cache},
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                seconds[name].append(float(json.loads(out.strip().split()[-1])))
    return seconds

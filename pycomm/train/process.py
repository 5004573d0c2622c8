"""A rank as a process: its group, threads and signals, and what its host shares."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from pycomm.train.config import Config
from pycomm.train.data.corpus import Corpus, open_corpus


class StopFlag:
    """SIGTERM and the first ctrl-C ask for an end after the step; a second ctrl-C ends at once."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._before[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


def open_group(config: Config, **where: Any) -> bool:
    """Opens the default group if there is none, and says whether it did.

    Args:
        where: init_method, rank and world_size; by default torchrun's environment, or one rank.
    """
    if dist.is_initialized():
        return False
    if config.run.deterministic:
        os.environ.setdefault("PYCOMM_DETERMINISTIC", "1")
    timeout = timedelta(seconds=config.run.timeout_s)
    if not where and "RANK" not in os.environ:
        where = {"store": torch._C._distributed_c10d.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(config.run.backend, timeout=timeout, **where)
    return True


def set_up_process(config: Config, rank: int) -> None:
    """Threads, processor, determinism."""
    cpus = sorted(os.sched_getaffinity(0))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    torch.set_num_threads(config.run.threads or max(1, len(cpus) // ranks_here))
    if config.run.pin:
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        os.sched_setaffinity(0, {cpus[local_rank % len(cpus)]})
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)


def open_corpus_once(config: Config) -> Corpus:
    """One rank of each host makes the file of tokens, the others find it."""
    is_first = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
    fault: str | None = None
    corpus: Corpus | None = None
    if is_first:
        try:
            corpus = open_corpus(config.data, config.model.context)
        except (ValueError, OSError) as error:
            fault = str(error)
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    fault = next((f for f in faults if f), None)
    if fault:
        raise ValueError(fault)
    return corpus or open_corpus(config.data, config.model.context)


def slowest(value: float) -> float:
    """The least of all ranks; collective."""
    tensor = torch.tensor(value, dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return float(tensor)


def communication_time() -> tuple[float, float]:
    """Seconds of all operations of this process so far, and seconds that callers waited."""
    from pycomm._loader import torch_module

    result: tuple[float, float] = torch_module().communication_time()
    return result

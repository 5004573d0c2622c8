"""A rank as a process: its group, threads and signals, and what its host shares."""

from __future__ import annotations

import fcntl
import os
import signal
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from pycomm.train.agreement import AgreedError, alike
from pycomm.train.config import Config
from pycomm.train.data.corpus import Corpus, open_corpus


def patient_group() -> dist.ProcessGroup:
    """A group for work that may take long on one rank, such as making tokens: its operations wait
    for a day. A rank that dies is noticed at once all the same."""
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(days=1))
    return group


class FolderLock:
    """Keeps two runs out of one folder, for as long as this process lives."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if another run has it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {folder}; give another run.out") from None


class StopFlag:
    """SIGTERM, SIGHUP and the first ctrl-C ask for an end after the step; a second ctrl-C ends at
    once. A hang-up is what ssh's end is to a rank on another host."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
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


def open_corpus_once(config: Config, patient: dist.ProcessGroup) -> Corpus:
    """One rank of each host makes the file of tokens, the others find it; collective.

    Raises:
        AgreedError: it cannot be made, or hosts have different text.
    """
    is_first = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
    corpus: Corpus | None = None
    with alike(patient):
        if is_first:
            corpus = open_corpus(config.data)
    with alike(patient):
        corpus = corpus or open_corpus(config.data)
    assert corpus is not None
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, corpus.content, group=patient)
    if len(set(digests)) > 1:
        other = next(rank for rank, one in enumerate(digests) if one != digests[0])
        raise AgreedError(
            f"ranks 0 and {other} have different text under data.path '{config.data.path}'; every "
            "host needs the same files"
        )
    return corpus


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

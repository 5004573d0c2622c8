"""How long saving a checkpoint keeps ranks from training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycomm.bench.gang import Gang

_SAVES = 5


class SavingContestant:
    """One rank; a call is a step and an asynchronous save, its lap what the save took of it."""

    def __init__(
        self, rank: int, folder: Path, out: Path, model: dict[str, Any], layout: dict[str, Any]
    ) -> None:
        import numpy as np

        from pycomm.train.checkpoint import Checkpoints
        from pycomm.train.config import make_config
        from pycomm.train.data.source import Sequences
        from pycomm.train.engine import Engine
        from pycomm.train.layout.degrees import resolve
        from pycomm.train.layout.mesh import make_meshes

        torch.set_num_threads(1)
        dist.init_process_group(
            "pycomm", init_method=f"file://{folder}/meet", rank=rank, world_size=2
        )
        config = make_config({"model": model, "layout": layout, "batch": {"size": 4}})
        tokens = np.zeros(100_000, np.uint16)
        resolved = resolve(config, 2)
        source = Sequences([tokens], config.model.context)
        self._engine = Engine(config, resolved, make_meshes(resolved), source)
        self._checkpoints = Checkpoints(out, 2, is_async=True, say=print, group=dist.new_group())
        self._now = 0.0

    def prepare(self, size_bytes: int, count: int, is_checked: bool) -> int:
        """One step, so that there is a state; returns the checkpoint's bytes."""
        del size_bytes, count, is_checked
        self._engine.train_step()
        return sum(t.numel() * t.element_size() for t in self._engine.tensors().values())

    def call(self) -> None:
        """A step, and a save of which only the time that it blocks counts."""
        stats = self._engine.train_step()
        self._checkpoints.wait()
        start = time.perf_counter()
        self._checkpoints.save(stats.step, self._engine.tensors(), {})
        self._now += time.perf_counter() - start

    def call_many(self, times: int) -> None:
        """Saves one checkpoint and waits until it is written."""
        stats = self._engine.train_step()
        begun = time.perf_counter()
        self._checkpoints.save(stats.step, self._engine.tensors(), {})
        self._checkpoints.wait()
        self._now += (time.perf_counter() - begun) * times

    def barrier(self) -> None:
        """Lines the ranks up."""
        dist.barrier()

    def clock(self) -> float:
        """Seconds in saves."""
        return self._now


def measure(folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    """By layout: bytes, seconds blocked by each save, seconds until it is written."""
    result: dict[str, Any] = {}
    for name, layout in (("data", {}), ("ZeRO-3", {"zero": 3})):
        out = folder / name
        with Gang(name, 2) as gang:
            gang.fork(
                lambda rank, meet, out=out, layout=layout: SavingContestant(  # type: ignore[misc]
                    rank, meet, out, model, layout
                ),
                pin=True,
            )
            gang.await_ranks()
            sizes = gang.ask(do="prepare", size_bytes=0, count=0, check=False, warmup=0)
            answers = gang.ask(do="round", times=_SAVES + 1, blocking=True)
            blocked = [max(laps) for laps in zip(*[a["seconds"] for a in answers], strict=True)]
            written = [
                max(a["seconds"][0] for a in gang.ask(do="round", times=1, blocking=False))
                for _ in range(3)
            ]
        result[name] = {"bytes": sizes[0]["wrong"], "blocked_s": blocked, "written_s": written}
    return result

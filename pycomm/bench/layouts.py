"""Steps of the trainer, layout by layout, over pycomm, gloo, and a backend that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pycomm.bench.gang import Gang
from pycomm.bench.plan import FAKE

_GPT = {"layers": 4, "channels": 256, "heads": 8, "context": 128, "vocab_size": 512, "tied": False}
_EXPERTS = {"experts": 4, "ffn_channels": 512}


@dataclass(frozen=True)
class LayoutCase:
    """A layout and the ranks that it is measured on."""

    name: str
    num_ranks: int
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    batch: int = 8
    holds_against_fake: bool = False


CASES = [
    LayoutCase("data", 2),
    LayoutCase("ZeRO-1", 2, {"zero": 1}),
    LayoutCase("ZeRO-2", 2, {"zero": 2}),
    LayoutCase("ZeRO-3", 2, {"zero": 3}, holds_against_fake=True),
    LayoutCase("tensor", 2, {"tensor": 2}, holds_against_fake=True),
    LayoutCase(
        "tensor, sequence", 2, {"tensor": 2, "sequence_parallel": True}, holds_against_fake=True
    ),
    LayoutCase("pipeline", 2, {"pipeline": 2}),
    LayoutCase("expert", 2, {"expert": 2}, _EXPERTS),
    LayoutCase("data", 4),
    LayoutCase("ZeRO-3", 4, {"zero": 3}),
    LayoutCase("ZeRO-3 x tensor", 4, {"zero": 3, "tensor": 2}),
    LayoutCase("data x pipeline", 4, {"pipeline": 2}),
    LayoutCase("tensor x pipeline", 4, {"tensor": 2, "pipeline": 2}),
    LayoutCase("expert x data", 4, {"expert": 2}, _EXPERTS),
]


class LayoutContestant:
    """One rank of a layout over one backend; a call is an optimizer step."""

    def __init__(self, backend: str, case: LayoutCase, rank: int, folder: Path) -> None:
        import numpy as np
        import torch
        import torch.distributed as dist

        from pycomm.train.config import make_config
        from pycomm.train.data.source import Sequences
        from pycomm.train.engine import Engine
        from pycomm.train.layout.degrees import resolve
        from pycomm.train.layout.mesh import make_meshes
        from pycomm.train.predict import make_choice

        torch.set_num_threads(1)
        if backend == FAKE:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group(FAKE, store=FakeStore(), rank=rank, world_size=case.num_ranks)
        else:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/meet",
                rank=rank,
                world_size=case.num_ranks,
            )
        config = make_config(
            {
                "model": _GPT | case.model,
                "layout": case.layout,
                "batch": {"size": case.batch * case.num_ranks // 2},
                "run": {"steps": 1_000_000},
            }
        )
        layout = resolve(config, case.num_ranks)
        tokens = np.random.default_rng(0).integers(0, 512, 200_000).astype(np.uint16)
        self.engine = Engine(
            config,
            layout,
            make_meshes(layout),
            Sequences([tokens], config.model.context),
            choice=make_choice(config, layout, 5e10),
        )
        if backend == FAKE:  # DDP asks for a Future, which `fake` has none of
            for part in self.engine.parts:
                if isinstance(part.module, torch.nn.parallel.DistributedDataParallel):
                    part.module = part.plain
        self._dist = dist

    def prepare(self, size_bytes: int, count: int, is_checked: bool) -> int:
        """Nothing depends on a size here."""
        del size_bytes, count, is_checked
        return 0

    def call(self) -> None:
        """One step."""
        self.engine.train_step()

    def call_many(self, times: int) -> None:
        """One after the other."""
        for _ in range(times):
            self.call()

    def barrier(self) -> None:
        """Lines the ranks up."""
        self._dist.barrier()


def measure_layout(case: LayoutCase, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step by backend, of the slowest rank, one value a round, interleaved."""
    names = ["pycomm", "gloo", FAKE]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        gangs = {name: stack.enter_context(Gang(name, case.num_ranks)) for name in names}

        def maker(name: str) -> Callable[[int, Path], LayoutContestant]:
            return lambda rank, folder: LayoutContestant(name, case, rank, folder)

        for name, gang in gangs.items():
            gang.fork(maker(name), pin=True)
        for gang in gangs.values():
            gang.await_ranks()
            gang.ask(do="prepare", size_bytes=0, count=0, check=False, warmup=3)
        for round_ in range(rounds):
            for name in names if round_ % 2 == 0 else reversed(names):
                answers = gangs[name].ask(do="round", times=steps, blocking=True)
                laps = zip(*[answer["seconds"] for answer in answers], strict=True)
                seconds[name].append(median(max(lap) for lap in laps))
    return seconds

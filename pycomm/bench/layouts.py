"""Steps of the trainer, layout by layout, over pycomm, gloo, and a backend that does nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycomm.bench.gang import Maker, StepContestant, take_turns
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


CASES = [
    LayoutCase("data", 2),
    LayoutCase("ZeRO-1", 2, {"zero": 1}),
    LayoutCase("ZeRO-2", 2, {"zero": 2}),
    LayoutCase("ZeRO-3", 2, {"zero": 3}),
    LayoutCase("tensor", 2, {"tensor": 2}),
    LayoutCase("tensor, sequence", 2, {"tensor": 2, "sequence_parallel": True}),
    LayoutCase("pipeline", 2, {"pipeline": 2}),
    LayoutCase("expert", 2, {"expert": 2}, _EXPERTS),
    LayoutCase("data", 4),
    LayoutCase("ZeRO-3", 4, {"zero": 3}),
    LayoutCase("ZeRO-3 x tensor", 4, {"zero": 3, "tensor": 2}),
    LayoutCase("data x pipeline", 4, {"pipeline": 2}),
    LayoutCase("tensor x pipeline", 4, {"tensor": 2, "pipeline": 2}),
    LayoutCase("expert x data", 4, {"expert": 2}, _EXPERTS),
]


class LayoutContestant(StepContestant):
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

    def call(self) -> None:
        """One step."""
        self.engine.train_step()


def measure_layout(case: LayoutCase, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step by backend, of the slowest rank, one value a round, interleaved."""

    def maker(name: str) -> Maker:
        return lambda rank, folder: LayoutContestant(name, case, rank, folder)

    makers = {name: maker(name) for name in ("pycomm", "gloo", FAKE)}
    times = dict.fromkeys(makers, steps)
    return take_turns(makers, case.num_ranks, rounds=rounds, warmup=3, times=times)

"""Steps of a pipeline beside the time of its stages alone, over pycomm and gloo."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm.bench.gang import Maker, StepContestant, take_turns

ALONE = "alone"
_SPIN_S = 3e-4


@dataclass(frozen=True)
class PipelineCase:
    """Ranks, microbatches, and how long a stage sleeps; 0 stands for layers that compute."""

    ranks: int
    microbatches: int
    stage_ms: float = 0.0


@dataclass(frozen=True)
class PipelineResult:
    """Seconds by round."""

    stage: list[float]  # forward and backward of one microbatch, of the slowest rank, alone
    step: dict[str, list[float]]  # by backend


def _nap(seconds: float) -> None:
    """Sleeps, and spins at the end, where sleeping is not exact."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - _SPIN_S))
    while time.perf_counter() < end:
        pass


def _make_stage(case: PipelineCase, shape: tuple[int, ...]) -> Any:
    import torch
    from torch import nn

    from pycomm.train.config import ModelConfig
    from pycomm.train.model.decoder import Block

    if not case.stage_ms:
        torch.manual_seed(0)
        config = ModelConfig(channels=shape[2], heads=8, context=shape[1], vocab_size=8)
        return nn.Sequential(Block(config), Block(config))

    class Sleep(torch.autograd.Function):
        """A third forward, two thirds backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            _nap(case.stage_ms / 3e3)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            _nap(case.stage_ms * 2 / 3e3)
            return grads[0].clone()

    class Stage(nn.Module):
        """A weight, so that there is a gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape[2]))

        def forward(self, x: torch.Tensor) -> Any:
            """Sleeps."""
            return Sleep.apply(x * self.weight)  # type: ignore[no-untyped-call]

    return Stage()


class PipelineContestant(StepContestant):
    """One rank; a call is all passes of one step, or, alone, one microbatch without any peer."""

    def __init__(self, name: str, case: PipelineCase, rank: int, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        from pycomm.train.pipeline.links import Links
        from pycomm.train.pipeline.run import Pipeline
        from pycomm.train.pipeline.schedule import one_f_one_b

        torch.set_num_threads(1)
        backend = "gloo" if name == "gloo" else "pycomm"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meet", rank=rank, world_size=case.ranks
        )
        shape = (4, 128, 256)  # half a MiB of activations
        self._stage = _make_stage(case, shape)
        self._inputs = [torch.randn(shape) for _ in range(case.microbatches)]
        self._case, self._is_alone, self._torch = case, name == ALONE, torch
        world = dist.group.WORLD
        assert world is not None
        self._pipeline = Pipeline(
            {rank: self._stage},
            case.ranks,
            one_f_one_b(case.ranks, case.microbatches)[rank],
            Links(world, case.ranks, shape, torch.float32),
            lambda y, target: y.mean(),
            lambda stage, is_last: None,
        )

    def call(self) -> None:
        """One step, or one microbatch alone."""
        if self._is_alone:
            x = self._inputs[0].detach().requires_grad_()
            self._torch.autograd.backward(self._stage(x), self._inputs[-1])
            return
        targets = [None] * self._case.microbatches
        self._pipeline.step(self._inputs, targets, 1.0, contextlib.nullcontext)


def measure_pipeline(case: PipelineCase, rounds: int) -> PipelineResult:
    """One value a round, interleaved."""

    def maker(name: str) -> Maker:
        return lambda rank, folder: PipelineContestant(name, case, rank, folder)

    makers = {name: maker(name) for name in (ALONE, "pycomm", "gloo")}
    times = {ALONE: case.microbatches, "pycomm": 2, "gloo": 2}
    seconds = take_turns(makers, case.ranks, rounds=rounds, warmup=2, times=times)
    return PipelineResult(seconds.pop(ALONE), seconds)

"""One optimizer step of a layout: passes, gradients, optimizer. It knows no files and no screen."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pycomm.train.config import Config
from pycomm.train.data.cursor import samples_at, samples_of_rank
from pycomm.train.data.source import Source
from pycomm.train.layout.build import Part, build_parts
from pycomm.train.layout.degrees import Layout
from pycomm.train.layout.mesh import Meshes, group_of
from pycomm.train.layout.tensor import like, local_tensor
from pycomm.train.model.decoder import Decoder, name_in_whole, next_token_loss
from pycomm.train.model.experts import Experts
from pycomm.train.offload import BackwardOptimizer
from pycomm.train.optimizer import Optimizer, StepResult, lr_at, make_optimizer
from pycomm.train.pipeline.run import Span
from pycomm.train.pipeline.schedule import Choice
from pycomm.train.precision import LossScale, autocast
from pycomm.train.randomness import seed_step
from pycomm.train.stages import make_pipeline
from pycomm.train.tied import TiedWeights

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass
class Progress:
    """Where a run stands: all there is to know beside the tensors."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # consumed, over all ranks and epochs
    loss_scale: float = 0.0  # of float16, where it is dynamic
    good_steps: int = 0
    bad_steps: int = 0


@dataclass(frozen=True)
class StepStats:
    """What a step did; the same on every rank, but for `seconds`."""

    step: int
    loss: float  # mean over the step's samples, without the balance loss
    lr: float
    grad_norm: float
    seconds: float
    balance: float  # of routed experts; 0 without
    dropped: float  # share of their tokens above capacity
    is_skipped: bool
    stop: bool  # some rank was asked to stop


class Engine:
    """A rank's share of a run."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        meshes: Meshes,
        source: Source,
        *,
        parts: list[Part] | None = None,
        loss: Loss = next_token_loss,
        choice: Choice | None = None,
    ) -> None:
        """Args:
        parts: of a user's model; by default the configured decoder is built.
        choice: the pipeline's schedule, where there is a pipeline.
        """
        self.config, self.layout, self.meshes = config, layout, meshes
        self.source, self._loss = source, loss
        self.parts = parts if parts is not None else build_parts(config, layout, meshes)
        self.progress = Progress()
        self._place = (meshes.rank_in("pipeline"), meshes.rank_in("data"))
        self.spans: list[Span] = []  # of the last step, on this rank
        self.scale = LossScale(config.precision)
        self._experts = [m for p in self.parts for m in p.plain.modules() if isinstance(m, Experts)]
        self._tied = TiedWeights(config.model.tied and parts is None, layout, meshes)
        self.optimizer = self._make_optimizer()
        self._in_backward = self._make_backward_optimizer()
        self.pipeline = make_pipeline(config, layout, meshes, self.parts, loss, choice)

    # What the parts are called -------------------------------------------------------------

    def named_parameters(self) -> list[tuple[str, nn.Parameter, bool]]:
        """(name in the whole model, parameter, whether this rank's copy counts)."""
        result = []
        for part in self.parts:
            for name, parameter in part.plain.named_parameters():
                whole = name
                if isinstance(part.plain, Decoder):
                    whole = name_in_whole(part.plain.config, name)
                if parameter.requires_grad:
                    result.append((whole, parameter, whole == name))
        return result

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds, by name; DTensors where it is sharded."""
        result: dict[str, torch.Tensor] = {}
        for name, parameter, _ in self.named_parameters():
            result[f"model.{name}"] = like(local_tensor(parameter.detach()), parameter)
        for part in self.parts:
            if not isinstance(part.plain, Decoder):
                for name, buffer in part.plain.state_dict().items():
                    if f"model.{name}" not in result and isinstance(buffer, torch.Tensor):
                        result[f"model.{name}"] = buffer
        result.update(self.optimizer.tensors())
        return result

    # Steps ---------------------------------------------------------------------------------

    def train_step(self, stop: bool = False) -> StepStats:
        """Consumes one batch of the global order; collective.

        Args:
            stop: this rank was asked to stop; the answer says whether any was.
        """
        start = time.perf_counter()
        step = self.progress.step
        self.spans = []
        seed_step(self.config.run.seed, step, self._place)
        inputs, targets = self._batches(self.progress.samples, self.layout.passes)
        scale = self.scale.value / self.layout.passes
        for experts in self._experts:
            experts.loss_scale = scale
        self._mark("data", start)
        lr = lr_at(self.config.optimizer, step, self.config.run.steps)
        if self.pipeline is not None:
            loss = self.pipeline.step(inputs, targets, scale, self._autocast)
            self.spans += self.pipeline.spans
        else:
            loss = self._passes(inputs, targets, scale, lr)
        before_update = time.perf_counter()
        self._tied.reduce(self.named_parameters())
        done = self._update(lr)
        self.scale.update(done.is_skipped)
        self._mark("update", before_update)
        loss_value, balance, dropped, stops = self._agree(loss, stop)
        self.progress = Progress(
            step + 1,
            self.progress.samples + self.layout.batch,
            self.scale.value if self.scale.is_dynamic else 0.0,
            self.scale.good_steps,
            self.scale.bad_steps,
        )
        seconds = time.perf_counter() - start
        return StepStats(
            step + 1,
            loss_value,
            lr,
            done.grad_norm,
            seconds,
            balance,
            dropped,
            done.is_skipped,
            stops > 0,
        )

    @torch.no_grad()
    def evaluate(self, source: Source, num_samples: int) -> float:
        """Mean loss on samples spread evenly over a source; collective.

        Raises:
            ValueError: the source has fewer samples than one pass needs.
        """
        per_pass = self.layout.data * self.layout.micro
        passes = max(1, min(num_samples, len(source)) // per_pass)
        count = passes * per_pass
        if len(source) < per_pass:
            raise ValueError(f"validation has {len(source)} sequences, a pass needs {per_pass}")
        rank = self.meshes.rank_in("data")
        spread = np.arange(count) * len(source) // count
        samples = spread.reshape(passes, self.layout.data, -1)[:, rank]
        batches = [source.batch(row) for row in samples]
        losses: list[torch.Tensor] = []
        with self._evaluating():
            if self.pipeline is not None:
                targets = iter(batches)
                inputs = [x for x, _ in batches]
                self.pipeline.forward(
                    inputs, lambda y: losses.append(self._loss(y, next(targets)[1]))
                )
            else:
                module = self.parts[0].module
                losses = [self._loss(module(x), y) for x, y in batches]
        return self._agree(torch.stack(losses).mean() if losses else None, False)[0]

    @torch.no_grad()
    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        """What the model expects behind some tokens, on every rank; collective. Shape: (V,).

        The model sees no token to the right, so the rest of a sequence may hold anything.
        """
        model = self.config.model
        rows = self.layout.micro if self.pipeline is not None else 1
        window = torch.zeros(rows, model.context, dtype=torch.int64)
        window[:, : len(tokens)] = torch.tensor(tokens)
        logits = torch.zeros(model.vocab_size)
        with self._evaluating():
            if self.pipeline is None:
                logits = self.parts[0].module(window)[0, len(tokens) - 1].float()
            else:
                self.pipeline.forward([window], lambda y: logits.copy_(y[0, len(tokens) - 1]))
        logits = logits.contiguous()
        if self.layout.world_size > 1:  # ranks of a pipeline's end, and then everyone
            dist.broadcast(logits, src=self.layout.world_size - 1)
        return logits

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        for part in self.parts:
            part.module.eval()
        try:
            with self._autocast():
                yield
        finally:
            for part in self.parts:
                part.module.train()

    def restore(self, progress: Progress) -> None:
        """Goes on from there; the tensors were read already."""
        self.progress = progress
        if self.scale.is_dynamic and progress.loss_scale:
            self.scale.value = progress.loss_scale
            self.scale.good_steps, self.scale.bad_steps = progress.good_steps, progress.bad_steps

    def share_buffers(self) -> None:
        """Gives every rank rank 0's buffers of a user's module, as a checkpoint has them."""
        for part in self.parts:
            if not isinstance(part.plain, Decoder) and self.layout.world_size > 1:
                for buffer in part.plain.buffers():
                    dist.broadcast(buffer, src=0)

    def _update(self, lr: float) -> StepResult:
        if self._in_backward is not None:
            return self._in_backward.finish()
        for part in self.parts:
            if part.reductions is not None:
                part.reductions.wait()
        return self.optimizer.step(lr, self.scale.value)

    def _passes(
        self, inputs: list[Any], targets: list[Any], scale: float, lr: float
    ) -> torch.Tensor:
        part = self.parts[0]
        losses = []
        for i, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            part.set_last_pass(i == len(inputs) - 1, self.layout.zero)
            start = time.perf_counter()
            with self._autocast():
                loss = self._loss(part.module(x), y)
            losses.append(loss.detach())
            self._mark("F", start, i)
            if self._in_backward is not None and i == len(inputs) - 1:
                self._in_backward.begin(lr)
            start = time.perf_counter()
            torch.autograd.backward(loss * scale)
            self._mark("B", start, i)
        return torch.stack(losses).mean()

    def _mark(self, kind: str, start: float, microbatch: int = 0) -> None:
        self.spans.append(Span(kind, 0, microbatch, start, time.perf_counter()))

    def _autocast(self) -> Any:
        return autocast(self.config.precision)

    def _batches(self, first: int, passes: int) -> tuple[list[Any], list[Any]]:
        samples = samples_at(first, self.layout.batch, len(self.source), self.config.run.seed)
        rank = self.meshes.rank_in("data")
        own = samples_of_rank(samples, passes, self.layout.micro, rank, self.layout.data)
        batches = [self.source.batch(row) for row in own]
        return [b[0] for b in batches], [b[1] for b in batches]

    def _agree(self, loss: torch.Tensor | None, stop: bool) -> tuple[float, float, float, float]:
        """Means over the ranks that know them: loss, balance, dropped; and how many would stop."""
        values = torch.zeros(5, dtype=torch.float64)
        if loss is not None:
            values[0] = loss.double() / (self.layout.data * self.layout.tensor)
        for experts in self._experts:
            values[1] += experts.balance
            values[2] += experts.dropped
            values[3] += 1
        values[4] = float(stop)
        if self.layout.world_size > 1:
            dist.all_reduce(values)
        count = max(float(values[3]), 1.0)
        return (
            float(values[0]),
            float(values[1]) / count,
            float(values[2]) / count,
            float(values[4]),
        )

    # Construction --------------------------------------------------------------------------

    def _make_optimizer(self) -> Optimizer:
        group = group_of(self.meshes.pipeline)
        return make_optimizer(self.config.optimizer, self.named_parameters(), group)

    def _make_backward_optimizer(self) -> BackwardOptimizer | None:
        """Where the norm of the whole gradient is not needed before the first update."""
        if not self.config.layout.offload or self.config.optimizer.clip:
            return None
        reductions = self.parts[0].reductions
        return BackwardOptimizer(self.optimizer, reductions.take if reductions else list)

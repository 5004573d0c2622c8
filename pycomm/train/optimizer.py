"""The optimizer of a rank: torch's, on this rank's parts of the parameters.

A DTensor costs tens of microseconds for every operation on the CPU; an elementwise optimizer needs
none of what they buy. So the optimizer sees plain tensors that share memory with the parameters'
local parts, and only clipping, which needs the norm of everything, communicates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pycomm.train.config import OptimizerConfig
from pycomm.train.layout.tensor import like, local_tensor

_STATE_KEYS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def lr_at(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step 0, 1, ...: a warm-up, then the decay."""
    if step < config.warmup:
        if config.warmup_shape == "log" and config.warmup > 1:
            return config.lr * math.log(step + 1) / math.log(config.warmup)
        return config.lr * (step + 1) / config.warmup
    if config.decay == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    share = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr + (1 - config.min_lr) * share)


@dataclass
class Held:
    """A parameter of this rank: under its name in the whole model, its part as a plain tensor."""

    name: str
    parameter: nn.Parameter
    local: nn.Parameter
    is_counted: bool  # False for the second copy of tied weights

    def __post_init__(self) -> None:
        """Along which dimensions of the mesh it is sharded, and the groups of those."""
        self.sharding: tuple[str, ...] = ()
        self.groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(self.parameter, DTensor):
            mesh, placements = self.parameter.device_mesh, self.parameter.placements
            names = mesh.mesh_dim_names or ()
            dims = [i for i, p in enumerate(placements) if not p.is_replicate()]
            self.sharding = tuple(names[i] for i in dims)
            self.groups = tuple(mesh.get_group(i) for i in dims)


class Squares:
    """Sums of squares of gradients, by how they are sharded."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, ...], torch.Tensor] = {}
        self._open: dict[tuple[str, ...], list[torch.Tensor]] = {}

    def count(self, held: Held, grad: torch.Tensor | None) -> None:
        """Takes a gradient in; it is read when the sums are settled."""
        if held.is_counted and grad is not None and grad.numel():
            self._open.setdefault(held.sharding, []).append(grad)

    def settle(self) -> None:
        """Reads what was counted."""
        for sharding, grads in self._open.items():
            square = torch.stack(torch._foreach_norm(grads)).double().square().sum()
            self.sums[sharding] = self.sums.get(sharding, torch.zeros_like(square)) + square
        self._open.clear()

    def add(self, other: Squares) -> None:
        """Adds settled sums."""
        for sharding, square in other.sums.items():
            self.sums[sharding] = self.sums.get(sharding, torch.zeros_like(square)) + square


@dataclass
class StepResult:
    """What an optimizer step did."""

    grad_norm: float  # before clipping, of the unscaled gradient
    is_skipped: bool  # the gradient was not finite


@dataclass
class Optimizer:
    """Made by `make_optimizer`."""

    config: OptimizerConfig
    held: list[Held]
    inner: torch.optim.Optimizer
    pipeline_group: dist.ProcessGroup | None = None
    steps_done: int = 0  # that were not skipped

    def __post_init__(self) -> None:
        # The same on all ranks of every group that is in it, in the same order.
        self._shardings = sorted({h.sharding: h.groups for h in self.held}.items(), key=_first)

    def step(self, lr: float, loss_scale: float) -> StepResult:
        """Clips and steps; skips the step, on all ranks alike, where the gradient is not finite."""
        held = [h for h in self.held if h.parameter.grad is not None]
        for h in held:
            h.local.grad = _local_grad(h.parameter)
        squares = Squares()
        for h in held:
            squares.count(h, h.local.grad)
        norm = math.sqrt(self._sum(squares)) / loss_scale
        if not math.isfinite(norm):
            self.zero_grad()
            return StepResult(norm, True)
        factor = 1 / loss_scale
        if self.config.clip and norm > self.config.clip:
            factor *= self.config.clip / (norm + 1e-6)
        grads = [h.local.grad for h in held if h.local.grad is not None]
        if factor != 1:
            torch._foreach_mul_(grads, factor)
        self.set_lr(lr)
        self.inner.step()
        self.steps_done += 1
        self.zero_grad()
        return StepResult(norm, False)

    def set_lr(self, lr: float) -> None:
        """Of the next step."""
        for group in self.inner.param_groups:
            group["lr"] = lr

    def step_chunk(self, chunk: list[tuple[Held, torch.Tensor]]) -> Squares:
        """Steps some parameters with their final gradients. Thread: any, one at a time."""
        squares = Squares()
        for held, grad in chunk:
            squares.count(held, grad)
            held.local.grad = grad
        squares.settle()
        self.inner.step()
        for held, _ in chunk:
            held.local.grad = None
        return squares

    def finish_chunks(self, squares: Squares) -> StepResult:
        """The end of a step whose parameters were all stepped in chunks."""
        norm = math.sqrt(self._sum(squares))
        self.steps_done += 1
        return StepResult(norm, False)

    def zero_grad(self) -> None:
        """Drops gradients."""
        for h in self.held:
            h.local.grad = None
            h.parameter.grad = None

    def _sum(self, squares: Squares) -> float:
        """Over all ranks. A shard counts once: sums go over the dimensions along which a gradient
        is sharded, and over the pipeline; along the others every rank has the same."""
        squares.settle()
        total = torch.zeros((), dtype=torch.float64)
        for sharded, groups in self._shardings:
            square = squares.sums.get(sharded, torch.zeros((), dtype=torch.float64)).clone()
            for group in groups:
                dist.all_reduce(square, group=group)
            total += square
        if self.pipeline_group is not None:
            dist.all_reduce(total, group=self.pipeline_group)
        return float(total)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's state under the parameters' names, sharded as they are."""
        result = {}
        for h in self.held:
            for key, value in sorted(self.inner.state.get(h.local, {}).items()):
                if isinstance(value, torch.Tensor) and value.shape == h.local.shape:
                    result[f"{key}.{h.name}"] = like(value, h.parameter)
        return result

    def make_state(self, steps_done: int, saved: set[str]) -> None:
        """Allocates the state that a checkpoint has, for it to be read into.

        Args:
            saved: names of the checkpoint's tensors; a parameter that never had a gradient has no
                state.
        """
        self.steps_done = steps_done
        for h in self.held:
            keys = [k for k in _STATE_KEYS if f"{k}.{h.name}" in saved]
            state: dict[str, Any] = {key: torch.zeros_like(h.local) for key in keys}
            if "exp_avg" in state:
                state["step"] = torch.tensor(float(steps_done))
            if state:
                self.inner.state[h.local] = state


def _first(item: tuple[tuple[str, ...], object]) -> tuple[str, ...]:
    return item[0]


def _local_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        if grad.placements != parameter.placements:  # sums that sequence parallel left open
            grad = grad.redistribute(placements=parameter.placements)
            parameter.grad = grad
        return grad._local_tensor
    return grad


def make_optimizer(
    config: OptimizerConfig,
    named: list[tuple[str, nn.Parameter, bool]],
    pipeline_group: dist.ProcessGroup | None = None,
) -> Optimizer:
    """An optimizer over (name in the whole model, parameter, counted in the norm)."""
    held = [
        Held(name, p, nn.Parameter(local_tensor(p.detach()), requires_grad=True), counted)
        for name, p, counted in named
    ]
    matrices = [h.local for h in held if h.parameter.dim() > 1]
    vectors = [h.local for h in held if h.parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    inner: torch.optim.Optimizer
    if config.name == "sgd":
        inner = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    else:
        kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
        inner = kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return Optimizer(config, held, inner, pipeline_group)

"""Runs a schedule on this rank's stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pycomm.train.pipeline.links import Links
from pycomm.train.pipeline.schedule import Action

Loss = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass
class _Flight:
    """A microbatch between its forward and its backward pass on one stage."""

    input: torch.Tensor
    output: torch.Tensor
    weights: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    """One pass on this rank's clock, in seconds."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


class Pipeline:
    """One rank of a pipeline; `step` is one optimizer step's forward and backward passes.

    Args:
        stages: this rank's modules by stage number.
        actions: this rank's row of the schedule.
        prepare: called before each backward pass with (stage, whether it is its last).
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        num_stages: int,
        actions: list[Action],
        links: Links,
        loss: Loss,
        prepare: Callable[[int, bool], None],
    ) -> None:
        self._stages, self._num_stages = stages, num_stages
        self._actions, self._links, self._loss = actions, links, loss
        self._prepare = prepare
        last: dict[int, int] = {}
        for i, action in enumerate(actions):
            if action.kind in "BW":
                last[action.stage] = i
        self._last = set(last.values())
        self.spans: list[Span] = []

    def step(
        self,
        inputs: list[torch.Tensor],
        targets: list[Any],
        scale: float,
        autocast: Callable[[], Any],
    ) -> torch.Tensor | None:
        """One step.

        Args:
            inputs: tokens of each microbatch; read by the first stage.
            targets: of each microbatch; read by the last stage.
            scale: what each microbatch's loss is multiplied with before backward.

        Returns:
            The mean loss over microbatches on the rank that has the last stage, else None.
        """
        flights: dict[tuple[int, int], _Flight] = {}
        losses: list[torch.Tensor] = []
        self.spans = []
        self._links.begin(self._actions)
        for i, action in enumerate(self._actions):
            key = (action.stage, action.microbatch)
            start = time.perf_counter()
            if action.kind == "F":
                x = self._input(action, inputs)
                start = time.perf_counter()  # waiting is no work
                with autocast():
                    y = self._stages[action.stage](x)
                    if action.stage == self._num_stages - 1:
                        loss = self._loss(y, targets[action.microbatch])
                        losses.append(loss.detach())
                        y = loss * scale
                flights[key] = _Flight(x, y)
                self._links.send(action, y)
            elif action.kind == "W":
                self._backward_weights(action, flights.pop(key), i in self._last)
            else:
                grad = None
                if action.stage < self._num_stages - 1:
                    grad = self._links.receive(action)
                start = time.perf_counter()
                self._backward(action, flights, grad, i in self._last)
            self.spans.append(Span(*action, start, time.perf_counter()))
        self._links.end()
        return torch.stack(losses).mean() if losses else None

    @torch.no_grad()
    def forward(self, inputs: list[torch.Tensor], take: Callable[[torch.Tensor], object]) -> None:
        """Forward passes alone; `take` gets each output on the rank that has the last stage."""
        stages = sorted(self._stages)
        actions = [Action("F", s, i) for s in stages for i in range(len(inputs))]
        self._links.begin(actions)
        for action in actions:
            y = self._stages[action.stage](self._input(action, inputs))
            if action.stage == self._num_stages - 1:
                take(y)
            self._links.send(action, y)
        self._links.end()

    def _input(self, action: Action, inputs: list[torch.Tensor]) -> torch.Tensor:
        if action.stage == 0:
            return inputs[action.microbatch]
        return self._links.receive(action).requires_grad_(torch.is_grad_enabled())

    def _backward(
        self,
        action: Action,
        flights: dict[tuple[int, int], _Flight],
        grad: torch.Tensor | None,
        is_last: bool,
    ) -> None:
        key = (action.stage, action.microbatch)
        flight = flights[key]
        if grad is not None:
            grad = grad.to(flight.output.dtype)
        if action.kind == "I" and action.stage > 0:
            self._prepare(action.stage, False)
            weights = iter(self._stages[action.stage].parameters())
            grads, flight.weights = stage_backward_input(
                [flight.output], None if grad is None else [grad], [flight.input], weights
            )
            assert grads[0] is not None
            self._links.send(action, grads[0])
            return
        if action.kind == "I":  # nobody waits for the first stage's: both halves at once, later
            flight.weights = [{"grad": grad}]
            return
        del flights[key]
        self._prepare(action.stage, is_last)
        torch.autograd.backward(flight.output, grad)
        if action.stage > 0:
            assert flight.input.grad is not None
            self._links.send(action, flight.input.grad)

    def _backward_weights(self, action: Action, flight: _Flight, is_last: bool) -> None:
        module = self._stages[action.stage]
        if action.stage == 0:
            self._prepare(0, is_last)
            torch.autograd.backward(flight.output, flight.weights[0]["grad"])
            return
        stage_backward_weight(iter(module.parameters()), flight.weights)

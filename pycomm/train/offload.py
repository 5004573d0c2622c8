"""The optimizer in chunks, beside the backward pass.

With ZeRO, a layer's reduced gradient is final before the backward pass has reached the layers
before it. A worker thread then updates that layer's parameters, by torch's fused optimizer,
and drops the gradient: no rank ever holds more than a few chunks of gradients beside the state.

Clipping by the norm of the whole gradient needs the whole gradient first; with it, everything is
updated after the backward pass, as without this.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pycomm.train.layout.tensor import local_tensor
from pycomm.train.optimizer import Held, Optimizer, Squares, StepResult

CHUNK_BYTES = 4 << 20
CHUNKS_MAX = 4  # whose gradients wait for their update


class BackwardOptimizer:
    """Updates what a backward pass has finished, while it goes on."""

    def __init__(self, optimizer: Optimizer, take_works: Callable[[], list[Any]]) -> None:
        """Args:
        take_works: the reductions begun since it was last called, which bring the gradients.
        """
        self._optimizer, self._take_works = optimizer, take_works
        self._worker = ThreadPoolExecutor(1, "pycomm-optimizer")
        self._chunk: list[tuple[Held, torch.Tensor]] = []
        self._chunk_bytes = 0
        self._pending: deque[tuple[Future[Squares], int]] = deque()
        self._squares = Squares()
        self._is_on = False
        self.held_bytes_max = 0  # of gradients that waited for their update, in the last step
        for held in optimizer.held:
            parameter: Any = held.parameter  # torch gives the method no type
            parameter.register_post_accumulate_grad_hook(self._hook_of(held))

    def begin(self, lr: float) -> None:
        """Before the last backward pass of a step."""
        self._optimizer.set_lr(lr)
        self._squares = Squares()
        self._is_on = True
        self.held_bytes_max = 0

    def finish(self) -> StepResult:
        """After it: updates what is left; the result has the norm that the gradient had.

        Raises:
            FloatingPointError: the gradient was not finite, and parts of it are in the parameters;
                on every rank.
        """
        for held in self._optimizer.held:  # what earlier passes reduced and the last did not touch
            self._take(held)
        self._submit()
        while self._pending:
            self._retire()
        self._is_on = False
        result = self._optimizer.finish_chunks(self._squares)
        if not math.isfinite(result.grad_norm):
            raise FloatingPointError(
                "the gradient was not finite; with layout.offload it has been applied already: "
                "start again from the newest checkpoint, with a lower optimizer.lr or without "
                "layout.offload, which skips such steps"
            )
        return result

    def _hook_of(self, held: Held) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self._is_on:
                self._take(held)

        return hook

    def _take(self, held: Held) -> None:
        parameter = held.parameter
        if parameter.grad is None:
            return
        grad = local_tensor(parameter.grad)
        parameter.grad = None
        self._chunk.append((held, grad))
        self._chunk_bytes += grad.numel() * grad.element_size()
        waiting = self._chunk_bytes + sum(size for _, size in self._pending)
        self.held_bytes_max = max(self.held_bytes_max, waiting)
        if self._chunk_bytes >= CHUNK_BYTES:
            self._submit()

    def _submit(self) -> None:
        if not self._chunk:
            return
        chunk, self._chunk = self._chunk, []
        size, self._chunk_bytes = self._chunk_bytes, 0
        works = self._take_works()
        self._pending.append((self._worker.submit(self._update, works, chunk), size))
        while len(self._pending) > CHUNKS_MAX or (self._pending and self._pending[0][0].done()):
            self._retire()

    def _retire(self) -> None:
        self._squares.add(self._pending.popleft()[0].result())

    def _update(self, works: list[Any], chunk: list[tuple[Held, torch.Tensor]]) -> Squares:
        for work in works:
            work.wait()
        return self._optimizer.step_chunk(chunk)

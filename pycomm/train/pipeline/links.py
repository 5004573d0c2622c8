"""Activations and gradients between the ranks of a pipeline.

Shapes never change, so nothing but the tensors travels: receives are posted ahead of their use, in
the order in which the peer sends, and sends are not waited for before the end of the step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from pycomm.train.pipeline.schedule import Action, before

_AHEAD = 2  # receives posted before they are needed, for each direction


class Links:
    """One rank's streams to and from its neighbours."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_stages: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        """Args:
        shape: of what travels, (B, T, C) of this rank's share.
        """
        self._group, self._num_stages = group, num_stages
        self._rank, self._size = group.rank(), group.size()
        self._shape, self._dtype = shape, dtype
        self._streams: dict[tuple[str, int], deque[Action]] = {}
        self._posted: dict[Action, tuple[torch.Tensor, Any]] = {}
        self._sends: deque[tuple[torch.Tensor, Any]] = deque()

    def begin(self, actions: list[Action]) -> None:
        """Posts the first receives of a step."""
        self._streams.clear()
        for action in actions:
            if self._comes_from_elsewhere(action):
                direction = "F" if action.kind == "F" else "B"
                self._streams.setdefault((direction, action.stage), deque()).append(action)
        for stream in self._streams.values():
            for _ in range(min(_AHEAD, len(stream))):
                self._post(stream.popleft())

    def receive(self, action: Action) -> torch.Tensor:
        """What a pass needs from another rank; waits for it."""
        tensor, work = self._posted.pop(action)
        work.wait()
        direction = "F" if action.kind == "F" else "B"
        stream = self._streams[direction, action.stage]
        if stream:
            self._post(stream.popleft())
        return tensor

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Hands a pass's result to the rank that needs it; returns at once."""
        to_stage = action.stage + (1 if action.kind == "F" else -1)
        if not 0 <= to_stage < self._num_stages:
            return
        tensor = tensor.detach().to(self._dtype).contiguous()
        work = self._group.send([tensor], to_stage % self._size, self._tag(action.kind, to_stage))
        self._sends.append((tensor, work))
        while self._sends and self._sends[0][1].is_completed():
            self._sends.popleft()[1].wait()

    def end(self) -> None:
        """Waits until everything that was sent has been taken."""
        while self._sends:
            self._sends.popleft()[1].wait()

    def _comes_from_elsewhere(self, action: Action) -> bool:
        return before(action, self._size, self._num_stages) is not None

    def _post(self, action: Action) -> None:
        needs = before(action, self._size, self._num_stages)
        assert needs is not None
        tensor = torch.empty(self._shape, dtype=self._dtype)
        tag = self._tag(action.kind, action.stage)
        self._posted[action] = (tensor, self._group.recv([tensor], needs.stage % self._size, tag))

    @staticmethod
    def _tag(kind: str, to_stage: int) -> int:
        return 2 * to_stage + (kind != "F")

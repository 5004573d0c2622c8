"""Tied weights over a pipeline: the first and the last stage both hold the table."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from pycomm.train.layout.degrees import Layout
from pycomm.train.layout.mesh import Meshes
from pycomm.train.layout.tensor import local_tensor

_NAME = "embedding.tokens.weight"


class TiedWeights:
    """Keeps the two copies equal by summing their gradients."""

    def __init__(self, is_tied: bool, layout: Layout, meshes: Meshes) -> None:
        """Collective: every rank of the default group calls it."""
        self._group: dist.ProcessGroup | None = None
        if not is_tied or meshes.pipeline is None:
            return
        by_pipeline = meshes.whole.mesh.movedim(0, -1).reshape(-1, layout.pipeline)
        for ranks in by_pipeline.tolist():
            group = dist.new_group([ranks[0], ranks[-1]])
            if dist.get_rank() in (ranks[0], ranks[-1]):
                self._group = group

    def reduce(self, named: list[tuple[str, nn.Parameter, bool]]) -> None:
        """After the backward passes, before clipping."""
        if self._group is None:
            return
        for name, parameter, _ in named:
            if name == _NAME and parameter.grad is not None:
                dist.all_reduce(local_tensor(parameter.grad), group=self._group)

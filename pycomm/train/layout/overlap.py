"""What FSDP2 does with streams on a GPU, done with asynchronous operations on the CPU.

FSDP2 overlaps by issuing its collectives on side streams. A CPU has none, so there every gather and
every reduce_scatter is waited for where it is issued. Here, for ZeRO on CPU tensors: a layer's
parameters are gathered while the layer before is computed, its gradients are reduced while the
layers before it run backward, and nobody waits before the optimizer needs them.

It pays where another host, or a processor to spare, moves the bytes. On one host whose processors
all compute, there is nothing to overlap with, and a blocking call takes the faster way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class ReductionsInFlight(ReduceScatter):
    """FSDP2's reduce_scatter, not waited for. One serves all layers of a stage.

    FSDP2 makes the gradient a view of the output as soon as this returns: right where a step has
    one reduction for each layer. A second one would be added to it at once, so where reductions
    accumulate (`is_deferred` False) they are waited for. It is for float32 gradients of float32
    parameters: others FSDP2 casts or divides as soon as this returns.
    """

    def __init__(self) -> None:
        self.is_deferred = True
        self._works: deque[Any] = deque()

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for the input or output of a reduction."""
        return torch.empty([int(s) for s in size], dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Begins a reduction; the Work holds the tensors."""
        work = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=self.is_deferred
        )
        if work is not None:
            self._works.append(work)

    def take(self) -> list[Any]:
        """The reductions begun since the last call; a gradient is there when its own is done."""
        works = list(self._works)
        self._works.clear()
        return works

    def wait(self) -> None:
        """Until all gradients are there; before anyone reads one."""
        for work in self.take():
            work.wait()


def put_in_flight(model: FSDPModule, layers: Sequence[nn.Module]) -> ReductionsInFlight:
    """Gathers ahead and reduces behind, for a module whose `layers` run in this order."""
    reductions = ReductionsInFlight()
    sharded = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for module in [model, *sharded]:
        module.set_custom_reduce_scatter(reductions)
    model._set_unshard_async_op(True)
    for layer, following in pairwise(sharded):
        layer.set_modules_to_forward_prefetch([following])
    return reductions

"""How much of a step waits for gradients.

Communication that runs beside the backward pass costs nothing; exposed is what remains after the
last gradient was ready: from the launch of the last bucket until backward() returns.
"""

# No postponed annotations here: DDP checks a hook's annotations as objects.

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_Future = torch.futures.Future[torch.Tensor]


class ExposedTimer:
    """Measures exposed communication of a DDP model by a hook that averages as DDP itself does."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._last_launch = 0.0
        self._world_size = dist.get_world_size()
        model.register_comm_hook(None, self._hook)

    def _hook(self, _: object, bucket: dist.GradBucket) -> _Future:  # type: ignore[name-defined]
        self._last_launch = time.perf_counter()
        tensor = bucket.buffer().div_(self._world_size)
        work: Any = dist.all_reduce(tensor, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def start_backward(self) -> None:
        """Call just before backward()."""
        self._last_launch = time.perf_counter()

    def end_backward(self) -> float:
        """Call just after backward(); seconds of exposed communication."""
        return max(time.perf_counter() - self._last_launch, 0.0)

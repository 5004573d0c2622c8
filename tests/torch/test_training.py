"""Training over pycomm equals training in one process."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks

BATCH = 12


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)
    )


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 10, generator=generator), torch.randn(BATCH, 3, generator=generator))
        for _ in range(steps)
    ]


def train(model: nn.Module, rank: int, world: int, steps: int = 8) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches(steps):
        share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        loss = nn.functional.mse_loss(model(x[share]), y[share])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(float(total))
    return losses


def test_ddp_equals_one_process() -> None:
    alone = train(make_model(), 0, 1)
    for world_size in (2, 3):
        for transport in ("shm", "tcp"):
            for bucket_cap_mb in (25, 0.01):

                def body(rank: int, world: int, cap: float = bucket_cap_mb) -> list[float]:
                    model = DistributedDataParallel(make_model(), bucket_cap_mb=cap)
                    return train(model, rank, world)

                outcome = run_ranks(body, world_size, env={"PYCOMM_TRANSPORT": transport})
                outcome.expect_all_ok()
                for losses in outcome.results.values():
                    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-6)


def test_ddp_hooks_and_buffers() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def body(rank: int, world: int) -> list[float]:
        results = []
        for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
            model = DistributedDataParallel(make_model())
            model.register_comm_hook(None, hook)
            results.append(train(model, rank, world)[-1])
        model = DistributedDataParallel(make_model())
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        results.append(train(model, rank, world)[-1])
        norm = DistributedDataParallel(nn.Sequential(make_model(), nn.BatchNorm1d(3)))
        results.append(train(norm, rank, world)[-1])
        return results

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()
    alone = train(make_model(), 0, 1)[-1]
    first = outcome.results[0]
    assert first == outcome.results[1]
    assert abs(first[0] - alone) < 1e-4
    assert abs(first[1] - alone) < 0.05 * alone


def test_data_loader_workers_fork_after_init() -> None:
    def body(rank: int, world: int) -> float:
        data = torch.utils.data.TensorDataset(torch.arange(64.0).view(32, 2))
        total = torch.zeros(())
        for _ in range(2):
            for (x,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
                total += x.sum()
                dist.all_reduce(total, dist.ReduceOp.AVG)
        return float(total)

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()
    assert outcome.results[0] == outcome.results[1] == 2 * sum(range(64))


def test_no_import_is_needed_and_gloo_stays_the_default() -> None:
    script = (
        "import torch.distributed as d, sys; assert hasattr(d.Backend, 'PYCOMM'); "
        "assert 'pycomm._torch' not in sys.modules; "
        "assert d.Backend.default_device_backend_map['cpu'] == 'gloo'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

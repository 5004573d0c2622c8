"""Training stacks of torch over pycomm compute the numbers of one process on the whole batch.

Replicated and sharded models, sharded optimizers, tensor, sequence and pipeline parallelism,
checkpoints, routed experts and compiled functions: each is trained for a few steps, and its losses
and final parameters are compared with those of the same model trained without any group.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
import torch.distributed.nn.functional as dist_nn
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed import fsdp, pipelining
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from tests.ranks import Outcome, run_ranks

BATCH = 12
CPU = torch.device("cpu")
Data = list[tuple[torch.Tensor, torch.Tensor]]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    return nn.Sequential(*layers).double()


class Mixed(nn.Module):
    """A sparse table, a head per kind of row and one never used, a buffer that follows row 0."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = (make_model(seed) for seed in range(3))
        self.table = nn.Embedding(20, 10, sparse=True, dtype=torch.float64)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        goes_left, out = x[:, 0] > 0, x.new_zeros(len(x), 3)
        mixed = x / self.scale.clone() + self.table((x[:, 1].abs() * 5).long())
        for rows, head in ((goes_left, self.left), (~goes_left, self.right)):
            if rows.any():
                out[rows] = head(mixed[rows])
        self.scale.mul_(0.5).add_(x[0].abs().mean())
        return out


def make_data(steps: int = 4) -> Data:
    """Batches whose first half is positive in the first column and whose second half is not."""
    torch.manual_seed(7)
    data = [torch.randn(2, BATCH, 10, dtype=torch.float64) for _ in range(steps)]
    for x, _ in data:
        x[:, 0] = torch.arange(BATCH) < BATCH // 2
    return [(x, y[:, :3]) for x, y in data]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Unlike Adam's, its steps show a gradient that is wrong by a factor."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = mse_loss(model(x).to(y.dtype), y)
    loss.backward()
    return loss.detach()


def backward_in_halves(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Adds up two gradients, and communicates for the second only; alone, it does not split."""
    is_fsdp2 = isinstance(model, fsdp.FSDPModule)
    if not is_fsdp2 and not hasattr(model, "no_sync"):
        return backward(model, x, y)
    total = torch.zeros((), dtype=y.dtype)
    for i, (half_x, half_y) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        if is_fsdp2:
            model.set_requires_gradient_sync(i == 1)
        with contextlib.nullcontext() if is_fsdp2 or i == 1 else model.no_sync():
            loss = mse_loss(model(half_x), half_y) / 2
            loss.backward()
        total += loss.detach()
    return total


def backward_and_clip(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the loss and the norm that the gradients had."""
    loss = backward(model, x, y)
    clip = getattr(model, "clip_grad_norm_", None)  # of FSDP1
    norm = clip(0.3) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    return torch.stack([loss, norm.full_tensor() if isinstance(norm, DTensor) else norm])


def train(
    model: nn.Module, data: Data, optimizer: Any, part: int = 0, parts: int = 1, by: Any = backward
) -> list[Any]:
    """Trains on one part of each batch; returns the numbers of the whole batches."""
    numbers = []
    for x, y in data:
        number = by(model, x.chunk(parts)[part], y.chunk(parts)[part])
        if parts > 1:
            dist.all_reduce(number, dist.ReduceOp.AVG)
        numbers.append(number.tolist())
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers under the plain model's names."""
    options = states.StateDictOptions(full_state_dict=True)
    state = states.get_model_state_dict(model, options=options)
    return {name: value.clone() for name, value in state.items()}


def expect_same(actual: Any, expected: Any, dtype: torch.dtype = torch.float64) -> None:
    """Equal but for the order of a few additions."""
    rtol, atol = (1e-10, 1e-12) if dtype == torch.float64 else (1e-5, 1e-6)
    assert_close(actual, expected, rtol=rtol, atol=atol)


def expect_near(actual: Any, expected: Any, first: Any, error: float) -> None:
    """Training changed what it should have; a share of the change may be wrong."""
    change, wrong = (
        torch.cat([(a[name] - b[name]).flatten() for name in first]).norm()
        for a, b in ((expected, first), (actual, expected))
    )
    assert wrong <= error * change, f"{wrong / change} of the change is wrong"


def run(body: Callable[[int, int], Any], world_size: int, **options: Any) -> None:
    run_ranks(body, world_size, **options).expect_all_ok()


def ddp(model: nn.Module, on: DeviceMesh, hook: Any = None, **options: Any) -> nn.Module:
    model = DistributedDataParallel(model, process_group=on.get_group(), **options)
    if hook is not None:
        model.register_comm_hook(*hook)
    return model


def power_sgd(num_columns: int) -> dict[str, Any]:
    """Sends gradients as two thin matrices, from the third step on."""
    state = powerSGD_hook.PowerSGDState(None, num_columns, 2, min_compression_rate=0.1)
    return {"hook": (state, powerSGD_hook.powerSGD_hook)}


def keep(_, bucket):  # DDP takes a hook with its own types, or with none
    """Exchanges nothing: every rank goes on with its own gradient."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fsdp1(model: nn.Module, on: DeviceMesh, **options: Any) -> nn.Module:
    options |= {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "device_id": CPU}
    return fsdp.FullyShardedDataParallel(model, device_mesh=on, **options)


def fsdp2(model: nn.Module, on: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fsdp.fully_shard(layer, mesh=on, **options)
    return fsdp.fully_shard(model, mesh=on, **options)


def tensor_parallel(model: nn.Module, on: DeviceMesh) -> nn.Module:
    plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
    return tp.parallelize_module(model, on, plan)


def sequence_parallel(model: nn.Module, on: DeviceMesh) -> nn.Module:
    plan = {
        "0": tp.ColwiseParallel(),
        "2": tp.RowwiseParallel(output_layouts=Shard(0)),
        "3": tp.SequenceParallel(sequence_dim=0),
        "4": tp.ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return tp.parallelize_module(model, on, plan)


@dataclass
class Stack:
    """A way to train a model over several ranks."""

    wrap: Callable[..., nn.Module]
    shape: tuple[int, ...] = (2,)  # of the ranks
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] = make_model
    dtype: torch.dtype = torch.float64
    parts: int | None = None  # of a batch; one for each rank unless said otherwise
    by: Callable[..., torch.Tensor] = backward
    error: float | None = None  # allowed in the change of the parameters, if some is


F32 = torch.float32
F16 = {"hook": (None, default_hooks.fp16_compress_hook)}
BF16 = {"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
ALL_BF16 = {"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
OFFLOAD = {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)}
HYBRID = {"sharding_strategy": fsdp.ShardingStrategy.HYBRID_SHARD}
STACKS = {
    "ddp": Stack(ddp, (3,)),
    "ddp_f32": Stack(ddp, dtype=F32),
    "ddp_static_graph": Stack(ddp, options={"static_graph": True}),
    "ddp_views": Stack(ddp, options={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
    "ddp_mixed": Stack(ddp, (3,), {"find_unused_parameters": True}, Mixed),
    "ddp_no_sync": Stack(ddp, by=backward_in_halves),
    "ddp_hook": Stack(ddp, options={"hook": (None, default_hooks.allreduce_hook)}),
    "ddp_f16_hook": Stack(ddp, options=F16, error=1e-3),  # 11 bits of a gradient are sent
    "ddp_power_sgd": Stack(ddp, options=power_sgd(8), error=0.05),  # 8 columns of up to 16
    "ddp_power_sgd_all": Stack(ddp, options=power_sgd(16)),
    "fsdp1": Stack(fsdp1),
    "fsdp1_clip": Stack(fsdp1, (3,), dtype=F32, by=backward_and_clip),  # a norm in float32 anyway
    "fsdp1_no_sync": Stack(fsdp1, by=backward_in_halves),
    "fsdp1_hybrid": Stack(fsdp1, (2, 2), HYBRID),
    "fsdp2": Stack(fsdp2),
    "fsdp2_clip": Stack(fsdp2, (3,), by=backward_and_clip),
    "fsdp2_no_sync": Stack(fsdp2, by=backward_in_halves),
    "fsdp2_offload": Stack(fsdp2, options=OFFLOAD, by=backward_and_clip),
    "fsdp2_bf16": Stack(fsdp2, options=BF16, dtype=F32, error=0.02),  # 8 bits in the model too
    "fsdp2_all_bf16": Stack(fsdp2, options=ALL_BF16, dtype=F32, error=0.02),
    "fsdp2_hybrid": Stack(fsdp2, (2, 2), by=backward_and_clip),
    "tensor_parallel": Stack(tensor_parallel, parts=1),
    "sequence_parallel": Stack(sequence_parallel, parts=1),
    "fsdp2_of_tensor_parallel": Stack(
        lambda model, on: fsdp2(tensor_parallel(model, on["inner"]), on["outer"]), (2, 2), parts=2
    ),
}


def train_both_ways(stack: Stack) -> Outcome:
    data = [(x.to(stack.dtype), y.to(stack.dtype)) for x, y in make_data()]
    alone = stack.make().to(stack.dtype)
    first = {name: p.detach().clone() for name, p in alone.named_parameters()}
    expected = train(alone, data, sgd(alone), by=stack.by)
    last = {name: p.detach() for name, p in alone.named_parameters()}

    def body(rank: int, world: int) -> Any:
        parts = stack.parts or world
        mesh = init_device_mesh(
            "cpu", stack.shape, mesh_dim_names=("outer", "inner")[: len(stack.shape)]
        )
        model = stack.wrap(stack.make().to(stack.dtype), mesh, **stack.options)
        numbers = train(model, data, sgd(model), rank * parts // world, parts, stack.by)
        state = {name: value for name, value in full_state(model).items() if name in last}
        if stack.error is None:
            expect_same(state, last, stack.dtype)
            expect_same(numbers, expected, stack.dtype)
        else:
            expect_near(state, last, first, stack.error)
            assert_close(numbers, expected, rtol=stack.error, atol=0)
        return numbers, [value.tolist() for value in state.values()]

    return run_ranks(body, math.prod(stack.shape))


@pytest.mark.parametrize("name", STACKS)
def test_same_numbers(name: str) -> None:
    outcome = train_both_ways(STACKS[name])
    outcome.expect_all_ok()
    assert all(result == outcome.results[0] for result in outcome.results.values())


def test_wrong_numbers_are_noticed() -> None:
    kept = {"hook": (None, keep)}
    for stack, message in (
        (Stack(ddp, options=kept), "not close"),
        (Stack(ddp, options=kept, dtype=F32), "not close"),
        (Stack(ddp, options=kept, error=0.02), "of the change is wrong"),
        (Stack(ddp, options=power_sgd(8), error=1e-3), "of the change is wrong"),
    ):
        errors = train_both_ways(stack).errors
        assert sorted(errors) == [0, 1]
        assert all(message in error.partition("Traceback")[0] for error in errors.values())


def test_ddp_join_of_uneven_inputs() -> None:
    data, alone, num_batches = make_data(5), make_model(), torch.tensor([3, 5, 4])
    live = [num_batches.repeat_interleave(BATCH // 3) > step for step in range(5)]
    whole = [(x[rows], y[rows]) for (x, y), rows in zip(data, live, strict=True)]

    def backward_alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mse_loss(model(x), y, reduction="sum") / (BATCH * 3)
        loss.backward()
        return loss.detach()

    train(alone, whole, sgd(alone), by=backward_alone)

    def body(rank: int, world: int) -> None:
        model = DistributedDataParallel(make_model())
        own = [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in data]
        with Join([model]):
            train(model, own[: num_batches[rank]], sgd(model))
        expect_same(full_state(model), full_state(alone))

    run(body, 3)


def test_zero_redundancy_optimizer() -> None:
    data, alone = make_data(), make_model()
    optimizer = torch.optim.Adam(alone.parameters())
    expected = train(alone, data, optimizer)

    def body(rank: int, world: int) -> None:
        model = DistributedDataParallel(make_model())
        own = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        assert len(own.optim.param_groups[0]["params"]) < len(list(model.parameters()))
        expect_same(train(model, data, own, rank, world), expected)
        expect_same(full_state(model), full_state(alone))
        own.consolidate_state_dict(to=0)
        if rank == 0:
            expect_same(own.state_dict()["state"], optimizer.state_dict()["state"])

    run(body, 2)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_pipelines(name: str) -> None:
    num_stages = 4 if name == "Interleaved1F1B" else 2

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(num_stages)]
        return nn.Sequential(*stages).double()

    def body(rank: int, world: int) -> None:
        alone, model, numbers = make(), make(), range(rank, num_stages, world)
        stages = [pipelining.PipelineStage(model[i], i, num_stages, CPU) for i in numbers]
        given = stages if len(stages) > 1 else stages[0]
        schedule = getattr(pipelining, f"Schedule{name}")(given, 4, loss_fn=mse_loss)
        for x, _ in make_data():
            losses: list[torch.Tensor] = []
            schedule.step(*([x] if rank == 0 else []), target=x if rank else None, losses=losses)
            loss = backward(alone, x, x)
            if rank == world - 1:
                expect_same(torch.stack(losses).mean().detach(), loss)
            for i in numbers:
                for own, whole in zip(model[i].parameters(), alone[i].parameters(), strict=True):
                    expect_same(own.grad, whole.grad)
            for trained in (model, alone):
                sgd(trained).step()
                trained.zero_grad()

    run(body, 2)


@pytest.mark.parametrize("write", [dcp.save, dcp.async_save])
def test_checkpoint_moves_to_another_number_of_ranks(write: Any, tmp_path: Path) -> None:
    data, alone = make_data(8), make_model()
    optimizer = torch.optim.Adam(alone.parameters())
    train(alone, data[:2], optimizer)
    halfway = full_state(alone)
    expected = train(alone, data[2:], optimizer)

    def save(rank: int, world: int) -> None:
        model = fsdp2(make_model(), init_device_mesh("cpu", (world,)))
        own = torch.optim.Adam(model.parameters())
        train(model, data[:2], own, rank, world)
        state = dict(zip(("model", "optimizer"), states.get_state_dict(model, own), strict=True))
        written = write(state, checkpoint_id=tmp_path, process_group=dist.new_group())
        if write is dcp.async_save:  # training goes on meanwhile
            expect_same(train(model, data[2:], own, rank, world), expected)
            written.result()

    def resume(rank: int, world: int) -> None:
        model = fsdp2(make_model(seed=1), init_device_mesh("cpu", (world,)))
        own = torch.optim.Adam(model.parameters())
        state, own_state = states.get_state_dict(model, own)
        dcp.load({"model": state, "optimizer": own_state}, checkpoint_id=tmp_path)
        states.set_state_dict(model, own, model_state_dict=state, optim_state_dict=own_state)
        expect_same(full_state(model), halfway)
        expect_same(train(model, data[2:], own, rank, world), expected)
        expect_same(full_state(model), full_state(alone))

    run(save, 2)
    loaded = make_model(seed=1).state_dict()
    dcp.load({"model": loaded}, checkpoint_id=tmp_path, no_dist=True)
    expect_same(loaded, halfway)
    run(resume, 3)


@pytest.mark.parametrize("is_functional", [True, False], ids=["functional", "nn"])
def test_tokens_routed_to_experts(is_functional: bool) -> None:
    def exchange(x: torch.Tensor, receive: list[int], send: list[int]) -> torch.Tensor:
        if is_functional:
            return funcol.all_to_all_single_autograd(x, receive, send, dist.group.WORLD)
        return dist_nn.all_to_all_single(x.new_empty(sum(receive), 8), x, receive, send)

    torch.manual_seed(0)
    routes = torch.tensor([[0, 1, 1, 2, 1], [2, 2, 0, 2, 2], [1, 1, 1, 1, 1]])  # rank, token
    tokens, targets = torch.randn(2, *routes.shape, 8, dtype=torch.float64)
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in routes).double()
    x = tokens.clone().requires_grad_()
    outputs = sum(e(x).tanh() * (routes == i)[..., None] for i, e in enumerate(experts))
    total = ((outputs - targets) ** 2).sum()
    of_x, *of_experts = torch.autograd.grad(total, [x, *experts.parameters()])

    def body(rank: int, world: int) -> None:
        expert, x = experts[rank], tokens[rank].clone().requires_grad_()
        order = routes[rank].argsort(stable=True)
        num_sent = routes[rank].bincount(minlength=world)
        num_received = torch.empty_like(num_sent)
        dist.all_to_all_single(num_received, num_sent)
        send, receive = num_sent.tolist(), num_received.tolist()
        routed = expert(exchange(x[order], receive, send)).tanh()
        out = torch.zeros_like(x).index_copy(0, order, exchange(routed, send, receive))
        ((out - targets[rank]) ** 2).sum().backward()
        actual = [out, x.grad, *(p.grad for p in expert.parameters())]
        expect_same(actual, [outputs[rank], of_x[rank], *of_experts[2 * rank : 2 * rank + 2]])

    run(body, 3)


@pytest.mark.slow
def test_compiled_steps(tmp_path: Path) -> None:
    data, alone = make_data(), make_model()
    expected = train(alone, data, sgd(alone))

    def descend(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        error = x @ weight - y
        gradient = funcol.all_reduce(x.T @ error / len(x), "avg", dist.group.WORLD)
        total = (error**2).sum()
        dist.all_reduce(total)
        return [weight - 0.1 * gradient, total.sin()]

    def body(rank: int, world: int) -> None:
        torch._inductor.config.compile_threads = 1
        compiled = torch.compile(descend, fullgraph=True)
        own = whole = torch.zeros(10, 3, dtype=torch.float64)
        for x, y in data:
            own, total = compiled(own, x.chunk(world)[rank], y.chunk(world)[rank])
            error = x @ whole - y
            whole = whole - 0.1 * (x.T @ error / len(x))
            expect_same([own, total], [whole, (error**2).sum().sin()])
        model = DistributedDataParallel(make_model())
        expect_same(train(torch.compile(model), data, sgd(model), rank, world), expected)
        expect_same(full_state(model), full_state(alone))

    run(body, 2, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, timeout_s=110, group_timeout_s=90)


def test_ring_and_coalesced_operations() -> None:
    def body(rank: int, world: int) -> None:
        rows = torch.arange(world * 5, dtype=torch.float64).view(world, 5)
        total, moving = rows[rank].clone(), rows[rank].clone()
        for _ in range(world - 1):
            arrived = torch.empty_like(moving)
            send = dist.P2POp(dist.isend, moving, (rank + 1) % world)
            receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % world)
            for work in dist.batch_isend_irecv([send, receive] if rank else [receive, send]):
                work.wait()
            total, moving = total + arrived, arrived
        parts = [rows[rank] * factor for factor in (1, 2, 3)]
        with dist._coalescing_manager(device=CPU, async_ops=True) as reduced:
            for part in parts:
                dist.all_reduce(part)
        reduced.wait()
        expect_same([total, *parts], [rows.sum(0) * factor for factor in (1, 1, 2, 3)])

    run(body, 3)


def test_objects() -> None:
    def body(rank: int, world: int) -> None:
        objects = [{"rank": r, "text": "é" * r * 1000, "row": [r / 3] * r} for r in range(world)]
        gathered, at_last, copied, own = ([None] * n for n in (world, world, world, 1))
        dist.all_gather_object(gathered, objects[rank])
        dist.gather_object(objects[rank], at_last if rank == world - 1 else None, dst=world - 1)
        assert gathered == objects
        assert at_last == (objects if rank == world - 1 else [None] * world)
        copied = objects if rank == 1 else copied
        dist.broadcast_object_list(copied, src=1)
        dist.scatter_object_list(own, objects if rank == 0 else None, src=0)
        assert copied == objects
        assert own == [objects[rank]]

    run(body, 3)

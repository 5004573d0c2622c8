"""Operations through torch.distributed against arithmetic done in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import TRANSPORTS, run_ranks

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def value(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 3, (count,), generator=generator).to(dtype)


def reference(inputs: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    wide = torch.complex128 if inputs[0].is_complex() else torch.float64
    stacked = torch.stack([x.to(wide) for x in inputs])
    table = {
        dist.ReduceOp.SUM: lambda: stacked.sum(0),
        dist.ReduceOp.AVG: lambda: stacked.mean(0),
        dist.ReduceOp.PRODUCT: lambda: stacked.prod(0),
        dist.ReduceOp.MIN: lambda: stacked.amin(0),
        dist.ReduceOp.MAX: lambda: stacked.amax(0),
    }
    return table[op]()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_of_every_dtype_equals_float64(world_size: int, transport: str) -> None:
    def body(rank: int, world: int) -> None:
        for dtype in DTYPES:
            ops = [dist.ReduceOp.SUM]
            if not dtype.is_complex:
                ops += [dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
            if dtype.is_floating_point or dtype.is_complex:
                ops.append(dist.ReduceOp.AVG)
            for op in ops:
                for count in (0, 1, 5, 3001, 70_001):
                    inputs = [value(r, count, dtype) for r in range(world)]
                    mine = inputs[rank].clone()
                    dist.all_reduce(mine, op)
                    expected = reference(inputs, op)
                    if dtype == torch.bool:
                        expected = expected != 0
                    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-6)
                    torch.testing.assert_close(
                        mine.to(expected.dtype), expected, rtol=tolerance, atol=0
                    )

    run_ranks(body, world_size, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()


def test_every_rank_gets_identical_bits() -> None:
    def body(rank: int, world: int) -> list[int]:
        digests = []
        for count in (3, 900, 5_000, 300_000):
            for dtype in (torch.float32, torch.bfloat16):
                generator = torch.Generator().manual_seed(rank)
                x = torch.randn(count, generator=generator).to(dtype)
                dist.all_reduce(x)
                digests.append(hash(x.view(torch.uint8).numpy().tobytes()))
        return digests

    for world_size in (2, 3, 4):
        for transport in TRANSPORTS:
            env = {"PYCOMM_TRANSPORT": transport, "PYTHONHASHSEED": "0"}
            outcome = run_ranks(body, world_size, env=env)
            outcome.expect_all_ok()
            assert len({tuple(r) for r in outcome.results.values()}) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_broadcast_all_gather_barrier(transport: str) -> None:
    def body(rank: int, world: int) -> None:
        for count in (1, 700, 90_000):
            for root in range(world):
                x = torch.full((count,), rank if rank == root else -1)
                dist.broadcast(x, root)
                assert torch.equal(x, torch.full((count,), root))
            mine = torch.full((count,), float(rank))
            parts = [torch.empty(count) for _ in range(world)]
            dist.all_gather(parts, mine)
            assert all(torch.equal(p, torch.full((count,), float(r))) for r, p in enumerate(parts))
            whole = torch.empty(count * world)
            dist.all_gather_into_tensor(whole, mine)
            assert torch.equal(whole, torch.cat(parts))
        x = torch.zeros(10, dtype=torch.float8_e5m2)
        dist.broadcast(x, 0)
        dist.barrier()

    run_ranks(body, 3, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()


def test_tensors_that_are_not_contiguous_and_subgroups_and_objects() -> None:
    def body(rank: int, world: int) -> None:
        base = torch.zeros(6, 8)
        view = base[:, ::2]
        view.fill_(rank + 1)
        dist.all_reduce(view)
        assert torch.equal(view, torch.full((6, 4), 6.0))
        assert torch.equal(base[:, 1::2], torch.zeros(6, 4))
        channels_last = torch.full((2, 3, 4, 4), 1.0).to(memory_format=torch.channels_last)
        work = dist.all_reduce(channels_last, async_op=True)
        assert work is not None
        work.wait()
        assert bool((channels_last == 3).all())
        pair = dist.new_group([0, 2])
        if rank in (0, 2):
            x = torch.ones(5)
            dist.all_reduce(x, group=pair)
            assert float(x[0]) == 2
        gathered: list[object] = [None] * world
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": r} for r in range(world)]

    run_ranks(body, 3).expect_all_ok()


def test_async_work_and_futures() -> None:
    def body(rank: int, world: int) -> None:
        tensors = [torch.full((1 + 5_000 * i,), float(rank)) for i in range(20)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        futures = [w.get_future() for w in works if w is not None]
        doubled = [f.then(lambda done: done.value()[0] * 2) for f in futures]
        for tensor, future in zip(tensors, doubled, strict=True):
            assert torch.equal(future.wait(), tensor * 2)
            assert bool((tensor == 1).all())
        # A callback that waits for another operation must not hang.
        outer = dist.all_reduce(torch.ones(3), async_op=True)
        assert outer is not None

        def nested(_: object) -> float:
            x = torch.ones(40_000)
            dist.all_reduce(x)
            return float(x[0])

        assert outer.get_future().then(nested).wait() == 2.0

        # Nor one that waits for another operation's callback, as PowerSGD's does.
        def nest(depth: int) -> float:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            assert work is not None
            if depth == 0:
                return float(work.get_future().wait()[0][0])
            return float(work.get_future().then(lambda _: nest(depth - 1)).wait())

        assert nest(5) == 2.0

    run_ranks(body, 2).expect_all_ok()


def test_what_cannot_be_done_is_said_with_a_remedy() -> None:
    def body(rank: int, world: int) -> None:
        with pytest.raises(RuntimeError, match="to_dense"):
            group = dist.group.WORLD
            assert group is not None
            backend = group._get_backend(torch.device("cpu"))
            backend.broadcast([torch.eye(3).to_sparse()], dist.BroadcastOptions()).wait()
        with pytest.raises(RuntimeError, match="bxor is not defined on float32"):
            dist.all_reduce(torch.ones(3), dist.ReduceOp.BXOR)
        dist.barrier()

    run_ranks(body, 2).expect_all_ok()

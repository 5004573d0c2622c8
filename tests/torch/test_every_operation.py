"""Every operation through torch.distributed: dtype x reduction x size x world x layout, against
float64 (complex128) arithmetic in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import TRANSPORTS, run_ranks

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX]
OPS = dist.ReduceOp
# 0 elements, one, odd, above a flat slot (4 KiB), above a chunk.
COUNTS = [0, 1, 77, 1500, 40_003]
WORLDS = [1, 2, 3, 4, 8]


def ops_on(dtype: torch.dtype) -> list[Any]:
    if dtype.is_complex:
        return [OPS.SUM, OPS.AVG]  # torch refuses the others
    if dtype.is_floating_point:
        return [OPS.SUM, OPS.AVG, OPS.PRODUCT, OPS.MIN, OPS.MAX]
    return [OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX, OPS.BAND, OPS.BOR, OPS.BXOR]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    whole = torch.randint(0, 3, shape, generator=generator)
    if dtype.is_complex:
        whole = torch.complex(
            whole.double(), torch.randint(0, 3, shape, generator=generator).double()
        )
    return whole.to(dtype)


def reduced(inputs: list[torch.Tensor], op: Any) -> torch.Tensor:
    dtype = inputs[0].dtype
    if op in (OPS.BAND, OPS.BOR, OPS.BXOR):
        result = inputs[0].clone()
        for x in inputs[1:]:
            result = {OPS.BAND: result & x, OPS.BOR: result | x, OPS.BXOR: result ^ x}[op]
        return result
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = torch.stack([x.to(wide) for x in inputs])
    folds: dict[Any, Callable[[], torch.Tensor]] = {
        OPS.SUM: lambda: stacked.sum(0),
        OPS.AVG: lambda: stacked.mean(0),
        OPS.PRODUCT: lambda: stacked.prod(0),
        OPS.MIN: lambda: stacked.amin(0),
        OPS.MAX: lambda: stacked.amax(0),
    }
    result = folds[op]()
    if dtype == torch.bool:
        return result != 0
    # Eight twos are one more than an int8 holds: it wraps, in C++ as in torch.
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    return result.to(torch.int64).to(dtype) if is_whole else result


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    # Small whole numbers are exact; averages and bfloat16's products of eight round once.
    rtol = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}.get(got.dtype, 1e-12)
    wide = torch.complex128 if got.is_complex() else torch.float64
    torch.testing.assert_close(
        got.to(wide),
        want.to(wide),
        rtol=1e-6 if got.is_complex() else rtol,
        atol=0,
        msg=lambda text: f"{what}: {text}",
    )


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same elements, every second of a larger tensor."""
    room = torch.zeros(2 * x.numel(), dtype=x.dtype)
    room[::2] = x.flatten()
    return room[::2].view_as(x) if x.dim() == 1 else room[::2]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "strided": strided,
}


@pytest.mark.parametrize("world_size", WORLDS)
def test_reductions(world_size: int) -> None:
    def body(rank: int, world: int) -> None:
        for dtype in DTYPES:
            for op in ops_on(dtype):
                for count in COUNTS:
                    layout = LAYOUTS["strided" if count == 77 else "contiguous"]
                    inputs = [value(r, (count,), dtype) for r in range(world)]
                    want = reduced(inputs, op) if count else torch.zeros(0)
                    what = f"{dtype} {op} {count} of {world}"
                    mine = layout(inputs[rank])
                    dist.all_reduce(mine, op)
                    assert_same(mine, want, f"all_reduce {what}")
                    root = count % world
                    mine = layout(inputs[rank])
                    dist.reduce(mine, root, op)
                    kept = want if rank == root else inputs[rank]
                    assert_same(mine, kept, f"reduce {what}")
                    if count > 5000 and world > 4:
                        continue
                    parts = [value(50 + r, (world * count,), dtype) for r in range(world)]
                    total = reduced(parts, op) if count else torch.zeros(0)
                    out = layout(torch.zeros(count, dtype=dtype))
                    dist.reduce_scatter_tensor(out, layout(parts[rank]), op)
                    assert_same(
                        out, total[rank * count : (rank + 1) * count], f"reduce_scatter {what}"
                    )

    run_ranks(body, world_size, timeout_s=110).expect_all_ok()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x.to(torch.float32)


def check_moves(rank: int, world: int, count: int, dtype: torch.dtype) -> None:
    layout = LAYOUTS["strided" if count == 77 else "contiguous"]
    raw = [value(r, (count,), torch.float32).to(dtype) for r in range(world)]
    root = count % world

    def empty(parts: int = 1) -> torch.Tensor:
        return layout(torch.zeros(parts * count, dtype=torch.float32).to(dtype))

    def check(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
        same = torch.equal(bits(got), bits(want))
        assert same, f"{what} of {count} {dtype} among {world}"

    mine = layout(raw[rank])
    dist.broadcast(mine, root)
    check(mine, raw[root], "broadcast")
    outs = [empty() for _ in range(world)]
    dist.all_gather(outs, layout(raw[rank]))
    for r in range(world):
        check(outs[r], raw[r], "all_gather")
    joined = empty(world)
    dist.all_gather_into_tensor(joined, layout(raw[rank]))
    check(joined, torch.cat(raw), "all_gather_into_tensor")
    outs = [empty() for _ in range(world)]
    dist.gather(layout(raw[rank]), outs if rank == root else None, root)
    if rank == root:
        for r in range(world):
            check(outs[r], raw[r], "gather")
    out = empty()
    dist.scatter(out, [layout(x) for x in raw] if rank == root else None, root)
    check(out, raw[rank], "scatter")
    sent = [raw[(rank + r) % world] for r in range(world)]
    want = torch.cat([raw[(r + rank) % world] for r in range(world)])
    got = empty(world)
    dist.all_to_all_single(got, torch.cat(sent))
    check(got, want, "all_to_all_single")
    outs = [empty() for _ in range(world)]
    dist.all_to_all(outs, [layout(x) for x in sent])
    check(torch.cat(outs), want, "all_to_all")


@pytest.mark.parametrize("world_size", WORLDS)
def test_moves(world_size: int) -> None:
    def body(rank: int, world: int) -> None:
        for dtype in [*DTYPES, *FLOAT8]:
            for count in COUNTS:
                check_moves(rank, world, count, dtype)

    run_ranks(body, world_size, timeout_s=110).expect_all_ok()


@pytest.mark.parametrize("world_size", WORLDS)
def test_uneven_all_to_all(world_size: int) -> None:
    def body(rank: int, world: int) -> None:
        for row in (1, 3, 2000):
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn):
                to = [(rank + 2 * p) % 4 for p in range(world)]
                frm = [(p + 2 * rank) % 4 for p in range(world)]
                rows = torch.tensor([rank * world + p for p in range(world) for _ in range(to[p])])
                wanted = [p * world + rank for p in range(world) for _ in range(frm[p])]
                sent = (rows % 16).float()[:, None].expand(-1, row).to(dtype)
                got = torch.zeros(sum(frm), row).to(dtype)
                dist.all_to_all_single(got, sent, frm, to)
                want = (torch.tensor(wanted, dtype=torch.int64) % 16).float()[:, None]
                assert torch.equal(got.float(), want.expand(-1, row))

    run_ranks(body, world_size).expect_all_ok()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_coalesced_forms_and_the_coalescing_manager(transport: str) -> None:
    def body(rank: int, world: int) -> None:
        sizes = [5, 3000, 1]
        group = dist.group.WORLD
        tensors = [torch.full((n,), float(rank)) for n in sizes]
        dist.all_reduce_coalesced(tensors)
        assert all((t == sum(range(world))).all() for t in tensors)
        for is_async in (False, True):
            tensors = [torch.full((n,), float(rank)) for n in sizes]
            with dist._coalescing_manager(group, async_ops=is_async) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            if is_async:
                manager.wait()
            assert all((t == sum(range(world))).all() for t in tensors)
        outs = [torch.zeros(n * world) for n in sizes]
        with dist._coalescing_manager(group):
            for out, n in zip(outs, sizes, strict=True):
                dist.all_gather_into_tensor(out, torch.full((n,), float(rank)))
        for out, n in zip(outs, sizes, strict=True):
            assert torch.equal(out, torch.arange(world).repeat_interleave(n).float())
        parts = [torch.zeros(n) for n in sizes]
        with dist._coalescing_manager(group):
            for part, n in zip(parts, sizes, strict=True):
                dist.reduce_scatter_tensor(part, torch.arange(world).repeat_interleave(n).float())
        assert all((part == rank * world).all() for part in parts)
        # With a device: operations of every kind between start and end.
        box, sums = torch.zeros(9), torch.ones(7)
        with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
            dist.isend(torch.full((9,), float(rank)), (rank + 1) % world)
            dist.irecv(box, (rank - 1) % world)
            group._get_backend(torch.device("cpu")).allreduce([sums])
        manager.wait()
        assert (box == (rank - 1) % world).all() and (sums == world).all()

    run_ranks(body, 3, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sends_and_receives_with_tags_and_any_source(transport: str) -> None:
    def body(rank: int, world: int) -> None:
        for size in (0, 1, 60_000):
            # Posted in another order than sent; tags keep them apart.
            boxes = {tag: torch.zeros(size) for tag in (1, 2, 3)}
            left, right = (rank - 1) % world, (rank + 1) % world
            pending = [dist.irecv(boxes[tag], left, tag=tag) for tag in (3, 1, 2)]
            works = [
                dist.isend(torch.full((size,), 10.0 * tag + rank), right, tag=tag)
                for tag in (2, 3, 1)
            ]
            for work in [*pending, *works]:
                work.wait()
            for tag, box in boxes.items():
                assert (box == 10 * tag + left).all()
            if rank == 0:
                seen = []
                for _ in range(world - 1):
                    box = torch.zeros(size + 1)
                    sender = dist.recv(box, tag=7)
                    assert (box == sender).all()
                    seen.append(sender)
                assert sorted(seen) == list(range(1, world))
            else:
                dist.send(torch.full((size + 1,), float(rank)), 0, tag=7)
        strided = torch.zeros(6, 4).t()
        if rank == 0:
            dist.send(torch.arange(24.0).view(4, 6), 1)
        elif rank == 1:
            dist.recv(strided, 0)
            assert torch.equal(strided, torch.arange(24.0).view(4, 6))

    run_ranks(body, 3, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()


def test_sparse_all_reduce_equals_the_dense_one() -> None:
    def body(rank: int, world: int) -> None:
        for dtype in (torch.float32, torch.float64, torch.int64):
            dense = torch.zeros(50, 3, dtype=dtype)
            dense[rank * 3 : rank * 3 + 2 * rank] = rank + 1  # rank 0 has nothing
            dense[40] = 1
            everyone = torch.zeros_like(dense)
            for r in range(world):
                everyone[r * 3 : r * 3 + 2 * r] += r + 1
            everyone[40] = world
            for sparse_dim in (1, 2):
                mine = dense.to_sparse(sparse_dim)
                dist.all_reduce(mine)
                assert mine.is_sparse and torch.equal(mine.to_dense(), everyone)
        with pytest.raises(RuntimeError, match="different shapes"):
            dist.all_reduce(torch.zeros(3 + rank, 2).to_sparse())

    run_ranks(body, 3).expect_all_ok()


def test_a_premultiplied_sum_scales_each_input() -> None:
    def body(rank: int, world: int) -> None:
        for factor in (0.5, torch.tensor([2.0])):
            mine = torch.full((1000,), float(rank + 1))
            dist.all_reduce(mine, dist._make_nccl_premul_sum(factor))
            assert (mine == float(factor) * 6).all()
            out = torch.zeros(2)
            given = torch.full((2 * world,), float(rank + 1))
            dist.reduce_scatter_tensor(out, given, dist._make_nccl_premul_sum(factor))
            assert (out == float(factor) * 6).all() and (given == rank + 1).all()

    run_ranks(body, 3).expect_all_ok()


def test_what_cannot_be_done_is_refused_with_the_remedy() -> None:
    def body(rank: int, world: int) -> None:
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        for call, text in (
            # c10d sends a device's tensors to the device's backend; here one comes to ours.
            (
                lambda: backend.allreduce([torch.ones(2, device="meta")]),
                "cpu:pycomm,cuda:nccl",
            ),
            (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)), "convert the tensor"),
            (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), OPS.AVG), "not defined"),
            (lambda: dist.all_reduce(torch.ones(2), OPS.BAND), "not defined"),
            (
                lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
                "needs an output",
            ),
            (lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(3)), "for each"),
            (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "divide"),
            (
                lambda: dist.all_to_all_single(torch.ones(3), torch.ones(4), [1, 2], [1, 2]),
                "add up to 3, but",
            ),
            (lambda: dist.isend(torch.ones(2), rank).wait(), "itself|self"),
        ):
            with pytest.raises((RuntimeError, ValueError), match=text):
                call()
        total = torch.ones(3)
        dist.all_reduce(total)  # none of it went out: ranks are still in step
        assert (total == world).all()

    run_ranks(body, 2).expect_all_ok()


def test_sixteen_bit_floats_are_added_in_float32() -> None:
    def body(rank: int, world: int) -> None:
        # 256 + 1 is 256 in bfloat16: adding pairwise loses every one.
        for count in (10, 5_000, 300_000):
            mine = torch.full((count,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
            dist.all_reduce(mine)
            assert (mine.float() == 264.0).all(), mine[:3]
            half = torch.full((count,), 60_000.0, dtype=torch.float16)
            dist.all_reduce(half, OPS.AVG)  # the sum is beyond the largest half
            assert (half.float() == 60_000).all()

    for transport in ("shm", "tcp"):
        run_ranks(body, 8, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_deterministic_bits_do_not_depend_on_buckets(transport: str) -> None:
    count = 50_000

    def body(rank: int, world: int) -> list[bytes]:
        digests = []
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            data = torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)
            for bucket in (count, 20_000, 1_000, 250):
                mine = data.clone()
                for piece in mine.split(bucket):
                    dist.all_reduce(piece, OPS.AVG)
                digests.append(mine.view(torch.uint8).numpy().tobytes())
            whole = torch.cat([data] * world)
            part = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, whole, OPS.AVG)
            digests.append(part.view(torch.uint8).numpy().tobytes())
        return digests

    env = {"PYCOMM_TRANSPORT": transport, "PYCOMM_DETERMINISTIC": "1"}
    runs = []
    for _ in range(2):
        outcome = run_ranks(body, 5, env=env)
        outcome.expect_all_ok()
        runs.extend(outcome.results.values())
    first = runs[0]
    for digests in runs:
        assert digests == first
    for start in range(0, len(first), 5):
        assert len(set(first[start : start + 5])) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [3, 50_000])
def test_lists_that_share_tensors_are_as_right_as_others(count: int, transport: str) -> None:
    def body(rank: int, world: int) -> None:
        parts = [value(10 * rank + r, (count,), torch.float32) for r in range(world)]
        want = [value(10 * r + rank, (count,), torch.float32) for r in range(world)]
        dist.all_to_all(parts, parts)  # in place, which nobody promises
        assert all(torch.equal(got, x) for got, x in zip(parts, want, strict=True))
        for k in range(world):
            ins = [value(10 * rank + r, (count,), torch.float32) for r in range(world)]
            dist.reduce_scatter(ins[k], ins)
            total = sum(value(10 * r + rank, (count,), torch.float32) for r in range(world))
            assert torch.equal(ins[k], total), k
            outs = [torch.full((count,), float(rank)) for _ in range(world)]
            dist.all_gather(outs, outs[k])
            assert all((outs[r] == r).all() for r in range(world)), k

    run_ranks(body, 3, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()


def test_splits_that_differ_for_a_rank_itself_are_refused() -> None:
    def body(rank: int, world: int) -> None:
        with pytest.raises(RuntimeError, match="to itself"):
            dist.all_to_all_single(
                torch.zeros(4 + rank), torch.zeros(8), [1, 3 + rank], [5, 3]
            ) if rank == 0 else dist.all_to_all_single(
                torch.zeros(4), torch.zeros(8), [3, 1], [3, 5]
            )

    run_ranks(body, 2, env={"PYCOMM_TRANSPORT": "tcp"}).expect_all_ok()

"""CPU tensors in shared memory: who gets them, what operations do with them, and what happens when
memory is short, a child forks, or they outlive their group."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import _torch
from tests.ranks import run_ranks


def given(rank: int, count: int) -> torch.Tensor:
    return (torch.arange(count) % 13 + 1).float() * (rank + 1)


def all_reduce(rank: int, world: int, count: int) -> list[torch.Tensor]:
    x = given(rank, count)
    dist.all_reduce(x)
    return [x]


def average_of_bfloat16(rank: int, world: int, count: int) -> list[torch.Tensor]:
    x = given(rank, count).bfloat16()
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return [x]


def reduce(rank: int, world: int, count: int) -> list[torch.Tensor]:
    x = given(rank, count)
    dist.reduce(x, world - 1)
    return [x] if rank == world - 1 else []


def broadcast(rank: int, world: int, count: int) -> list[torch.Tensor]:
    x = given(rank, count)
    dist.broadcast(x, world - 1)
    return [x]


def all_gather(rank: int, world: int, count: int) -> list[torch.Tensor]:
    out = torch.zeros(world * count)
    dist.all_gather_into_tensor(out, given(rank, count))
    parts = [torch.zeros(count) for _ in range(world)]
    dist.all_gather(parts, given(rank, count))
    return [out, *parts]


def reduce_scatter(rank: int, world: int, count: int) -> list[torch.Tensor]:
    out = torch.zeros(count)
    dist.reduce_scatter_tensor(out, given(rank, world * count))
    return [out]


def all_to_all(rank: int, world: int, count: int) -> list[torch.Tensor]:
    out = torch.zeros(world * count)
    dist.all_to_all_single(out, given(rank, world * count))
    sizes = [count * (1 + (rank + peer) % 2) for peer in range(world)]
    uneven = torch.zeros(sum(sizes))
    dist.all_to_all_single(uneven, given(rank, sum(sizes)), sizes, sizes)
    return [out, uneven]


def gather_and_scatter(rank: int, world: int, count: int) -> list[torch.Tensor]:
    parts = [torch.zeros(count) for _ in range(world)] if rank == 0 else None
    dist.gather(given(rank, count), parts, 0)
    out = torch.zeros(count)
    dist.scatter(out, [given(r, count) for r in range(world)] if rank == 0 else None, 0)
    return [out, *(parts or [])]


def send_and_receive(rank: int, world: int, count: int) -> list[torch.Tensor]:
    out = torch.zeros(count)
    sending = dist.isend(given(rank, count), (rank + 1) % world)
    dist.recv(out, (rank - 1) % world)
    sending.wait()
    return [out]


OPERATIONS = {
    f.__name__: f
    for f in (
        all_reduce,
        average_of_bfloat16,
        reduce,
        broadcast,
        all_gather,
        reduce_scatter,
        all_to_all,
        gather_and_scatter,
        send_and_receive,
    )
}


def shared(make: Callable[[], Any]) -> Any:
    with pycomm.shared_memory():
        return make()


def staged_bytes() -> int:
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    return sum(int(peer["bytes_staged"]) for peer in group.peer_stats())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_gives_the_same_on_shared_as_on_private_tensors(
    name: str, world_size: int
) -> None:
    def body(rank: int, world: int) -> None:
        for count in (7, 5_000, 90_001):
            private = OPERATIONS[name](rank, world, count)
            with pycomm.shared_memory():
                on_shared = OPERATIONS[name](rank, world, count)
            for a, b in zip(private, on_shared, strict=True):
                assert torch.equal(a, b), (name, count)

    run_ranks(body, world_size).expect_all_ok()


def test_nothing_is_copied_on_the_way() -> None:
    def body(rank: int, world: int) -> None:
        count = 1 << 18
        x, y = shared(lambda: (torch.ones(count), torch.empty(2 * count)))
        before = staged_bytes()
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather_into_tensor(y, x)
        dist.reduce_scatter_tensor(x, y)
        dist.all_to_all_single(torch.empty(2 * count), y)
        dist.reduce(x, 1)
        assert staged_bytes() == before
        assert x[0] == (8.0 if rank == 1 else 4.0)
        dist.all_reduce(torch.ones(count))
        assert staged_bytes() > before

    run_ranks(body, 2).expect_all_ok()


def test_one_rank_with_private_tensors_is_no_obstacle() -> None:
    def body(rank: int, world: int) -> None:
        x = torch.full((100_003,), rank + 1.0)
        if rank == 0:
            x = shared(x.clone)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full_like(x, 6.0))

    run_ranks(body, 3).expect_all_ok()


def test_views_at_odd_places_are_reduced_where_they_lie() -> None:
    def body(rank: int, world: int) -> None:
        whole = shared(lambda: torch.zeros(300_000))
        part = whole[1_001:201_002]
        part.fill_(rank + 1.0)
        dist.all_reduce(part)
        assert part.eq(3.0).all()
        assert whole[:1_001].eq(0).all() and whole[201_002:].eq(0).all()
        raw = shared(lambda: torch.zeros(400_001, dtype=torch.uint8))
        odd = raw[1:]  # no whole elements of any wider type begin here
        odd.fill_(rank + 1)
        dist.all_reduce(odd)
        assert odd.eq(3).all() and raw[0] == 0

    run_ranks(body, 2).expect_all_ok()


def test_only_large_tensors_of_this_thread_are_shared() -> None:
    with pycomm.shared_memory():
        large, small = torch.empty(10_000), torch.empty(10)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.empty(10_000)))
        thread.start()
        thread.join()
        with pycomm.shared_memory():
            pass
        nested = torch.empty(10_000)
    after = torch.empty(10_000)
    assert _torch.is_shared(large) and _torch.is_shared(nested)
    assert not any(_torch.is_shared(t) for t in (small, seen[0], after))


def test_freed_memory_is_counted_down_and_used_again() -> None:
    before = pycomm.shared_memory_stats()["shared_bytes"]
    x = shared(lambda: torch.ones(1 << 20))
    address = x.data_ptr()
    assert pycomm.shared_memory_stats()["shared_bytes"] == before + (4 << 20)
    del x
    gc.collect()
    assert pycomm.shared_memory_stats()["shared_bytes"] == before
    y = shared(lambda: torch.zeros(1 << 20))
    assert y.data_ptr() == address
    assert not y.any()


def test_resizing_copying_and_pickling_work_as_ever() -> None:
    x = shared(lambda: torch.arange(20_000.0))
    x.resize_(60_000)
    assert torch.equal(x[:20_000], torch.arange(20_000.0))
    y = x[:20_000].clone()
    assert torch.equal(pickle.loads(pickle.dumps(x))[:20_000], y)
    z = torch.from_numpy(x.numpy())
    z[0] = 5
    assert x[0] == 5
    x.share_memory_()
    assert x[0] == 5 and x[19_999] == 19_999


def test_short_memory_falls_back_with_one_warning() -> None:
    def body(rank: int, world: int) -> None:
        with warnings.catch_warnings(record=True) as caught, pycomm.shared_memory():
            warnings.simplefilter("always")
            tensors = [torch.full((1 << 21,), rank + 1.0) for _ in range(4)]
        told = [w for w in caught if "PYCOMM_SHM_BYTES_MAX" in str(w.message)]
        assert len(told) == 1, [str(w.message) for w in caught]
        assert pycomm.shared_memory_stats()["num_refused"] >= 2
        assert any(_torch.is_shared(t) for t in tensors)
        for tensor in tensors:
            dist.all_reduce(tensor)
            assert tensor[0] == 3.0 and tensor[-1] == 3.0

    run_ranks(body, 2, env={"PYCOMM_SHM_BYTES_MAX": str(24 << 20)}).expect_all_ok()


def test_the_environment_shares_gradient_buckets_and_training_is_the_same() -> None:
    def train(rank: int, world: int) -> list[float]:
        torch.manual_seed(0)
        model = DistributedDataParallel(
            torch.nn.Sequential(
                torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7)
            ),
            gradient_as_bucket_view=True,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(16, 300, generator=generator)
            loss = model(x).square().mean()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        is_wanted = os.environ.get("PYCOMM_SHM_TENSORS") == "1"
        assert any(_torch.is_shared(g) for g in grads) == is_wanted
        return losses

    private = run_ranks(train, 2, env={"PYCOMM_SHM_TENSORS": "0"})
    in_shared = run_ranks(train, 2, env={"PYCOMM_SHM_TENSORS": "1"})
    private.expect_all_ok()
    in_shared.expect_all_ok()
    assert private.results == in_shared.results


def test_a_data_loaders_workers_read_shared_tensors_and_make_private_ones() -> None:
    def body(rank: int, world: int) -> None:
        data = torch.arange(40_000.0).reshape(400, 100)
        assert _torch.is_shared(data)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(data), batch_size=100, num_workers=2
        )
        seen = torch.cat([batch for (batch,) in loader])
        assert torch.equal(seen, data)
        dist.all_reduce(data)
        assert data[399, 99] == 39_999.0 * world

    run_ranks(body, 2, env={"PYCOMM_SHM_TENSORS": "1"}).expect_all_ok()


def test_what_a_forked_child_writes_stays_with_it_and_it_frees_nothing() -> None:
    def body(rank: int, world: int) -> None:
        mine = torch.ones(100_000)
        kept = [torch.ones(50_000) for _ in range(20)]
        stop = threading.Event()

        def busy() -> None:  # holds the allocator's lock now and then while others fork
            while not stop.is_set():
                for _ in range(50):
                    torch.empty(20_000)

        thread = threading.Thread(target=busy)
        thread.start()
        for _ in range(15):
            child = os.fork()
            if child == 0:
                mine.zero_()
                kept.clear()
                own = torch.full((40_000,), 3.0)
                os._exit(0 if own.sum() == 120_000 and not mine.any() else 1)
            deadline = time.monotonic() + 20
            ended = (0, 0)
            while ended[0] == 0 and time.monotonic() < deadline:
                ended = os.waitpid(child, os.WNOHANG)
                time.sleep(0.002)
            if ended[0] == 0:
                os.kill(child, signal.SIGKILL)
            assert ended == (child, 0)
        stop.set()
        thread.join()
        assert mine.all()

    run_ranks(body, 2, env={"PYCOMM_SHM_TENSORS": "1"}).expect_all_ok()


def test_tensors_outlive_their_group() -> None:
    def body(rank: int, world: int) -> None:
        x = shared(lambda: torch.full((50_000,), rank + 1.0))
        dist.all_reduce(x)
        dist.destroy_process_group()
        assert x.eq(3.0).all()
        x += 1
        del x

    run_ranks(body, 2, destroy=False).expect_all_ok()


def test_a_rank_that_dies_in_a_shared_operation_is_named() -> None:
    def body(rank: int, world: int) -> str:
        x = shared(lambda: torch.ones(4 << 20))
        for _ in range(100_000):
            try:
                dist.all_reduce(x)
            except dist.DistBackendError as error:
                return str(error)
        return "nobody died"

    def kill_one(pids: list[int]) -> None:
        time.sleep(1.5)
        os.kill(pids[1], signal.SIGKILL)

    outcome = run_ranks(body, 3, meanwhile=kill_one, destroy=False)
    for rank in (0, 2):
        assert "rank 1" in str(outcome.results.get(rank)), outcome

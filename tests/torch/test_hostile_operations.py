"""Any operation at any moment: a rank dies, runs ahead, is late, differs, forks or ends."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import TRANSPORTS, run_ranks

SIZES = [2, 150_000]


def sendrecv(x: torch.Tensor, rank: int, world: int) -> None:
    box = torch.empty_like(x)
    works = [dist.irecv(box, (rank - 1) % world), dist.isend(x, (rank + 1) % world)]
    for work in works:
        work.wait()


def any_source(x: torch.Tensor, rank: int, world: int) -> None:
    if rank == 0:
        for _ in range(world - 1):
            dist.recv(torch.empty_like(x))
    else:
        dist.send(x, 0)
    dist.barrier()


def scatter(x: torch.Tensor, rank: int, world: int) -> None:
    dist.scatter(torch.empty_like(x), [x] * world if rank == 0 else None, 0)


def gather(x: torch.Tensor, rank: int, world: int) -> None:
    dist.gather(x, [torch.empty_like(x) for _ in range(world)] if rank == 0 else None, 0)


OPERATIONS: dict[str, Callable[[torch.Tensor, int, int], Any]] = {
    "all_reduce": lambda x, rank, world: dist.all_reduce(x.clone()),
    "broadcast": lambda x, rank, world: dist.broadcast(x, 0),
    "reduce": lambda x, rank, world: dist.reduce(x.clone(), 0),
    "all_gather": lambda x, rank, world: dist.all_gather(
        [torch.empty_like(x) for _ in range(world)], x
    ),
    "reduce_scatter": lambda x, rank, world: dist.reduce_scatter(torch.empty_like(x), [x] * world),
    "all_to_all": lambda x, rank, world: dist.all_to_all_single(
        torch.empty_like(x.repeat(world)), x.repeat(world)
    ),
    "uneven_all_to_all": lambda x, rank, world: dist.all_to_all_single(
        torch.empty_like(x.repeat(world)), x.repeat(world), [len(x)] * world, [len(x)] * world
    ),
    "scatter": scatter,
    "gather": gather,
    "barrier": lambda x, rank, world: dist.barrier(),
    "sendrecv": sendrecv,
    "any_source": any_source,
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", SIZES)
def test_a_death_in_any_operation_is_named_within_a_second(count: int, transport: str) -> None:
    generator = random.Random(f"{transport}{count}")
    for name, operation in OPERATIONS.items():
        killed_at: list[float] = []
        victim = generator.randrange(3)
        delay = 0.05 + generator.random() * 0.05

        def body(
            rank: int,
            world: int,
            operation: Callable[..., Any] = operation,
            victim: int = victim,
        ) -> float:
            x = torch.ones(count)
            try:
                while True:
                    operation(x, rank, world)
            except dist.DistBackendError as error:
                assert f"rank {victim} was lost" in str(error), error
                return time.monotonic()

        def kill(
            pids: list[int],
            victim: int = victim,
            delay: float = delay,
            killed_at: list[float] = killed_at,
        ) -> None:
            time.sleep(0.4 + delay)
            killed_at.append(time.monotonic())
            os.kill(pids[victim], signal.SIGKILL)

        outcome = run_ranks(body, 3, env={"PYCOMM_TRANSPORT": transport}, meanwhile=kill)
        assert not outcome.errors, (name, outcome.errors)
        survivors = {0, 1, 2} - {victim}
        assert set(outcome.results) == survivors, (name, outcome.exit_codes)
        late = max(outcome.results[rank] - killed_at[0] for rank in survivors)
        assert late < 1.0, f"{name}: {late} s"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_timeouts_of_an_operation_a_group_and_a_changed_group(transport: str) -> None:
    def body(rank: int, world: int) -> None:
        def waits_about(seconds: float, call: Callable[[], Any]) -> None:
            start = time.monotonic()
            with pytest.raises(dist.DistBackendError, match="timeout of"):
                call()
            assert seconds <= time.monotonic() - start < seconds + 0.8

        box = torch.empty(5)
        groups = [dist.new_group(timeout=timedelta(seconds=0.4)) for _ in range(4)]
        dist.barrier()
        if rank == 0:
            waits_about(0.4, lambda: dist.all_reduce(box, group=groups[0]))
            waits_about(0.4, lambda: dist.recv(box, 1, group=groups[1]))
            groups[2].set_timeout(timedelta(seconds=0.9))
            waits_about(0.9, lambda: dist.all_reduce(box, group=groups[2]))
            options = groups[3]._get_backend(torch.device("cpu")).options
            options._timeout = timedelta(seconds=0.7)
            waits_about(0.7, lambda: dist.barrier(group=groups[3]))
            work = dist.irecv(box, 1)
            start = time.monotonic()
            with pytest.raises(dist.DistBackendError, match="gave up after 200 ms"):
                work.wait(timedelta(milliseconds=200))  # this wait only: the receive goes on
            assert time.monotonic() - start < 0.7
            dist.send(torch.ones(1), 1)
            work.wait()
            assert (box == 7).all()
        else:
            go = torch.empty(1)
            dist.recv(go, 0)
            dist.send(torch.full((5,), 7.0), 0)

    run_ranks(body, 2, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    def body(rank: int, world: int) -> str:
        if rank == 1:
            time.sleep(1.5)
            return ""
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="rank 1") as caught:
            dist.new_group([0, 1], timeout=timedelta(seconds=0.8), use_local_synchronization=True)
        assert time.monotonic() - start < 2.0
        return str(caught.value)

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_different_operations_are_named_and_a_new_group_works(transport: str) -> None:
    def body(rank: int, world: int) -> None:
        x = torch.ones(100)
        pairs = [("all_reduce", "broadcast"), ("scatter", "gather"), ("barrier", "all_gather")]
        for first, second in pairs:
            group = dist.new_group()
            dist.barrier(group)  # a rank still joining would learn of the failure there
            time.sleep(0.1)  # and so would one that this rank's last word has not reached yet
            previous = dist.group.WORLD
            dist.distributed_c10d.GroupMember.WORLD = group
            try:
                with pytest.raises(dist.DistBackendError) as caught:
                    OPERATIONS[first if rank == 0 else second](x, rank, world)
                    dist.barrier()  # whose operation needed nobody learns it here
            finally:
                dist.distributed_c10d.GroupMember.WORLD = previous
            text = str(caught.value)
            assert "disagree" in text or "says" in text, text
            dist.all_reduce(x)  # the process goes on, on another group

    run_ranks(body, 3, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_runs_far_ahead(transport: str) -> None:
    def body(rank: int, world: int) -> None:
        ahead = 1500
        boxes = [torch.full((17,), float(i)) for i in range(ahead)]
        works = []
        if rank == 0:
            works = [dist.broadcast(box, 0, async_op=True) for box in boxes]
            works += [dist.isend(box, 1, tag=i % 3) for i, box in enumerate(boxes)]
        time.sleep(0.3 * rank)
        if rank != 0:
            for i in range(ahead):
                boxes[i].zero_()
                dist.broadcast(boxes[i], 0)
                assert (boxes[i] == i).all()
        if rank == 1:
            for i in range(ahead):
                dist.recv(boxes[i], 0, tag=i % 3)
                assert (boxes[i] == i).all()
        for work in works:
            work.wait()

    run_ranks(body, 3, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()


def test_a_hundred_thousand_tiny_operations_back_to_back() -> None:
    def body(rank: int, world: int) -> None:
        x = torch.ones(1, dtype=torch.int64)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        for _ in range(50_000):
            backend.allreduce([x]).wait()
            x //= world
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(50_000)]
        for work in works:
            work.wait()
        assert x.item() == 1

    run_ranks(body, 2, timeout_s=100).expect_all_ok()


def memory_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_hundred_groups_come_and_go_and_sixty_four_live(transport: str) -> None:
    def body(rank: int, world: int) -> dict[str, int]:
        def count() -> dict[str, int]:
            return {
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "mib": memory_kib() // 1024,
            }

        before = count()
        for i in range(200):
            group = dist.new_group()
            dist.all_reduce(torch.ones(3_000), group=group)
            dist.destroy_process_group(group)
            if i == 20:
                before = count()
        after = count()
        groups = [dist.new_group() for _ in range(64)]
        for group in groups:
            x = torch.ones(10)
            dist.all_reduce(x, group=group)
            assert (x == world).all()
        return {key: after[key] - before[key] for key in after}

    outcome = run_ranks(body, 2, env={"PYCOMM_TRANSPORT": transport}, timeout_s=100)
    outcome.expect_all_ok()
    for left in outcome.results.values():
        # Completion threads come as they are needed, and stay.
        assert left["descriptors"] == 0 and left["threads"] <= 2 and left["mib"] <= 8, left


def test_threads_with_groups_of_their_own_and_messages_on_one() -> None:
    def body(rank: int, world: int) -> None:
        groups = [dist.new_group() for _ in range(4)]
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                for i in range(200):
                    x = torch.full((1 + 997 * (i % 5),), 1.0)
                    dist.all_reduce(x, group=groups[index])
                    assert (x == world).all()
                    box = torch.empty(3)
                    # All threads share the default group; tags keep their messages apart.
                    pending = dist.irecv(box, 1 - rank, tag=index)
                    dist.send(torch.full((3,), float(i)), 1 - rank, tag=index)
                    pending.wait()
                    assert (box == i).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures

    run_ranks(body, 2).expect_all_ok()


def test_a_callback_may_wait_for_another_operation_and_its_callback() -> None:
    def body(rank: int, world: int) -> None:
        depth = 5

        def descend(level: int) -> float:
            x = torch.ones(5_000)
            future = dist.all_reduce(x, async_op=True).get_future()

            def then(done: Any) -> float:
                value = float(done.value()[0][0])
                return value + (descend(level - 1) if level > 1 else 0.0)

            return float(future.then(then).wait())

        assert descend(depth) == depth * world

    run_ranks(body, 2).expect_all_ok()


def test_data_loader_workers_forked_after_init_do_no_harm() -> None:
    def body(rank: int, world: int) -> None:
        data = TensorDataset(torch.arange(64.0))
        dist.all_reduce(torch.ones(3))
        for epoch in range(2):
            for (batch,) in DataLoader(data, batch_size=8, num_workers=2):
                x = batch.clone()
                dist.all_reduce(x)
                assert torch.equal(x, batch * world), epoch

    run_ranks(body, 2).expect_all_ok()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_process_may_end_with_operations_pending(transport: str) -> None:
    def body(rank: int, world: int) -> None:
        dist.barrier()
        if rank == 0:
            dist.all_reduce(torch.ones(100_000), async_op=True)
            dist.irecv(torch.ones(5), 1)
            return
        time.sleep(0.2)

    outcome = run_ranks(body, 2, env={"PYCOMM_TRANSPORT": transport}, destroy=False)
    outcome.expect_all_ok()
    assert not list(Path("/dev/shm").glob("pycomm*"))


def test_an_exception_inside_the_coalescing_manager_leaves_nothing_behind() -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        device = torch.device("cpu")
        for _ in range(2):
            with pytest.raises(KeyError), dist._coalescing_manager(group, device, async_ops=True):
                raise KeyError("in between")
            strided = torch.full((3, 4), 5.0 + rank).t()
            dist.broadcast(strided, 0)
            assert (strided == 5).all()
            with dist._coalescing_manager(group, device, async_ops=True) as manager:
                dist.broadcast(strided.fill_(7.0 + rank), 1)
            manager.wait()
            assert (strided == 8).all()
            dist.distributed_c10d._world.pg_coalesce_state.clear()

    run_ranks(body, 2).expect_all_ok()


def test_threads_on_one_group_keep_their_timeouts() -> None:
    def body(rank: int, world: int) -> None:
        group = dist.new_group(timeout=timedelta(seconds=20))
        dist.barrier()
        if rank == 1:
            time.sleep(3)
            dist.barrier(group=group)
            return
        first = threading.Thread(target=lambda: dist.barrier(group=group))
        first.start()
        time.sleep(0.2)
        used = time.process_time()
        start = time.monotonic()
        backend = group._get_backend(torch.device("cpu"))
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=1)
        with pytest.raises(dist.DistBackendError, match="another thread"):
            backend.allreduce([torch.ones(2)], options).wait()
        assert 0.9 < time.monotonic() - start < 2
        assert time.process_time() - used < 0.8
        first.join()

    run_ranks(body, 2).expect_all_ok()


def test_the_last_reference_may_go_while_a_callback_runs() -> None:
    def body(rank: int, world: int) -> None:
        import torch._C._distributed_c10d as c10d

        from pycomm._loader import torch_module

        store = c10d.PrefixStore("own", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        group = torch_module().create_process_group(
            store, rank, world, timedelta(seconds=20), "own", [0, 1]
        )
        future = group.allreduce([torch.ones(20_000)]).get_future()
        done = future.then(lambda f: time.sleep(0.5))
        del group
        done.wait()

    run_ranks(body, 2, destroy=False, timeout_s=30).expect_all_ok()


def test_a_receive_from_anyone_ends_when_all_have_left() -> None:
    def body(rank: int, world: int) -> None:
        if rank == 0:
            start = time.monotonic()
            with pytest.raises(dist.DistBackendError, match="every other rank has left"):
                dist.recv(torch.ones(2))
            assert time.monotonic() - start < 3

    run_ranks(body, 3).expect_all_ok()


def test_memory_of_a_failed_operation_is_not_reused_while_a_stopped_peer_may_write(
    tmp_path: Path,
) -> None:
    count = 8_000_000

    def body(rank: int, world: int) -> int:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]

        def shared(number: float) -> torch.Tensor:
            x = backend.allocate_tensor(count, dtype=torch.float32, device=torch.device("cpu"))
            return x.fill_(number)

        for _ in range(2000):
            x = shared(1)
            (tmp_path / f"inside{rank}").touch()
            try:
                dist.all_reduce(x)
            except dist.DistBackendError:
                del x
                fresh = [shared(5) for _ in range(3)]
                (tmp_path / "go on").touch()
                time.sleep(1.0)
                return sum(int((f != 5).sum()) for f in fresh)
        return -1

    def wait_for(name: str) -> None:
        deadline = time.monotonic() + 20
        while not (tmp_path / name).exists() and time.monotonic() < deadline:
            time.sleep(0.001)

    def stop(pids: list[int]) -> None:
        wait_for("inside1")
        time.sleep(0.2137)
        os.kill(pids[1], signal.SIGSTOP)
        wait_for("go on")
        os.kill(pids[1], signal.SIGCONT)

    outcome = run_ranks(body, 2, group_timeout_s=1, meanwhile=stop)
    assert outcome.results.get(0) == 0, outcome

"""Work and Future: threads, the GIL, signal handlers, ends that come early."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import TRANSPORTS, run_ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_futures_and_statistics_never_wait_for_the_interpreter_lock(transport: str) -> None:
    """Letting go of a tensor takes the GIL; no lock of the engine may be held meanwhile."""

    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        backend = group._get_backend(torch.device("cpu"))
        deadline = time.monotonic() + 3
        rounds = torch.zeros(1)
        while True:
            x = torch.ones(3_000)
            out = torch.empty(3_000 * world)
            work = dist.all_gather_into_tensor(out, x, async_op=True)
            assert work is not None
            if rounds[0] == 0:
                future = work.get_future()
            del x
            backend.peer_stats()
            backend.flight_records()
            future.wait()
            work.wait()
            rounds[0] = float(time.monotonic() > deadline)
            dist.broadcast(rounds, 0)
            if rounds[0]:
                return
            rounds[0] = 0

    outcome = run_ranks(body, 2, env={"PYCOMM_TRANSPORT": transport}, timeout_s=40)
    outcome.expect_all_ok()


def test_results_are_copied_under_the_issuers_modes() -> None:
    def body(rank: int, world: int) -> None:
        with torch.inference_mode():
            x = torch.full((4,), float(rank))
            outs = [torch.empty(8)[::2] for _ in range(world)]  # what is strided is copied out
            work = dist.all_gather(outs, x, async_op=True)
            assert work is not None
            work.get_future().wait()
            assert float(outs[1][0]) == 1
        parameter = torch.nn.Parameter(torch.ones(6, 4).t())
        with torch.no_grad():
            work = dist.all_reduce(parameter, async_op=True)
            assert work is not None
            work.get_future().wait()
        assert bool((parameter == world).all())

    run_ranks(body, 2).expect_all_ok()


def test_a_copy_that_fails_is_the_works_error_not_the_processes_end() -> None:
    def body(rank: int, world: int) -> str:
        with torch.inference_mode():
            outs = [torch.empty(8)[::2] for _ in range(world)]  # what is strided is copied out
        work = dist.all_gather(outs, torch.ones(4), async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError) as caught:
            work.get_future().wait()
        dist.barrier()
        return str(caught.value)

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()
    assert "nference" in outcome.results[0]


def test_a_signal_handler_may_use_the_group_without_a_deadlock() -> None:
    def body(rank: int, world: int) -> str:
        seen: list[str] = []

        def handler(*_: object) -> None:
            try:
                dist.all_reduce(torch.ones(2))
            except dist.DistBackendError as error:
                seen.append(str(error))

        signal.signal(signal.SIGUSR1, handler)
        dist.barrier()
        if rank == 0:
            threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        else:
            time.sleep(1.0)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert float(x[0]) == 2
        return seen[0] if seen else ""

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()
    assert "signal handler" in outcome.results[0]


def test_a_signal_handler_may_destroy_the_group() -> None:
    def body(rank: int, world: int) -> str:
        if rank == 1:
            time.sleep(1.5)
            return ""

        def handler(*_: object) -> None:
            dist.destroy_process_group()

        signal.signal(signal.SIGTERM, handler)
        threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(torch.ones(2))
        return str(caught.value)

    outcome = run_ranks(body, 2, destroy=False)
    outcome.expect_all_ok()
    assert "shut down" in outcome.results[0] or "destroyed" in outcome.results[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [2, 200_000])
def test_a_rank_that_destroyed_the_group_is_named_at_once(transport: str, count: int) -> None:
    def body(rank: int, world: int) -> float:
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3), group=pair)
        if rank == 1:
            dist.destroy_process_group(pair)
            time.sleep(3)
            return 0.0
        time.sleep(0.3)
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="rank 1 was lost: it left the group"):
            dist.all_reduce(torch.ones(count), group=pair)
        return time.monotonic() - start

    outcome = run_ranks(body, 2, env={"PYCOMM_TRANSPORT": transport})
    outcome.expect_all_ok()
    assert outcome.results[0] < 1.0


def test_futures_asked_for_after_the_end_still_complete() -> None:
    def body(rank: int, world: int) -> float:
        work = dist.all_reduce(torch.ones(5_000), async_op=True)
        assert work is not None
        work.wait()
        dist.destroy_process_group()
        return float(work.get_future().wait()[0][0])

    outcome = run_ranks(body, 2, destroy=False)
    outcome.expect_all_ok()
    assert outcome.results == {0: 2.0, 1: 2.0}


def test_a_failed_work_says_so_before_anyone_waits() -> None:
    def body(rank: int, world: int) -> None:
        if rank == 1:
            time.sleep(2)
            return
        group = dist.group.WORLD
        assert group is not None
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=300)
        work = group._get_backend(torch.device("cpu")).allreduce([torch.ones(10_000)], options)
        time.sleep(1)
        assert not work.is_success()
        assert "rank 1" in str(work.exception())

    outcome = run_ranks(body, 2, destroy=False)
    outcome.expect_all_ok()


def test_a_work_inherited_by_a_child_is_an_error_there() -> None:
    def body(rank: int, world: int) -> int:
        if rank == 1:
            time.sleep(1.5)
        work = dist.all_reduce(torch.ones(10_000), async_op=True)
        assert work is not None

        def child() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(3)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(10)
        work.wait()
        return -1 if process.exitcode is None else process.exitcode

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()
    assert outcome.results[0] == 0


def test_a_death_is_noticed_while_another_group_keeps_the_engine_busy() -> None:
    killed_at: list[float] = []

    def body(rank: int, world: int) -> float:
        busy = dist.new_group([0, 1])
        pair = dist.new_group([0, 2])
        dist.barrier()
        if rank == 2:
            time.sleep(30)
        stop = time.monotonic() + 4
        noticed: list[float] = []

        def wait_for_two() -> None:
            try:
                dist.all_reduce(torch.ones(2), group=pair)
            except dist.DistBackendError:
                noticed.append(time.monotonic())

        thread = threading.Thread(target=wait_for_two)
        if rank == 0:
            thread.start()
        going = torch.ones(50_000)
        while going[0]:
            going.fill_(1.0)
            if rank == 0 and time.monotonic() > stop:
                going.fill_(0.0)
            dist.all_reduce(going, dist.ReduceOp.MIN, group=busy)
        if rank == 0:
            thread.join(5)
        return noticed[0] if noticed else 0.0

    def kill(pids: list[int]) -> None:
        time.sleep(2)
        killed_at.append(time.monotonic())
        os.kill(pids[2], signal.SIGKILL)

    outcome = run_ranks(body, 3, meanwhile=kill, destroy=False)
    assert 0 < outcome.results[0] - killed_at[0] < 1.0, (outcome.results, outcome.errors)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_averages_of_large_halves_do_not_overflow(transport: str) -> None:
    def body(rank: int, world: int) -> None:
        for count in (10, 10_000, 200_000):
            x = torch.full((count,), 40_000.0, dtype=torch.float16)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            assert bool((x == 40_000).all()), x[0]

    run_ranks(body, 2, env={"PYCOMM_TRANSPORT": transport}).expect_all_ok()

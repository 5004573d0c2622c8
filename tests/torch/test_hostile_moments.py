"""A rank dies, leaves, lags, differs or is interrupted: errors that name it, in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import TRANSPORTS, run_ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [2, 200_000])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_killed_rank_is_named_within_a_second(transport: str, count: int, is_async: bool) -> None:
    killed_at: list[float] = []

    def body(rank: int, world: int) -> float:
        x = torch.ones(count)
        try:
            while True:
                work = dist.all_reduce(x, async_op=is_async)
                if work is not None and is_async:
                    work.wait()
        except dist.DistBackendError as error:
            assert "rank 1 was lost" in str(error), error
            return time.monotonic()

    def kill(pids: list[int]) -> None:
        time.sleep(1.0)
        killed_at.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    outcome = run_ranks(body, 3, env={"PYCOMM_TRANSPORT": transport}, meanwhile=kill)
    assert not outcome.errors, outcome.errors
    assert set(outcome.results) == {0, 2}
    for rank in (0, 2):
        assert outcome.results[rank] - killed_at[0] < 1.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_script_that_ends_without_destroying_its_group_is_no_death(transport: str) -> None:
    def body(rank: int, world: int) -> None:
        x = torch.ones(100_000)
        for _ in range(5):
            dist.all_reduce(x)
        if rank == 0:
            time.sleep(0.5)

    outcome = run_ranks(body, 2, env={"PYCOMM_TRANSPORT": transport}, destroy=False)
    outcome.expect_all_ok()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_is_a_timeout_that_names_it(transport: str) -> None:
    def body(rank: int, world: int) -> str:
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        with pytest.raises(dist.DistBackendError) as caught:
            for _ in range(3):
                dist.all_reduce(torch.ones(100_000))
        return str(caught.value)

    def release(pids: list[int]) -> None:
        time.sleep(5)
        os.kill(pids[1], signal.SIGCONT)

    outcome = run_ranks(
        body, 2, env={"PYCOMM_TRANSPORT": transport}, group_timeout_s=2, meanwhile=release
    )
    assert "timeout" in outcome.results[0]
    assert "rank 1" in outcome.results[0]


def test_different_shapes_are_an_error_that_shows_both_and_the_group_goes_on() -> None:
    def body(rank: int, world: int) -> str:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(torch.ones(100 + rank))
        x = torch.ones(4)
        dist.all_reduce(x)
        assert float(x[0]) == 2
        return str(caught.value)

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()
    for text in outcome.results.values():
        assert "100 elements" in text and "101 elements" in text and "rank 1" in text


def test_unequal_options_name_both_sides() -> None:
    def body(rank: int, world: int) -> None:
        raise AssertionError("the group must not come together")

    def spoil(rank: int) -> None:
        os.environ["PYCOMM_CHUNK_BYTES"] = "4096" if rank == 0 else "8192"

    outcome = run_ranks(body, 2, before=spoil)
    assert len(outcome.errors) == 2
    for text in outcome.errors.values():
        assert "CHUNK_BYTES=4096" in text and "CHUNK_BYTES=8192" in text


def test_ctrl_c_in_a_wait_raises_keyboard_interrupt(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import os, sys, time, torch, torch.distributed as dist
        rank = int(sys.argv[1]); count = int(sys.argv[2])
        dist.init_process_group("pycomm", init_method="file://{tmp_path}/store" + sys.argv[2],
                                rank=rank, world_size=2)
        dist.barrier()
        if rank == 1:
            time.sleep(30)
        print("waiting", flush=True)
        try:
            dist.all_reduce(torch.ones(count))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            os._exit(42)
        """
    )
    for count in ("2", "300000"):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(rank), count], stdout=subprocess.PIPE, text=True
            )
            for rank in (0, 1)
        ]
        try:
            assert ranks[0].stdout is not None
            assert ranks[0].stdout.readline().strip() == "waiting"
            time.sleep(0.5)
            start = time.monotonic()
            ranks[0].send_signal(signal.SIGINT)
            assert ranks[0].wait(timeout=10) == 42
            assert time.monotonic() - start < 2
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def test_fifty_groups_come_and_go_without_leaving_descriptors() -> None:
    def body(rank: int, world: int) -> int:
        def count_descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        before = 0
        for i in range(50):
            group = dist.new_group([0, 1])
            x = torch.ones(3_000)
            dist.all_reduce(x, group=group)
            dist.destroy_process_group(group)
            if i == 2:
                before = count_descriptors()
        return count_descriptors() - before

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()
    assert set(outcome.results.values()) == {0}

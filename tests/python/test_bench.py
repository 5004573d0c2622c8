"""The benchmark's arithmetic, its command, and that it notices wrong results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pycomm.bench import plan
from pycomm.bench.contestants import TorchContestant
from pycomm.bench.gang import Gang, GangError
from pycomm.bench.measure import Row, measure_gangs, sizes_of
from pycomm.bench.peer import operations
from pycomm.bench.peers import PEERS
from pycomm.bench.plan import Settings
from pycomm.bench.ratios import ratio_of_medians
from pycomm.cli import main
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("64K", 65536), ("16M", 16 << 20), ("1G", 1 << 30), ("2MiB", 2 << 20)],
)
def test_sizes_are_read_as_nccl_tests_does(text: str, size: int) -> None:
    assert plan.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-8", "8T", "1.5M"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        plan.parse_bytes(text)


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 30), st.integers(2, 9), st.integers(0, 1 << 24))
def test_sizes_ascend_within_their_bounds(first: int, span: int, factor: int, step: int) -> None:
    step = step if step == 0 or step > span // 1000 else 0
    sizes = plan.sizes_between(first, first + span, factor, step)
    assert sizes[0] == first
    assert sizes == sorted(set(sizes))
    assert sizes[-1] <= first + span


def test_bus_bandwidth_follows_nccl_tests() -> None:
    assert plan.bandwidth("all_reduce", 10**9, 1.0, 4).busbw == pytest.approx(1.5)
    assert plan.bandwidth("all_gather", 10**9, 1.0, 4).busbw == pytest.approx(0.75)
    assert plan.bandwidth("broadcast", 10**9, 0.5, 4).busbw == pytest.approx(2.0)


def test_the_interval_of_a_ratio_covers_it_and_shrinks_with_noise() -> None:
    quiet = ratio_of_medians([2.0] * 9, [1.0] * 9)
    assert (quiet.value, quiet.low, quiet.high) == (2.0, 2.0, 2.0)
    noisy = ratio_of_medians([1.0, 3.0, 2.0, 2.5, 1.5], [1.0, 1.1, 0.9, 1.0, 1.0])
    assert noisy.low < noisy.value < noisy.high


def test_the_command_measures_checks_and_writes(tmp_path: Path) -> None:
    json_path, png_path = tmp_path / "run.json", tmp_path / "run.png"
    arguments = [
        "bench",
        "all_reduce",
        "-b",
        "8",
        "-e",
        "4K",
        "-f",
        "512",
        "-n",
        "3",
        "-w",
        "1",
        "-m",
        "3",
        "--vs",
        "gloo",
    ]
    result = CliRunner().invoke(main, [*arguments, "-J", str(json_path), "--png", str(png_path)])
    assert result.exit_code == 0, result.output
    run = json.loads(json_path.read_text())
    assert [row["size_bytes"] for row in run["rows"]] == [8, 4096]
    for row in run["rows"]:
        assert set(row["seconds"]) == {"pycomm", "gloo"}
        assert all(len(s) == 3 and min(s) > 0 for s in row["seconds"].values())
        assert row["wrong"] == {"pycomm": 0, "gloo": 0}
    assert png_path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("api", ["torch", "numpy"])
def test_every_operation_runs_and_is_right(api: str) -> None:
    for operation in operations.OPERATIONS:
        sizes = [64, 40_000]
        settings = Settings(operation, sizes, iterations=2, warmup=1, rounds=2, root=1, api=api)
        rows: list[Row] = []
        measure_gangs(settings, 3, pin=False, report=rows.append)
        assert len(rows) == 2
        for row in rows:
            assert row.wrong == {"pycomm": 0}, operation
            assert len(row.seconds["pycomm"]) == 2 and len(row.laps["pycomm"]) == 4


def test_all_operations_make_one_picture(tmp_path: Path) -> None:
    json_path, png_path = tmp_path / "all.json", tmp_path / "all.png"
    arguments = "bench all -b 64 -e 4K -f 64 -n 2 -w 1 -m 2 --vs gloo".split()
    result = CliRunner().invoke(main, [*arguments, "-J", str(json_path), "--png", str(png_path)])
    assert result.exit_code == 0, result.output
    runs = json.loads(json_path.read_text())
    assert [run["settings"]["operation"] for run in runs] == list(operations.OPERATIONS)
    assert png_path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["mpich"])
def test_an_mpi_takes_its_turns(name: str) -> None:
    peer = PEERS[name]
    if not peer.is_set_up():
        try:
            peer.set_up()
        except RuntimeError as error:
            pytest.skip(str(error))
    for operation in ("reduce_scatter", "gather"):
        rows: list[Row] = []
        settings = Settings(
            operation, [4096], iterations=3, warmup=1, rounds=2, backends=("pycomm", name)
        )
        measure_gangs(settings, 2, pin=True, report=rows.append)
        assert rows[0].wrong == {"pycomm": 0, name: 0}
        assert len(rows[0].laps[name]) == 6


def test_the_ranks_of_another_launcher_compare_torchs_backends() -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pycomm", "bench"]
    ran = subprocess.run(
        [sys.executable, *command, *"all_gather -e 64 -n 2 -m 2 --vs gloo --no-pin".split()],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(" float ") == 2


def test_a_wrong_result_is_counted() -> None:
    def body(rank: int, world: int) -> int:
        contestant = TorchContestant(Settings("all_reduce", [64]), dist.group.WORLD)
        right = contestant.prepare(64, 16, True)
        real = dist.all_reduce

        def broken(tensor: torch.Tensor, *args: object, **kwargs: object) -> None:
            real(tensor, *args, **kwargs)
            tensor[3] += 1

        dist.all_reduce = broken
        return contestant.prepare(64, 16, True) - right

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()
    assert set(outcome.results.values()) == {1}


@given(
    st.sampled_from([o for o in operations.OPERATIONS if o != "barrier"]),
    st.integers(1, 6),
    st.integers(1, 20),
    st.sampled_from(operations.REDUCE_OPS),
)
def test_what_is_expected_fits_what_is_given(
    operation: str, num_ranks: int, count: int, op: str
) -> None:
    for rank in range(num_ranks):
        want = operations.expected(operation, rank, num_ranks, count, op)
        if want is not None:
            assert len(want) == operations.num_outputs(operation, num_ranks) * count


def test_a_size_below_one_element_is_left_out() -> None:
    assert [count for _, count in sizes_of(Settings("all_reduce", [0, 2, 8]), 1)] == [0, 2]
    assert [count for _, count in sizes_of(Settings("all_gather", [8, 16]), 4)] == [1]


def test_a_rank_that_ends_is_an_error_not_a_hang() -> None:
    def make(rank: int, folder: Path) -> TorchContestant:
        raise ValueError("not today")

    with Gang("nobody", 2) as gang:
        gang.fork(make, pin=False)
        with pytest.raises(GangError, match="did not come together"):
            gang.await_ranks()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench all_reduce -b x", "is not a size"),
        ("bench all_reduce -d float99", "is none of"),
        ("bench all_reduce -o median", "is none of"),
        ("bench all_reduce -b 16 -e 8", "first <= last"),
        ("bench all_reduce -n 0", "not in the range"),
        ("bench all_reduce --np 0", "not in the range"),
        ("bench all_reduce -d int8 -o avg", "average of integers"),
        ("bench broadcast -r 5", "not among 2"),
        ("bench all_reduce --vs nothing", "no backend 'nothing'"),
        ("bench all_reduce --vs openmpi -d bfloat16", "no bfloat16"),
        ("bench all_reduce --vs mpich -o avg", "no average"),
        ("run -- /nowhere/at/all", "no command"),
        ("bench all_reduce -J /nowhere/x.json", "no folder"),
        ("demo --steps 0", "not in the range"),
        ("demo --backend nothing", "no backend 'nothing'"),
        ("demo --data /nowhere/at/all", "names no file"),
    ],
)
def test_wrong_arguments_are_explained(arguments: str, message: str) -> None:
    result = CliRunner().invoke(main, arguments.split())
    assert result.exit_code != 0
    assert message in result.output


def test_help_shows_examples() -> None:
    for command in ("bench", "demo", "run", "doctor"):
        result = CliRunner().invoke(main, [command, "--help"])
        assert "Examples:" in result.output


@pytest.mark.parametrize("operation", [o for o in operations.OPERATIONS if o != "barrier"])
def test_every_operation_has_a_bare_loop(operation: str) -> None:
    from pycomm import _core

    small, large = (_core.bare_seconds(operation, n, False) for n in (65536, 4 << 20))
    assert 0 < small < large < 1


@pytest.mark.parametrize("api", ["torch", "numpy"])
def test_bounds_and_shared_tensors_take_turns_with_the_rest(api: str) -> None:
    settings = Settings(
        "all_reduce",
        [65536],
        api=api,
        rounds=2,
        iterations=2,
        backends=("pycomm", "shared", "bound", "bound-shared"),
    )
    rows: list[Row] = []
    measure_gangs(settings, 2, pin=False, report=rows.append)
    assert {name: len(laps) for name, laps in rows[0].seconds.items()} == dict.fromkeys(
        settings.backends, 2
    )
    assert rows[0].wrong == {"pycomm": 0, "shared": 0}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["all_reduce", "--vs", "bound", "--np", "3"], "2 ranks"),
        (["all_gather", "--vs", "bound-shared"], "all_reduce"),
    ],
)
def test_bounds_that_there_are_not_are_refused(words: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, ["bench", *words])
    assert result.exit_code == 2 and complaint in result.output


def test_buffers_lie_in_pages_of_the_kind_that_was_asked_for() -> None:
    small, huge = (operations.new_array(2 << 20, np.float32, kind) for kind in ("small", "huge"))
    assert small.ctypes.data % (2 << 20) == huge.ctypes.data % (2 << 20) == 0
    assert not small.any() and not huge.any()
    small[:] = 1
    assert small.sum() == 2 << 20


def test_a_page_about_performance_is_written_from_what_was_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["performance", "bfloat16", "-m", "2", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    page = (tmp_path / "performance.md").read_text()
    assert "bfloat16" in page and "us" in page
    raw = json.loads((tmp_path / "performance.json").read_text())
    assert raw["bfloat16"]["float"]["wrong"] == {"pycomm": 0}


def test_a_chapter_that_there_is_not_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["performance", "nonsense", "--out", str(tmp_path)])
    assert result.exit_code == 1 and "there are small" in result.output

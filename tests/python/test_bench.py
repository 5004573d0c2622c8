"""The benchmark's arithmetic, its command, and that it notices wrong results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pycomm.bench import plan
from pycomm.bench.measure import Row, Settings, make_call, measure
from pycomm.bench.statistics import ratio_of_medians
from pycomm.cli import main
from pycomm.launch import Place
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


@pytest.mark.parametrize("operation", ["broadcast", "all_gather", "barrier"])
def test_the_other_operations_run(operation: str) -> None:
    arguments = f"bench {operation} -b 64 -e 4K -f 64 -n 2 -w 1 -m 3 --np 3 --no-pin".split()
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output


def test_a_wrong_result_is_counted() -> None:
    def body(rank: int, world: int) -> int:
        group = dist.group.WORLD
        assert group is not None
        settings = Settings("all_reduce", [64])
        _, check = make_call(settings, 16, group, Place(rank, world, "", False))
        right = check()
        real = dist.all_reduce

        def broken(tensor: torch.Tensor, *args: object, **kwargs: object) -> None:
            real(tensor, *args, **kwargs)
            tensor[3] += 1

        dist.all_reduce = broken
        return check() - right

    outcome = run_ranks(body, 2)
    outcome.expect_all_ok()
    assert set(outcome.results.values()) == {1}


def test_a_size_below_one_element_is_left_out(tmp_path: Path) -> None:
    rows: list[Row] = []
    place = Place(0, 1, f"file://{tmp_path}/store", False)
    sizes = [0, 2, 8]
    measure(Settings("all_reduce", sizes, iterations=1, warmup=0, rounds=2), place, rows.append)
    assert [row.count for row in rows] == [0, 2]


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
    for command in ("bench", "demo"):
        result = CliRunner().invoke(main, [command, "--help"])
        assert "Examples:" in result.output

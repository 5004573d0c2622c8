"""A run that goes on from a checkpoint is the run that never stopped."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from pycomm._loader import torch_module
from pycomm.train.checkpoint import CheckpointError, Checkpoints
from pycomm.train.config import Config
from pycomm.train.engine import Engine, Progress
from pycomm.train.manifest import MANIFEST
from pycomm.train.process import communication_time
from tests.train.runs import (
    ADAM,
    EXPERTS,
    GPT,
    LLAMA,
    SGD,
    config,
    engine_of,
    in_ranks,
    numbers,
    train,
)


def checkpoints_in(folder: Path, *, is_async: bool = True, keep: int = 3) -> Checkpoints:
    said: list[str] = []
    result = Checkpoints(folder, keep, is_async=is_async, say=said.append, group=dist.new_group())
    result.said = said  # type: ignore[attr-defined]
    return result


def save(engine: Engine, checkpoints: Checkpoints) -> None:
    step = engine.progress.step
    state = {"progress": asdict(engine.progress), "optimizer_steps": engine.optimizer.steps_done}
    checkpoints.save(step, engine.tensors(), state)


def resume(settings: Config, world: int, folder: Path) -> Engine:
    engine = engine_of(settings, world)
    checkpoints = checkpoints_in(folder)
    found = checkpoints.newest()
    assert found is not None
    saved = checkpoints.names_in(found)
    engine.optimizer.make_state(found.state["optimizer_steps"], saved)
    checkpoints.load(found, engine.tensors())
    engine.restore(Progress(**found.state["progress"]))
    return engine


def save_halfway(settings: Config, num_ranks: int, folder: Path) -> list[list[float]]:
    """Three steps, a checkpoint, and the numbers of the three steps after it."""

    def body(rank: int, world: int) -> Any:
        engine, checkpoints = engine_of(settings, world), checkpoints_in(folder)
        train(engine, 3)
        save(engine, checkpoints)
        after = numbers(train(engine, 3)).tolist()  # written meanwhile
        checkpoints.wait()
        return after

    result: list[list[float]] = in_ranks(num_ranks, body).results[0]
    return result


SAME = {
    "data": (2, {}, GPT),
    "zero3": (2, {"zero": 3}, GPT),
    "tensor": (2, {"tensor": 2}, LLAMA),
    "zero_bubble": (2, {"pipeline": 2, "schedule": "zero_bubble"}, GPT),
    "expert_zero2": (4, {"expert": 2, "zero": 2}, EXPERTS),
}


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", SAME)
def test_the_same_layout_goes_on_bit_for_bit(
    name: str, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    num_ranks, layout, model = SAME[name]
    sections = {"optimizer": optimizer, "run": {"steps": 6, "deterministic": True}}
    settings = config(model | {"dropout": 0.1}, layout=layout, **sections)
    expected = save_halfway(settings, num_ranks, tmp_path)

    def body(rank: int, world: int) -> Any:
        return numbers(train(resume(settings, world, tmp_path), 3)).tolist()

    environment = {"PYCOMM_DETERMINISTIC": "1"}
    assert in_ranks(num_ranks, body, env=environment).results[0] == expected


MOVES: list[tuple[int, dict[str, Any], int, dict[str, Any], dict[str, Any]]] = [
    (4, {"zero": 3}, 2, {"tensor": 2}, GPT),
    (4, {"tensor": 2, "pipeline": 2}, 3, {"zero": 3}, GPT),
    (4, {"expert": 2, "tensor": 2}, 1, {}, EXPERTS),
    (1, {}, 4, {"expert": 2, "pipeline": 2}, EXPERTS),
    (4, {"tensor": 2, "zero": 3, "sequence_parallel": True}, 4, {"pipeline": 4}, LLAMA),
    (8, {"tensor": 2, "zero": 3, "pipeline": 2}, 2, {}, GPT),
]


@pytest.mark.parametrize("move", MOVES, ids=lambda m: f"{m[0]}to{m[2]}")
def test_another_layout_goes_on_to_rounding(move: Any, tmp_path: Path) -> None:
    first_ranks, first, then_ranks, then, model = move
    batch = {"size": 24}
    expected = save_halfway(config(model, layout=first, batch=batch), first_ranks, tmp_path)

    def body(rank: int, world: int) -> Any:
        settings = config(model, layout=then, batch=batch)
        return numbers(train(resume(settings, world, tmp_path), 3)).tolist()

    assert_close(in_ranks(then_ranks, body).results[0], expected, rtol=1e-5, atol=1e-6)


def test_all_samples_are_seen_once_whatever_the_ranks(tmp_path: Path) -> None:
    """Two steps on four ranks, the rest of the epoch on two, on one: no sample lost or doubled."""
    model = GPT | {"context": 125}  # 47 sequences
    seen: list[int] = []

    def body(rank: int, world: int) -> Any:
        settings = config(model, batch={"size": 8})
        fresh = not any(tmp_path.iterdir())
        dist.barrier()
        engine = engine_of(settings, world) if fresh else resume(settings, world, tmp_path)
        own: list[int] = []
        batch = engine.source.batch
        engine.source.batch = lambda s: own.extend(s.tolist()) or batch(s)  # type: ignore[method-assign]
        train(engine, 2)
        checkpoints = checkpoints_in(tmp_path)
        save(engine, checkpoints)
        checkpoints.wait()
        return own

    for num_ranks in (4, 2, 1):
        for own in in_ranks(num_ranks, body).results.values():
            seen += own
    assert len(seen) == 48
    assert set(seen) == set(range(47))
    assert sorted(seen[:40]) == sorted(set(seen[:40]))


def damage_size(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)


def damage_byte(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def lose_file(path: Path) -> None:
    next(path.glob("*.safetensors")).unlink()


def cut_manifest(path: Path) -> None:
    os.truncate(path / MANIFEST, 40)


def hostile_manifest(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] = "nothing"
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "damage", [damage_size, damage_byte, lose_file, cut_manifest, hostile_manifest]
)
def test_a_damaged_checkpoint_is_skipped_with_a_word(damage: Any, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> Any:
        engine = engine_of(config(GPT, layout={"zero": 3}), world)
        checkpoints = checkpoints_in(tmp_path)
        for _ in range(2):
            train(engine, 1)
            save(engine, checkpoints)
        checkpoints.wait()
        dist.barrier()
        if rank == 0:
            damage(tmp_path / "step-00000002")
        dist.barrier()
        found = checkpoints.newest()
        assert found is not None
        return found.step, checkpoints.said  # type: ignore[attr-defined]

    results = in_ranks(2, body).results
    assert [results[rank][0] for rank in (0, 1)] == [1, 1]
    assert "skipping checkpoint step-00000002" in results[0][1][0]
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == ["step-00000001", "step-00000002.damaged-1"]  # it counts no more, nor is it lost


def test_only_whole_ones_count_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> Any:
        engine = engine_of(config(GPT), world)
        checkpoints = checkpoints_in(tmp_path, keep=2)
        assert checkpoints.newest() is None
        if rank == 0:  # a death while writing leaves such a folder
            (tmp_path / "step-00000009.partial").mkdir()
        dist.barrier()
        assert checkpoints.newest() is None
        for _ in range(4):
            train(engine, 1)
            save(engine, checkpoints)
        checkpoints.wait()

    in_ranks(2, body)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_disk_is_an_error_on_all_and_loses_nothing(is_async: bool, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> Any:
        from torch.distributed.checkpoint import filesystem

        engine = engine_of(config(GPT, layout={"zero": 3}), world)
        checkpoints = checkpoints_in(tmp_path, is_async=is_async)
        train(engine, 1)
        save(engine, checkpoints)
        checkpoints.wait()
        write = filesystem._write_item

        def full(*arguments: Any, **options: Any) -> Any:
            if rank == 1:
                raise OSError(28, "No space left on device")
            return write(*arguments, **options)

        filesystem._write_item = full
        train(engine, 1)
        with pytest.raises(CheckpointError, match=r"rank 1.*No space left"):
            save(engine, checkpoints)
            checkpoints.wait()
        filesystem._write_item = write
        found = checkpoints.newest()
        assert found is not None
        assert found.step == 1
        train(engine, 1)
        save(engine, checkpoints)  # there is room again
        checkpoints.wait()
        newest = checkpoints.newest()
        assert newest is not None
        return newest.step

    assert set(in_ranks(2, body).results.values()) == {3}


def test_nothing_in_it_is_a_pickle(tmp_path: Path) -> None:
    save_halfway(config(GPT, layout={"zero": 3}), 2, tmp_path)
    names = {p.suffix for p in (tmp_path / "step-00000003").iterdir()}
    assert names == {".safetensors", ".json"}


def test_another_model_is_refused_with_its_tensor(tmp_path: Path) -> None:
    save_halfway(config(GPT), 1, tmp_path)

    def body(rank: int, world: int) -> Any:
        with pytest.raises(ValueError, match=r"it has \(16, 32\) for .*, the run wants \(16, 64\)"):
            resume(config(GPT | {"channels": 64}), world, tmp_path)

    in_ranks(1, body)


def test_tensors_that_no_rank_wants_are_refused(tmp_path: Path) -> None:
    save_halfway(config(GPT | {"tied": False}), 2, tmp_path)

    def body(rank: int, world: int) -> None:
        with pytest.raises(ValueError, match=r"output.weight', which the run has not"):
            resume(config(GPT), world, tmp_path)

    in_ranks(2, body)


def test_a_parameter_without_state_and_steps_that_were_all_skipped_resume(tmp_path: Path) -> None:
    overflows = {"compute": "float16", "initial_scale_power": 40}
    settings = config(GPT, precision=overflows, optimizer=ADAM)

    def first(rank: int, world: int) -> None:
        engine, checkpoints = engine_of(settings, world), checkpoints_in(tmp_path)
        assert all(stats.is_skipped for stats in train(engine, 2))
        save(engine, checkpoints)
        checkpoints.wait()

    def then(rank: int, world: int) -> Any:
        engine = resume(settings, world, tmp_path)
        return engine.progress.step, engine.scale.value, engine.train_step().is_skipped

    in_ranks(2, first)
    assert in_ranks(2, then).results[0] == (2, 2.0**38, True)


def test_the_writing_thread_s_waits_are_not_training_s(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> tuple[float, float]:
        group = dist.new_group()
        results: list[float] = []

        def wait_for_the_late_one() -> None:
            before = communication_time()[1]
            dist.barrier(group)
            results.append(communication_time()[1] - before)

        def aside() -> None:
            torch_module().leave_out_this_thread()
            wait_for_the_late_one()

        time.sleep(0.3 * rank)
        wait_for_the_late_one()
        time.sleep(0.3 * rank)
        thread = threading.Thread(target=aside)
        thread.start()
        thread.join()
        return results[0], results[1]

    counted, left_out = in_ranks(2, body).results[0]
    assert counted > 0.2
    assert left_out == 0


def test_saving_blocks_for_a_copy_only(tmp_path: Path) -> None:
    """What a save copies is what was there when it was called, whatever happens next."""

    def body(rank: int, world: int) -> Any:
        engine, checkpoints = engine_of(config(GPT), world), checkpoints_in(tmp_path)
        train(engine, 1)
        before = {k: v.clone() for k, v in engine.tensors().items()}
        save(engine, checkpoints)
        with torch.no_grad():
            for _, parameter, _ in engine.named_parameters():
                parameter.zero_()
        checkpoints.wait()
        found = checkpoints.newest()
        assert found is not None
        checkpoints.load(found, engine.tensors())
        for name, tensor in engine.tensors().items():
            assert torch.equal(tensor, before[name]), name

    in_ranks(2, body)
    shutil.rmtree(tmp_path)

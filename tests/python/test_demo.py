"""The demonstration trains on real text, and its loss falls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pycomm.demo import text
from pycomm.demo.model import ByteGPT, ModelConfig
from pycomm.launch import Place, run_ranks


def run_demo(tmp_path: Path, *arguments: str) -> list[float]:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "pycomm", "demo", "--out", str(out), *arguments]
    subprocess.run(command, check=True, timeout=110, cwd=tmp_path)
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    lines = (out / "steps.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert all(0 <= r["exposed_share"] <= 1 and r["tokens_per_s"] > 0 for r in records)
    return [record["loss"] for record in records]


def test_the_loss_falls_on_the_standard_library(tmp_path: Path) -> None:
    losses = run_demo(tmp_path, "--steps", "40")
    assert losses[0] == pytest.approx(5.55, abs=0.15)  # ln 256 for an untrained model
    assert sum(losses[-5:]) / 5 < losses[0] - 2.0


def test_a_folder_of_ones_own_over_another_backend(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    losses = run_demo(tmp_path, "--steps", "3", "--data", str(folder), "--backend", "gloo")
    assert len(losses) == 3


def test_texts_are_found_by_file_folder_and_glob(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 3000)
    (tmp_path / "b.txt").write_bytes(b"b" * 3000)
    assert len(text.load_bytes(str(tmp_path / "a.txt"), 128)) == 3000
    assert len(text.load_bytes(str(tmp_path), 128)) == 6001
    assert len(text.load_bytes(str(tmp_path / "*.txt"), 128)) == 6001
    assert len(text.load_bytes("", 128)) > 1_000_000
    with pytest.raises(ValueError, match="needs at least"):
        text.load_bytes(str(tmp_path / "a.txt"), 1000)


def test_a_bigram_model_of_noise_knows_nothing() -> None:
    noise = torch.randint(0, 256, (400_000,), dtype=torch.uint8)
    assert text.bigram_loss(noise[:200_000], noise[200_000:]) > 5.4
    same = torch.zeros(10_000, dtype=torch.uint8)
    assert text.bigram_loss(same, same) < 0.01


def test_the_model_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = ByteGPT(ModelConfig(context=16, channels=32, heads=2, layers=2))
    x = torch.randint(0, 256, (1, 16))
    changed = x.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    targets = torch.full((1, 16), -100)
    targets[0, :10] = 1
    with torch.no_grad():
        assert float(model(x, targets)) == float(model(changed, targets))


def test_a_full_disk_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    def body(place: Place) -> None:
        with open("/dev/full", "w") as file:
            file.write("x")

    assert run_ranks(body, 1, pin=False) == 1
    told = capfd.readouterr().err
    assert "No space left on device" in told
    assert "Traceback" not in told


def test_a_failing_rank_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    def body(place: Place) -> None:
        if place.rank == 1:
            raise ValueError("rank one is broken")
        import time

        time.sleep(60)

    assert run_ranks(body, 2, pin=False) == 1
    assert "rank one is broken" in capfd.readouterr().err

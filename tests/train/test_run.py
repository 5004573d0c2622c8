"""Whole runs by the command line: they learn, survive deaths and signals, and show it all."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pycomm.cli import main
from pycomm.train.watch.records import read_records
from pycomm.train.watch.report import write_report

PYCOMM = [sys.executable, "-m", "pycomm"]
# Some text to learn from, small enough to start at once.
TEXT = "".join(f"def function_{i % 37}(x):\n    return x + {i % 11}\n\n" for i in range(3000))
SMALL = ["-s", "model.channels=32", "-s", "model.layers=2", "-s", "model.context=32"]
SMALL += ["-s", "batch.size=16", "-s", "watch.sample_tokens=20"]
KILLS = int(os.environ.get("TRAIN_KILLS", "3"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_command(*arguments: str) -> list[str]:
    return [*PYCOMM, "train", "--data", "text.txt", *SMALL, *arguments]


def train(*arguments: str, status: int = 0) -> str:
    """Runs it to its end; returns everything it said."""
    done = subprocess.run(
        train_command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def losses(run: str) -> list[float]:
    records = read_records(Path(run) / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    return [r["loss"] for r in records]


def ranks_of(launcher: int) -> list[int]:
    """Processes whose parent is the launcher."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and int(stat[1]) == launcher:
            found.append(int(entry.name))
    return sorted(found)


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def num_steps(run: str) -> int:
    path = Path(run) / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_run_learns_and_says_what_it_did(folder: Path) -> None:
    told = train("--nproc", "2", "--out", "run", "--steps", "60", "-s", "optimizer.lr=0.01")
    assert re.search(
        r"step 60/60  loss \d\.\d+  validation \d\.\d+  .* tokens/s  MFU \d+%  comm", told
    )
    assert "--- it writes:" in told
    values = losses("run")
    assert values[-1] < values[0] - 2
    record = read_records(folder / "run" / "metrics.jsonl")[-1]
    about = json.loads((folder / "run" / "about.json").read_text())
    assert record["validation_loss"] < about["bigram_loss"]
    assert 0 <= record["communication_share"] <= 1
    assert 0 <= record["overlap"] <= 1
    assert 0 < record["mfu"] < 1.5
    assert record["samples"] == 60 * 16
    assert "nothing is left to do" in train("--nproc", "2", "--out", "run", "--steps", "60")


# A soak kills more often, and in more layouts.
KILLED = {"zero3": ["-s", "layout.zero=3"]}
if KILLS > 3:
    KILLED |= {
        "data": [],
        "tensor": ["-s", "layout.tensor=2"],
        "pipeline": ["-s", "layout.pipeline=2"],
    }


@pytest.mark.parametrize("name", KILLED)
def test_killed_ranks_come_back_to_the_identical_curve(folder: Path, name: str) -> None:
    """kill -9 of any rank at random moments, saves included; every loss is that of the run that
    was left alone, bit for bit, and no step is missing or doubled."""
    steps = 60 * (KILLS + 1)
    common = ["--nproc", "2", "--steps", str(steps), *KILLED[name], "-s", "checkpoint.every=7"]
    common += ["-s", "run.deterministic=true", "-s", f"run.max_restarts={KILLS}"]
    train(*common, "--out", "alone")
    rng = random.Random(0)
    with open("log", "w") as log:
        process = subprocess.Popen(
            train_command(*common, "--out", "killed"), stdout=log, stderr=subprocess.STDOUT
        )
        for i in range(KILLS):
            wait_for(lambda i=i: num_steps("killed") >= 10 + 60 * i)
            time.sleep(rng.random() * 0.2)
            os.kill(rng.choice(ranks_of(process.pid)), signal.SIGKILL)
        assert process.wait(100) == 0, Path("log").read_text()
    told = Path("log").read_text()
    assert told.count("starting again from the newest checkpoint") == KILLS
    assert losses("killed") == losses("alone")
    samples = [r["samples"] for r in read_records(Path("killed/metrics.jsonl"))]
    assert samples == [16 * (i + 1) for i in range(steps)]
    assert [p.name for p in Path("killed/checkpoints").glob("*.partial")] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_the_same_command_goes_on(folder: Path, number: int) -> None:
    common = ["--nproc", "2", "--steps", "400", "-s", "run.deterministic=true"]
    common += ["-s", "optimizer.decay=constant"]  # so that the number of steps changes nothing
    process = subprocess.Popen(
        train_command(*common, "--out", "run"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: num_steps("run") >= 10)
    if number != signal.SIGTERM:  # as a terminal does
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143, told
    stopped = re.search(r"stopped after step (\d+), which is saved", told)
    assert stopped is not None
    step = int(stopped.group(1))
    assert num_steps("run") == step
    more = str(step + 5)
    assert f"going on after step {step}" in train(*common, "--out", "run", "--steps", more)
    train(*common, "--out", "alone", "--steps", more)
    assert losses("run") == losses("alone")


def test_a_second_ctrl_c_ends_at_once(folder: Path) -> None:
    """Steps here take seconds: the first ctrl-C would wait for one."""
    wide = ["-s", "model.channels=512", "-s", "model.layers=8", "-s", "batch.size=512"]
    process = subprocess.Popen(
        train_command("--nproc", "2", "--steps", "50", "--out", "run", *wide),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: Path("run/metrics.jsonl").exists())
    ranks = ranks_of(process.pid)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    assert time.monotonic() - start < 10
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_data_of_unequal_shapes_are_named_and_end_all_ranks(folder: Path) -> None:
    (folder / "own.py").write_text("""
import torch
from pycomm.train import Trainer, make_config
data = [(torch.zeros(8 + (i == 5)), torch.zeros(1)) for i in range(8)]
config = make_config({"batch": {"size": 8}, "run": {"steps": 5}})
Trainer(config, model=torch.nn.Linear(8, 1), dataset=data, loss=torch.nn.functional.mse_loss).fit()
""")
    start = time.monotonic()
    done = subprocess.run(
        [*PYCOMM, "run", "--np", "2", "--", sys.executable, "own.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    named = re.search(r"samples \[([\d, ]+)\] make no batch: .*equal size", done.stderr)
    assert named is not None, done.stderr
    assert "5" in named.group(1).split(", ")
    assert time.monotonic() - start < 40


def test_without_its_packages_the_trainer_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    missing = ("pydantic", "yaml")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    for arguments in (["train"], ["report", "."], ["export", ".", "x"]):
        told = CliRunner().invoke(main, arguments)
        assert told.exit_code == 1
        assert "the trainer needs pydantic, yaml: in pycomm's folder, pip install" in told.output


def test_a_killed_launcher_leaves_no_ranks(folder: Path) -> None:
    process = subprocess.Popen(train_command("--nproc", "2", "--steps", "5000", "--out", "run"))
    wait_for(lambda: num_steps("run") >= 5)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 30)


def test_torchrun_restarts_resume_by_themselves(folder: Path) -> None:
    common = ["--steps", "60", "-s", "checkpoint.every=5", "-s", "run.deterministic=true"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "2", "--monitor-interval", "0.1", "-m", "pycomm"]
    with open("log", "w") as log:
        process = subprocess.Popen(
            [*launcher, *train_command(*common, "--out", "run")[3:]],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        wait_for(lambda: num_steps("run") >= 12 or process.poll() is not None)
        os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
        assert process.wait(100) == 0, Path("log").read_text()
    assert "going on after step" in Path("log").read_text()
    train("--nproc", "2", *common, "--out", "alone")
    assert losses("run") == losses("alone")


def test_listed_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh is a shell of this host here; the two "hosts" come together as torchrun's nodes."""
    shell = folder / "shell"
    shell.write_text('#!/bin/sh\nshift\nexec sh -c "$1"\n')
    shell.chmod(0o700)
    monkeypatch.setenv("PYCOMM_SSH", str(shell))
    told = train("--hosts", "127.0.0.1,localhost", "--nproc", "1", "--out", "run", "--steps", "5")
    assert "step 5: loss" in told
    assert json.loads((folder / "run" / "about.json").read_text())["world_size"] == 2
    assert "is no list of hosts" in train("--hosts", "a,,b", status=1)


def test_a_dry_run_starts_nothing(folder: Path) -> None:
    path = folder / "run.toml"
    path.write_text("[layout]\ntensor = 2\npipeline = 2\nzero = 1\n[model]\nlayers = 4\n")
    told = train("run.toml", "--nproc", "8", "--dry-run", "-s", "model.layers=4")
    for word in (
        "pipeline 2 x data 2 (ZeRO-1) x tensor 2",
        "8, stage s on ranks 4s to 4s+3, tensor groups of 2 neighbours",
        "activations",
        "predicted",
        "passes in flight",
        "bubble",
        "communication",
    ):
        assert word in told
    assert not (folder / "run").exists()
    assert "needs 6 ranks, there are 8" in train(
        "--nproc", "8", "--dry-run", "-s", "layout.data=3", "-s", "layout.tensor=2", status=1
    )


def test_all_keys_are_listed_and_can_be_read_back(folder: Path) -> None:
    told = subprocess.run([*PYCOMM, "train", "--keys"], capture_output=True, text=True, check=True)
    (folder / "all.toml").write_text(told.stdout)
    assert "[layout]" in told.stdout
    assert "known" not in train("all.toml", "--dry-run")


def test_another_run_in_the_same_folder_is_refused_and_changes_nothing(folder: Path) -> None:
    train("--out", "run", "--steps", "2")
    settings = (folder / "run" / "config.json").read_text()
    for change, told in (
        ("model.heads=2", "was made with model.heads 4, this run has 2"),
        ("data.validation=0.5", "was made with data.validation 0.05"),
        ("run.seed=1", "was made with run.seed 0"),
    ):
        assert told in train("--out", "run", "--steps", "4", "-s", change, status=2)
    (folder / "text.txt").write_text(TEXT[::-1])
    told = train("--nproc", "2", "--out", "run", "--steps", "4", status=2)
    assert "was made with data" in told
    assert "Traceback" not in told
    assert told.count("error:") == 1
    assert (folder / "run" / "config.json").read_text() == settings
    assert num_steps("run") == 2


def test_starting_anew_sets_older_checkpoints_aside(folder: Path) -> None:
    train("--out", "run", "--steps", "12", "-s", "checkpoint.every=5")
    told = train(
        "--out", "run", "--steps", "3", "-s", "checkpoint.resume=false", "-s", "run.seed=7"
    )
    assert "older checkpoints are in run/checkpoints.before-1" in told
    assert [p.name for p in Path("run/checkpoints").iterdir()] == ["step-00000003"]
    assert len(list(Path("run/checkpoints.before-1").iterdir())) == 3
    assert "going on after step 3" in train("--out", "run", "--steps", "4", "-s", "run.seed=7")


def test_two_runs_do_not_share_a_folder(folder: Path) -> None:
    process = subprocess.Popen(train_command("--out", "run", "--steps", "100000"))
    try:
        wait_for(lambda: num_steps("run") >= 3)
        assert "another run is writing to run" in train("--out", "run", status=2)
    finally:
        process.terminate()
        assert process.wait(60) == 143


def test_hosts_with_different_text_are_told(folder: Path) -> None:
    """Two ranks that are the first of their hosts, in folders with a text each."""
    script = """
import os, sys
rank = sys.argv[1]
os.environ |= {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
from pycomm.train import Trainer, make_config
text = f"{rank}.txt"
open(text, "w").write("some text " * 1000 + rank)
try:
    Trainer(make_config({"data": {"path": text}}))
except ValueError as error:
    print(error)
"""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, r, port], stdout=subprocess.PIPE, text=True)
        for r in "01"
    ]
    for rank in ranks:
        assert "ranks 0 and 1 have different text" in rank.communicate(timeout=60)[0]


def test_a_damaged_newest_checkpoint_costs_steps_not_the_run(folder: Path) -> None:
    train("--out", "run", "--steps", "10", "-s", "checkpoint.every=5")
    file = next(Path("run/checkpoints/step-00000010").glob("*.safetensors"))
    os.truncate(file, 100)
    told = train("--out", "run", "--steps", "12", "-s", "checkpoint.every=5")
    assert "skipping checkpoint step-00000010" in told
    assert "going on after step 5" in told
    assert len(losses("run")) == 12


def test_metrics_for_tensorboard_and_prometheus(folder: Path) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        train_command(
            "--steps",
            "100000",
            "--out",
            "run",
            "-s",
            f"watch.prometheus_port={port}",
            "-s",
            "watch.tensorboard=true",
        ),
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: num_steps("run") >= 5)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            text = page.read().decode()
        assert re.search(r"^pycomm_train_loss \d", text, re.MULTILINE)
        assert re.search(r"^pycomm_train_tokens_per_s \d", text, re.MULTILINE)
        listening = Path("/proc/net/tcp").read_text()
        assert f"0100007F:{port:04X}" in listening  # 127.0.0.1, nowhere else
        assert f"00000000:{port:04X}" not in listening
    finally:
        process.terminate()
        assert process.wait(60) == 143
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("train/loss")) >= 5


@pytest.mark.parametrize("steps", ["6", "7"])
def test_what_cannot_be_saved_is_a_warning_then_an_error(folder: Path, steps: str) -> None:
    """A file stands where the folder of checkpoints should be."""
    (folder / "run").mkdir()
    (folder / "run" / "checkpoints").write_text("in the way")
    common = ["--nproc", "2", "--out", "run", "--steps", steps, "-s", "checkpoint.every=2"]
    told = train(*common, "-s", "run.max_restarts=0", status=1)
    assert told.count("warning: no checkpoint was written to run/checkpoints") >= 2
    assert "the run goes on" in told
    assert "error: " in told
    assert len(losses("run")) == int(steps)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted by root")
def test_a_disk_that_fills_up(folder: Path) -> None:
    (folder / "run").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "none", "run"], check=True)
    try:
        common = ["--out", "run", "--steps", "200", "-s", "checkpoint.every=20"]
        wide = ["-s", "model.channels=64", "-s", "run.max_restarts=0"]
        told = train(*common, *wide, status=1)
        assert "step 200/200" in told
        assert "No space left on device" in told
        assert "the run goes on" in told
        assert list(Path("run/checkpoints").glob("*.partial")) == []
    finally:
        subprocess.run(["umount", "run"], check=True)


BROWSER = next(
    (b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None
)


def look(page: Path, *arguments: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="there is no browser here")
def test_the_report_in_a_real_browser(folder: Path) -> None:
    train("--nproc", "2", "--out", "run", "--steps", "8", "-s", "watch.validate_every=4")
    told = subprocess.run([*PYCOMM, "report", "run"], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "run/report.html"
    # A hostile sample and layout: shown as text, run by nobody.
    (folder / "run" / "sample.txt").write_text("<script>document.title='owned'</script>&amp;")
    about = json.loads((folder / "run" / "about.json").read_text())
    about["layout"] = "<img src=x onerror=\"document.title='owned'\">"
    (folder / "run" / "about.json").write_text(json.dumps(about))
    page = write_report(folder / "run")
    dom = look(page, "--dump-dom")
    assert "<title>Run run</title>" in dom
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;&amp;amp;" in dom
    assert dom.count("<svg") == 3
    assert "rank 1" in dom or 'id="text' in dom
    for heading in ("Loss", "Speed", "Timeline of a step", "Layout and memory", "What it writes"):
        assert f">{heading}</h2>" in dom
    picture = folder / "page.png"
    look(page, f"--screenshot={picture}", "--window-size=1000,2000")
    from PIL import Image

    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 50  # not a blank page
    assert not re.search(r"<script|(?:src|href)=.?https?:", page.read_text())  # loads nothing


def test_a_run_without_steps_has_no_report(folder: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        write_report(folder)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no steps yet"):
        write_report(folder)

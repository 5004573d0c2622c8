"""docs/train.md: every command on it runs as it is written.

But for the first run, which is cut short unless TRAIN_WHOLE_PAGE=1 (`make soak`): it takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "train.md").read_text()
BIN = Path(sys.executable).parent
INSTALLS = "pip install '.[train]'"
FIRST, SHORT_STEPS = "pycomm train --nproc 2", 60


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every line of the page's shell blocks, without comments."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    found = [re.sub(r"\s{2,}#.*", "", line).strip() for line in lines]
    return [line for line in found if line and line != INSTALLS]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    for text in (*blocks("toml"), *blocks("python")):
        name = text.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(text)
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (tmp_path / "notes.jsonl").write_text(json.dumps({"text": "one two three " * 2000}) + "\n")
    # ssh to the page's hosts is a shell of this one.
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nshift\nexec sh -c "$(echo "$1" | sed s/node1:/127.0.0.1:/)"\n')
    shell.chmod(0o700)
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYCOMM_SSH": str(shell),
    }
    environment.pop("OMP_NUM_THREADS", None)
    is_whole = os.environ.get("TRAIN_WHOLE_PAGE") == "1"
    said = {}
    assert len(commands()) >= 15
    for line in commands():
        short = ["--steps", str(SHORT_STEPS)] if line == FIRST and not is_whole else []
        done = subprocess.run(
            [*shlex.split(line), *short],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}"
        said[line] = done.stdout
    check_the_first_run(tmp_path, said[FIRST], is_whole=is_whole)
    assert any("going on after step 20" in text for text in said.values())
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    steps = (tmp_path / "llama" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == list(range(1, 35))


def check_the_first_run(folder: Path, said: str, *, is_whole: bool) -> None:
    """It beats a bigram model on text that it has not seen, and writes something like Python."""
    about = json.loads((folder / "run" / "about.json").read_text())
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    sample = (folder / "run" / "sample.txt").read_text()
    assert sample in said
    if not is_whole:
        assert len(records) == SHORT_STEPS
        assert records[-1]["validation_loss"] < records[0]["loss"] - 2
        return
    assert records[-1]["validation_loss"] < about["bigram_loss"] - 0.2
    assert sum(record["seconds"] for record in records) < 300
    words = r"\b(?:self|def|return|import|if|for|in|not|None|class|is|raise|else)\b"
    assert len(re.findall(words, sample)) >= 3, sample
    assert re.search(r"\n {4}", sample), sample


def test_the_page_names_what_exists() -> None:
    from pycomm.train.config import Config

    for section, key in re.findall(r"`(?:-s )?(\w+)\.(\w+)(?:[ =][^`]*)?`", PAGE):
        if section in Config.model_fields:
            table = Config.model_fields[section].annotation
            assert table is not None
            assert key in table.model_fields, f"{section}.{key}"

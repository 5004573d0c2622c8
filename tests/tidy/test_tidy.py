"""The house rules as tests: who includes whom, banned calls, sizes, format, words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def tracked(*suffixes: str) -> list[Path]:
    """Files of the project with one of the suffixes."""
    output = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [ROOT / line for line in output.splitlines()]
    return [p for p in paths if p.suffix in suffixes and p.is_file()]


def cpp_files(folder: str = "") -> list[Path]:
    return [p for p in tracked(".h", ".cc", ".cu", ".inc") if str(p).startswith(str(ROOT / folder))]


# A room of csrc may include its own files, the public headers, and these rooms.
MAY_INCLUDE = {
    "base": set[str](),
    "platform": {"base"},
    "kernels": {"base"},
    "lab": {"base", "platform"},
    "transport": {"base", "platform", "kernels"},
    "collectives": {"base", "kernels"},
    "communicator": {"base", "platform", "kernels", "transport", "collectives"},
}
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


@pytest.mark.parametrize("path", cpp_files("csrc"), ids=lambda p: str(p.relative_to(ROOT)))
def test_includes_point_one_way(path: Path) -> None:
    room = path.relative_to(ROOT / "csrc").parts[0]
    for include in INCLUDE.findall(path.read_text()):
        target = include.split("/")[0]
        if target == "pycomm":
            continue
        assert room != "include", f"a public header includes {include}"
        assert target == room or target in MAY_INCLUDE[room], f"{room} includes {include}"
        if room == target == "transport":
            mine = path.relative_to(ROOT / "csrc/transport").parts
            theirs = include.split("/")[1:]
            is_sibling = len(theirs) > 1 and (len(mine) == 1 or mine[0] != theirs[0])
            assert not is_sibling, f"transport/{mine[0]} includes its sibling {include}"


def test_the_core_knows_neither_torch_nor_python() -> None:
    for path in cpp_files("csrc"):
        found = re.findall(r"#include [<\"](?:torch|ATen|c10|Python|pybind11)\b", path.read_text())
        assert not found, path


def test_backends_and_bench_see_the_public_headers_only() -> None:
    for folder, extra in (
        ("backends/torch", {"python"}),
        ("backends/python", {"machine_limits.h", "bare_loops.h", "core_latency.h", "udp_pipe.h"}),
        ("bench", {"kernels", "platform"}),  # the same kernels and ciphers, and nothing above
    ):
        own = {p.name for p in cpp_files(folder)}
        for path in cpp_files(folder):
            for include in INCLUDE.findall(path.read_text()):
                is_public = include.startswith("pycomm/")
                assert is_public or include in own or include.split("/")[0] in extra, include


BANNED = re.compile(
    r"\b(?:clock_gettime|gettimeofday|getenv|rand|srand|random_device|nanosleep|usleep|getpid|fork)"
    r"\s*\(|(?:steady|system|high_resolution)_clock::now|\b(?:mmap|socket|epoll_wait|sendmsg)\s*\("
    r"|(?<![\w>])::(?:read|write|close|open)\s*\("
)


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def test_effects_stand_in_platform_only() -> None:
    for path in cpp_files("csrc"):
        if path.relative_to(ROOT / "csrc").parts[0] == "platform":
            continue
        found = BANNED.findall(without_comments(path.read_text()))
        assert not found, f"{path}: {found}"


def test_headers_are_included_once_and_say_what_they_are() -> None:
    for path in cpp_files():
        text = path.read_text()
        if path.suffix == ".h":
            assert "#pragma once" in text, path
        starts_with_comment = text.startswith("//")
        has_header = path.with_suffix(".h").exists()
        is_unit = path.suffix in {".cc", ".cu"} and has_header
        assert starts_with_comment or is_unit, f"{path} does not say what it is"


LINES_MAX = {".h": 250, ".cc": 520, ".cu": 300, ".inc": 300, ".py": 320, ".sh": 200}


def test_files_stay_small() -> None:
    for path in tracked(*LINES_MAX):
        num_lines = len(path.read_text().splitlines())
        is_test = "tests" in path.parts
        limit = LINES_MAX[path.suffix] if not is_test else max(LINES_MAX[path.suffix], 520)
        assert num_lines <= limit, f"{path} has {num_lines} lines"


def test_the_torch_plug_in_stays_thin() -> None:  # the c10d surface, an allocator
    assert sum(len(p.read_text().splitlines()) for p in cpp_files("backends/torch")) <= 1540


def test_nothing_is_left_to_do_on_main() -> None:
    words = re.compile("|".join(["FIX" + "ME", "TO" + "DO", "X" + "XX"]))
    for path in tracked(".h", ".cc", ".cu", ".inc", ".py", ".sh", ".md", ".toml"):
        assert not words.search(path.read_text()), path


# What a room of the trainer may import of it; the rest of pycomm imports none of it, but for the
# command line and the benchmark.
TRAIN_MAY_IMPORT = {
    "config": set[str](),
    "data": {"config"},
    "model": {"config"},
    "pipeline": set[str](),
    "layout": {"config", "model"},
    "optimizer": {"config", "layout"},
    "engine": {
        *("config", "data", "layout", "model", "offload", "optimizer", "pipeline", "precision"),
        *("randomness", "stages", "tied"),
    },
    "checkpoint": {"agreement", "layout", "manifest"},
    "stages": {"config", "layout", "pipeline"},
    "manifest": set[str](),
    "watch": {"config"},
}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_the_trainer_stands_on_top_and_its_rooms_point_one_way() -> None:
    for path in tracked(".py"):
        if ROOT / "pycomm" not in path.parents:
            continue
        parts = path.relative_to(ROOT / "pycomm").with_suffix("").parts
        used = {n.split(".")[2] for n in imports_of(path) if n.startswith("pycomm.train.")}
        if parts[0] != "train":
            assert not used or parts[0] in ("cli_train", "bench"), path
        elif len(parts) > 1 and parts[1] in TRAIN_MAY_IMPORT:
            extra = used - TRAIN_MAY_IMPORT[parts[1]] - {parts[1]}
            assert not extra, f"{path} imports {extra}"


def test_identities_and_the_lab_know_no_torch() -> None:
    for room, may_import in (("control", {"control"}), ("lab", {"lab", "jobs", "_core"})):
        for path in (ROOT / "pycomm" / room).glob("*.py"):
            names = imports_of(path)
            assert not any(name.split(".")[0] == "torch" for name in names), path
            used = {name.split(".")[1] for name in names if name.startswith("pycomm.")}
            assert used <= may_import, f"{path} imports {used}"


def test_private_attributes_of_aioquic_stand_in_one_file() -> None:
    names = r"\b(?:quic|connection)\._|tls\._"
    for path in tracked(".py"):
        is_ours = ROOT / "pycomm" in path.parents and path.name != "aioquic_private.py"
        assert (
            not is_ours
            or "aioquic" not in path.read_text()
            or not re.search(names, path.read_text())
        ), path


def test_python_does_not_unpickle() -> None:
    for path in tracked(".py"):
        if "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "marshal", "shelve"} & set(names), path


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)


def test_cpp_is_formatted() -> None:
    files = [str(p) for p in cpp_files()]
    result = run(str(BIN / "clang-format"), "--dry-run", "-Werror", *files)
    assert result.returncode == 0, result.stderr[:2000] + "\nrun `make format`"


def test_python_is_formatted_and_linted() -> None:
    for arguments in (["check", "."], ["format", "--check", "."]):
        result = run(str(BIN / "ruff"), *arguments)
        assert result.returncode == 0, result.stdout[:2000] + "\nrun `make format`"


@pytest.mark.timeout(240)
def test_python_is_typed() -> None:
    result = run(str(BIN / "mypy"))
    assert result.returncode == 0, result.stdout[:3000]
    # A program of its own, whose modules stand beside it.
    arguments = ["--strict", "--explicit-package-bases", "vm.py"]
    result = run(str(BIN / "mypy"), *arguments, cwd=ROOT / "tests/softroce")
    assert result.returncode == 0, result.stdout[:3000]

"""What makes a folder a checkpoint: its name, and a manifest of its files with checksums."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{8})")
PARTIAL = ".partial"
FORMAT = 1


class File(BaseModel):
    bytes: int
    blake2b: str


class Manifest(BaseModel):
    format: int
    step: int
    state: dict[str, Any]
    files: dict[str, File]


@dataclass(frozen=True)
class Found:
    """A whole checkpoint."""

    path: Path
    step: int
    state: dict[str, Any]  # what was saved beside the tensors


def checksum(path: Path) -> str:
    """Of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def verify(path: Path, part: int = 0, parts: int = 1) -> str:
    """What is wrong with a checkpoint; empty if nothing is. Looks at every parts-th file."""
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read ({type(error).__name__})"
    if manifest.format != FORMAT:
        return f"format {manifest.format}, this version reads {FORMAT}"
    for name, entry in sorted(manifest.files.items())[part::parts]:
        file = path / Path(name).name
        try:
            if file.stat().st_size != entry.bytes:
                return f"{name} has {file.stat().st_size} bytes, not {entry.bytes}"
            if checksum(file) != entry.blake2b:
                return f"{name} is damaged"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def names(folder: Path) -> list[str]:
    """Of whole checkpoints, newest first."""
    if not folder.is_dir():
        return []
    return sorted((p.name for p in folder.iterdir() if NAME.fullmatch(p.name)), reverse=True)


def open_checkpoint(path: Path) -> Found:
    manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    return Found(path, manifest.step, manifest.state)


def newest_alone(folder: Path) -> Found | None:
    """The newest whole checkpoint, for one process without a group."""
    return next(
        (open_checkpoint(folder / n) for n in names(folder) if not verify(folder / n)), None
    )


def put_aside(path: Path, word: str) -> Path:
    """Renames a folder to one that counts no more, and returns its new path."""
    number = 1
    while (target := path.with_name(f"{path.name}.{word}-{number}")).exists():
        number += 1
    path.rename(target)
    return target


def commit(partial: Path, manifest: str) -> Path:
    """Makes a folder of files a checkpoint: manifest, then name, both on the disk."""
    path = partial / MANIFEST
    with path.open("w") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    handle = os.open(partial.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return final

"""Text to train on: any file, folder or glob; by default Python's own standard library."""

from __future__ import annotations

import glob
import sysconfig
from pathlib import Path


def find_files(path: str, setting: str) -> list[Path]:
    """Files that a path names, in a fixed order; the standard library's source for none.

    Args:
        setting: what the path was given by, for the error.

    Raises:
        ValueError: there is nothing there.
    """
    if not path:
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(p for p in root.glob("*.py") if p.is_file())
    given = Path(path).expanduser()
    if given.is_file():
        return [given]
    if given.is_dir():
        files = sorted(p for p in given.rglob("*") if p.is_file())
    else:
        names = glob.glob(str(given), recursive=True)
        files = sorted(Path(p) for p in names if Path(p).is_file())
    if not files:
        raise ValueError(f"{setting} '{path}' names no file; give a file, a folder or a glob")
    return files

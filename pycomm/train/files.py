"""Configurations in files: TOML, YAML, and DeepSpeed's ds_config.json."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pycomm.train.config import Config, make_config
from pycomm.train.deepspeed import from_deepspeed, is_deepspeed


def load_config(path: Path | None, overrides: tuple[str, ...] = ()) -> Config:
    """Reads a file and applies `section.key=value` overrides.

    Args:
        path: .toml, .yaml, .yml or .json; a .json is DeepSpeed's if it has one of its keys.
            None stands for the defaults.
        overrides: values are read as TOML; what is none is taken as text.

    Raises:
        ValueError: says what is wrong, and where.
        OSError: the file cannot be read.
    """
    values = {} if path is None else read_values(path)
    for override in overrides:
        _apply(values, override)
    return make_config(values, str(path) if path is not None else "the configuration")


def read_values(path: Path) -> dict[str, Any]:
    """The file as nested dictionaries of our sections."""
    text = path.read_text()
    try:
        values = _parse(path, text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a table is wanted at the top, not a {type(values).__name__}")
    if path.suffix == ".json" and is_deepspeed(values):
        return from_deepspeed(values, str(path))
    return values


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
    raise ValueError("give a .toml, .yaml, .yml or .json file")


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot:
        raise ValueError(f"'{override}' is not of the form section.key=value")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise ValueError(f"'{section}' is not a table")
    table[name] = value

"""The bare limits of this machine, as a table."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pycomm import _core


def print_limits(json_path: Path | None) -> None:
    """Prints what this machine allows, each figure as it is known."""
    rows: list[dict[str, object]] = []

    def show(name: str, size_bytes: int, num_processes: int, value: float, unit: str) -> None:
        rows.append(
            {
                "name": name,
                "size_bytes": size_bytes,
                "processes": num_processes,
                "value": value,
                "unit": unit,
            }
        )
        click.echo(f" {name:>26} {size_bytes:>12} {num_processes:>10} {value:>10.2f} {unit}")

    click.echo("# two pinned processes where two work; best median of three; GB/s are 10^9 bytes")
    click.echo("# flag exchange: each writes a word and waits for the other's; read only: what an")
    click.echo("# all_reduce of shared tensors cannot avoid; bare loop: all of it, no library")
    click.echo(f"#{'what':>26} {'size (B)':>12} {'processes':>10} {'value':>10} unit")
    _core.measure_limits(show)
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1))

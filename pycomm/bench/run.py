"""One run of the benchmark from the command line."""

from __future__ import annotations

import sys
from pathlib import Path

from pycomm.bench import report
from pycomm.bench.measure import Row, Settings, measure
from pycomm.launch import Place, run_ranks

# Above this a comparison of backends says more about the other program than about them.
_OTHER_LOAD_MAX = 0.3


def run(
    settings: Settings,
    num_ranks: int,
    *,
    pin: bool,
    json_path: Path | None,
    png_path: Path | None,
) -> int:
    """Measures, prints, writes. Returns the exit status: 1 if a result was wrong."""
    load = report.other_load()
    if load > _OTHER_LOAD_MAX:
        text = f"other programs keep {load:.1f} processors busy: these figures do not compare\n"
        sys.stderr.write(f"warning: {text}")

    def body(place: Place) -> None:
        rows: list[Row] = []

        def show(row: Row) -> None:
            rows.append(row)
            print(report.table_line(settings, row, place.world_size), flush=True)

        if place.rank == 0:
            print(report.header(settings, place.world_size), flush=True)
        measure(settings, place, show)
        if place.rank != 0:
            return
        if json_path is not None:
            report.write_json(json_path, settings, rows, place.world_size)
        if png_path is not None:
            report.draw(png_path, settings, rows, place.world_size)
        if any(wrong for row in rows for wrong in row.wrong.values()):
            raise SystemExit("some results were wrong; see the #wrong column")

    return run_ranks(body, num_ranks, pin=pin)

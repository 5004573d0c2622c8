"""One run of the benchmark from the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pycomm.bench import report
from pycomm.bench.gang import GangError
from pycomm.bench.measure import Row, measure_gangs, measure_here
from pycomm.bench.peers import PEERS, set_up_missing
from pycomm.bench.plan import Settings
from pycomm.launch import Place

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
    """Measures, prints, writes. Returns the exit status: 1 if a result was wrong or a rank ended.

    When torchrun started this process it is one rank of the run, and torch's backends take turns
    inside it; otherwise every contestant has ranks of its own.
    """
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    place = Place.from_environment(pin=pin) if is_rank else None
    if place is not None:
        num_ranks = place.world_size
        if settings.api != "torch" or any(name in PEERS for name in settings.backends):
            sys.stderr.write("ranks of another launcher compare torch's backends only\n")
            return 2
    is_first = place is None or place.rank == 0
    if is_first:
        load = report.other_load()
        if load > _OTHER_LOAD_MAX:
            text = f"other programs keep {load:.1f} processors busy: these figures do not compare\n"
            sys.stderr.write(f"warning: {text}")
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(report.table_line(settings, row, num_ranks), flush=True)

    try:
        if place is not None:
            if is_first:
                print(report.header(settings, num_ranks), flush=True)
            measure_here(settings, place, show)
        else:
            set_up_missing(list(settings.backends))
            print(report.header(settings, num_ranks), flush=True)
            measure_gangs(settings, num_ranks, pin=pin, report=show)
    except (GangError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not is_first:
        return 0
    if json_path is not None:
        report.write_json(json_path, settings, rows, num_ranks)
    if png_path is not None:
        report.draw(png_path, settings, rows, num_ranks)
    if any(wrong for row in rows for wrong in row.wrong.values()):
        sys.stderr.write("some results were wrong; see the #wrong column\n")
        return 1
    return 0

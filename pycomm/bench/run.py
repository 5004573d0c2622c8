"""One run of the benchmark from the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pycomm.bench import report
from pycomm.bench.gang import GangError
from pycomm.bench.measure import Row, measure_gangs, measure_here
from pycomm.bench.peers import PEERS, set_up_missing
from pycomm.bench.plan import BOUNDS, SHARED, Settings
from pycomm.launch import Place

# Above this a comparison of backends says more about the other program than about them.
_OTHER_LOAD_MAX = 0.3


def run(
    plan: list[Settings],
    num_ranks: int,
    *,
    pin: bool,
    json_path: Path | None,
    png_path: Path | None,
) -> int:
    """Measures, prints, writes. Returns the exit status: 1 if a result was wrong or a rank ended.

    `plan` has one entry for each operation, alike but for that. When torchrun started this process
    it is one rank of the run, and torch's backends take turns inside it; otherwise every contestant
    has ranks of its own.
    """
    place = _place_in_job(pin)
    if place is not None:
        num_ranks = place.world_size
        only_torch = plan[0].api == "torch" and not any(
            n in (*PEERS, *BOUNDS, SHARED) for n in plan[0].backends
        )
        if not only_torch or len(plan) > 1:
            sys.stderr.write("ranks of another launcher run one operation over torch's backends\n")
            return 2
    is_first = place is None or place.rank == 0
    if is_first:
        _warn_of_other_load()
    runs: list[report.Run] = []
    try:
        set_up_missing([] if place is not None else list(plan[0].backends))
        for settings in plan:
            done = report.Run(settings, num_ranks, [])
            runs.append(done)

            def show(row: Row, done: report.Run = done) -> None:
                done.rows.append(row)
                print(report.table_line(done.settings, row, num_ranks), flush=True)

            if is_first:
                print(report.header(settings, num_ranks), flush=True)
            if place is not None:
                measure_here(settings, place, show)
            else:
                measure_gangs(settings, num_ranks, pin=pin, report=show)
    except (GangError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return _write(runs, json_path, png_path) if is_first else 0


def _place_in_job(pin: bool) -> Place | None:
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return Place.from_environment(pin=pin) if is_rank else None


def _warn_of_other_load() -> None:
    load = report.other_load()
    if load > _OTHER_LOAD_MAX:
        text = f"other programs keep {load:.1f} processors busy: these figures do not compare\n"
        sys.stderr.write(f"warning: {text}")


def _write(runs: list[report.Run], json_path: Path | None, png_path: Path | None) -> int:
    if json_path is not None:
        report.write_json(json_path, runs)
    if png_path is not None and len(runs) == 1:
        report.draw(png_path, runs[0])
    elif png_path is not None:
        report.draw_all(png_path, runs)
    if any(wrong for done in runs for row in done.rows for wrong in row.wrong.values()):
        sys.stderr.write("some results were wrong; see the #wrong column\n")
        return 1
    return 0

"""Writes docs/performance.md: every figure on it comes out of one run of this command."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.progress import Progress

from pycomm.bench import training
from pycomm.bench.chapters import KIB, MIB, MPIS, Chapter, chapters, settings
from pycomm.bench.measure import Row, measure_gangs
from pycomm.bench.peers import PEERS, set_up_missing
from pycomm.bench.plan import BOUND, BOUND_SHARED, SHARED
from pycomm.bench.ratios import ratio_of_medians
from pycomm.bench.report import machine, other_load, short_size


def write(folder: Path, rounds: int, only: tuple[str, ...]) -> int:
    """Measures everything, or the chapters `only`, and writes `performance.md`, its pictures and
    `performance.json` to `folder`. Returns the exit status."""
    known = [*(c.name for c in chapters(rounds)), "core", "bfloat16", "training"]
    unknown = set(only) - set(known)
    if unknown:
        raise ValueError(f"no such chapter: {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [c for c in chapters(rounds) if not only or c.name in only]
    needed = {name for c in chosen for name in c.settings.backends if name in PEERS}
    if not only or "core" in only:
        needed |= {"openmpi", "mpich"}
    set_up_missing(sorted(needed))
    parts: list[str] = [_head(rounds)]
    raw: dict[str, Any] = {"machine": machine(), "load_before": other_load()}
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=sum(len(c.operations) for c in chosen) + 3)
        if not only or "core" in only:
            parts.append(_core_part(rounds, raw))
        progress.advance(task)
        for chapter in chosen:
            rows = {}
            for operation in chapter.operations:
                progress.update(task, description=f"{chapter.name}: {operation}")
                rows[operation] = list(_measure(chapter, operation))
                progress.advance(task)
            raw[chapter.name] = {
                operation: [asdict(row) for row in measured] for operation, measured in rows.items()
            }
            parts.append(_chapter_part(chapter, rows))
            if chapter.name == "private":
                _draw(folder / "figures" / "performance_private.png", rows)
                parts.append(
                    "\n![Time of each operation over that of the barest loop]"
                    "(figures/performance_private.png)\n"
                )
        if not only or "bfloat16" in only:
            parts.append(_bfloat16_part(rounds, raw))
        progress.advance(task)
        if not only or "training" in only:
            progress.update(task, description="training")
            parts.append(_training_part(rounds, raw))
        progress.advance(task)
    (folder / "performance.md").write_text("\n".join(parts))
    (folder / "performance.json").write_text(json.dumps(_without_laps(raw)))
    return 0


def _without_laps(raw: Any) -> Any:
    """Without the times of single operations, which are most of it."""
    if isinstance(raw, dict):
        return {key: _without_laps(value) for key, value in raw.items() if key != "laps"}
    return [_without_laps(value) for value in raw] if isinstance(raw, list) else raw


def _measure(chapter: Chapter, operation: str) -> Iterator[Row]:
    sizes = [0] if operation == "barrier" else chapter.settings.sizes
    chosen = replace(chapter.settings, operation=operation, sizes=sizes)
    rows: list[Row] = []
    measure_gangs(chosen, chapter.num_ranks, pin=True, report=rows.append)
    wrong = {name: row.wrong[name] for row in rows for name in row.wrong if row.wrong[name]}
    if wrong and chosen.check:
        raise RuntimeError(f"{operation}: wrong elements: {wrong}")
    yield from rows


def _head(rounds: int) -> str:
    about = machine()
    return f"""# Performance

Written by `pycomm performance` on {time.strftime("%Y-%m-%d")}, on {about["cpu"]} with
{about["cpus_allowed"]} processors under Linux {about["kernel"]}, torch {about["torch"]}. Two pinned
ranks unless said; float32 sums; every figure is the median of {rounds} interleaved rounds of the
slowest rank's time, in microseconds. Contestants work on tensors in pages of one kind. A ratio says
how many times as long the other one takes, with its 95 % interval (bootstrap over paired rounds).

`bound` is the barest loop that does the same copies and sums without a library, in the fastest of
the known ways (`bench/bare_loops.cc`), measured in the same rounds; "of the bound" is its time over
pycomm's. Above 100 % the loop was slower than pycomm: there it is no bound.
"""


def _us(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _chapter_part(chapter: Chapter, rows: dict[str, list[Row]]) -> str:
    names = chapter.settings.backends
    mpis = [name for name in names if name in PEERS]
    bound = next((name for name in names if name in (BOUND, BOUND_SHARED)), None)
    first = SHARED if bound == BOUND_SHARED else "pycomm"
    cells = ["operation", "size", *names, *(["of the bound"] if bound else []), "p99"]
    others = [name for name in names if name not in (first, bound)]
    if mpis:
        cells.append(f"best MPI / {first}")
    else:
        cells += [f"{name} / {first}" for name in others]
    lines = [f"## {chapter.title}", "", chapter.text, "", _line(cells), _line(["---"] * len(cells))]
    for operation, measured in rows.items():
        for row in measured:
            mine = row.seconds[first]
            fields = [operation, short_size(row.size_bytes) if row.size_bytes else ""]
            fields += [_us(median(row.seconds[name])) for name in names]
            if bound:
                fields.append(f"{median(row.seconds[bound]) / median(mine):.0%}")
            fields.append(_us(float(np.percentile(row.laps[first], 99))))
            if mpis:
                best = min(mpis, key=lambda name: median(row.seconds[name]))
                fields.append(f"{_ratio(row.seconds[best], mine)} {best}")
            else:
                fields += [_ratio(row.seconds[name], mine) for name in others]
            lines.append(_line(fields))
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ratio(numerator: list[float], denominator: list[float]) -> str:
    ratio = ratio_of_medians(numerator, denominator)
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _core_part(rounds: int, raw: dict[str, Any]) -> str:
    """The core and two MPIs called from C++ and C."""
    from pycomm import _core

    programs = {name: _compile_latency(name) for name in ("openmpi", "mpich")}
    lines = [
        "## Small messages, from C++",
        "",
        "All_reduce by the core's `Communicator::run` beside `MPI_Allreduce` called from C. The "
        "flag exchange is the bare minimum of two processes that wait for each other.",
        "",
        _line(
            [
                "size",
                "pycomm",
                "p99",
                "openmpi",
                "p99",
                "mpich",
                "p99",
                "flag exchange",
                "pycomm / bound",
                "openmpi / pycomm",
            ]
        ),
        _line(["---"] * 10),
    ]
    raw["core"] = {}
    for size in (8, KIB):
        p50s: dict[str, list[float]] = {"pycomm": [], "openmpi": [], "mpich": [], "flag": []}
        p99s: dict[str, list[float]] = {"pycomm": [], "openmpi": [], "mpich": []}
        bounds = []
        for _ in range(max(rounds, 5)):
            p50s["flag"].append(_core.flag_exchange_ns(100_000) * 1e-9)
            p50, p99 = _core.core_latency(size)
            p50s["pycomm"].append(p50)
            p99s["pycomm"].append(p99)
            # With the copies that the operation is: the loop does nothing else.
            bounds.append(max(_core.bare_seconds("all_reduce", size, False), p50s["flag"][-1]))
            for name, program in programs.items():
                told = json.loads(_run_latency(name, program, size))
                p50s[name].append(told["p50_s"])
                p99s[name].append(told["p99_s"])
        raw["core"][size] = {"p50_s": p50s, "p99_s": p99s, "bound_s": bounds}
        fields = [short_size(size)]
        for name in ("pycomm", "openmpi", "mpich"):
            fields += [f"{median(p50s[name]) * 1e6:.3f}", _us(median(p99s[name]))]
        fields.append(f"{median(p50s['flag']) * 1e6:.3f}")
        fields += [_ratio(p50s["pycomm"], bounds), _ratio(p50s["openmpi"], p50s["pycomm"])]
        lines.append(_line(fields))
    return "\n".join(lines) + "\n"


def _compile_latency(name: str) -> Path:
    peer = PEERS[name]
    program = peer.folder / "mpi_latency"
    source = Path(__file__).parent / "peer" / "mpi_latency.c"
    library = str(peer.folder / "lib")
    command = ["cc", "-O2", str(source), "-I", str(peer.folder / "include"), "-L", library]
    subprocess.run([*command, "-lmpi", f"-Wl,-rpath,{library}", "-o", str(program)], check=True)
    return program


def _run_latency(name: str, program: Path, size: int) -> str:
    peer = PEERS[name]
    launch = peer.launch_command(2)[:-1]  # without its Python
    return subprocess.run(
        [*launch, str(program), str(size)],
        env=peer.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def _bfloat16_part(rounds: int, raw: dict[str, Any]) -> str:
    """As many elements of half the bytes."""
    rows = {}
    for dtype, size in (("float", 16 * MIB), ("bfloat16", 8 * MIB)):
        chapter = Chapter(
            dtype, "", "", settings((), [size], api="torch", rounds=rounds, dtype=dtype)
        )
        rows[dtype] = next(_measure(chapter, "all_reduce"))
    raw["bfloat16"] = {dtype: asdict(row) for dtype, row in rows.items()}
    half, whole = (median(rows[dtype].seconds["pycomm"]) for dtype in ("bfloat16", "float"))
    return (
        "## bfloat16\n\n"
        f"All_reduce of {4 * MIB:,} elements by torch.distributed: bfloat16 {_us(half)} us, "
        f"float32 {_us(whole)} us: {half / whole:.2f} of it. Sums are in float32, rounded once.\n"
    )


def _training_part(rounds: int, raw: dict[str, Any]) -> str:
    steps = training.measure_steps(rounds, 3)
    waiting = training.measure_waiting()
    first_use = training.measure_first_use(5)
    raw["training"] = {"steps": steps, "waiting": waiting, "first_use": first_use}
    alone = np.asarray(steps[training.ALONE])
    exposed = {
        name: [float(x) for x in np.asarray(steps[name]) - alone]
        for name in ("gloo", "pycomm", SHARED)
    }
    lines = [
        "## Training",
        "",
        "DistributedDataParallel on a perceptron of 100 MB. Exposed is what a step takes longer "
        "than the same step without communication; `shared` has its buckets in shared memory.",
        "",
        _line(["", "step (ms)", "exposed (ms)", "of gloo's"]),
        _line(["---"] * 4),
    ]
    for name in ("gloo", "pycomm", SHARED):
        lines.append(
            _line(
                [
                    name,
                    f"{median(steps[name]) * 1e3:.1f}",
                    f"{median(exposed[name]) * 1e3:.1f}",
                    _ratio(exposed[name], exposed["gloo"]),
                ]
            )
        )
    lines.append(_line([training.ALONE, f"{median(steps[training.ALONE]) * 1e3:.1f}", "", ""]))
    extra = median(first_use["first"]) - median(first_use["second"])
    lines += [
        "",
        "Processor time that pycomm takes of a rank whose peer computes for three seconds: "
        f"{waiting['idle']:.2%} of a core beside an idle group, {waiting['started']:.2%} beside an "
        f"operation that was started, {waiting['blocked']:.2%} inside a call that waits.",
        "",
        "Creating a group and reducing 4 MiB five times takes "
        f"{median(first_use['first']) * 1e3:.0f} ms with nothing known of the host, "
        f"{median(first_use['second']) * 1e3:.0f} ms the second time: {extra * 1e3:+.0f} ms.",
    ]
    return "\n".join(lines) + "\n"


def _draw(path: Path, rows: dict[str, list[Row]]) -> None:
    """Times over the bound, by operation and size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [row.size_bytes for row in next(iter(rows.values()))]
    names = ["pycomm", *MPIS]
    figure, panels = plt.subplots(1, len(sizes), figsize=(4.2 * len(sizes), 3.6), dpi=130)
    for column, (size, axes) in enumerate(zip(sizes, np.atleast_1d(panels), strict=True)):
        for place, name in enumerate(names):
            times = [
                median(measured[column].seconds[name]) / median(measured[column].seconds[BOUND])
                for measured in rows.values()
            ]
            at = np.arange(len(rows)) + (place - 1.5) * 0.2
            axes.bar(at, times, 0.2, label=name)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(rows)), list(rows), rotation=60, ha="right", fontsize=8)
        axes.set_title(short_size(size), fontsize=10)
        axes.set_ylim(0, 6)
    np.atleast_1d(panels)[0].set_ylabel("time / barest loop (cut at 6)")
    np.atleast_1d(panels)[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)

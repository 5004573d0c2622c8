"""The table, JSON and picture of a benchmark run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pycomm.bench.measure import Row
from pycomm.bench.peer.operations import REDUCTIONS, ROOTED
from pycomm.bench.plan import Settings, bandwidth
from pycomm.bench.ratios import ratio_of_medians

_COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 9),
    ("redop", "", 6),
    ("root", "", 5),
    ("min", "(us)", 11),
    ("median", "(us)", 11),
    ("p99", "(us)", 11),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
)


def header(settings: Settings, world_size: int) -> str:
    """The head of the table, in nccl-tests' columns; peers stand to the right."""
    peers = settings.backends[1:]
    what = f"# {settings.operation}, {world_size} ranks, pycomm by its {settings.api} interface"
    lines = [
        f"{what}; {settings.rounds} interleaved rounds of {settings.iterations} operations, "
        "slowest rank; GB/s are 10^9 bytes",
        "# median: of the rounds' means; min and p99: of single operations",
    ]
    for part in (0, 1):
        cells = "".join(f" {column[part]:>{column[2]}}" for column in _COLUMNS)
        right = "".join(
            f" {peer if part == 0 else '(us)':>11} {'x faster [95 %]' if part == 0 else '':>24}"
            for peer in peers
        )
        lines.append("#" + cells[1:] + right)
    return "\n".join(lines)


def table_line(settings: Settings, row: Row, world_size: int) -> str:
    """One size."""
    first, *peers = settings.backends
    seconds = median(row.seconds[first])
    laps = np.asarray(row.laps[first])
    rate = bandwidth(settings.operation, row.size_bytes, seconds, world_size)
    cells = [
        row.size_bytes,
        row.count,
        settings.dtype,
        settings.op if settings.operation in REDUCTIONS else "none",
        settings.root if settings.operation in ROOTED else -1,
        f"{laps.min() * 1e6:.2f}",
        f"{seconds * 1e6:.2f}",
        f"{np.percentile(laps, 99) * 1e6:.2f}",
        f"{rate.algbw:.2f}",
        f"{rate.busbw:.2f}",
        row.wrong[first] if settings.check else "N/A",
    ]
    line = "".join(f" {cell:>{column[2]}}" for cell, column in zip(cells, _COLUMNS, strict=True))
    for peer in peers:
        ratio = ratio_of_medians(row.seconds[peer], row.seconds[first])
        wrong = f" ({row.wrong[peer]} wrong)" if row.wrong[peer] else ""
        interval = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        line += f" {median(row.seconds[peer]) * 1e6:>11.2f} {interval:>24}{wrong}"
    return line


def as_json(settings: Settings, rows: list[Row], world_size: int) -> dict[str, Any]:
    """Everything that was measured, with what it was measured on."""
    return {
        "settings": asdict(settings),
        "world_size": world_size,
        "rows": [asdict(row) for row in rows],
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "torch": importlib.metadata.version("torch") if importlib.util.find_spec("torch") else "",
    }


def write_json(path: Path, settings: Settings, rows: list[Row], world_size: int) -> None:
    """Writes the run to `path`."""
    path.write_text(json.dumps(as_json(settings, rows, world_size), indent=1))


def draw(path: Path, settings: Settings, rows: list[Row], world_size: int) -> None:
    """Time and bus bandwidth over size, one curve a contestant, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), dpi=130)
    sizes = [max(row.size_bytes, 1) for row in rows]
    for name in settings.backends:
        times = [median(row.seconds[name]) for row in rows]
        rates = [
            bandwidth(settings.operation, row.size_bytes, seconds, world_size).busbw
            for row, seconds in zip(rows, times, strict=True)
        ]
        left.plot(sizes, [t * 1e6 for t in times], marker="o", markersize=3.5, label=name)
        right.plot(sizes, rates, marker="o", markersize=3.5, label=name)
    left.set_yscale("log")
    left.set_ylabel("median time (us)")
    right.set_ylabel("bus bandwidth (GB/s)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("size (bytes)")
        axes.grid(alpha=0.3, which="both", linewidth=0.4)
    left.legend()
    figure.suptitle(f"{settings.operation}, {world_size} ranks, {settings.dtype}")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def other_load(seconds: float = 0.3) -> float:
    """Processors that other programs keep busy right now, measured over `seconds`."""

    def busy() -> float:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")

    before = busy()
    time.sleep(seconds)
    return max(busy() - before, 0.0) / seconds

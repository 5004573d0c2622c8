"""The table, JSON and picture of a benchmark run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import time
from dataclasses import asdict, dataclass
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
    what = (
        f"# {settings.operation}, {world_size} ranks, pycomm by its {settings.api} interface, "
        f"{settings.pages} pages"
    )
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
        wrong = f" ({row.wrong[peer]} wrong)" if row.wrong.get(peer) else ""
        interval = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        line += f" {median(row.seconds[peer]) * 1e6:>11.2f} {interval:>24}{wrong}"
    return line


@dataclass
class Run:
    """One operation, measured."""

    settings: Settings
    world_size: int
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Everything that was measured, with what it was measured on."""
        return {
            "settings": asdict(self.settings),
            "world_size": self.world_size,
            "rows": [asdict(row) for row in self.rows],
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


def write_json(path: Path, runs: list[Run]) -> None:
    """Writes one run to `path`, or a list of them."""
    content = [run.as_json() for run in runs]
    path.write_text(json.dumps(content[0] if len(content) == 1 else content, indent=1))


def draw(path: Path, run: Run) -> None:
    """Time and bus bandwidth over size, one curve a contestant, as a PNG."""
    settings, rows, world_size = run.settings, run.rows, run.world_size
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


def draw_all(path: Path, runs: list[Run]) -> None:
    """How many times faster than the first peer, by operation and size, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    first, *peers = runs[0].settings.backends
    sizes = sorted({row.size_bytes for run in runs for row in run.rows if row.size_bytes > 0})
    figure, axes = plt.subplots(figsize=(1.6 + 0.95 * len(sizes), 0.9 + 0.36 * len(runs)), dpi=130)
    cells = np.full((len(runs), len(sizes)), np.nan)
    for y, run in enumerate(runs):
        for row in run.rows:
            mine = median(row.seconds[first])
            value = median(row.seconds[peers[0]]) / mine if peers else mine * 1e6
            x = sizes.index(row.size_bytes) if row.size_bytes > 0 else 0
            cells[y, x] = value
            text = f"{value:.2g}x" if peers and value < 10 else f"{value:.0f}" + "x" * bool(peers)
            axes.text(x, y, text, ha="center", va="center", fontsize=8)
    norm = LogNorm(1 / 64, 64, clip=True) if peers else LogNorm()  # yellow: equally fast
    axes.imshow(cells, cmap="RdYlGn" if peers else "viridis_r", norm=norm, aspect="auto", alpha=0.6)
    axes.set_xticks(range(len(sizes)), [short_size(size) for size in sizes])
    axes.set_yticks(range(len(runs)), [run.settings.operation for run in runs])
    what = f"times faster than {peers[0]}" if peers else "median time (us)"
    axes.set_title(f"{first}, {runs[0].world_size} ranks: {what}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def short_size(size: int) -> str:
    """A size in its largest unit: 16 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def other_load(seconds: float = 0.3) -> float:
    """Processors that other programs keep busy right now, measured over `seconds`."""

    def busy() -> float:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")

    before = busy()
    time.sleep(seconds)
    return max(busy() - before, 0.0) / seconds

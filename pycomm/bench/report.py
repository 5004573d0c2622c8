"""The table, JSON and picture of a benchmark run."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from pycomm.bench.measure import Row, Settings
from pycomm.bench.plan import bandwidth
from pycomm.bench.statistics import ratio_of_medians


def header(settings: Settings, world_size: int) -> str:
    """The head of the table, in nccl-tests' columns; peers stand to the right."""
    peers = settings.backends[1:]
    lines = [
        f"# {settings.operation}, {world_size} ranks, {settings.rounds} interleaved rounds of "
        f"{settings.iterations} operations; medians, slowest rank; GB/s are 10^9 bytes",
        f"#{'size':>12} {'count':>12} {'type':>9} {'redop':>6} {'root':>5} {'time':>11} "
        f"{'algbw':>8} {'busbw':>8} {'#wrong':>7}"
        + "".join(f" {peer:>11} {'x faster [95 %]':>22}" for peer in peers),
        f"#{'(B)':>12} {'(elements)':>12} {'':>9} {'':>6} {'':>5} {'(us)':>11} "
        f"{'(GB/s)':>8} {'(GB/s)':>8} {'':>7}" + "".join(f" {'(us)':>11} {'':>22}" for _ in peers),
    ]
    return "\n".join(lines)


def table_line(settings: Settings, row: Row, world_size: int) -> str:
    """One size."""
    first, *peers = settings.backends
    seconds = median(row.seconds[first])
    rate = bandwidth(settings.operation, row.size_bytes, seconds, world_size)
    reduces = settings.operation == "all_reduce"
    rooted = settings.operation == "broadcast"
    line = (
        f" {row.size_bytes:>12} {row.count:>12} {settings.dtype:>9} "
        f"{settings.op if reduces else 'none':>6} {settings.root if rooted else -1:>5} "
        f"{seconds * 1e6:>11.2f} {rate.algbw:>8.2f} {rate.busbw:>8.2f} "
        f"{row.wrong[first] if settings.check else 'N/A':>7}"
    )
    for peer in peers:
        ratio = ratio_of_medians(row.seconds[peer], row.seconds[first])
        wrong = f" ({row.wrong[peer]} wrong)" if row.wrong[peer] else ""
        interval = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        line += f" {median(row.seconds[peer]) * 1e6:>11.2f} {interval:>22}{wrong}"
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
    import torch

    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "torch": torch.__version__,
    }


def write_json(path: Path, settings: Settings, rows: list[Row], world_size: int) -> None:
    """Writes the run to `path`."""
    path.write_text(json.dumps(as_json(settings, rows, world_size), indent=1))


def draw(path: Path, settings: Settings, rows: list[Row], world_size: int) -> None:
    """Time over size, one curve a backend, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.8), dpi=130)
    for name in settings.backends:
        sizes = [max(row.size_bytes, 1) for row in rows]
        times = [median(row.seconds[name]) * 1e6 for row in rows]
        axes.plot(sizes, times, marker="o", markersize=3.5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel("time (us)")
    axes.set_title(f"{settings.operation}, {world_size} ranks, {settings.dtype}")
    axes.grid(alpha=0.3, which="both", linewidth=0.4)
    axes.legend()
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

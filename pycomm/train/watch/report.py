"""The page about a run: curves, the timeline of a step, layout and memory, in one file."""

from __future__ import annotations

import io
import json
from importlib import resources
from pathlib import Path
from typing import Any

from pycomm.train.watch.line import shorten
from pycomm.train.watch.records import read_records

# Colours of passes in a timeline.
_COLOURS = {
    "F": "#4c78a8",
    "B": "#f58518",
    "I": "#f58518",
    "W": "#eeca3b",
    "data": "#9d9d9d",
    "update": "#54a24b",
}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input",
    "W": "backward, weights",
    "data": "data",
    "update": "clip and update",
}


def write_report(run: Path, output: Path | None = None) -> Path:
    """Writes RUN/report.html, or `output`, and returns its path.

    Raises:
        ValueError: the folder holds no run.
        OSError: a file cannot be read or written.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{run} holds no run: there is no {metrics.name}")
    records = read_records(metrics)
    if not records:
        raise ValueError(f"{metrics} has no steps yet")
    about, config = _read_json(run / "about.json"), _read_json(run / "config.json")
    text = _render(run, records, about, config)
    path = output or run / "report.html"
    path.write_text(text)
    return path


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = json.loads(path.read_text())
    return values if isinstance(values, dict) else {}


def _render(
    run: Path, records: list[dict[str, Any]], about: dict[str, Any], config: dict[str, Any]
) -> str:
    import jinja2
    from markupsafe import Markup

    pictures = [
        (
            "Loss",
            Markup(_draw_loss(records, about.get("bigram_loss"))),
            "Nats per token of each step, and on text that no step sees.",
        ),
        (
            "Speed",
            Markup(_draw_speed(records)),
            "Tokens a second, and the share of each step that waits for other ranks.",
        ),
    ]
    timeline = _read_json(run / "timeline.json")
    if timeline.get("ranks"):
        told = f"Step {timeline['step']} on every rank; white is waiting, or what has no name."
        pictures.append(("Timeline of a step", Markup(_draw_timeline(timeline)), told))
    sample = run / "sample.txt"
    # Everything that comes from a run is escaped; pictures are our own SVG.
    page = resources.files("pycomm.train.watch").joinpath("report.html.jinja").read_text()
    return (
        jinja2.Environment(autoescape=True)
        .from_string(page)
        .render(
            title=f"Run {run.resolve().name}",
            tiles=_tiles(records),
            pictures=pictures,
            facts=_facts(records, about),
            sample=sample.read_text() if sample.is_file() else "",
            config=json.dumps(config, indent=1),
        )
    )


def _tiles(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    last = records[-1]
    recent = records[-50:]
    seconds = sum(r["seconds"] for r in recent)
    rate = sum(r["tokens_per_s"] * r["seconds"] for r in recent) / seconds
    tiles = [("steps", str(last["step"])), ("loss", f"{last['loss']:.3f}")]
    validations = [r["validation_loss"] for r in records if r["validation_loss"] is not None]
    if validations:
        tiles.append(("validation loss", f"{validations[-1]:.3f}"))
    tiles.append(("tokens/s", shorten(rate)))
    for key, name in (("mfu", "MFU"), ("communication_share", "waiting"), ("overlap", "overlap")):
        values = [r[key] for r in recent if r.get(key) is not None]
        if values:
            tiles.append((name, f"{sum(values) / len(values):.1%}"))
    return tiles


def _facts(records: list[dict[str, Any]], about: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("layout", about.get("layout", "?")),
        ("ranks", str(about.get("world_size", "?"))),
        ("backend", about.get("backend", "?")),
        ("memory of rank 0, at most", f"{shorten(records[-1]['memory_bytes'])}B"),
        ("samples in an epoch", str(about.get("num_samples", "?"))),
        ("epochs", f"{records[-1]['epoch']:.2f}"),
    ]
    if "schedule" in about:
        facts.append(("pipeline", f"{about['schedule']}: {about['why']}"))
    if "matmul_flops_per_rank" in about:
        peak = shorten(about["matmul_flops_per_rank"])
        facts.append(("products, measured", f"{peak}FLOP/s a rank: the denominator of MFU"))
    return facts


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height))
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3, linewidth=0.5)
    return figure, axes


def _as_svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw_loss(records: list[dict[str, Any]], bigram: float | None) -> str:
    figure, axes = _figure(3.6)
    steps = [r["step"] for r in records]
    axes.plot(steps, [r["loss"] for r in records], linewidth=1, label="training")
    validated = [r for r in records if r["validation_loss"] is not None]
    if validated:
        axes.plot(
            [r["step"] for r in validated],
            [r["validation_loss"] for r in validated],
            "o-",
            markersize=4,
            label="validation",
        )
    if bigram is not None:
        label = "bigram model, validation"
        axes.axhline(bigram, color="grey", linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.legend()
    return _as_svg(figure)


def _draw_speed(records: list[dict[str, Any]]) -> str:
    figure, axes = _figure(2.6)
    steps = [r["step"] for r in records]
    axes.plot(steps, [r["tokens_per_s"] for r in records], linewidth=1, label="tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("tokens/s")
    shares = [r.get("communication_share") for r in records]
    if any(share is not None for share in shares):
        right = axes.twinx()
        values = [float("nan") if share is None else 100 * share for share in shares]
        right.plot(steps, values, linewidth=0.8, color="#e45756")
        right.set_ylabel("waiting, % of the step", color="#e45756")
        right.set_ylim(0, 100)
    return _as_svg(figure)


def _draw_timeline(timeline: dict[str, Any]) -> str:
    rows = timeline["ranks"]
    figure, axes = _figure(0.9 + 0.4 * len(rows))
    first = min(span["start"] for row in rows for span in row)
    seen: dict[str, Any] = {}
    for rank, row in enumerate(rows):
        for span in row:
            kind = span["kind"]
            start, length = (span["start"] - first) * 1e3, (span["end"] - span["start"]) * 1e3
            bar = axes.barh(
                rank,
                length,
                left=start,
                height=0.8,
                color=_COLOURS.get(kind, "black"),
                edgecolor="white",
                linewidth=0.4,
                alpha=1 - 0.35 * (span["stage"] // max(1, len(rows)) % 2),
            )
            seen.setdefault(_NAMES.get(kind, str(kind)), bar)
    axes.set_yticks(range(len(rows)), [f"rank {r}" for r in range(len(rows))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    where = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False}
    axes.legend(list(seen.values()), list(seen), ncols=len(seen), **where)
    return _as_svg(figure)

"""Writes docs/trainer_performance.md: every figure on it comes out of one run of this command."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.progress import Progress

from pycomm.bench.layouts import CASES, measure_layout
from pycomm.bench.pipelines import PipelineCase, measure_pipeline
from pycomm.bench.plan import FAKE
from pycomm.bench.ratios import Ratio, ratio_of_medians
from pycomm.bench.report import machine, other_load

PIPELINES = [
    PipelineCase(4, 16, 30.0),
    PipelineCase(4, 35, 30.0),
    PipelineCase(4, 56, 30.0),
    PipelineCase(2, 8),
    PipelineCase(2, 16),
]
_OVERHEAD_S = 1e-3  # that a microbatch may take beside its stage
_SAVED_PARAMETERS = {"layers": 8, "channels": 256, "heads": 8, "vocab_size": 512, "tied": True}
_RESAMPLES = 2000


def write(folder: Path, rounds: int) -> int:
    """Measures everything and writes the page and its numbers; returns the exit status."""
    raw: dict[str, Any] = {"machine": machine(), "load_before": other_load()}
    lines = [_head(rounds)]
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=len(CASES) + len(PIPELINES) + 1)
        lines.append(_LAYOUT_HEAD)
        for case in CASES:
            progress.update(task, description=f"{case.name}, {case.num_ranks} ranks")
            seconds = measure_layout(case, rounds, 3)
            raw[f"{case.name} {case.num_ranks}"] = seconds
            lines.append(_layout_row(case.name, case.num_ranks, seconds))
            progress.advance(task)
        lines.append(_PIPELINE_HEAD)
        for pipeline in PIPELINES:
            progress.update(task, description=f"pipeline of {pipeline.ranks}")
            result = measure_pipeline(pipeline, rounds)
            raw[f"pipeline {pipeline}"] = {"stage": result.stage, **result.step}
            lines.append(_pipeline_row(pipeline, result.stage, result.step))
            progress.advance(task)
        progress.update(task, description="saving")
        raw["saving"] = measure_saving()
        lines.append(_saving_part(raw["saving"]))
    (folder / "trainer_performance.md").write_text("\n".join(lines) + "\n")
    (folder / "trainer_performance.json").write_text(json.dumps(raw))
    return 0


def _head(rounds: int) -> str:
    about = machine()
    return f"""# The trainer's performance

Written by `pycomm performance --trainer` on {time.strftime("%Y-%m-%d")}, on {about["cpu"]} with
{about["cpus_allowed"]} processors under Linux {about["kernel"]}, torch {about["torch"]}. Ranks are
pinned, one thread each; every figure is the median of {rounds} interleaved rounds of the slowest
rank's step, in milliseconds; ratios come with their 95 % interval (bootstrap over paired rounds).
"""


_LAYOUT_HEAD = """## Layouts

A GPT of 3.4 million parameters (4 layers of 256 channels, context 128), 4 sequences a rank.
`fake` is torch's backend that does nothing, so its step is compute alone (for `data`, the model
without DistributedDataParallel). Exposed is what communication adds to it, as a share of what it
adds over gloo; in a pipeline over `fake` nobody waits for a turn either, so there it says nothing.

| layout | ranks | pycomm | gloo | fake | speed / gloo's | speed / fake's | exposed / gloo's |
|---|---|---|---|---|---|---|---|"""


def _layout_row(name: str, num_ranks: int, seconds: dict[str, list[float]]) -> str:
    own, gloo, fake = (seconds[key] for key in ("pycomm", "gloo", FAKE))
    shown = "" if "pipeline" in name else _interval(exposed_ratio(own, gloo, fake))
    cells = [
        name,
        str(num_ranks),
        *(f"{median(x) * 1e3:.1f}" for x in (own, gloo, fake)),
        _interval(ratio_of_medians(gloo, own)),
        _interval(ratio_of_medians(fake, own)),
        shown,
    ]
    return f"| {' | '.join(cells)} |"


def exposed_ratio(own: list[float], other: list[float], alone: list[float]) -> Ratio:
    """(own - alone) / (other - alone) of medians, with its interval over paired rounds."""
    a, b, base = (np.asarray(x) for x in (own, other, alone))
    picks = np.random.default_rng(0).integers(0, len(a), size=(_RESAMPLES, len(a)))
    medians = [np.median(x[picks], axis=1) for x in (a, b, base)]
    ratios = (medians[0] - medians[2]) / (medians[1] - medians[2])
    low, high = np.percentile(ratios, [2.5, 97.5])
    value = (np.median(a) - np.median(base)) / (np.median(b) - np.median(base))
    return Ratio(float(value), float(low), float(high))


def _interval(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


_PIPELINE_HEAD = """
## Pipelines

1F1B with p ranks and m microbatches of half a MiB. t is the forward and backward pass of one stage
and microbatch, measured alone in the same rounds (its gradients included), o what is left:
step = (m + p - 1)(t + o). Stages of 30 ms sleep (four ranks share two processors), the others
compute two layers. "bound" is the step over (m + p - 1)(t + 1 ms); bubble is the share of a rank's
step in which it does not run its stage.

| stages | p | m | t | step | o | gloo's o | bound | bubble | (p-1)/(m+p-1) |
|---|---|---|---|---|---|---|---|---|---|"""


def _pipeline_row(case: PipelineCase, stage: list[float], step: dict[str, list[float]]) -> str:
    t, turns = median(stage), case.microbatches + case.ranks - 1
    own, gloo = median(step["pycomm"]), median(step["gloo"])
    cells = [
        "sleep" if case.stage_ms else "compute",
        str(case.ranks),
        str(case.microbatches),
        f"{t * 1e3:.2f}",
        f"{own * 1e3:.1f}",
        f"{(own / turns - t) * 1e3:.2f}",
        f"{(gloo / turns - t) * 1e3:.2f}",
        f"{own / (turns * (t + _OVERHEAD_S)):.3f}",
        f"{1 - case.microbatches * t / own:.1%}",
        f"{(case.ranks - 1) / turns:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def measure_saving() -> dict[str, Any]:
    """Seconds that an asynchronous save keeps two ranks from training, and a synchronous one, of
    80 MB: parameters and Adam's state."""
    from pycomm.bench.saving import measure

    with tempfile.TemporaryDirectory(prefix="pycomm-saving-") as folder:
        return measure(Path(folder), _SAVED_PARAMETERS)


def _saving_part(saving: dict[str, Any]) -> str:
    rows = []
    for name in ("data", "ZeRO-3"):
        one = saving[name]
        cells = [
            name,
            f"{one['bytes'] / 1e6:.0f}",
            f"{max(one['blocked_s'][1:]) * 1e3:.0f}",
            f"{one['blocked_s'][0] * 1e3:.0f}",
            f"{median(one['written_s']) * 1e3:.0f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return """
## Saving

Two ranks; MB of parameters and optimizer state in a checkpoint, and milliseconds that training
waits for `checkpoint.async_save` (the longest of the saves after the first; the first makes the
copy's memory), and until the checkpoint is whole on the disk.

| layout | MB | blocked | blocked, first | written after |
|---|---|---|---|---|
""" + "\n".join(rows)

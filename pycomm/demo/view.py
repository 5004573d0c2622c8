"""What a person sees of a run: a progress line, and the curve as a picture."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

_SHARE_STEPS = 20


class ProgressView:
    """A progress bar on a terminal, a line every so often elsewhere."""

    def __init__(self, steps: int, *, enabled: bool) -> None:
        self._steps = steps
        self._done = 0
        self._shares: deque[float] = deque(maxlen=_SHARE_STEPS)  # single steps jump
        self._is_live = enabled and sys.stderr.isatty()
        self._is_plain = enabled and not self._is_live
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> ProgressView:
        if self._is_live:
            from rich.console import Console

            self._progress = Progress(
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._steps)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, loss: float, tokens_per_s: float, exposed_share: float) -> None:
        """After each step."""
        self._done += 1
        self._shares.append(exposed_share)
        share = sum(self._shares) / len(self._shares)
        text = f"loss {loss:.2f}  {tokens_per_s:,.0f} tokens/s  communication {share:.1%}"
        if self._progress is not None:
            self._progress.update(self._task, advance=1, description=text)
        elif self._is_plain and (self._done % 20 == 0 or self._done in (1, self._steps)):
            print(f"step {self._done}/{self._steps}  {text}", file=sys.stderr, flush=True)


def draw_curve(path: Path, losses: list[float], baseline: float, title: str) -> None:
    """Loss over steps with a bigram model's as a line to beat, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=130)
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1.2, label="byte GPT, training loss")
    axes.axhline(baseline, color="grey", linestyle="--", linewidth=1, label="bigram model")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)

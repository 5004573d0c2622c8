"""The line that a person watches: live on a terminal, one every so often elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from types import TracebackType
from typing import Any

from pycomm.train.watch.records import Record

_WINDOW = 20  # steps that jumping numbers are averaged over


def shorten(count: float) -> str:
    """1234567 as 1.23 M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.3g}"


class Line:
    """Shown by rank 0 only."""

    def __init__(self, steps: int, every: int, *, enabled: bool) -> None:
        self._steps, self._every = steps, every
        self._is_enabled = enabled
        self._is_live = enabled and sys.stderr.isatty()
        self._window: deque[Record] = deque(maxlen=_WINDOW)
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Line:
        if self._is_live:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._progress = Progress(
                BarColumn(bar_width=12),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
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

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        elif self._is_enabled:
            print(text, file=sys.stderr, flush=True)

    def show(self, record: Record) -> None:
        """After each step."""
        self._window.append(record)
        text = self._describe(record)
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, description=text)
        elif self._is_enabled and (
            record.step % self._every == 0 or record.step == self._steps or len(self._window) == 1
        ):
            print(f"step {record.step}/{self._steps}  {text}", file=sys.stderr, flush=True)

    def _describe(self, record: Record) -> str:
        seconds = sum(r.seconds for r in self._window) / len(self._window)
        parts = [f"loss {record.loss:.3f}"]
        if record.validation_loss is not None:
            parts.append(f"validation {record.validation_loss:.3f}")
        rate = sum(r.tokens_per_s * r.seconds for r in self._window) / (seconds * len(self._window))
        parts.append(f"{shorten(rate)} tokens/s")
        for name, label in (
            ("mfu", "MFU"),
            ("communication_share", "comm"),
            ("overlap", "overlap"),
        ):
            value = self._mean(name)
            if value is not None:
                parts.append(f"{label} {value:.0%}")
        parts.append(f"{shorten(record.memory_bytes)}B")
        if record.loss_scale != 1:
            parts.append(f"scale {record.loss_scale:g}")
        if record.is_skipped:
            parts.append("skipped: the gradient was not finite")
        if record.dropped is not None:
            parts.append(f"dropped {record.dropped:.0%}")
        parts.append(f"ETA {_as_time((self._steps - record.step) * seconds)}")
        return "  ".join(parts)

    def _mean(self, name: str) -> float | None:
        values = [getattr(r, name) for r in self._window if getattr(r, name) is not None]
        return sum(values) / len(values) if values else None


def _as_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

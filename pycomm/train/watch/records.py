"""What is written down of every step, and where to: JSON lines, TensorBoard, Prometheus."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pycomm.train.config import WatchConfig


@dataclass(frozen=True)
class Record:
    """A step. Communication and overlap are this rank's (rank 0's in the files)."""

    step: int
    samples: int  # consumed so far, over all ranks
    epoch: float
    loss: float  # nats per token
    validation_loss: float | None
    lr: float
    grad_norm: float
    seconds: float
    tokens_per_s: float  # of all ranks
    mfu: float | None  # share of the measured peak of matrix products, of all ranks
    memory_bytes: int  # the most this process has held so far
    communication_share: float | None  # of the step's time: waiting for other ranks
    overlap: float | None  # share of communication that ran beside compute
    loss_scale: float
    balance: float | None  # of routed experts: 1 is even
    dropped: float | None  # share of tokens above an expert's capacity
    is_skipped: bool


class Sink(Protocol):
    """Takes records."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl; what was written after the checkpoint that a run resumes from is cut off."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = [r for r in read_records(path) if r["step"] <= first_step] if path.exists() else []
        if path.exists():
            text = "".join(json.dumps(record) + "\n" for record in kept)
            new = path.with_suffix(".new")
            try:
                new.write_text(text)
                new.replace(path)
            except OSError:
                new.unlink(missing_ok=True)
                raise
        self._file = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """One line."""
        self._file.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        """The end."""
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that was cut off by a death is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "watch.tensorboard needs the package 'tensorboard': pip install 'pycomm[train]'"
            ) from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, record: Record) -> None:
        """Every number under its name."""
        for name, value in asdict(record).items():
            if isinstance(value, int | float) and name not in ("step", "is_skipped"):
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def close(self) -> None:
        """Flushes."""
        self._writer.close()


class Prometheus:
    """Gauges at http://127.0.0.1:port/metrics."""

    def __init__(self, port: int) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ValueError(
                "watch.prometheus_port needs the package 'prometheus-client': "
                "pip install 'pycomm[train]'"
            ) from None
        registry = prometheus_client.CollectorRegistry()
        self._gauges = {
            name: prometheus_client.Gauge(f"pycomm_train_{name}", name, registry=registry)
            for name in Record.__dataclass_fields__
        }
        self._server, self._thread = prometheus_client.start_http_server(
            port, addr="127.0.0.1", registry=registry
        )

    def write(self, record: Record) -> None:
        """Sets the gauges."""
        for name, value in asdict(record).items():
            if value is not None:
                self._gauges[name].set(float(value))

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Guarded:
    """A sink whose failure is a warning, told once: a full disk costs records, not the run."""

    def __init__(self, sink: Sink, say: Callable[[str], None]) -> None:
        self._sink, self._say = sink, say
        self._has_failed = False

    def write(self, record: Record) -> None:
        """Of the sink."""
        self._try(lambda: self._sink.write(record))

    def close(self) -> None:
        """Of the sink."""
        self._try(self._sink.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._has_failed:
                self._say(f"warning: records are not written: {error}; the run goes on")
            self._has_failed = True


def make_sinks(
    config: WatchConfig, out: Path, first_step: int, say: Callable[[str], None]
) -> list[Sink]:
    """Of rank 0.

    Raises:
        ValueError: a package is missing.
        OSError: the port is taken, or the disk is full.
    """
    sinks: list[Sink] = [Guarded(JsonLines(out / "metrics.jsonl", first_step), say)]
    if config.tensorboard:
        sinks.append(Guarded(TensorBoard(out / "tensorboard", first_step), say))
    if config.prometheus_port:
        sinks.append(Prometheus(config.prometheus_port))
    return sinks

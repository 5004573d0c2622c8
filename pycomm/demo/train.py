"""Data-parallel training of the demonstration's model over any torch.distributed backend."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycomm.demo import text
from pycomm.demo.model import ByteGPT, ModelConfig
from pycomm.demo.overlap import ExposedTimer
from pycomm.demo.view import ProgressView, draw_curve
from pycomm.launch import Place, run_ranks


@dataclass(frozen=True)
class DemoConfig:
    """One run."""

    data: str = ""
    steps: int = 300
    num_ranks: int = 2
    backend: str = "pycomm"
    out: Path = Path("demo")
    seed: int = 0
    batch: int = 12
    learning_rate: float = 1.5e-3
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.num_ranks < 1 or self.batch < 1:
            raise ValueError("--steps and --np must be at least 1")


@dataclass(frozen=True)
class StepRecord:
    """What one step did; written as a line of JSON."""

    step: int
    loss: float  # nats per byte, mean over ranks
    seconds: float
    tokens_per_s: float  # of all ranks
    exposed_share: float  # of the step's time, waiting for gradients to be reduced


def run_demo(config: DemoConfig) -> int:
    """Trains, shows progress, writes curve.png and steps.jsonl to config.out.

    Raises:
        ValueError: the data cannot be used; nothing was started.
    """
    context = config.model.context
    data = text.load_bytes(config.data, context)
    config.out.mkdir(parents=True, exist_ok=True)
    return run_ranks(lambda place: train_rank(config, data, place), config.num_ranks)


def train_rank(config: DemoConfig, data: torch.Tensor, place: Place) -> None:
    """One rank of the run."""
    torch.set_num_threads(1)
    place.pin_to_cpu()
    dist.init_process_group(
        config.backend,
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
    )
    records = train(config, data, place)
    if place.rank == 0:
        held_out = data[-len(data) // 10 :]
        baseline = text.bigram_loss(data[: -len(held_out)], held_out)
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in records)
        (config.out / "steps.jsonl").write_text(lines)
        losses = [record.loss for record in records]
        title = f"{place.world_size} ranks over {config.backend}"
        draw_curve(config.out / "curve.png", losses, baseline, title)
        print(
            f"loss {losses[0]:.2f} -> {sum(losses[-10:]) / len(losses[-10:]):.2f} nats per byte "
            f"(a bigram model: {baseline:.2f}); curve in {config.out / 'curve.png'}"
        )
    dist.barrier()
    dist.destroy_process_group()


def train(config: DemoConfig, data: torch.Tensor, place: Place) -> list[StepRecord]:
    """The loop; every rank sees other samples, all hold the same weights."""
    torch.manual_seed(config.seed)
    model = DistributedDataParallel(ByteGPT(config.model))
    timer = ExposedTimer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    warmup = min(20, config.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup))
    generator = torch.Generator().manual_seed(config.seed * 1000 + place.rank + 1)
    context = config.model.context
    tokens_per_step = config.batch * context * place.world_size
    records: list[StepRecord] = []
    with ProgressView(config.steps, enabled=place.rank == 0) as view:
        for step in range(config.steps):
            start = time.perf_counter()
            inputs, targets = sample(data, config.batch, context, generator)
            optimizer.zero_grad(set_to_none=True)
            loss = model(inputs, targets)
            timer.start_backward()
            loss.backward()
            exposed = timer.end_backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss, dist.ReduceOp.AVG)
            seconds = time.perf_counter() - start
            records.append(
                StepRecord(
                    step, float(mean_loss), seconds, tokens_per_step / seconds, exposed / seconds
                )
            )
            view.show(records[-1].loss, records[-1].tokens_per_s, records[-1].exposed_share)
    return records


def sample(
    data: torch.Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the first nine tenths. Shape: (B, T) int64 each."""
    usable = len(data) - len(data) // 10 - context - 1
    starts = torch.randint(usable, (batch, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]

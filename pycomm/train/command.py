"""`pycomm train`: a run on this host's ranks, or as one of torchrun's."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from pycomm.launch import Place, run_ranks
from pycomm.train.agreement import AgreedError
from pycomm.train.checkpoint import CheckpointError
from pycomm.train.complete import complete
from pycomm.train.config import Config
from pycomm.train.data.corpus import check_length, open_corpus
from pycomm.train.hosts import HostsPlan, run_on_hosts
from pycomm.train.layout.build import DTYPES
from pycomm.train.layout.degrees import Layout, resolve
from pycomm.train.predict import (
    make_choice,
    measure_copy_bytes_per_s,
    measure_matmul_flops,
    predict,
)
from pycomm.train.process import open_group
from pycomm.train.trainer import Trainer
from pycomm.train.watch.line import shorten

USAGE = 2  # exit status: trying again cannot help
STOPPED = 143  # by SIGTERM, saved


def train(config: Config, num_ranks: int) -> int:
    """Runs it, and again after a rank has died; returns an exit status.

    Raises:
        ValueError: the configuration cannot work; nothing was started.
    """
    if "RANK" in os.environ:  # torchrun starts again by itself
        return _train_rank(config, Place.from_environment(pin=config.run.pin))
    prepared = _prepare(config)
    resolve(prepared, num_ranks)
    first = config
    for attempt in range(config.run.max_restarts + 1):
        # Whatever the first attempt was told: the others go on.
        again = config.checkpoint.model_copy(update={"resume": True})
        config = config.model_copy(update={"checkpoint": again}) if attempt else first
        body = partial(_train_and_exit, config)
        status = run_ranks(body, num_ranks, pin=config.run.pin, passes_signals_on=True)
        if status in (0, USAGE, STOPPED, 130) or attempt == config.run.max_restarts:
            break
        click.echo(
            f"--- starting again from the newest checkpoint ({attempt + 1} of "
            f"{config.run.max_restarts})",
            err=True,
        )
    return status


def _train_and_exit(config: Config, place: Place) -> None:
    sys.exit(_train_rank(config, place))


def train_on_hosts(
    config: Config,
    hosts: str,
    num_ranks: int,
    path: Path | None,
    overrides: tuple[str, ...],
    flags: dict[str, Any],
) -> int:
    """The same command on every host; the folder, the file and Python are where they are here.

    Raises:
        ValueError: the list of hosts is none.
    """
    words = [str(path)] if path is not None else []
    for key, value in flags.items():
        words += ["-s", f"{key}={value}"] if value is not None else []
    for override in overrides:
        words += ["-s", override]
    names = tuple(hosts.split(","))
    plan = HostsPlan(names, num_ranks, tuple(words), config.run.max_restarts)
    return run_on_hosts(plan)


def _prepare(config: Config) -> Config:
    """Makes the tokens while there is one process and a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task: Any = None

    def show(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task("reading text", total=total)
        bar.update(task, completed=done)

    try:
        corpus = open_corpus(config.data, show)
    finally:
        if task is not None:
            bar.stop()
    config = complete(config, corpus.tokenizer.vocab_size)
    check_length(corpus, config.model.context)
    return config


def _train_rank(config: Config, place: Place) -> int:
    open_group(config, init_method=place.init_method, rank=place.rank, world_size=place.world_size)
    try:
        summary = Trainer(config).fit()
        dist.barrier()
        dist.destroy_process_group()
    except (ValueError, FloatingPointError) as error:
        # What all ranks say, one says; who fails alone says so.
        if place.rank == 0 or not isinstance(error, AgreedError | FloatingPointError):
            is_own = place.world_size > 1 and not isinstance(error, AgreedError)
            who = f"rank {place.rank}: " if is_own else ""
            click.secho(f"error: {who}{error}", err=True, fg="red")
        return USAGE
    except CheckpointError as error:
        if place.rank == 0:
            click.secho(f"error: {error}", err=True, fg="red")
        return 1
    if place.rank == 0 and not summary.was_stopped and summary.loss == summary.loss:
        out = config.run.out
        validation = summary.validation_loss
        told = "" if validation is None else f", validation {validation:.3f}"
        click.echo(f"step {summary.step}: loss {summary.loss:.3f}{told} nats per token; {out}")
        sample = out / "sample.txt"
        if sample.exists():
            click.echo(f"--- it writes:\n{sample.read_text()}\n---")
        click.echo(f"look at it:  pycomm report {out}")
    return STOPPED if summary.was_stopped else 0


def dry_run(config: Config, num_ranks: int) -> None:
    """Prints what would run, and what it would need and take.

    Raises:
        ValueError: it would not run.
    """
    config = _prepare(config)
    layout = resolve(config, num_ranks)
    flops = measure_matmul_flops(DTYPES[config.precision.compute])
    copies = measure_copy_bytes_per_s()
    choice = make_choice(config, layout, flops)
    prediction = predict(config, layout, flops, copies, choice)
    memory = prediction.memory
    rows = [
        ("layout", layout.describe()),
        ("ranks", _describe_ranks(layout)),
        ("batch", _describe_batch(layout, config)),
        ("model", f"{shorten(prediction.num_parameters)} parameters, {config.model.layers} layers"),
        (
            "memory",
            f"{shorten(memory.total)}B a rank: parameters {shorten(memory.parameters)}B, gradients "
            f"{shorten(memory.gradients)}B, optimizer {shorten(memory.optimizer)}B, activations "
            f"{shorten(memory.activations)}B",
        ),
    ]
    if choice is not None:
        rows.append(("pipeline", f"{choice.name}: {choice.why}"))
    rows.append(
        (
            "step",
            f"{prediction.step_s * 1e3:.0f} ms at least: compute "
            f"{prediction.compute_s * 1e3:.0f} ms at {shorten(flops)}FLOP/s a rank, communication "
            f"{prediction.communication_s * 1e3:.1f} ms at {shorten(copies)}B/s, bubble "
            f"{prediction.bubble:.1%}",
        )
    )
    total = prediction.step_s * config.run.steps
    rows.append(("run", f"{config.run.steps} steps, {total:.0f} s at least; into {config.run.out}"))
    for name, text in rows:
        click.echo(f"{click.style(f'{name:>9}', bold=True)}  {text}")


def _describe_ranks(layout: Layout) -> str:
    parts = [f"{layout.world_size}"]
    if layout.pipeline > 1:
        each = layout.world_size // layout.pipeline
        parts.append(f"stage s on ranks {each}s to {each}s+{each - 1}")
    if layout.tensor > 1:
        parts.append(f"tensor groups of {layout.tensor} neighbours")
    return ", ".join(parts)


def _describe_batch(layout: Layout, config: Config) -> str:
    return (
        f"{layout.batch} sequences of {config.model.context} tokens = data {layout.data} x micro "
        f"{layout.micro} x {layout.passes} {'microbatches' if layout.pipeline > 1 else 'passes'}"
    )


def config_from_flags(
    path: Path | None, overrides: tuple[str, ...], flags: dict[str, Any]
) -> Config:
    """A file, overrides, and the flags that have names of their own.

    Raises:
        ValueError: says what is wrong.
    """
    from pycomm.train.files import load_config

    named = tuple(f"{key}={value}" for key, value in flags.items() if value is not None)
    return load_config(path, named + overrides)


def print_keys() -> None:
    """A TOML file of all defaults, with what each key means."""
    for section, field in Config.model_fields.items():
        table = field.annotation
        assert table is not None
        click.secho(f"[{section}]", bold=True)
        for name, entry in table.model_fields.items():
            default = entry.default
            value = json.dumps(default if not isinstance(default, Path) else str(default))
            told = f"  # {entry.description}" if entry.description else ""
            click.echo(f"{name} = {value}{told}")
        click.echo()

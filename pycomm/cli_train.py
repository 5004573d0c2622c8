"""The trainer's commands; what they need is imported when they run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import click

from pycomm.bench.checks import check_backends

COUNT = click.IntRange(1)
_EXTRA = ("pydantic", "yaml", "jinja2", "safetensors", "torch")


def need_extra() -> None:
    """What `pip install pycomm` alone does not bring, said before it is missed.

    Raises:
        click.ClickException: a package is not there; says how it comes.
    """
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the trainer needs {', '.join(missing)}: in pycomm's folder, pip install '.[train]'"
        )


@click.command(
    epilog="""\b
Examples:
  pycomm train --nproc 2                             the standard library's source, a small GPT
  pycomm train run.toml --nproc 4 --dry-run          layout, memory, step time; starts nothing
  pycomm train --nproc 4 -s layout.tensor=2 -s layout.zero=3
  pycomm train ds_config.json --data '~/books/*.txt' --out books
  torchrun --nproc-per-node 2 -m pycomm train run.toml
  pycomm train run.toml --hosts node1,node2 --nproc 4
  pycomm train --keys                                everything that can be set, with defaults"""
)
@click.argument("config", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--nproc", "num_ranks", default=1, show_default=True, type=COUNT, help="Ranks here.")
@click.option(
    "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Such as layout.tensor=2."
)
@click.option("--hosts", help="Start it on these by ssh, --nproc ranks on each; by commas.")
@click.option("--data", help="File, folder, glob or .jsonl. Default: Python's own source.")
@click.option("--out", help="The run's folder. One with checkpoints is gone on with.")
@click.option("--steps", type=COUNT, help="Optimizer steps.")
@click.option("--backend", help="Of torch.distributed. Default: pycomm.")
@click.option("--dry-run", is_flag=True, help="Say what would run, start nothing.")
@click.option("--keys", is_flag=True, help="List every key with its default and meaning.")
def train(
    config: Path | None,
    num_ranks: int,
    overrides: tuple[str, ...],
    hosts: str | None,
    data: str | None,
    out: str | None,
    steps: int | None,
    backend: str | None,
    dry_run: bool,
    keys: bool,
) -> None:
    """Trains a transformer over any layout of ranks, from one file (TOML, YAML or ds_config.json).

    The run's folder gets checkpoints, metrics and a report. Ranks that die are started again from
    the newest checkpoint; SIGTERM and ctrl-C save and end, and the same command goes on.
    """
    need_extra()
    from pycomm.train import command

    flags = {"data.path": data, "run.out": out, "run.steps": steps, "run.backend": backend}
    try:
        if keys:
            command.print_keys()
            return
        settings = command.config_from_flags(config, overrides, flags)
        check_backends([settings.run.backend])
        if dry_run:
            command.dry_run(settings, num_ranks)
            return
        if hosts:
            status = command.train_on_hosts(settings, hosts, num_ranks, config, overrides, flags)
        else:
            status = command.train(settings, num_ranks)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)


@click.command(
    epilog="""\b
Examples:
  pycomm export run weights        then: AutoModelForCausalLM.from_pretrained("weights")"""
)
@click.argument("run_folder", metavar="RUN", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def export(run_folder: Path, folder: Path) -> None:
    """Writes a run's newest checkpoint as Hugging Face safetensors (gpt2, llama or mixtral)."""
    need_extra()
    from pycomm.train.export import export as export_run

    try:
        step = export_run(run_folder, folder)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"step {step} is in {folder}")


@click.command(
    epilog="""\b
Examples:
  pycomm report run                the page run/report.html
  pycomm report run -o page.html"""
)
@click.argument("run_folder", metavar="RUN", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the page.")
def report(run_folder: Path, output: Path | None) -> None:
    """One HTML page about a training run: curves, the timeline of a step, layout and memory."""
    need_extra()
    from pycomm.train.watch.report import write_report

    try:
        path = write_report(run_folder, output)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(path)

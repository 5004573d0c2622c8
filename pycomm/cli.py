"""The `pycomm` command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import click

from pycomm.bench.checks import check_backends, check_bounds, check_contestants
from pycomm.bench.limits import print_limits
from pycomm.bench.peer.operations import OPERATIONS, REDUCE_OPS
from pycomm.cli_certs import certs
from pycomm.cli_lab import lab
from pycomm.cli_train import export, report, train

COUNT = click.IntRange(1)
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="pycomm")
def main() -> None:
    """Communication for training across uneven machines."""


@main.command(
    epilog="""\b
Examples:
  pycomm bench all_reduce                          8 B to 16 MiB on two ranks
  pycomm bench all_reduce -b 8 -e 256M -f 4 --vs gloo --png all_reduce.png
  pycomm bench reduce_scatter --np 4 --vs gloo,openmpi,mpich,impi
  pycomm bench all_to_all --api numpy --vs openmpi     mpi4py's users: like with like
  pycomm bench all --vs gloo --png overview.png         every operation, one picture
  torchrun --nproc-per-node 2 -m pycomm bench all_gather -J gather.json
  pycomm bench limits                              what this machine allows"""
)
@click.argument("operation", type=click.Choice([*OPERATIONS, "all", "limits"]))
@click.option("-b", "--minbytes", default="8", show_default=True, help="Smallest size.")
@click.option("-e", "--maxbytes", default="16M", show_default=True, help="No size above this.")
@click.option(
    "-f",
    "--stepfactor",
    default=8,
    show_default=True,
    type=click.IntRange(2),
    help="Factor between sizes.",
)
@click.option("-i", "--stepbytes", default="0", help="Fixed step between sizes instead.")
@click.option(
    "-n", "--iters", default=20, show_default=True, type=COUNT, help="Operations in a round."
)
@click.option(
    "-w",
    "--warmup",
    default=5,
    show_default=True,
    type=click.IntRange(0),
    help="Operations before.",
)
@click.option(
    "-m", "--rounds", default=9, show_default=True, type=COUNT, help="Rounds, interleaved."
)
@click.option("-c", "--check", default=1, show_default=True, help="Check results (0: do not).")
@click.option("-o", "--op", default="sum", show_default=True, help="sum, avg, prod, min or max.")
@click.option("-d", "--datatype", default="float", show_default=True, help="Element type.")
@click.option("-r", "--root", default=0, show_default=True, help="Root, where there is one.")
@click.option("-z", "--blocking", default=1, show_default=True, help="0: issue all, then wait.")
@click.option(
    "--api",
    default="torch",
    show_default=True,
    type=click.Choice(["torch", "numpy"]),
    help="pycomm by torch.distributed, or by pycomm.Communicator.",
)
@click.option("--np", "num_ranks", default=2, show_default=True, type=COUNT, help="Ranks here.")
@click.option(
    "--vs",
    default="",
    help="Compare with, by commas: gloo; openmpi, mpich, impi by mpi4py; shared (pycomm on tensors "
    "in shared memory); bound (the barest loop), bound-shared.",
)
@click.option(
    "--pages",
    default="small",
    show_default=True,
    type=click.Choice(["small", "huge"]),
    help="Of everyone's private tensors: torch's are small, NumPy's from 4 MiB huge.",
)
@click.option("--pin/--no-pin", default=True, show_default=True, help="One processor a rank.")
@click.option("-J", "--json", "json_path", type=click.Path(path_type=Path), help="Write JSON.")
@click.option("--png", "png_path", type=click.Path(path_type=Path), help="Draw a picture.")
def bench(
    operation: str,
    minbytes: str,
    maxbytes: str,
    stepfactor: int,
    stepbytes: str,
    iters: int,
    warmup: int,
    rounds: int,
    check: int,
    op: str,
    datatype: str,
    root: int,
    blocking: int,
    api: str,
    num_ranks: int,
    vs: str,
    pages: str,
    pin: bool,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """Measures an operation over pycomm, with nccl-tests' flags and columns.

    Every number is the median over rounds of the slowest rank's time. With --vs, other backends
    run in the same rounds, and the ratio comes with its 95 % interval.
    """
    for path in (json_path, png_path):
        if path is not None and not path.resolve().parent.is_dir():
            raise click.BadParameter(f"there is no folder '{path.resolve().parent}'")
    if operation == "limits":
        print_limits(json_path)
        return
    from pycomm.bench.plan import DTYPES, Settings, parse_bytes, sizes_between

    names = [name for name in vs.split(",") if name]
    if datatype not in DTYPES:
        raise click.BadParameter(f"'{datatype}' is none of {', '.join(DTYPES)}", param_hint="-d")
    if op not in REDUCE_OPS:
        raise click.BadParameter(f"'{op}' is none of {', '.join(REDUCE_OPS)}", param_hint="-o")
    if op == "avg" and "int" in datatype:
        raise click.BadParameter("an average of integers is not defined", param_hint="-o")
    if not 0 <= root < num_ranks:
        raise click.BadParameter(f"rank {root} is not among {num_ranks}", param_hint="-r")
    check_contestants(names, api, datatype, op)
    check_bounds(names, operation, num_ranks, datatype)
    try:
        sizes = sizes_between(
            parse_bytes(minbytes), parse_bytes(maxbytes), stepfactor, parse_bytes(stepbytes)
        )
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    from pycomm.bench.run import run as run_bench

    settings = Settings(
        operation=operation,
        sizes=sizes,
        dtype=datatype,
        op=op,
        root=root,
        iterations=iters,
        warmup=warmup,
        rounds=rounds,
        check=check != 0,
        blocking=blocking != 0,
        api=api,
        pages=pages,
        backends=("pycomm", *names),
    )
    operations = OPERATIONS if operation == "all" else (operation,)
    plan = [
        replace(settings, operation=name, sizes=[0] if name == "barrier" else sizes)
        for name in operations
    ]
    sys.exit(run_bench(plan, num_ranks, pin=pin, json_path=json_path, png_path=png_path))


@main.command(
    epilog="""\b
Examples:
  pycomm performance --out docs            the whole page, about a quarter of an hour
  pycomm performance private shared        two chapters of it, into ./performance
  pycomm performance --trainer --out docs  steps of every layout, pipelines, saving
  pycomm performance --wan -m 3 --out docs   QUIC beside TCP over long and lossy paths"""
)
@click.option(
    "--out",
    default="performance",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for performance.md, its pictures and performance.json.",
)
@click.option("-m", "--rounds", default=15, show_default=True, type=COUNT, help="Rounds.")
@click.option("--trainer", is_flag=True, help="The trainer's page instead, about 25 minutes.")
@click.option("--wan", is_flag=True, help="The wide area's page instead; needs root.")
@click.argument("only", metavar="[CHAPTER]...", nargs=-1)
def performance(out: Path, rounds: int, trainer: bool, wan: bool, only: tuple[str, ...]) -> None:
    """Measures pycomm beside gloo, three MPIs and the barest loops, and writes a page about it.

    Chapters: core, small, dispatch, private, huge, large, shared, shared256, torch, four, bfloat16,
    training.
    """
    from pycomm.bench.gang import GangError
    from pycomm.bench.performance import write

    out.mkdir(parents=True, exist_ok=True)
    try:
        if trainer:
            from pycomm.bench import trainer_page

            sys.exit(trainer_page.write(out, rounds))
        if wan:
            from pycomm.bench import wan as wan_page

            sys.exit(wan_page.write(out, rounds))
        sys.exit(write(out, rounds, only))
    except (ValueError, GangError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error


@main.command(
    epilog="""\b
Examples:
  pycomm demo                                the standard library's source, two ranks
  pycomm demo --data '~/books/*.txt' --steps 1000
  pycomm demo --np 4 --backend gloo          the same over another backend"""
)
@click.option("--data", default="", help="A file, folder or glob; default: Python's own source.")
@click.option("--steps", default=300, show_default=True, type=COUNT, help="Optimizer steps.")
@click.option("--np", "num_ranks", default=2, show_default=True, type=COUNT, help="Ranks.")
@click.option("--backend", default="pycomm", show_default=True, help="torch.distributed backend.")
@click.option(
    "--out", default="demo", show_default=True, type=click.Path(path_type=Path), help="Folder."
)
@click.option("--seed", default=0, show_default=True, help="Of weights and samples.")
def demo(data: str, steps: int, num_ranks: int, backend: str, out: Path, seed: int) -> None:
    """Trains a small byte-level GPT on real text over pycomm and draws its loss."""
    from pycomm.demo.train import DemoConfig, run_demo

    check_backends([backend])

    config = DemoConfig(
        data=data, steps=steps, num_ranks=num_ranks, backend=backend, out=out, seed=seed
    )
    try:
        status = run_demo(config)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)


@main.command(
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  pycomm run --np 4 -- python sums.py       four ranks on this host
  pycomm run --np 2 --pin -- python train.py   one processor a rank""",
)
@click.option("--np", "num_ranks", default=2, show_default=True, type=COUNT, help="Ranks here.")
@click.option("--pin/--no-pin", default=False, show_default=True, help="One processor a rank.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(num_ranks: int, pin: bool, command: tuple[str, ...]) -> None:
    """Runs COMMAND as the ranks of a job on this host.

    Each finds RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and PYCOMM_RENDEZVOUS in its
    environment, for torch's env:// and for pycomm.Communicator().
    """
    from pycomm.jobs import run_job

    try:
        sys.exit(run_job(command, num_ranks, pin=pin))
    except FileNotFoundError as error:
        raise click.ClickException(f"there is no command '{command[0]}'") from error


@main.command(
    epilog="""\b
Examples:
  pycomm doctor
  pycomm doctor -J doctor.json     for a bug report"""
)
@click.option("-J", "--json", "json_path", type=click.Path(path_type=Path), help="Write JSON.")
@click.option("--settings", is_flag=True, help="List every setting with value, source and meaning.")
def doctor(json_path: Path | None, settings: bool) -> None:
    """Tells what is usable here and, for each thing that is not, why and what to do."""
    if settings:
        print_settings()
        return
    from pycomm.doctor import as_json, examine

    mark = {"ok": ("ok", "green"), "limited": ("!", "yellow"), "absent": ("-", "red")}
    findings = []
    topic = ""
    for finding in examine():
        findings.append(finding)
        if finding.topic != topic:
            topic = finding.topic
            click.secho(topic, bold=True)
        sign, color = mark[finding.verdict]
        click.echo(f"  {click.style(f'{sign:>2}', fg=color)} {finding.name}: {finding.text}")
        if finding.remedy:
            click.echo(f"       {finding.remedy}")
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(findings), indent=1))


def print_settings() -> None:
    """A table of all settings."""
    from pycomm import _core

    resolved = _core.resolve_settings()
    for row in resolved["settings"]:
        click.secho(f"{row['name']}={row['value']}", bold=row["source"] != "default", nl=False)
        click.echo(f"   ({row['source']})\n    {row['help']}")
    if resolved["complaint"]:
        raise click.ClickException(resolved["complaint"])


for command in (train, report, export, lab, certs):
    main.add_command(command)


if __name__ == "__main__":
    main()

"""`pycomm lab`: hosts on one machine, with the network between them that one asks for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import click

COUNT = click.IntRange(1)
NAME = click.option("--name", default="lab", show_default=True, help="Of the lab.")

_WAN_OPTIONS = (
    click.option("--rtt", "rtt_ms", type=float, help="Round trip between sites, ms."),
    click.option("--jitter", "jitter_ms", type=float, help="Added to each way, 0 to this, ms."),
    click.option("--reorder", "reorders", is_flag=True, default=None, help="Jitter may reorder."),
    click.option("--loss", type=float, help="Share of packets lost, percent."),
    click.option("--burst", metavar="P,R,H", help="Bursts: begins, ends, loses (percent each)."),
    click.option("--duplicate", "duplicates", type=float, help="Packets that come twice, percent."),
    click.option("--wan-rate", "rate_mbit", type=float, help="Between sites, Mbit/s."),
    click.option("--queue", "queue_ms", type=float, help="Longest queue, ms. Default: one RTT."),
    click.option("--ecn", is_flag=True, default=None, help="Mark rather than wait for drops."),
    click.option("--mtu", type=int, help="Longer IP packets vanish, with no ICMP."),
)


def _wan_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_WAN_OPTIONS):
        command = option(command)
    return command


def _wan_fields(options: dict[str, Any]) -> dict[str, Any]:
    """What was given, in the units of `Wan`."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("loss", "duplicates"):
        if name in given:
            given[name] /= 100
    if "burst" in given:
        given["burst"] = tuple(float(part) / 100 for part in given["burst"].split(","))
    return given


def _fail(error: Exception) -> click.ClickException:
    return click.ClickException(str(error))


@click.group()
def lab() -> None:
    """Hosts on this machine, to try pycomm on uneven and distant networks. Needs root.

    A host is a network namespace with its own link; sites are joined by a relay with delay, loss,
    rate and queue. See docs/lab.md.
    """


@lab.command(
    epilog="""\b
Examples:
  pycomm lab up --hosts 4 --rates 200,1000,1000,1000       one site, one slow link
  pycomm lab up --hosts 2 --rtt 40 --loss 1 --wan-rate 1000   two clouds
  pycomm lab up --hosts 4 --sites 2 --rates 1000 --rtt 80 --wan-rate 200"""
)
@NAME
@click.option("--hosts", default=2, show_default=True, type=COUNT, help="Hosts.")
@click.option("--sites", default=0, type=click.IntRange(0), help="Sites they stand in.")
@click.option("--rates", default="", help="Of the hosts' links, Mbit/s, by commas.")
@click.option("--tcp", default="", help="Congestion control: cubic, bbr. Default: the system's.")
@click.option("--seed", default=0, help="Of the relay's chance.")
@_wan_options
def up(name: str, hosts: int, sites: int, rates: str, tcp: str, seed: int, **wan: Any) -> None:
    """Brings a lab up; it stays until `pycomm lab down`."""
    from pycomm.lab import Lab, LabError, LabPlan, Wan

    try:
        fields = _wan_fields(wan)
        network = Wan(**fields) if fields or sites > 1 else None
        rates_mbit = tuple(float(rate) for rate in rates.split(",") if rate)
        plan = LabPlan(hosts, sites, rates_mbit, network, seed, tcp)
        made = Lab(plan, name).up(outlives_us=True)
    except (ValueError, LabError) as error:
        raise _fail(error) from error
    for host in range(plan.hosts):
        rate = plan.rate_mbit(host)
        link = f"{rate:g} Mbit/s" if rate else "no bound"
        place = f"site {plan.site_of(host)}, {link}"
        click.echo(f"host {host}  {plan.address(host):<14} {place:<26} {made.namespace(host)}")
    click.echo("a job over them: pycomm lab run -- python train.py; the end: pycomm lab down")


@lab.command("set")
@NAME
@click.option("--between", metavar="A,B", help="Two sites. Default: all.")
@_wan_options
def set_wan(name: str, between: str | None, **wan: Any) -> None:
    """Changes the network between sites at once; what is not named keeps its value."""
    from pycomm.lab import LabError, Wan, open_lab

    try:
        found = open_lab(name)
        rows = found.report()
        pairs = {(row["from"], row["to"]): Wan(**row["wan"]) for row in rows}
        if between is not None:
            a, b = (int(part) for part in between.split(","))
            if (a, b) not in pairs:
                raise ValueError(f"there is no network between sites {a} and {b}")
            pairs = {(a, b): pairs[a, b]}
        for (a, b), before in pairs.items():
            if a < b or between is not None:
                found.set_wan(dataclasses.replace(before, **_wan_fields(wan)), (a, b))
    except (ValueError, LabError) as error:
        raise _fail(error) from error


@lab.command()
@NAME
def show(name: str) -> None:
    """What the relay did so far, a line for each direction between sites."""
    from pycomm.lab import LabError, open_lab

    try:
        rows = open_lab(name).report()
    except LabError as error:
        raise _fail(error) from error
    if not rows:
        click.echo("one site: no relay between its hosts")
    for row in rows:
        click.echo(
            f"site {row['from']} to {row['to']}: {row['num_out']} packets, "
            f"{row['bytes_out'] / 1e6:.1f} MB; lost {row['num_lost']}, queue full "
            f"{row['num_overflow']}, too long {row['num_too_long']}; longest queue "
            f"{row['queue_ns_max'] / 1e6:.1f} ms, relay late {row['late_ns_max'] / 1e6:.1f} ms"
        )


@lab.command(
    "exec",
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  pycomm lab exec 0 -- ping -c 3 10.77.1.10
  pycomm lab exec 0                            a shell in host 0""",
)
@NAME
@click.argument("host", type=click.IntRange(0))
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def exec_in(name: str, host: int, command: tuple[str, ...]) -> None:
    """Runs COMMAND in HOST."""
    import os

    from pycomm.lab import LabError, open_lab

    try:
        namespace = open_lab(name).namespace(host)
    except LabError as error:
        raise _fail(error) from error
    shell = [os.environ.get("SHELL", "/bin/sh")]
    os.execvp("ip", ["ip", "netns", "exec", namespace, *(command or shell)])


@lab.command(
    "run",
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  pycomm lab run -- python train.py            one rank on each host
  pycomm lab run --nproc 2 -- pycomm bench all_reduce -b 1M -e 64M""",
)
@NAME
@click.option("--nproc", default=1, show_default=True, type=COUNT, help="Ranks on each host.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run_in(name: str, nproc: int, command: tuple[str, ...]) -> None:
    """Runs COMMAND as the ranks of a job over all hosts.

    Each finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and PYCOMM_RENDEZVOUS in its
    environment, and a secret of the job in PYCOMM_SECRET_FILE.
    """
    from pycomm.lab import LabError, open_lab
    from pycomm.lab.job import run_job

    try:
        sys.exit(run_job(open_lab(name), command, nproc))
    except LabError as error:
        raise _fail(error) from error


@lab.command()
@NAME
@click.argument("site", type=click.IntRange(0))
def rebind(name: str, site: int) -> None:
    """Makes the NAT before SITE forget: its UDP comes from other ports from now on."""
    from pycomm.lab import LabError, open_lab

    try:
        open_lab(name).rebind(site)
    except LabError as error:
        raise _fail(error) from error


@lab.command()
@NAME
def down(name: str) -> None:
    """Takes the lab down. What still runs in its hosts keeps running, without a network."""
    from pycomm.lab import LabError, open_lab

    try:
        found = open_lab(name)
    except LabError as error:
        raise _fail(error) from error
    left = found.processes()
    found.down()
    if left:
        click.echo(f"still running, cut off: processes {', '.join(map(str, left))}")

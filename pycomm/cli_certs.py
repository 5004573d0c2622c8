"""`pycomm certs`: a private CA, and certificates for the hosts of a job."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

FOLDER = click.Path(path_type=Path, file_okay=False)
DAYS = click.option("--days", default=90, show_default=True, type=click.IntRange(1), help="Valid.")


def _parse_ranks(text: str) -> list[int]:
    """0-3,8 as [0, 1, 2, 3, 8]."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    if not ranks:
        raise ValueError(f"'{text}' names no rank")
    return ranks


@click.group(
    epilog="""\b
Examples:
  pycomm certs init ca --job vision              once, on a machine that you trust
  pycomm certs issue ca hosts/a --ranks 0-3      for the host of ranks 0 to 3
  pycomm certs issue ca hosts/b                  for a host of any rank
  scp -r hosts/a a:certs                         then, there: export PYCOMM_CERTS=~/certs
  pycomm certs renew ca hosts/a                  before it ends; running jobs keep their links"""
)
def certs() -> None:
    """Certificates, so that ranks on several hosts prove who they are and encrypt."""


@certs.command()
@click.argument("ca", type=FOLDER)
@click.option(
    "--job", default="job", show_default=True, help="Its name, part of every certificate's."
)
@click.option("--days", default=3650, show_default=True, type=click.IntRange(1), help="Valid.")
def init(ca: Path, job: str, days: int) -> None:
    """Makes a CA in the folder CA. Keep its ca.key off the hosts: it lets anyone join."""
    from pycomm.control.certificates import Authority, CertificateError

    try:
        Authority.create(ca, job, days)
    except (CertificateError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"a CA of job '{job}' in {ca}; next: pycomm certs issue {ca} HOST_FOLDER")


@certs.command()
@click.argument("ca", type=FOLDER)
@click.argument("folder", type=FOLDER)
@click.option("--ranks", help="That may run there, such as 0-3,8. Default: any of the job.")
@DAYS
def issue(ca: Path, folder: Path, ranks: str | None, days: int) -> None:
    """Fills FOLDER with a key and a certificate for one host."""
    from pycomm.control.certificates import Authority, CertificateError

    try:
        Authority.open(ca).issue(folder, None if ranks is None else _parse_ranks(ranks), days)
    except (CertificateError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"copy {folder} to its host and set PYCOMM_CERTS to it there")


@certs.command()
@click.argument("ca", type=FOLDER)
@click.argument("folder", type=FOLDER)
@DAYS
def renew(ca: Path, folder: Path, days: int) -> None:
    """A fresh key and certificate for the same names. Jobs read them at their next connection."""
    from pycomm.control.certificates import Authority, CertificateError

    try:
        Authority.open(ca).renew(folder, days)
    except (CertificateError, OSError) as error:
        raise click.ClickException(str(error)) from error


@certs.command()
@click.argument("ca", type=FOLDER)
@click.argument("folder", type=FOLDER)
def deny(ca: Path, folder: Path) -> None:
    """Puts FOLDER's certificate on CA's list `denied`; copy that into every host's folder."""
    from pycomm.control.certificates import Authority, CertificateError

    try:
        print_ = Authority.open(ca).deny(folder)
    except (CertificateError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{print_} is denied; copy {ca / 'denied'} to every host's PYCOMM_CERTS")


@certs.command()
@click.argument("folder", type=FOLDER)
def show(folder: Path) -> None:
    """What FOLDER's certificate says, and for how long."""
    from pycomm.control.certificates import (
        CertificateError,
        fingerprint,
        load_certificate,
        names_of,
    )

    try:
        certificate = load_certificate(folder)
    except CertificateError as error:
        raise click.ClickException(str(error)) from error
    ends = certificate.not_valid_after_utc
    left = ends - datetime.now(UTC)
    click.echo(f"made out to   {', '.join(names_of(certificate))}")
    click.echo(f"by            {certificate.issuer.rfc4514_string()}")
    click.echo(f"valid until   {ends:%Y-%m-%d %H:%M} UTC, {left.days} days from now")
    click.echo(f"fingerprint   {fingerprint(certificate)}")
    if left.total_seconds() < 0:
        raise click.ClickException("it has ended; pycomm certs renew CA FOLDER")

"""A job over the hosts of a lab."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence

from pycomm.jobs import attend
from pycomm.lab.lab import Lab

_PORT = 29_500


def job_environments(
    lab: Lab, ranks_per_host: int, hosts: Sequence[int] = ()
) -> list[tuple[int, dict[str, str]]]:
    """Host and environment of each rank; makes the job's secret file in the lab's folder.

    `hosts` are the job's, in the order of ranks; all of the lab's if there are none.
    """
    hosts = hosts or range(lab.plan.hosts)
    secret = lab.folder / "secret"
    if not secret.exists():
        handle = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(32))
    world_size = len(hosts) * ranks_per_host
    master = lab.plan.address(hosts[0])
    shared = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(_PORT),
        "PYCOMM_RENDEZVOUS": f"tcp://{master}:{_PORT + 1}",
        "PYCOMM_SECRET_FILE": str(secret),
        "PYCOMM_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    ranks = []
    for rank in range(world_size):
        host, local = divmod(rank, ranks_per_host)
        ranks.append((hosts[host], {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)}))
    return ranks


def run_job(lab: Lab, command: Sequence[str], ranks_per_host: int = 1) -> int:
    """Runs `command` as every rank and returns the first bad exit status, or 0."""

    def start() -> Iterator[subprocess.Popen[bytes]]:
        for host, environment in job_environments(lab, ranks_per_host):
            yield lab.start(host, command, env={**os.environ, **environment})

    return attend(start())

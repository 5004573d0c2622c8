"""A job in the lab, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pycomm.lab import Lab
from pycomm.lab.job import job_environments

RANK = str(Path(__file__).with_name("rank.py"))


class Job:
    """A job of one rank a host, each a process of rank.py; {host} in a setting is its number."""

    def __init__(self, lab: Lab, certs: Path | None, what: str, **settings: str) -> None:
        self.ranks: list[subprocess.Popen[str]] = []
        for host, environment in job_environments(lab, 1):
            own = {name: value.replace("{host}", str(host)) for name, value in settings.items()}
            env = {**os.environ, **environment, "PYCOMM_TIMEOUT_SEC": "40", **own}
            if certs is not None:
                env["PYCOMM_CERTS"] = str(certs)
                del env["PYCOMM_SECRET_FILE"]
            self.ranks.append(
                lab.start(
                    host,
                    [sys.executable, RANK, what],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def lines(self, rank: int) -> list[str]:
        """What a rank said, to its end."""
        output, _ = self.ranks[rank].communicate(timeout=60)
        return output.splitlines()

    def results(self) -> list[dict[str, Any]]:
        """The last line of each rank, which is JSON."""
        every = [self.lines(rank) for rank in range(len(self.ranks))]
        try:
            return [dict(json.loads(lines[-1])) for lines in every]
        except (ValueError, IndexError):
            raise AssertionError(every) from None

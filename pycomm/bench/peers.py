"""MPI implementations to compare with, each in an environment of its own.

They are set up once, with pip, in the user's cache folder: a wheel of the MPI, mpi4py and NumPy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """One MPI."""

    name: str
    packages: tuple[str, ...]
    launcher: str
    arguments: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where its environment lies."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "pycomm" / "peers" / self.name

    def is_set_up(self) -> bool:
        """Whether it was set up to the end."""
        return (self.folder / "complete").exists()

    def set_up(self) -> None:
        """Makes the environment.

        Raises:
            RuntimeError: pip could not; with its last words.
        """
        venv.create(self.folder, with_pip=True, clear=True)
        command = [str(self.folder / "bin" / "pip"), "install", "-q", "numpy", "mpi4py"]
        ran = subprocess.run(
            [*command, *self.packages], capture_output=True, text=True, check=False
        )
        if ran.returncode != 0:
            raise RuntimeError(f"{self.name} could not be installed: {ran.stderr.strip()[-500:]}")
        (self.folder / "complete").touch()

    def launch_command(self, num_ranks: int) -> list[str]:
        """What starts `num_ranks` Pythons; the script and its arguments follow."""
        bin_folder = self.folder / "bin"
        return [
            str(bin_folder / self.launcher),
            *self.arguments,
            "-n",
            str(num_ranks),
            str(bin_folder / "python"),
        ]

    def environment(self) -> dict[str, str]:
        """Of its launcher: the ranks' paths, and nothing of this environment's Python."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        kept["PATH"] = f"{self.folder / 'bin'}:{kept.get('PATH', '')}"
        # Pinning is done by the ranks, alike for all contestants.
        kept.update(I_MPI_PIN="0", I_MPI_FABRICS="shm", OMPI_ALLOW_RUN_AS_ROOT="1")
        kept["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        return kept


PEERS = {
    "openmpi": Peer(
        "openmpi", ("openmpi",), "mpirun", ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
    ),
    "mpich": Peer("mpich", ("mpich",), "mpiexec", ()),
    "impi": Peer("impi", ("impi-rt",), "mpiexec", ()),
}


def set_up_missing(names: list[str]) -> None:
    """Sets up those that are not there yet, and says so."""
    for name in names:
        if name in PEERS and not PEERS[name].is_set_up():
            sys.stderr.write(f"setting up {name} in {PEERS[name].folder} (once) ...\n")
            PEERS[name].set_up()

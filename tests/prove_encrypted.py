"""Claim 4 of `make prove`: collectives in QUIC v2 packets, after certificates on both sides."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import pycomm
from pycomm.control.certificates import Authority

COUNTS = (1, 500, 131_072)  # of float64: 8 B, 4 KB, 1 MiB


def rank(number: int, folder: Path, queue: Any) -> None:
    os.environ.update(PYCOMM_TRANSPORT="quic", PYCOMM_CERTS=str(folder / f"rank{number}"))
    with pycomm.Communicator(number, 2, rendezvous=f"file://{folder}/meet", timeout=30) as comm:
        begin = time.monotonic()
        right = True
        for count in COUNTS:
            total = comm.all_reduce(np.arange(count) * (number + 1.0))
            right &= bool((total == 3.0 * np.arange(count)).all())
        queue.put((right, time.monotonic() - begin, comm.peer_stats()[0]))


def main() -> int:
    """Exit status 0 if the claim holds."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority.create(folder / "ca", "prove")
        for number in range(2):
            authority.issue(folder / f"rank{number}", [number])
        ranks = [context.Process(target=rank, args=(n, folder, queue)) for n in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            if process.is_alive():
                process.kill()
    results = [queue.get(timeout=1) for _ in range(2)] if not any(p.exitcode for p in ranks) else []
    holds = len(results) == 2 and all(
        right and stats["transport"] == "quic" for right, _, stats in results
    )
    if not holds:
        print(f"4 encrypted  FAILS  {results}")
        return 1
    packets = sum(path["packets_sent"] for _, _, stats in results for path in stats["paths"])
    milliseconds = 1e3 * max(seconds for _, seconds, _ in results)
    print(
        "4 encrypted  holds  8 B, 4 KB and 1 MiB all_reduce in QUIC v2 1-RTT packets after an "
        f"aioquic\n               handshake with certificates on both sides: {packets} packets "
        f"sealed, {milliseconds:.0f} ms;\n               sums right"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

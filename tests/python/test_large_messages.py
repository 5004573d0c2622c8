"""Messages above 4 GiB. They take 10 GiB of memory, so they run when asked for: `make test-all`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import pycomm
from tests.python.test_communicator import run_ranks
from tests.ranks import certificates

BYTES = (1 << 32) + 12_345_677

asked_for = pytest.mark.skipif(
    os.environ.get("TEST_LARGE") != "1", reason="10 GiB of memory; make test-all asks for it"
)


@asked_for
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_messages_above_four_gibibytes(transport: str, tmp_path: Path) -> None:
    places = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, BYTES - 1]

    def body(comm: pycomm.Communicator) -> list[int]:
        data = np.zeros(BYTES, np.uint8)
        for i, place in enumerate(places):
            data[place] = (i + 1) * (comm.rank + 1)
        comm.all_reduce(data, timeout=120)
        seen = [int(data[place]) for place in places]
        data[places] += comm.rank
        if comm.rank == 0:
            comm.send(data, 1, timeout=120)
        else:
            comm.recv(data, 0, timeout=120)
        return seen + [int(data[place]) for place in places] + [int(np.count_nonzero(data))]

    sums = [3 * (i + 1) for i in range(len(places))]
    results = run_ranks(body, 2, tmp_path, settings={"TRANSPORT": transport})
    assert results == [[*sums, *sums, len(places)]] * 2


@asked_for
@pytest.mark.timeout(300)
def test_a_quic_stream_above_four_gibibytes(tmp_path: Path) -> None:
    count = (64 << 20) // 8

    def body(comm: pycomm.Communicator) -> bool:
        data = np.arange(count)
        is_right = True
        for _ in range(BYTES // data.nbytes + 1):
            if comm.rank == 0:
                comm.send(data, 1)
                data += 1
            else:
                expected = int(data[0])
                comm.recv(data, 0)
                is_right &= int(data[0]) >= expected and bool((np.diff(data) == 1).all())
        return is_right and int(data[0]) >= BYTES // data.nbytes

    settings = {"TRANSPORT": "quic", "CERTS": str(certificates())}
    assert run_ranks(body, 2, tmp_path, settings=settings) == [True, True]

"""What doctor says of RDMA devices, and what is in the way of those that cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pycomm
from tests.rdma.ranks import run, sh

ROOT = Path(__file__).parents[2]
# Debian's python3-pyverbs, beside an interpreter that is not Debian's.
PYVERBS = "/usr/lib/python3/dist-packages"

PROGRAM = """
import json, sys
sys.path.append(sys.argv[1])
from pycomm.rdma_devices import list_ports
ports, refusal = list_ports()
print(json.dumps([vars(p) | {"text": p.describe(), "gids": len(p.gids)} for p in ports]))
"""


def ports(pyverbs: bool = True, prefix: tuple[str, ...] = (), **env: str) -> dict[str, Any]:
    command = [*prefix, sys.executable, "-c", PROGRAM, PYVERBS if pyverbs else "/nowhere"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
    )
    assert done.returncode == 0, done.stderr
    return {row["device"]: row for row in json.loads(done.stdout)}


@pytest.mark.parametrize("pyverbs", [True, False])
def test_every_port_is_listed_with_what_it_can_do(pyverbs: bool) -> None:
    seen = ports(pyverbs)
    assert sorted(seen) == ["rxe0", "rxe1", "rxe2", "rxe3"]
    for row in seen.values():
        assert row["usable"] and row["state"] == "ACTIVE" and row["link_layer"] == "Ethernet"
        assert row["atomics"] and row["gids"] >= 2 and "RoCE v2" in row["text"]
        assert "ffff:0a09" in row["text"]  # of the addresses the IPv4 one
        if pyverbs:
            assert row["source"] == "pyverbs" and row["mtu_bytes"] == 1024
            assert row["on_demand_paging"] is False
        else:
            assert row["source"] == "sysfs" and row["mtu_bytes"] is None


def test_what_is_in_the_way_is_said() -> None:
    sh("ip link set vb down")
    try:
        row = ports()["rxe1"]
        assert not row["usable"] and "DOWN" in row["reason"]
    finally:
        sh("ip link set vb up")
    assert "no GID at PYCOMM_IB_GID_INDEX" in ports(PYCOMM_IB_GID_INDEX="9")["rxe0"]["reason"]
    assert "partition" in ports(PYCOMM_IB_PKEY="0x1234")["rxe0"]["reason"]
    assert ports(PYCOMM_IB_PKEY="0xffff")["rxe0"]["usable"]
    sh("chmod 0600 /dev/infiniband/uverbs2")
    nobody = ("setpriv", "--reuid=65534", "--clear-groups")
    row = ports(prefix=nobody, HOME="/tmp")["rxe2"]
    assert not row["usable"] and "Permission" in row["reason"], row
    sh("chmod 0666 /dev/infiniband/uverbs2")


def test_doctor_tells_of_ports_and_of_locked_memory() -> None:
    # Its part alone: all of it runs jobs, and imports torch.
    program = "from pycomm import doctor; print(*doctor._rdma(), sep=chr(10))"
    command = f'ulimit -l 4096; exec "{sys.executable}" -c "{program}"'
    text = subprocess.run(
        ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    ).stdout
    assert "RDMA rxe3:1" in text and "4 MiB may be locked" in text, text


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (("rxe2,rxe0", "rxe3,rxe1"), ["rxe2:1", "rxe0:1"]),
        (("=rxe0:1", "=rxe1:1"), ["rxe0:1"]),
        (("^rxe1,rxe3", "^rxe0,rxe2"), ["rxe0:1", "rxe2:1"]),
    ],
)
def test_devices_are_chosen_by_name(specs: tuple[str, str], expected: list[str]) -> None:
    def body(comm: pycomm.Communicator) -> list[str]:
        comm.barrier()
        return [path.split()[0] for path in comm.peer_stats()[0]["rdma"]["paths"]]

    results = run(body, settings_of=lambda rank: {"PYCOMM_IB_HCA": specs[rank]})
    assert results[0] == expected


def test_transport_rdma_without_a_device_is_refused_with_the_reason() -> None:
    with pytest.raises(pycomm.Error, match="PYCOMM_IB_HCA=mlx5 leaves no device"):
        pycomm.Communicator(
            rank=0,
            size=1,
            rendezvous="file:///tmp/nobody",
            settings={"TRANSPORT": "rdma", "IB_HCA": "mlx5"},
        )

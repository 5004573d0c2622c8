"""One rank of a job in the lab, by what it does; the last line it prints is its result."""

from __future__ import annotations

import json
import select
import socket
import sys
import time

import numpy as np

import pycomm

SECRET = b"this line of text is nobody's business "


def sums(comm: pycomm.Communicator) -> dict[str, object]:
    rng = np.random.default_rng(7)
    for count in (1, 100, 30_000, 700_001):
        both = [rng.integers(-50, 50, count).astype(np.float32) for _ in range(comm.size)]
        total = np.sum(both, axis=0)
        np.testing.assert_array_equal(comm.all_reduce(both[comm.rank].copy()), total)
    return {"transport": comm.peer_stats()[0]["transport"], "ok": True}


def long(comm: pycomm.Communicator) -> dict[str, object]:
    done = np.zeros(1)
    begin = time.monotonic()
    while not done[0]:
        x = comm.all_reduce(np.full(300_000, comm.rank + 1, np.float32))
        assert (x == 3).all()
        done = comm.broadcast(np.array([float(time.monotonic() - begin > 6)]))
    return {"ok": True, "mtu": comm.peer_stats()[0]["paths"][0]["mtu"]}


def paths(comm: pycomm.Communicator) -> dict[str, object]:
    """What each path carried before one is cut, and after."""

    def run(seconds: float) -> list[int]:
        before = {row["peer"]: row["bytes_sent"] for row in comm.peer_stats()[0]["paths"]}
        done, begin = np.zeros(1), time.monotonic()
        while not done[0]:
            x = comm.all_reduce(np.full(300_000, comm.rank + 1, np.float32))
            assert (x == 3).all()
            done = comm.broadcast(np.array([float(time.monotonic() - begin > seconds)]))
        rows = comm.peer_stats()[0]["paths"]
        return sorted(row["bytes_sent"] - before[row["peer"]] for row in rows)

    first = run(2.5)
    print("first", flush=True)
    run(2)  # in which a path is cut
    return {"first": first, "last": run(2)}


def until_lost(comm: pycomm.Communicator) -> dict[str, object]:
    try:
        while True:
            comm.all_reduce(np.ones(100_000))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)


def secret(comm: pycomm.Communicator) -> dict[str, object]:
    text = np.frombuffer(SECRET * 10_000, np.uint8).copy()
    comm.broadcast(text)
    comm.all_reduce(np.zeros(3))
    return {"transport": comm.peer_stats()[0]["transport"]}


def sniff() -> None:
    """Counts packets that come by, and those in which the secret can be read."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:
        wire.bind(("eth0", 0))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        print("ready", flush=True)
        packets = readable = 0
        while True:
            ready, _, _ = select.select([wire, sys.stdin], [], [])
            if wire in ready:
                packets += 1
                readable += SECRET in wire.recv(1 << 17)
            elif sys.stdin in ready:
                print(json.dumps({"packets": packets, "readable": readable}))
                return


if __name__ == "__main__":
    if sys.argv[1] == "sniff":
        sniff()
    else:
        bodies = {
            "sums": sums,
            "long": long,
            "until-lost": until_lost,
            "secret": secret,
            "paths": paths,
        }
        with pycomm.Communicator() as communicator:
            print(json.dumps(bodies[sys.argv[1]](communicator)), flush=True)

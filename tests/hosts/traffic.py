"""Traffic between hosts of a lab, and what it saw, as JSON.

traffic.py echo PORT
traffic.py ping ADDRESS PORT COUNT BYTES [GAP_MS]   UDP round trips
traffic.py sink PORT                                takes one TCP connection to its end
traffic.py pour ADDRESS PORT SECONDS                TCP, as much as goes
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import sys
import time


def echo(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.bind(("0.0.0.0", port))
        print("ready", flush=True)
        while True:
            data, sender = here.recvfrom(65536)
            here.sendto(data, sender)


def ping(address: str, port: int, count: int, num_bytes: int, gap_ms: float) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
        here.connect((address, port))
        here.settimeout(0.001)
        rtts: dict[int, float] = {}
        order: list[int] = []
        last = time.monotonic()
        sent = 0
        while sent < count or time.monotonic() < last + 0.5:
            if sent < count:
                now = time.monotonic()
                here.send(struct.pack("!Id", sent, now).ljust(num_bytes, b"x"))
                sent, last = sent + 1, now
            until = last + gap_ms / 1000
            while True:
                try:
                    number, when = struct.unpack("!Id", here.recv(65536)[:12])
                    rtts.setdefault(number, 1000 * (time.monotonic() - when))
                    order.append(number)
                except TimeoutError:
                    pass
                if time.monotonic() >= until:
                    break
        overtaken = sum(a > b for a, b in itertools.pairwise(order))
        print(
            json.dumps(
                {
                    "rtts_ms": sorted(rtts.values()),
                    "lost": count - len(rtts),
                    "doubled": len(order) - len(rtts),
                    "overtaken": overtaken,
                    "port": here.getsockname()[1],
                }
            )
        )


def sink(port: int) -> None:
    with socket.create_server(("0.0.0.0", port)) as listener:
        print("ready", flush=True)
        connection, _ = listener.accept()
        total, begin = 0, time.monotonic()
        while data := connection.recv(1 << 20):
            total += len(data)
        seconds = time.monotonic() - begin
        print(json.dumps({"bytes": total, "mbit_per_s": total * 8e-6 / seconds}))


def pour(address: str, port: int, seconds: float) -> None:
    with socket.create_connection((address, port)) as here:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            here.sendall(bytes(1 << 18))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "echo":
        echo(int(rest[0]))
    elif what == "ping":
        gap_ms = float(rest[4]) if len(rest) > 4 else 5
        ping(rest[0], int(rest[1]), int(rest[2]), int(rest[3]), gap_ms)
    elif what == "sink":
        sink(int(rest[0]))
    else:
        pour(rest[0], int(rest[1]), float(rest[2]))

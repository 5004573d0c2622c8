"""One end of a wide-area measurement, as a process of its own; the last line it prints is JSON.

pour SECONDS WARMUP [NUM_BYTES [NUM_ARRAYS]]
                           pycomm, rank 1 to rank 0 in messages of 8 MB, sixteen under way; rank 1
                           sends so many different arrays, one after the other
tcp-pour SECONDS WARMUP ALGORITHM BUFFER   a plain TCP stream
reduce ROUNDS BACKEND MB   torch's all_reduce over a backend
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

import numpy as np

_UNDER_WAY = 16
_TCP_CONGESTION = 13  # netinet/tcp.h
_SNDBUFFORCE, _RCVBUFFORCE = 32, 33  # asm-generic/socket.h


def goodput(arrivals: list[tuple[float, int]], warmup_s: float) -> float:
    """Bits a second between the first arrival after the warm-up and the last."""
    after = [(at, total) for at, total in arrivals if at >= warmup_s]
    (begin, first), (end, last) = after[0], after[-1]
    return 8 * (last - first) / (end - begin)


def pour(
    seconds: float, warmup_s: float, message_bytes: int = 8_000_000, num_arrays: int = _UNDER_WAY
) -> dict[str, Any]:
    """The sender asks after each message whether to go on, by one that comes the other way."""
    import pycomm

    with pycomm.Communicator() as comm:
        count = num_arrays if comm.rank == 1 else _UNDER_WAY
        arrays = [np.zeros(message_bytes, np.uint8) for _ in range(count)]
        works: deque[Any] = deque()
        arrivals: list[tuple[float, int]] = []
        comm.barrier()
        begin = time.monotonic()
        total, index = 0, 0
        last = np.zeros(1, np.int64)
        ending = comm.recv(last, 0, tag=1, async_op=True) if comm.rank == 1 else None
        while True:
            array = arrays[index % count]
            if comm.rank == 1:
                if ending is not None and ending.is_done() and index >= last[0]:
                    break
                works.append(comm.send(array, 0, async_op=True))
            else:
                if last[0] and index >= last[0]:
                    break
                works.append(comm.recv(array, 1, async_op=True))
                if time.monotonic() - begin > seconds and not last[0]:
                    last[0] = index + 2 * _UNDER_WAY
                    comm.send(last, 1, tag=1)
            index += 1
            if len(works) >= _UNDER_WAY:
                works.popleft().wait()
                total += message_bytes
                arrivals.append((time.monotonic() - begin, total))
        while works:
            works.popleft().wait()
        comm.barrier()
        stats = comm.peer_stats()[0]
    return {"bits_per_s": goodput(arrivals, warmup_s) if comm.rank == 0 else 0.0, **stats}


def _grow_buffers(here: socket.socket, num_bytes: int) -> None:
    """Beyond what the system gives by itself; half of what is asked for is overhead to Linux."""
    here.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, num_bytes)
    here.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, num_bytes)


def tcp_pour(seconds: float, warmup_s: float, algorithm: str, buffer: int) -> dict[str, Any]:
    """Rank 0 listens and counts."""
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server((master, port)) as listener:
            _grow_buffers(listener, buffer)
            connection, _ = listener.accept()
            begin, total = time.monotonic(), 0
            arrivals: list[tuple[float, int]] = []
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(1 << 20):
                    total += len(data)
                    arrivals.append((time.monotonic() - begin, total))
        return {"bits_per_s": goodput(arrivals, warmup_s)}
    with socket.socket() as here:
        _grow_buffers(here, buffer)
        # The end cuts off: what waits in the buffer would take minutes over a lossy path.
        here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        here.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, algorithm.encode())
        deadline = time.monotonic() + 10
        while here.connect_ex((master, port)) != 0:
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 does not listen")
            time.sleep(0.05)
        until = time.monotonic() + seconds
        block = bytes(1 << 18)
        while time.monotonic() < until:
            here.sendall(block)
    return {"bits_per_s": 0.0}


def reduce(rounds: int, backend: str, megabytes: float) -> dict[str, Any]:
    """Seconds of each all_reduce, rank 0's; more than one have a warm-up before them."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    tensor = torch.ones(round(megabytes * (1 << 20)) // 4)
    seconds = []
    warmups = int(rounds > 1)
    for _ in range(rounds + warmups):
        dist.barrier()
        begin = time.monotonic()
        dist.all_reduce(tensor)
        seconds.append(time.monotonic() - begin)
        tensor.fill_(1)
    dist.destroy_process_group()
    return {"seconds": seconds[warmups:]}


def main() -> None:
    """Runs what the command line names."""
    what, *rest = sys.argv[1:]
    if what == "pour":
        result = pour(float(rest[0]), float(rest[1]), *map(int, rest[2:]))
    elif what == "tcp-pour":
        result = tcp_pour(float(rest[0]), float(rest[1]), rest[2], int(rest[3]))
    else:
        result = reduce(int(rest[0]), rest[1], float(rest[2]))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""The relay's process, and how others talk to it: one JSON object a line over a local socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pycomm._core import Relay
from pycomm.lab.plan import LabPlan, Wan

SOCKET_NAME = "relay.socket"
WAN_DEVICE = "wan0"
_ANSWER_BYTES_MAX = 1 << 20


def namespace_path(namespace: str) -> str:
    """Where iproute2 keeps it."""
    return f"/run/netns/{namespace}"


def ask(folder: Path, question: dict[str, Any]) -> Any:
    """Asks the relay of the lab in `folder`.

    Raises:
        RuntimeError: it does not run, or refuses.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        try:
            connection.connect(str(folder / SOCKET_NAME))
            connection.sendall(json.dumps(question).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline(_ANSWER_BYTES_MAX))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the lab's relay does not answer: {error}") from error
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


class _Desk:
    """Answers questions about a running relay."""

    def __init__(self, relay: Relay, plan: LabPlan) -> None:
        self._relay = relay
        self._plan = plan
        self._wans: dict[tuple[int, int], Wan] = {}

    def _pairs(self, between: list[int] | None) -> list[tuple[int, int]]:
        sites = range(self._plan.sites)
        if between is None:
            return [(a, b) for a in sites for b in sites if a != b]
        a, b = between
        if a == b or a not in sites or b not in sites:
            raise ValueError(f"there is no link between sites {a} and {b}")
        return [(a, b), (b, a)]

    def set_wan(self, wan: Wan, between: list[int] | None = None) -> None:
        """Of one pair of sites, or of all."""
        for pair in self._pairs(between):
            self._relay.set_link(*pair, **wan.to_link())
            self._wans[pair] = wan

    def answer(self, question: dict[str, Any]) -> Any:
        """The answer to one question."""
        match question["do"]:
            case "set":
                return self.set_wan(Wan(**question["wan"]), question.get("between"))
            case "rebind":
                if question["site"] not in range(self._plan.sites):
                    raise ValueError(f"there is no site {question['site']}")
                return self._relay.rebind(question["site"])
            case "report":
                return [
                    {"from": a, "to": b, "wan": vars(self._wans[a, b])} | self._relay.report(a, b)
                    for a, b in self._pairs(None)
                ]
        raise ValueError(f"the relay cannot '{question['do']}'")

    def serve(self, listener: socket.socket) -> None:
        """Until the listener closes."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                connection.settimeout(5)
                try:
                    answer = {"result": self.answer(json.loads(stream.readline()))}
                except (ValueError, TypeError, KeyError, OSError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                stream.write(json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Runs the relay of the lab in the folder that the command line names."""
    folder = Path(sys.argv[1])
    lab = json.loads((folder / "lab.json").read_text())
    plan = LabPlan.from_json(lab["plan"])
    sites = []
    for site in range(plan.sites):
        a, b, c = (int(part) for part in plan.subnet(site).split("."))
        path = namespace_path(f"{lab['prefix']}-s{site}")
        sites.append((path, WAN_DEVICE, a << 24 | b << 16 | c << 8))
    relay = Relay(sites, plan.seed)
    desk = _Desk(relay, plan)
    desk.set_wan(plan.wan or Wan())
    signal.signal(signal.SIGTERM, lambda *_: relay.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for what runs in the hosts
    worker = threading.Thread(target=relay.run)
    worker.start()
    listener = socket.socket(socket.AF_UNIX)
    os.umask(0o177)
    listener.bind(str(folder / SOCKET_NAME))
    listener.listen()
    threading.Thread(target=desk.serve, args=(listener,), daemon=True).start()
    while worker.is_alive():  # signals are seen in this thread, between naps
        time.sleep(0.1)
        if lab["owner"] and not Path(f"/proc/{lab['owner']}").exists():
            relay.stop()


if __name__ == "__main__":
    main()

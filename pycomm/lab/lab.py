"""Brings a lab up and down, and runs commands in its hosts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from pycomm.lab import relay
from pycomm.lab.plan import LabPlan, Wan

LABS = Path("/run/pycomm-lab")
_READY_S = 10.0


class LabError(RuntimeError):
    """A lab cannot be brought up, or does not do what it was asked for."""


def refusal() -> str:
    """Why there can be no lab here, or ""."""
    if os.geteuid() != 0:
        return (
            "network namespaces need root (sudo, or a container with CAP_NET_ADMIN and SYS_ADMIN)"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no '{tool}' here; install iproute2"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun here (modprobe tun; in a container, --device /dev/net/tun)"
    probe = subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True, text=True)
    return f"no new network namespace: {probe.stderr.strip()}" if probe.returncode else ""


def _sh(*command: str) -> None:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise LabError(f"{' '.join(command)}: {(result.stderr or result.stdout).strip()}")


def _allow_tcp(algorithm: str) -> None:
    """Lets namespaces choose an algorithm that the system has; stays allowed afterwards."""
    here = Path("/proc/sys/net/ipv4")
    available = (here / "tcp_available_congestion_control").read_text().split()
    if algorithm not in available:
        raise LabError(f"TCP has no '{algorithm}' here, but {', '.join(available)}")
    allowed = here / "tcp_allowed_congestion_control"
    if algorithm not in allowed.read_text().split():
        allowed.write_text(f"{allowed.read_text().strip()} {algorithm}")


def _start_time(pid: int) -> str:
    """Tells a process from a later one of the same number; "" if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return ""


class Lab:
    """Hosts and the network between them. As a context it is up for the block.

    Args:
        plan: What there is.
        name: Of a lab that others may find; default: one of this process's own.
    """

    def __init__(self, plan: LabPlan, name: str = "") -> None:
        self.plan = plan
        self.name = name or f"{os.getpid()}-{secrets.token_hex(2)}"
        self.folder = LABS / self.name
        self._processes: list[subprocess.Popen[Any]] = []

    def up(self, *, outlives_us: bool = False) -> Lab:
        """Brings it up; unless it `outlives_us`, it goes with this process at the latest.

        Raises:
            LabError: no root, no iproute2, or a lab of this name is up; see `refusal`.
        """
        if reason := refusal():
            raise LabError(reason)
        sweep()
        try:
            self.folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            raise LabError(f"lab '{self.name}' is up; take it down: pycomm lab down") from None
        self._write(owner=0 if outlives_us else os.getpid(), relay=0)
        try:
            self._build()
        except BaseException:
            self.down()
            raise
        return self

    @property
    def prefix(self) -> str:
        """Of its namespaces' names."""
        return f"pycomm-{self.name}"

    def _write(self, **more: Any) -> None:
        file = self.folder / "lab.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        fresh = {**before, "prefix": self.prefix, "plan": self.plan.to_json(), **more}
        file.write_text(json.dumps(fresh))

    def namespace(self, host: int) -> str:
        """The host's, for `ip netns exec`."""
        if host not in range(self.plan.hosts):
            raise LabError(f"there is no host {host} among {self.plan.hosts}")
        return f"{self.prefix}-h{host}"

    def _site(self, site: int) -> str:
        return f"{self.prefix}-s{site}"

    # ---------------------------------------------------------------- up
    def _build(self) -> None:
        for site in range(self.plan.sites):
            router = self._site(site)
            _sh("ip", "netns", "add", router)
            _sh("ip", "-n", router, "link", "set", "lo", "up")
            _sh("ip", "-n", router, "link", "add", "lan0", "type", "bridge")
            gateway = f"{self.plan.subnet(site)}.1"
            _sh("ip", "-n", router, "addr", "add", f"{gateway}/24", "dev", "lan0")
            _sh("ip", "-n", router, "link", "set", "lan0", "up")
            for host in self.plan.hosts_of(site):
                self._build_host(host, router, gateway)
        if self.plan.sites > 1:
            self._start_relay()

    def _build_host(self, host: int, router: str, gateway: str) -> None:
        mine = self.namespace(host)
        port = f"h{host}"
        _sh("ip", "netns", "add", mine)
        _sh("ip", "-n", mine, "link", "set", "lo", "up")
        ends = ("eth0", "netns", mine, "type", "veth", "peer", "name", port, "netns", router)
        _sh("ip", "link", "add", *ends)
        _sh("ip", "-n", router, "link", "set", port, "master", "lan0", "up")
        _sh("ip", "-n", mine, "addr", "add", f"{self.plan.address(host)}/24", "dev", "eth0")
        _sh("ip", "-n", mine, "link", "set", "eth0", "up")
        _sh("ip", "-n", mine, "route", "add", "default", "via", gateway)
        if self.plan.tcp:
            _allow_tcp(self.plan.tcp)
            self._sysctl(mine, "net.ipv4.tcp_congestion_control", self.plan.tcp)
        self.set_rate(host, self.plan.rate_mbit(host))

    def _sysctl(self, namespace: str, name: str, value: str) -> None:
        path = "/proc/sys/" + name.replace(".", "/")
        _sh("ip", "netns", "exec", namespace, "sh", "-c", f"echo {value} > {path}")

    def _start_relay(self) -> None:
        with (self.folder / "relay.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pycomm.lab.relay", str(self.folder)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._write(relay=process.pid, relay_start=_start_time(process.pid))
        deadline = time.monotonic() + _READY_S
        while not (self.folder / relay.SOCKET_NAME).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                log_text = (self.folder / "relay.log").read_text().strip()
                raise LabError(f"the relay did not start: {log_text[-500:]}")
            time.sleep(0.01)
        for site in range(self.plan.sites):
            router = self._site(site)
            device = relay.WAN_DEVICE
            _sh("ip", "-n", router, "link", "set", device, "txqueuelen", "10000", "up")
            _sh("ip", "-n", router, "route", "add", "10.77.0.0/16", "dev", device)
            self._sysctl(router, "net.ipv4.ip_forward", "1")

    # ---------------------------------------------------------------- changes
    def set_rate(self, host: int, mbit: float) -> None:
        """Shapes the host's link both ways; 0 takes the bound away."""
        ends = ((self.namespace(host), "eth0"), (self._site(self.plan.site_of(host)), f"h{host}"))
        for namespace, device in ends:
            place = ("tc", "-n", namespace, "qdisc")
            if mbit:
                shape = ("rate", f"{mbit}mbit", "burst", f"{max(16, int(mbit / 8))}kb")
                _sh(*place, "replace", "dev", device, "root", "tbf", *shape, "latency", "40ms")
            else:
                _sh(*place, "replace", "dev", device, "root", "noqueue")

    def set_wan(self, wan: Wan, between: tuple[int, int] | None = None) -> None:
        """Changes the network between two sites, or all, at once."""
        question = {"do": "set", "wan": asdict(wan)}
        self._ask(question if between is None else {**question, "between": list(between)})

    def rebind(self, site: int) -> None:
        """A NAT before `site` forgets: its UDP comes from other ports from now on."""
        self._ask({"do": "rebind", "site": site})

    def report(self) -> list[dict[str, Any]]:
        """What the relay did, a row a direction."""
        return list(self._ask({"do": "report"})) if self.plan.sites > 1 else []

    def _ask(self, question: dict[str, Any]) -> Any:
        if self.plan.sites == 1:
            raise LabError("this lab is one site: there is no network between sites")
        try:
            return relay.ask(self.folder, question)
        except RuntimeError as error:
            raise LabError(str(error)) from error

    # ---------------------------------------------------------------- commands
    def start(self, host: int, command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """Starts a command in a host; `more` is of subprocess.Popen. Ended by down()."""
        inside = ["ip", "netns", "exec", self.namespace(host), *command]
        process = subprocess.Popen(inside, **more)
        self._processes.append(process)
        return process

    def run(self, host: int, command: Sequence[str], timeout_s: float = 60) -> str:
        """Runs a command in a host and gives its output. Raises: LabError if it fails."""
        process = self.start(
            host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise LabError(
                f"'{' '.join(command)}' on host {host} took over {timeout_s} s"
            ) from None
        if process.returncode != 0:
            raise LabError(f"'{' '.join(command)}' on host {host}: {output.strip()}")
        return str(output)

    def processes(self) -> list[int]:
        """Of everything that runs in its hosts."""
        found = []
        for host in range(self.plan.hosts):
            listed = subprocess.run(
                ["ip", "netns", "pids", self.namespace(host)],
                check=False,
                capture_output=True,
                text=True,
            )
            found += [int(pid) for pid in listed.stdout.split()]
        return found

    # ---------------------------------------------------------------- down
    def down(self) -> None:
        """Ends what `start` began and the relay, and takes the namespaces away. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes.clear()
        _take_down(self.folder)

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()


def _take_down(folder: Path) -> None:
    file = folder / "lab.json"
    if not file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        return
    lab = json.loads(file.read_text())
    pid = lab.get("relay", 0)
    if pid and _start_time(pid) == lab.get("relay_start") != "":
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 2
        while _start_time(pid) == lab["relay_start"] and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
    for entry in Path("/run/netns").glob(f"{lab['prefix']}-[hs]*"):
        subprocess.run(["ip", "netns", "del", entry.name], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Takes down labs whose owner was killed."""
    for folder in LABS.glob("*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            owner = json.loads((folder / "lab.json").read_text())["owner"]
            if owner and not Path(f"/proc/{owner}").exists():
                _take_down(folder)


def open_lab(name: str) -> Lab:
    """A lab that `pycomm lab up` left running.

    Raises:
        LabError: there is none of this name.
    """
    file = LABS / name / "lab.json"
    if not file.exists():
        there = ", ".join(sorted(folder.name for folder in LABS.glob("*"))) or "none"
        raise LabError(f"no lab '{name}' is up (there are: {there}); pycomm lab up --hosts 2")
    return Lab(LabPlan.from_json(json.loads(file.read_text())["plan"]), name)

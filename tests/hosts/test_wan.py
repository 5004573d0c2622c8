"""Jobs over bad networks: what has to arrive arrives, over the way that was meant, encrypted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from pycomm.lab import Lab, LabPlan, Wan
from tests.hosts.conftest import MakeLab
from tests.hosts.job import RANK, Job


def has_nft() -> bool:
    return any((Path(folder) / "nft").exists() for folder in ("/usr/sbin", "/sbin", "/usr/bin"))


needs_nft = pytest.mark.skipif(not has_nft(), reason="no nft here; install nftables")


WEATHERS = {
    "clean": Wan(rtt_ms=20),
    "lossy": Wan(rtt_ms=40, loss=0.02, rate_mbit=300),
    "bursts": Wan(rtt_ms=20, burst=(0.002, 0.1, 1), rate_mbit=300),
    "reordering": Wan(rtt_ms=20, jitter_ms=8, reorders=True, duplicates=0.02),
    "far": Wan(rtt_ms=250, loss=0.001, rate_mbit=300),
    "small": Wan(rtt_ms=10, mtu=1280),
}


@pytest.mark.parametrize("weather", WEATHERS)
def test_sums_are_right_in_any_weather(make_lab: MakeLab, certs: Path, weather: str) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=WEATHERS[weather]))
    for result in Job(lab, certs, "sums").results():
        assert result == {"transport": "quic", "ok": True}


def test_the_path_may_change_under_a_running_job(make_lab: MakeLab, certs: Path) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=20, rate_mbit=300)))
    job = Job(lab, certs, "long")
    time.sleep(1.5)
    lab.rebind(1)
    time.sleep(0.5)
    lab.set_wan(Wan(rtt_ms=20, rate_mbit=300, mtu=1280, loss=0.01))
    time.sleep(1)
    lab.rebind(1)
    for result in job.results():
        assert result["ok"] and result["mtu"] <= 1252


@needs_nft
def test_paths_share_the_load_and_one_that_is_cut_is_done_without(
    make_lab: MakeLab, certs: Path
) -> None:
    # Each path has a rate of its own, and the job wants more than either: on a common one it would
    # be chance who gets how much, and what one can carry alone is left to the quicker.
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=20)))
    for host in (0, 1):
        lab.run(host, ["ip", "address", "add", f"10.77.{host}.50/24", "dev", "eth0"])
        police = "; ".join(
            f"ip daddr {address} limit rate over {rate} mbytes/second burst 100 kbytes drop"
            for address, rate in ((f"10.77.{host}.10", 6), (f"10.77.{host}.50", 5))
        )
        chain = f"chain c {{ type filter hook input priority -1; {police}; }}"
        lab.run(host, ["nft", f"table inet police {{ {chain}; }}"])
    job = Job(lab, certs, "paths", PYCOMM_QUIC_PATHS="10.77.{host}.10,10.77.{host}.50")
    output = job.ranks[0].stdout
    assert output is not None
    assert output.readline() == "first\n"
    for host in (0, 1):
        drop = f"ip daddr 10.77.{host}.50 drop"
        chain = f"chain c {{ type filter hook input priority 0; {drop}; }}"
        lab.run(host, ["nft", f"table inet t {{ {chain}; }}"])
    for result in job.results():
        low, high = result["first"]
        assert low > 0.25 * high, result
        low, high = result["last"]
        assert high > 10_000_000 and low < 0.05 * high, result


def test_a_trace_tells_what_both_ends_saw(make_lab: MakeLab, certs: Path, tmp_path: Path) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=10, loss=0.02)))
    for result in Job(lab, certs, "sums", PYCOMM_QUIC_QLOG=str(tmp_path)).results():
        assert result["ok"]
    names: dict[str, dict[str, int]] = {}
    sent: dict[str, set[int]] = {}
    received: dict[str, set[int]] = {}
    for side in ("client", "server"):
        (file,) = tmp_path.glob(f"*_{side}.sqlog")
        head, *events = [json.loads(record) for record in file.read_text().split("\x1e")[1:]]
        assert head["qlog_version"] == "0.3"
        assert head["trace"]["vantage_point"]["type"] == side
        numbers = {
            name: {
                event["data"]["header"]["packet_number"]
                for event in events
                if event["name"] == name
            }
            for name in ("transport:packet_sent", "transport:packet_received")
        }
        sent[side], received[side] = numbers.values()
        names[side] = Counter(event["name"] for event in events)
        times = [event["time"] for event in events]
        assert times == sorted(times)
        frames = {f["frame_type"] for e in events for f in e["data"].get("frames", [])}
        assert {"stream", "ack", "datagram", "ping", "padding"} <= frames
        assert not frames & {"unknown"}
    for one, other in (("client", "server"), ("server", "client")):
        assert received[one] <= sent[other]
        assert 0.9 * len(sent[other]) < len(received[one]) < len(sent[other])
        assert names[one]["recovery:packet_lost"] > 0
        assert names[one]["recovery:metrics_updated"] > 0
        assert names[one]["connectivity:connection_closed"] == 1


def test_a_killed_peer_is_named_within_seconds(make_lab: MakeLab, certs: Path) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=40, loss=0.01)))
    job = Job(lab, certs, "until-lost")
    time.sleep(2.5)
    begin = time.monotonic()
    victim = next(p for p in lab.processes() if _is_inside(lab, 1, p))
    os.kill(victim, signal.SIGKILL)
    last = job.lines(0)[-1]
    assert "PeerLostError" in last and "rank 1" in last, last
    assert time.monotonic() - begin < 4


def _is_inside(lab: Lab, host: int, pid: int) -> bool:
    name = Path(f"/proc/{pid}/ns/net").stat().st_ino
    return Path(f"/run/netns/{lab.namespace(host)}").stat().st_ino == name


def block_udp(lab: Lab, host: int) -> None:
    """As a firewall that lets nothing but TCP through."""
    table = (
        "table inet t { chain c { type filter hook input priority 0; meta l4proto udp drop; }; }"
    )
    lab.run(host, ["nft", table])


@needs_nft
def test_where_udp_is_blocked_tls_over_tcp_serves_and_says_so(
    make_lab: MakeLab, certs: Path
) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=5)))
    block_udp(lab, 0)
    job = Job(lab, certs, "sums")
    lines = job.lines(1)
    assert json.loads(lines[-1]) == {"transport": "tls", "ok": True}, lines
    assert any("TLS over TCP is used instead" in line for line in lines), lines
    lab.down()


@needs_nft
def test_a_port_range_and_an_address_are_enough_for_a_firewall(
    make_lab: MakeLab, certs: Path
) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=5)))
    for host in range(2):
        rules = (
            "table inet t { chain c { type filter hook input priority 0; policy drop; "
            'iifname "lo" accept; udp dport 20000-20009 accept; tcp dport 29500-29501 accept; '
            "ct state established,related accept; }; }"
        )
        lab.run(host, ["nft", rules])
    settings = {"PYCOMM_PORT_RANGE": "20000-20009", "PYCOMM_TRANSPORT": "quic"}
    for result in Job(lab, certs, "sums", **settings).results():
        assert result == {"transport": "quic", "ok": True}


@pytest.mark.parametrize("transport", ["quic", "tls", "tcp"])
def test_nobody_on_the_path_can_read_what_is_encrypted(
    make_lab: MakeLab, certs: Path, transport: str
) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=2)))
    sniffer = lab.start(
        1, [sys.executable, RANK, "sniff"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert sniffer.stdout is not None and sniffer.stdout.readline() == "ready\n"
    choice = "quic" if transport == "quic" else "tcp"
    job = Job(lab, None if transport == "tcp" else certs, "secret", PYCOMM_TRANSPORT=choice)
    assert all(result["transport"] == transport for result in job.results())
    seen = json.loads(sniffer.communicate("stop\n")[0])
    assert seen["packets"] > 100
    assert (seen["readable"] > 0) == (transport == "tcp"), seen

"""The lab itself: that its networks are what was asked for, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pycomm.cli import main
from pycomm.lab import Lab, LabError, LabPlan, Wan, refusal
from tests.hosts.conftest import MakeLab

TRAFFIC = [sys.executable, str(Path(__file__).with_name("traffic.py"))]


def start_ready(lab: Lab, host: int, *arguments: str) -> subprocess.Popen[str]:
    process = lab.start(host, [*TRAFFIC, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def ping(lab: Lab, count: int, *, num_bytes: int = 100, gap_ms: float = 2) -> dict[str, Any]:
    """UDP round trips from host 0 to host 1, where `echo 7000` runs."""
    address = lab.plan.address(1)
    output = lab.run(
        0, [*TRAFFIC, "ping", address, "7000", str(count), str(num_bytes), str(gap_ms)]
    )
    return dict(json.loads(output))


def left_over(owner: int) -> list[str]:
    """What there is of the labs of a process; other processes may have theirs."""
    labs = Path("/run/pycomm-lab").glob(f"{owner}-*")
    return [str(place) for place in [*Path("/run/netns").glob(f"pycomm-{owner}-*"), *labs]]


def test_delay_loss_duplicates_and_mtu_are_as_asked(make_lab: MakeLab) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=30)))
    start_ready(lab, 1, "echo", "7000")
    plain = ping(lab, 40)
    assert plain["lost"] == 0 and plain["overtaken"] == 0
    assert 30 <= plain["rtts_ms"][20] < 40
    lab.set_wan(Wan(loss=0.2))
    lossy = ping(lab, 600, gap_ms=1)
    assert 0.25 < lossy["lost"] / 600 < 0.47  # 1 - 0.8^2 = 0.36, at five deviations
    lab.set_wan(Wan(duplicates=1))
    assert ping(lab, 20)["doubled"] == 20 * 3
    lab.set_wan(Wan(mtu=1280))
    assert ping(lab, 5, num_bytes=1252)["lost"] == 0
    assert ping(lab, 5, num_bytes=1253)["lost"] == 5
    lab.set_wan(Wan(jitter_ms=20))
    assert ping(lab, 100)["overtaken"] == 0
    lab.set_wan(Wan(jitter_ms=20, reorders=True))
    assert ping(lab, 100)["overtaken"] > 10
    report = lab.report()[0]
    assert report["num_lost"] > 50 and report["num_too_long"] == 5


def test_rates_of_hosts_and_of_the_wan_are_kept(make_lab: MakeLab) -> None:
    lab = make_lab(LabPlan(hosts=2, rates_mbit=(100, 0), wan=Wan(rtt_ms=2, rate_mbit=400)))
    sink = start_ready(lab, 0, "sink", "7001")
    lab.run(1, [*TRAFFIC, "pour", lab.plan.address(0), "7001", "1.5"])
    assert 85 < json.loads(sink.communicate()[0])["mbit_per_s"] <= 100
    lab.set_rate(0, 0)
    sink = start_ready(lab, 0, "sink", "7001")
    lab.run(1, [*TRAFFIC, "pour", lab.plan.address(0), "7001", "1.5"])
    assert 250 < json.loads(sink.communicate()[0])["mbit_per_s"] <= 400


def test_a_rebinding_changes_the_port_that_the_peer_sees(make_lab: MakeLab) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=2)))
    listening = (
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.bind(('0.0.0.0', 7002))\n"
        "print('ready', flush=True)\n"
        "for _ in range(2): print(s.recvfrom(100)[1][1], flush=True)\n"
    )
    there = lab.start(1, [sys.executable, "-c", listening], stdout=subprocess.PIPE, text=True)
    assert there.stdout is not None and there.stdout.readline() == "ready\n"
    sending = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"s.connect(('{lab.plan.address(1)}', 7002))\n"
        "for _ in sys.stdin: s.send(b'x')\n"
    )
    here = lab.start(0, [sys.executable, "-c", sending], stdin=subprocess.PIPE, text=True)
    assert here.stdin is not None
    here.stdin.write("\n")
    here.stdin.flush()
    before = int(there.stdout.readline())
    lab.rebind(0)
    here.stdin.write("\n")
    here.stdin.flush()
    assert int(there.stdout.readline()) == before + 1


def test_hosts_have_the_congestion_control_that_was_asked_for(make_lab: MakeLab) -> None:
    lab = make_lab(LabPlan(hosts=1, tcp="cubic"))
    assert lab.run(0, ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]) == "cubic\n"
    with pytest.raises(LabError, match="no 'carrier-pigeon' here"):
        make_lab(LabPlan(hosts=1, tcp="carrier-pigeon"))


def test_hosts_of_a_site_share_a_lan_and_sites_a_wan(make_lab: MakeLab) -> None:
    lab = make_lab(LabPlan(hosts=4, sites=2, wan=Wan(rtt_ms=20)))
    assert [lab.plan.site_of(host) for host in range(4)] == [0, 0, 1, 1]
    start_ready(lab, 1, "echo", "7000")
    assert ping(lab, 10)["rtts_ms"][5] < 5
    far = [*TRAFFIC, "ping", lab.plan.address(1), "7000", "10", "100"]
    assert 20 <= json.loads(lab.run(3, far))["rtts_ms"][5] < 30


def test_nothing_stays_when_it_goes_down_nor_when_its_owner_is_killed(tmp_path: Path) -> None:
    if reason := refusal():
        pytest.skip(f"no lab: {reason}")
    with Lab(LabPlan(hosts=2, wan=Wan(rtt_ms=1))) as lab:
        lab.start(0, ["sleep", "100"])
        assert len(left_over(os.getpid())) == 5
        assert len(lab.processes()) == 1
    assert left_over(os.getpid()) == []
    script = (
        "import os, signal\n"
        "from pycomm.lab import Lab, LabPlan, Wan\n"
        "Lab(LabPlan(hosts=2, wan=Wan(rtt_ms=1))).up()\n"
        "print('up', flush=True)\n"
        "signal.pause()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "up\n"
    assert len(left_over(owner.pid)) == 5
    owner.kill()
    owner.wait()
    time.sleep(0.3)  # its relay notices by itself
    with Lab(LabPlan(hosts=1)):
        assert left_over(owner.pid) == []


def test_the_command_brings_one_up_changes_it_and_takes_it_down() -> None:
    if reason := refusal():
        pytest.skip(f"no lab: {reason}")
    name = f"test{os.getpid()}"

    def call(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(main, ["lab", *arguments])
        assert result.exit_code == status, result.output
        return result.output

    up = call("up", "--name", name, "--hosts", "2", "--rtt", "10", "--rates", "200,1000")
    try:
        assert "10.77.0.10" in up and "200 Mbit/s" in up and "10.77.1.10" in up
        assert "is up" in call("up", "--name", name, status=1)
        call("set", "--name", name, "--loss", "1.5", "--between", "0,1")
        assert "lost 0" in call("show", "--name", name)
        assert "no network between" in call("set", "--name", name, "--between", "0,9", status=1)
    finally:
        call("down", "--name", name)
    assert "pycomm lab up" in call("down", "--name", name, status=1)


def test_a_job_runs_over_the_hosts(tmp_path: Path) -> None:
    if reason := refusal():
        pytest.skip(f"no lab: {reason}")
    from pycomm.lab.job import run_job

    script = (
        "import sys, numpy, pycomm\n"
        "with pycomm.Communicator() as comm:\n"
        "    x = comm.all_reduce(numpy.full(1000, comm.rank + 1.0))\n"
        "    assert (x == 6).all() and comm.peer_stats()[0]['transport'] == 'tcp'\n"
        "    open(f'{sys.argv[1]}/{comm.rank}', 'w').close()\n"
        "    sys.exit(7 if len(sys.argv) > 2 and comm.rank == 1 else 0)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with Lab(LabPlan(hosts=3, wan=Wan(rtt_ms=2))) as lab:
        assert run_job(lab, command) == 0
        assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]
        assert run_job(lab, [*command, "fail"]) == 7
        assert lab.processes() == []


@pytest.mark.parametrize(
    "plan",
    [
        {"hosts": 0},
        {"hosts": 2, "sites": 3},
        {"hosts": 2, "rates_mbit": (1, 2, 3)},
        {"hosts": 2, "rates_mbit": (-1,)},
    ],
)
def test_a_plan_that_cannot_be_is_refused(plan: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="hosts"):
        LabPlan(**plan)


@pytest.mark.parametrize("wan", [{"loss": 1.5}, {"rtt_ms": -1}, {"burst": (0.1, 0.2)}])
def test_a_wan_that_cannot_be_is_refused(wan: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"shares|negative|three"):
        Wan(**wan)


def test_without_root_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in refusal()
    with pytest.raises(LabError, match="root"):
        Lab(LabPlan()).up()

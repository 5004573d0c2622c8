"""What an analyser that we did not write makes of our packets, with and without the keys."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from pycomm.lab import Lab, LabPlan, Wan
from tests.hosts.conftest import MakeLab
from tests.hosts.job import Job

TSHARK, MERGECAP = shutil.which("tshark"), shutil.which("mergecap") or ""
pytestmark = pytest.mark.skipif(TSHARK is None, reason="no tshark here; install tshark")


def capture(lab: Lab, host: int, file: Path) -> subprocess.Popen[bytes]:
    """Writes what arrives at a host: what leaves it is not cut into packets there yet."""
    assert TSHARK is not None
    port = f"udp and not src host {lab.plan.address(host)}"
    process = lab.start(
        host, [TSHARK, "-i", "eth0", "-w", str(file), "-f", port], stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    for line in process.stderr:
        if b"Capturing on" in line:
            break
    time.sleep(1)  # it says so before it is
    return process


def packets(file: Path, keys: Path | None) -> list[dict[str, list[str]]]:
    """The fields of each packet, as the analyser sees them."""
    assert TSHARK is not None
    names = ["quic.version", "quic.frame_type", "quic.decryption_failed", "_ws.malformed"]
    command = [TSHARK, "-r", str(file), "-T", "json", "--no-duplicate-keys"]
    for name in names:
        command += ["-e", name]
    if keys is not None:
        command += ["-o", f"tls.keylog_file:{keys}"]
    environment = {name: value for name, value in os.environ.items() if name != "SSLKEYLOGFILE"}
    said = subprocess.run(command, capture_output=True, check=True, env=environment, text=True)
    return [packet["_source"]["layers"] for packet in json.loads(said.stdout)]


def test_tshark_decrypts_all_with_the_keys_and_nothing_without(
    make_lab: MakeLab, certs: Path, tmp_path: Path
) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=10, loss=0.01)))
    # tshark drops its privileges, and root's temporary folders are root's alone.
    files = [Path("/tmp") / f"pycomm-capture-{os.getpid()}-{host}.pcapng" for host in range(2)]
    keys = tmp_path / "keys"
    recorders = [capture(lab, host, file) for host, file in enumerate(files)]
    try:
        job = Job(lab, certs, "sums", PYCOMM_QUIC_KEYLOG=str(keys))
        said = [job.lines(rank) for rank in range(2)]
        time.sleep(1)
        for recorder in recorders:
            recorder.terminate()
            recorder.wait(20)
        # Each half of the conversation is read with the other's first packets to go by.
        merged = files[0].with_suffix(".both")
        subprocess.run([MERGECAP, "-w", str(merged), *map(str, files)], check=True)
        files.append(merged)
        seen = packets(merged, keys)
        blind = packets(merged, None)
    finally:
        for recorder in recorders:
            recorder.kill()
        for file in files:
            file.unlink(missing_ok=True)
    for lines in said:
        assert json.loads(lines[-1])["ok"]
        assert any("PYCOMM_QUIC_KEYLOG" in line for line in lines), lines
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert len(seen) > 1_000
    frames = {int(frame) for packet in seen for frame in packet.get("quic.frame_type", [])}
    assert 0x06 in frames and 0x31 in frames and {0x02, 0x03} & frames  # CRYPTO, DATAGRAM, ACK
    assert {*range(0x08, 0x10)} & frames  # STREAM
    assert not [packet for packet in seen if "_ws.malformed" in packet]
    assert not [packet for packet in seen if "quic.decryption_failed" in packet]
    assert all("quic.frame_type" in packet for packet in seen)
    versions = {int(v, 0) for packet in seen for v in packet.get("quic.version", [])}
    assert versions == {0x6B3343CF}
    readable = [packet for packet in blind if "quic.frame_type" in packet]
    assert len(readable) < 20  # Initial packets, whose keys are no secret


def test_a_key_log_of_others_is_not_ours(make_lab: MakeLab, certs: Path, tmp_path: Path) -> None:
    lab = make_lab(LabPlan(hosts=2, wan=Wan(rtt_ms=5)))
    keys = tmp_path / "keys"
    for result in Job(lab, certs, "sums", SSLKEYLOGFILE=str(keys)).results():
        assert result["ok"]
    assert not keys.exists()

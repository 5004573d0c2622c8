"""Runs the encrypted probe: makes certificates, starts both ranks, prints their one line.

run_probe.py --program PATH/quic_probe
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT_S = 60


def main() -> int:
    """Exit status 0 if both ranks ended well."""
    parser = argparse.ArgumentParser(description="The encrypted probe.")
    parser.add_argument("--program", type=Path, required=True)
    program = str(parser.parse_args().program.resolve())
    with tempfile.TemporaryDirectory(prefix="pycomm-quic-") as folder:
        certs, ports = Path(folder) / "certs", Path(folder) / "ports"
        ports.mkdir()
        script = [sys.executable, str(HERE / "handshake.py")]
        subprocess.run([*script, "--make-certs", str(certs)], check=True, timeout=TIMEOUT_S)
        ranks = [
            subprocess.Popen(
                [
                    *[*script, "--rank", str(rank), "--certs", str(certs)],
                    *["--port-file", str(ports), "--program", program, "--rank", str(rank)],
                ]
            )
            for rank in (0, 1)
        ]
        try:
            return max(rank.wait(timeout=TIMEOUT_S) for rank in ranks)
        except subprocess.TimeoutExpired:
            print("the encrypted probe did not end in time", file=sys.stderr)
            return 1
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    sys.exit(main())

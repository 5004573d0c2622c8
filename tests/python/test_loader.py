"""What a user sees when the compiled module and torch do not fit each other."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_another_torch_than_it_was_built_for_is_told_with_the_remedy() -> None:
    ran = run(
        """
        import torch.distributed as dist
        from pycomm import _torch
        _torch.torch_version = "2.9.1+cu130"  # as if it had been built for that one
        dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
        """
    )
    assert ran.returncode != 0
    last = ran.stderr.strip().splitlines()[-1]
    assert "built for torch 2.9.1+cu130, this is 2.13" in last and "pip install" in last


def test_importing_the_package_does_not_import_torch() -> None:
    ran = run(
        "import sys, pycomm; assert 'torch' not in sys.modules; pycomm.Communicator().close()"
    )
    assert ran.returncode == 0, ran.stderr


def test_without_autoload_an_import_registers_the_backend() -> None:
    script = """
        import torch.distributed as dist, pycomm
        dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
        dist.barrier()
        dist.destroy_process_group()
        """
    assert run(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode == 0

"""torch.distributed over RDMA. Importing torch takes a minute on emulated processors, so there is
one case, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rdma.ranks import devices

PROGRAM = """
import sys
import torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("pycomm", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
data = torch.full((1 << 20,), float(rank + 1))
dist.all_reduce(data)
assert (data == 3).all()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
model(torch.ones(2, 300)).sum().backward()
grads = [torch.empty_like(model.module.weight.grad) for _ in range(2)]
dist.all_gather(grads, model.module.weight.grad)
assert torch.equal(*grads)
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.timeout(320)
def test_all_reduce_and_a_ddp_step(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "meet")],
            env=os.environ
            | {
                "PYCOMM_TRANSPORT": "rdma",
                "PYCOMM_IB_HCA": devices(rank, 2),
                "PYCOMM_DEBUG": "INFO",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        out, log = process.communicate(timeout=300)
        assert process.returncode == 0 and out == "fine\n", log[-2000:]
        assert f"rdma to rank {1 - rank}" in log

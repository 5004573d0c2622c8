"""These tests run where RDMA devices are: `make test-rdma` boots a machine that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

DEVICES = Path("/sys/class/infiniband")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (DEVICES / "rxe3").exists():
        return
    for item in items:
        if "tests/rdma" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="no soft RoCE devices here: make test-rdma"))

"""Labs for tests; without root they are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pycomm.control.certificates import Authority
from pycomm.lab import Lab, LabPlan, refusal

MakeLab = Callable[[LabPlan], Lab]


@pytest.fixture
def make_lab() -> Iterator[MakeLab]:
    """Brings labs up and takes them down with the test."""
    if reason := refusal():
        pytest.skip(f"no lab: {reason}")
    labs: list[Lab] = []

    def make(plan: LabPlan) -> Lab:
        labs.append(Lab(plan).up())
        return labs[-1]

    yield make
    for lab in labs:
        lab.down()


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    Authority.create(tmp_path / "ca", "wan").issue(tmp_path / "certs")
    return tmp_path / "certs"

"""Labs for tests; without root they are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

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

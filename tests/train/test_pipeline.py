"""Schedules are complete, free of deadlock and as short as their papers say; so is the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pycomm.train.pipeline.links import Links
from pycomm.train.pipeline.schedule import (
    Action,
    Costs,
    Schedule,
    choose,
    gpipe,
    interleaved,
    one_f_one_b,
    predict,
    zero_bubble,
)
from tests.ranks import run_ranks
from tests.train.runs import in_ranks

UNIT = Costs(1.0, 2.0)
MAKERS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero_bubble": zero_bubble,
}


def check_complete(schedule: Schedule, p: int, m: int, v: int) -> None:
    """Every pass of every microbatch of every stage once, on its rank, in a possible order."""
    for rank, row in enumerate(schedule):
        kinds = {kind for kind, _, _ in row}
        backward = ["I", "W"] if "I" in kinds else ["B"]
        stages = range(rank, p * v, p)
        wanted = [Action(k, s, i) for k in ["F", *backward] for s in stages for i in range(m)]
        assert sorted(row) == sorted(wanted)
        for s in stages:
            for i in range(m):
                times = [row.index(Action(k, s, i)) for k in ["F", *backward]]
                assert times == sorted(times)
    predict(schedule, p * v, UNIT)  # raises if it waits for itself


@pytest.mark.parametrize("name", MAKERS)
@given(p=st.integers(1, 9), m=st.integers(1, 20))
def test_schedules_are_complete(name: str, p: int, m: int) -> None:
    check_complete(MAKERS[name](p, m), p, m, 1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_schedules_are_complete(p: int, rounds: int, v: int) -> None:
    check_complete(interleaved(p, p * rounds, v), p, p * rounds, v)


def test_a_schedule_that_waits_for_itself_is_noticed() -> None:
    schedule = one_f_one_b(2, 2)
    schedule[0].reverse()
    with pytest.raises(ValueError, match="waits for itself"):
        predict(schedule, 2, UNIT)


@given(st.integers(2, 8), st.integers(1, 40))
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_turns(p: int, m: int) -> None:
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        seconds = predict(schedule, p, UNIT).seconds
        assert seconds == pytest.approx((m + p - 1) * 3)
    assert predict(gpipe(p, m), p, UNIT).in_flight_max == m
    assert predict(one_f_one_b(p, m), p, UNIT).in_flight_max == min(p, m)


def test_interleaving_divides_the_bubble_and_zero_bubble_hides_weights() -> None:
    """Narayanan et al.: the bubble shrinks by the stages a rank. Qi et al.: ZB-H1's is a third of
    1F1B's for F = I = W, in 1F1B's memory."""
    p, m = 4, 16
    plain = predict(one_f_one_b(p, m), p, UNIT)
    halved = predict(interleaved(p, m, 2), 2 * p, Costs(0.5, 1.0))
    assert plain.seconds - m * 3 == pytest.approx((p - 1) * 3)
    assert halved.seconds - m * 3 == pytest.approx((p - 1) * 3 / 2)
    hidden = predict(zero_bubble(p, m, UNIT), p, UNIT)
    assert hidden.seconds - m * 3 <= (p - 1) * 2 + 1e-9
    assert hidden.in_flight_max <= p


def test_eight_percent_of_bubble_at_four_stages_takes_35_microbatches() -> None:
    assert predict(one_f_one_b(4, 34), 4, UNIT).bubble > 0.08
    assert predict(one_f_one_b(4, 35), 4, UNIT).bubble <= 0.08


def test_the_choice_says_why() -> None:
    choice = choose("auto", 4, 16, 1, UNIT, may_split=True)
    assert choice.name == "zero_bubble"
    assert "1f1b 57000.0 ms with 4 in flight" in choice.why
    choice = choose("auto", 4, 16, 1, UNIT, may_split=False)
    assert choice.name == "1f1b"  # as fast as GPipe, with fewer activations
    with pytest.raises(ValueError, match="zero_bubble: not for this layout; 1f1b, gpipe are"):
        choose("zero_bubble", 4, 16, 1, UNIT, may_split=False)


def test_tensors_arrive_in_the_order_of_the_schedule() -> None:
    p, m, shape = 3, 6, (2, 3)

    def body(rank: int, world: int) -> None:
        schedule = interleaved(p, m, 2)
        links = Links(dist.group.WORLD, 2 * p, shape, torch.float64)
        for _ in range(3):  # steps follow each other
            links.begin(schedule[rank])
            for action in schedule[rank]:
                comes = action.stage > 0 if action.kind == "F" else action.stage < 2 * p - 1
                if comes:
                    sender = action.stage + (-1 if action.kind == "F" else 1)
                    told = links.receive(action)
                    assert torch.equal(
                        told,
                        torch.full(shape, 100.0 * sender + action.microbatch, dtype=torch.float64),
                    )
                value = 100.0 * action.stage + action.microbatch
                links.send(action, torch.full(shape, value, dtype=torch.float64))
            links.end()

    in_ranks(p, body)


def test_a_stage_that_dies_is_named_by_the_others() -> None:
    def body(rank: int, world: int) -> Any:
        links = Links(dist.group.WORLD, 2, (4,), torch.float32)
        actions = one_f_one_b(2, 4)[rank]
        links.begin(actions)
        if rank == 0:
            import os

            os._exit(1)
        links.receive(actions[0])

    outcome = run_ranks(body, 2)
    assert "rank 0" in outcome.errors[1]
    assert "lost" in outcome.errors[1]

"""Which pass of which microbatch a rank does when, as data.

A schedule is one list of actions a rank. F is a forward pass, B a whole backward pass, I and W the
backward pass split into the gradient of the input, which the stage before waits for, and of the
weights, which nobody waits for.

p ranks, m microbatches, v stages a rank; stage s is on rank s mod p.
Sources: Y. Huang et al., "GPipe", 2019; D. Narayanan et al., "PipeDream" (1F1B), 2019, and
"Efficient large-scale language model training" (interleaved), 2021; P. Qi et al., "Zero bubble
pipeline parallelism" (ZB-H1), 2023.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass."""

    kind: Kind
    stage: int
    microbatch: int


Schedule = list[list[Action]]  # by rank


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass of one stage of a rank, and until its result is at the next rank."""

    forward: float
    backward: float  # of both halves
    overhead: float = 0.0  # of every pass
    hop: float = 0.0


def gpipe(p: int, m: int) -> Schedule:
    """All forward passes, then all backward passes."""
    return [
        [Action("F", r, i) for i in range(m)] + [Action("B", r, i) for i in range(m)]
        for r in range(p)
    ]


def one_f_one_b(p: int, m: int) -> Schedule:
    """At most p - r microbatches are in flight on rank r."""
    return interleaved(p, m, 1)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """1F1B over v stages a rank; m is a multiple of p where v > 1."""
    schedule = []
    for rank in range(p):
        total = m * v
        warmup = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p
        warmup = min(total, warmup)

        def stage_of(k: int, rank: int = rank) -> int:
            return (k // p) % v * p + rank

        def microbatch_of(k: int) -> int:
            return k if v == 1 else k // (p * v) * p + k % p

        def forward(k: int, stage_of: Callable[[int], int] = stage_of) -> Action:
            return Action("F", stage_of(k), microbatch_of(k))

        def backward(k: int, rank: int = rank) -> Action:
            return Action("B", (v - 1 - (k // p) % v) * p + rank, microbatch_of(k))

        actions = [forward(k) for k in range(warmup)]
        for k in range(total - warmup):
            actions += [forward(k + warmup), backward(k)]
        actions += [backward(k) for k in range(total - warmup, total)]
        schedule.append(actions)
    if v == 1:  # the stage is the rank, whatever k
        schedule = [[a._replace(stage=r) for a in row] for r, row in enumerate(schedule)]
    return schedule


def zero_bubble(p: int, m: int, costs: Costs | None = None) -> Schedule:
    """1F1B whose weight gradients fill the time in which a rank would wait, without more memory."""
    costs = costs or Costs(1.0, 2.0)
    order = [
        [a._replace(kind="I") if a.kind == "B" else a for a in row] for row in one_f_one_b(p, m)
    ]
    result: Schedule = [[] for _ in range(p)]
    waiting: list[deque[Action]] = [deque() for _ in range(p)]
    clock, ends = [0.0] * p, dict[Action, float]()
    position = [0] * p
    half = costs.backward / 2 + costs.overhead

    def run(rank: int, action: Action, start: float, seconds: float) -> None:
        clock[rank] = ends[action] = start + seconds
        result[rank].append(action)

    while any(position[r] < len(order[r]) or waiting[r] for r in range(p)):
        # The rank that is free first decides next, so its view of the others is complete.
        candidates = [r for r in range(p) if position[r] < len(order[r]) or waiting[r]]
        best: tuple[float, int, bool] | None = None
        for r in candidates:
            ready = None
            if position[r] < len(order[r]):
                needs = before(order[r][position[r]], p)
                if needs is None or needs in ends:
                    ready = max(clock[r], ends[needs] + costs.hop if needs else 0.0)
            is_full = _in_flight(result[r]) >= p - r and _next_kind(order[r], position[r]) == "F"
            takes_weights = bool(waiting[r]) and (
                ready is None or is_full or ready - clock[r] >= half / 2
            )
            if ready is None and not takes_weights:
                continue
            start = clock[r] if takes_weights else ready
            assert start is not None
            if best is None or start < best[0]:
                best = (start, r, takes_weights)
        assert best is not None, "a schedule cannot wait for itself"
        start, r, takes_weights = best
        if takes_weights:
            run(r, waiting[r].popleft(), start, half)
            continue
        action = order[r][position[r]]
        position[r] += 1
        seconds = costs.forward + costs.overhead if action.kind == "F" else half
        run(r, action, start, seconds)
        if action.kind == "I":
            waiting[r].append(action._replace(kind="W"))
    return result


def _in_flight(actions: list[Action]) -> int:
    return sum(a.kind == "F" for a in actions) - sum(a.kind in "BW" for a in actions)


def _next_kind(order: list[Action], position: int) -> str:
    return order[position].kind if position < len(order) else ""


def before(action: Action, p: int, num_stages: int | None = None) -> Action | None:
    """What must have arrived from another stage, or None."""
    num_stages = num_stages or p
    kind, stage, microbatch = action
    if kind == "F":
        return Action("F", stage - 1, microbatch) if stage else None
    if kind == "W":
        return None
    if stage == num_stages - 1:
        return None
    return Action(kind, stage + 1, microbatch)


@dataclass(frozen=True)
class Prediction:
    """A schedule on a clock."""

    seconds: float
    bubble: float  # share of the ranks' time without work
    in_flight_max: int  # passes whose activations one rank holds
    spans: tuple[tuple[tuple[Action, float, float], ...], ...]  # by rank: action, start, end


def predict(schedule: Schedule, num_stages: int, costs: Costs) -> Prediction:
    """When everything would start and end.

    Raises:
        ValueError: the schedule waits for itself.
    """
    p = len(schedule)
    ends: dict[Action, float] = {}
    clock, position = [0.0] * p, [0] * p
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in range(p)]
    seconds_of = {
        "F": costs.forward,
        "B": costs.backward,
        "I": costs.backward / 2,
        "W": costs.backward / 2,
    }
    remaining = sum(len(row) for row in schedule)
    while remaining:
        moved = False
        for r, row in enumerate(schedule):
            while position[r] < len(row):
                action = row[position[r]]
                needs = before(action, p, num_stages)
                if needs is not None and needs not in ends:
                    break
                hop = 0.0 if needs is None or needs.stage % p == r else costs.hop
                start = max(clock[r], ends[needs] + hop if needs is not None else 0.0)
                clock[r] = ends[action] = start + seconds_of[action.kind] + costs.overhead
                spans[r].append((action, start, clock[r]))
                position[r] += 1
                remaining -= 1
                moved = True
        if not moved:
            raise ValueError("the schedule waits for itself")
    total = max(clock)
    work = sum(end - start for row in spans for _, start, end in row)
    in_flight = max(
        max(_in_flight(row[: i + 1]) for i in range(len(row))) if row else 0 for row in schedule
    )
    return Prediction(total, 1 - work / (p * total), in_flight, tuple(map(tuple, spans)))


@dataclass(frozen=True)
class Choice:
    """The schedule of a run and why it is the one."""

    name: str
    schedule: Schedule
    stages_per_rank: int
    prediction: Prediction
    why: str


def choose(name: str, p: int, m: int, v: int, costs: Costs, may_split: bool) -> Choice:
    """The schedule by name, or with "auto" the fastest on the clock; among equals (1 %) the one
    that holds the fewest activations.

    Args:
        v: stages a rank; costs are those of one of its stages.
        may_split: whether weight gradients can be computed on their own.
    """
    makers: dict[str, Callable[[], Schedule]] = {}
    if v > 1:
        makers["interleaved"] = lambda: interleaved(p, m, v)
    else:
        makers["1f1b"] = lambda: one_f_one_b(p, m)
        makers["gpipe"] = lambda: gpipe(p, m)
        if may_split:
            makers["zero_bubble"] = lambda: zero_bubble(p, m, costs)
    if name != "auto":
        if name not in makers:
            raise ValueError(
                f"layout.schedule {name}: not for this layout; {', '.join(makers)} are"
            )
        makers = {name: makers[name]}
    made = {}
    for key, make in makers.items():
        schedule = make()
        made[key] = (schedule, predict(schedule, p * v, costs))
    fastest = min(prediction.seconds for _, prediction in made.values())
    near = {k: x for k, x in made.items() if x[1].seconds <= 1.01 * fastest}
    best = min(near, key=lambda k: (near[k][1].in_flight_max, near[k][1].seconds))
    schedule, prediction = made[best]
    others = ", ".join(
        f"{k} {x.seconds * 1e3:.1f} ms with {x.in_flight_max} in flight"
        for k, (_, x) in made.items()
        if k != best
    )
    why = f"predicted {prediction.seconds * 1e3:.1f} ms, bubble {prediction.bubble:.1%}, "
    why += f"{prediction.in_flight_max} passes in flight"
    why += f" ({others})" if others else ""
    return Choice(best, schedule, v, prediction, why)

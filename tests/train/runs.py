"""Small runs for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pycomm.train.config import Config, make_config
from pycomm.train.data.source import Sequences
from pycomm.train.engine import Engine, StepStats
from pycomm.train.layout.degrees import resolve
from pycomm.train.layout.mesh import make_meshes
from pycomm.train.model.decoder import Decoder, initial_value
from pycomm.train.predict import make_choice
from tests.ranks import Outcome, run_ranks

# A few words over and over, with noise: something to learn in a few steps.
_NOISE = np.random.default_rng(0).integers(0, 61, 6000)
TOKENS = np.where(_NOISE < 12, _NOISE, np.arange(6000) % 7).astype(np.uint16)
STEPS = 6

GPT: dict[str, Any] = {"layers": 4, "channels": 32, "heads": 4, "context": 16, "vocab_size": 64}
LLAMA = GPT | {
    "norm": "rmsnorm",
    "positions": "rope",
    "activation": "swiglu",
    "kv_heads": 2,
    "bias": False,
    "tied": False,
}
EXPERTS = GPT | {"experts": 4, "capacity_factor": 1.0}
LLAMA_EXPERTS = LLAMA | {"experts": 4, "experts_per_token": 1}
# Unlike Adam's, its steps show a gradient that is wrong by a factor; clipping shows the norm.
SGD: dict[str, Any] = {"name": "sgd", "lr": 0.3, "momentum": 0.9, "warmup": 2, "clip": 0.3}
ADAM: dict[str, Any] = {"lr": 1e-2, "warmup": 2}


def config(model: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A run of a few steps of 16 sequences."""
    values: dict[str, Any] = {"batch": {"size": 16}, "optimizer": SGD, "run": {"steps": STEPS}}
    return make_config(values | sections | {"model": model or GPT})


def engine_of(settings: Config, world_size: int) -> Engine:
    """An engine over the tests' tokens, in an open group."""
    layout = resolve(settings, world_size)
    source = Sequences([TOKENS], settings.model.context)
    choice = make_choice(settings, layout, 1e10)
    return Engine(settings, layout, make_meshes(layout), source, choice=choice)


def alone(settings: Config, steps: int = STEPS) -> list[StepStats]:
    """The same run on one rank, without a layout; in this process's child."""
    one = settings.model_copy(update={"layout": Config().layout})
    one = one.model_copy(update={"batch": one.batch.model_copy(update={"micro": 0})})
    outcome = in_ranks(1, lambda rank, world: train(engine_of(one, world), steps))
    stats: list[StepStats] = outcome.results[0]
    return stats


def train(engine: Engine, steps: int = STEPS) -> list[StepStats]:
    """Some steps."""
    return [engine.train_step() for _ in range(steps)]


def in_ranks(world_size: int, body: Callable[[int, int], Any], **options: Any) -> Outcome:
    """All ranks end well."""
    outcome = run_ranks(body, world_size, **options)
    outcome.expect_all_ok()
    return outcome


def numbers(stats: list[StepStats]) -> torch.Tensor:
    """Losses and gradient norms. Shape: (steps, 2)."""
    return torch.tensor([[s.loss, s.grad_norm] for s in stats], dtype=torch.float64)


def initialise(model: Decoder, seed: int) -> None:
    """Gives every parameter its initial value; the same on every rank and for every layout."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(model.config, name, parameter.shape, seed))

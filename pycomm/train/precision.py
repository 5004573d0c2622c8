"""What is computed in 16 bits, and the loss scale that keeps float16's gradients from vanishing.

Source: P. Micikevicius et al., "Mixed precision training", 2018 (dynamic loss scaling).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.train.config import PrecisionConfig


def autocast(config: PrecisionConfig) -> Any:
    """A context in which products are computed in the configured type."""
    if config.compute == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, config.compute))


@dataclass
class LossScale:
    """The factor of the loss. Dynamic with float16: halved after a gradient that is not finite,
    doubled after `growth_interval` good ones; every rank sees the same gradients' norm, so every
    rank decides alike."""

    config: PrecisionConfig
    value: float = 1.0
    good_steps: int = 0
    bad_steps: int = 0  # since the scale was last doubled

    def __post_init__(self) -> None:
        if self.config.compute == "float16":
            self.value = self.config.loss_scale or 2.0**self.config.initial_scale_power

    @property
    def is_dynamic(self) -> bool:
        """Whether it moves."""
        return self.config.compute == "float16" and not self.config.loss_scale

    def update(self, is_skipped: bool) -> None:
        """After each optimizer step."""
        if not self.is_dynamic:
            return
        if is_skipped:
            self.good_steps = 0
            self.bad_steps += 1
            if self.bad_steps >= self.config.hysteresis:
                self.value = max(self.value / 2, self.config.min_loss_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.config.growth_interval:
            self.value *= 2
            self.good_steps = self.bad_steps = 0

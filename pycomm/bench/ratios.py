"""Medians and the interval of a ratio of medians."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with its 95 % interval."""

    value: float
    low: float
    high: float


def ratio_of_medians(numerator: list[float], denominator: list[float], seed: int = 0) -> Ratio:
    """Of two samples measured in the same interleaved rounds.

    Rounds are resampled in pairs, so that what disturbed both samples of a round cancels.
    Source: percentile bootstrap, B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993.
    """
    top: NDArray[np.float64] = np.asarray(numerator, dtype=np.float64)
    bottom: NDArray[np.float64] = np.asarray(denominator, dtype=np.float64)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(top), size=(_RESAMPLES, len(top)))
    ratios = np.median(top[picks], axis=1) / np.median(bottom[picks], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(top) / np.median(bottom)), float(low), float(high))

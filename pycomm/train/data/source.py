"""Where batches come from: a corpus cut into sequences, or a user's own dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from pycomm.train.data.corpus import Tokens


class Source(Protocol):
    """N samples by number."""

    def __len__(self) -> int: ...

    def batch(self, samples: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Inputs and targets of some samples."""
        ...


class Sequences:
    """Non-overlapping sequences of some stretches of tokens; the target of a token is the next."""

    def __init__(self, stretches: list[Tokens], context: int) -> None:
        self._stretches, self._context = stretches, context
        counts = [max(0, len(tokens) - 1) // context for tokens in stretches]
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, samples: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Shape: (B,) to (B, T) int64 each."""
        windows = torch.from_numpy(np.stack([self._row(s) for s in samples]).astype(np.int64))
        return windows[:, :-1], windows[:, 1:]

    def _row(self, sample: np.int64) -> Tokens:
        stretch = int(np.searchsorted(self._ends, sample, side="right"))
        first = int(self._ends[stretch - 1]) if stretch else 0
        start = (int(sample) - first) * self._context
        return self._stretches[stretch][start : start + self._context + 1]


class UserData:
    """A map-style dataset of (input, target) pairs."""

    def __init__(self, dataset: Sequence[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, samples: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Collated as torch's DataLoader does.

        Raises:
            ValueError: an item is not a pair, or items do not fit together; with their numbers.
        """
        items = [self._dataset[s] for s in samples.tolist()]
        try:
            collated = default_collate(items)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"samples {samples.tolist()} make no batch: {error}") from error
        if not isinstance(collated, list | tuple) or len(collated) != 2:
            raise ValueError("an item of the dataset must be a pair (input, target)")
        return collated[0], collated[1]

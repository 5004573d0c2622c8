"""Which sample comes when: one global order, of which every rank computes its part.

Sample number n of a run (counted over all ranks and steps) is in epoch n // N, at place n mod N of
that epoch's permutation of the N samples. The whole state of the data is the one number of samples
that were consumed, whatever the number of ranks, so any resume sees every sample of an epoch
exactly once.

Source of the permutation: a four-round Feistel network with cycle walking (J. Black, P. Rogaway,
"Ciphers with arbitrary finite domains", 2002): no table, any place of any epoch in constant time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 4
Int = npt.NDArray[np.int64]


def _mix(x: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser (S. Vigna) on x + key."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def permute(places: Int, num_samples: int, seed: int, epoch: int) -> Int:
    """The samples at some places of an epoch's order; a bijection of 0 .. num_samples - 1."""
    if num_samples < 1:
        raise ValueError("there are no samples")
    half_bits = max(1, -(-(num_samples - 1).bit_length() // 2))
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    base = _mix(np.array([seed], np.uint64), epoch * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    keys = [int(_mix(base, r + 1)[0]) for r in range(_ROUNDS)]
    x = places.astype(np.uint64)
    outside = np.ones(len(x), bool)
    while outside.any():  # the network's domain is at most four times num_samples
        left, right = x[outside] >> shift, x[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        x[outside] = left << shift | right
        outside = x >= num_samples
    return x.astype(np.int64)


def samples_at(first: int, count: int, num_samples: int, seed: int) -> Int:
    """The samples with global numbers first .. first + count - 1; they may span epochs."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    epochs = numbers // num_samples
    result = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        rows = epochs == epoch
        result[rows] = permute(numbers[rows] % num_samples, num_samples, seed, int(epoch))
    return result


def samples_of_rank(step_samples: Int, passes: int, micro: int, rank: int, num_ranks: int) -> Int:
    """This rank's part of a step's samples, by pass. Shape: (passes * micro * num_ranks,) to
    (passes, micro). Pass j of all ranks together is a contiguous run of the order."""
    return step_samples.reshape(passes, num_ranks, micro)[:, rank]

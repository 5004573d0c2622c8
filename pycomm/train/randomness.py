"""Random numbers as a function of where and when they are drawn."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_step(seed: int, step: int, place: tuple[int, int]) -> None:
    """Seeds torch, NumPy and Python before a step.

    Dropout and a user's augmentation then depend on the seed, the step and the place in the layout
    (pipeline, data), so there is no generator state to save. Ranks of a tensor-parallel group drop
    the same channels.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{place}".encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)

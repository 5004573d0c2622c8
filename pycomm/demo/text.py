"""The text of the demonstration as bytes."""

from __future__ import annotations

import torch

from pycomm.text_files import find_files

BYTES_MAX = 32 << 20


def load_bytes(data: str, context: int) -> torch.Tensor:
    """The text as a uint8 tensor. Shape: (num_bytes,).

    Raises:
        ValueError: fewer bytes than a few sequences of `context`.
    """
    pieces: list[bytes] = []
    total = 0
    for path in find_files(data, "--data"):
        piece = path.read_bytes()
        pieces.append(piece)
        total += len(piece)
        if total >= BYTES_MAX:
            break
    text = b"\n".join(pieces)[:BYTES_MAX]
    if len(text) < 20 * context:
        raise ValueError(
            f"the text has {len(text)} bytes, training needs at least {20 * context}; "
            "give more with --data"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def bigram_loss(text: torch.Tensor, held_out: torch.Tensor) -> float:
    """Nats per byte on `held_out` of a bigram model counted on `text`: a line for the plot."""

    def pairs(x: torch.Tensor) -> torch.Tensor:
        return x[:-1].long() * 256 + x[1:].long()

    counts = torch.bincount(pairs(text), minlength=65536).view(256, 256).double() + 0.1
    log_p = (counts / counts.sum(1, keepdim=True)).log().flatten()
    return float(-log_p[pairs(held_out)].mean())

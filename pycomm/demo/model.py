"""A small decoder over bytes.

Shapes: B batch, T time, C channels, H heads. Source: A. Radford et al., "Language models are
unsupervised multitask learners", 2019 (pre-norm decoder, GELU, tied embeddings).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

NUM_BYTES = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; about 0.9 million parameters as they stand."""

    context: int = 128
    channels: int = 128
    heads: int = 4
    layers: int = 4


class Block(nn.Module):
    """Attention, then a feed-forward layer, each around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config.channels
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(c)
        self.qkv = nn.Linear(c, 3 * c)
        self.projection = nn.Linear(c, c)
        self.norm_mlp = nn.LayerNorm(c)
        self.mlp = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))

    def forward(self, x_btc: torch.Tensor) -> torch.Tensor:
        """Shape: (B, T, C) to (B, T, C)."""
        b, t, c = x_btc.shape
        qkv = self.qkv(self.norm_attention(x_btc)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btc = x_btc + self.projection(mixed.transpose(1, 2).reshape(b, t, c))
        return cast(torch.Tensor, x_btc + self.mlp(self.norm_mlp(x_btc)))


class ByteGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, config.channels)
        self.position = nn.Parameter(torch.zeros(config.context, config.channels))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.channels)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 / (2 * config.layers) ** 0.5 if "projection" in name else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, bytes_bt: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        """The mean loss in nats per byte. Shape: (B, T) int64 each, to a scalar."""
        x_btc = self.embedding(bytes_bt) + self.position[: bytes_bt.shape[1]]
        for block in self.blocks:
            x_btc = block(x_btc)
        logits = self.norm(x_btc) @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets_bt.flatten())

"""A GPT-2 or Llama style decoder, or some consecutive layers of one.

Every parameter has the name that it has in the whole model, and the value that (seed, name) gives
it, so a model's parts on any number of ranks are that model.

Shapes: B batch, T time, C channels, V vocabulary, G key-value groups, Q query heads of a group,
D channels of a head, F feed-forward channels.
Sources: A. Radford et al., "Language models are unsupervised multitask learners", 2019; H. Touvron
et al., "LLaMA", 2023; J. Su et al., "RoFormer" (rotary positions), 2021; N. Shazeer, "GLU variants
improve transformer", 2020; J. Ainslie et al., "GQA", 2023.
"""

from __future__ import annotations

import hashlib
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from pycomm.train.config import ModelConfig
from pycomm.train.model.experts import Experts


def make_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm or RMSNorm over channels."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.channels, eps=config.norm_eps)
    return nn.LayerNorm(config.channels, eps=config.norm_eps, bias=config.bias)


class Embedding(nn.Module):
    """Tokens to vectors, with learned positions where those are configured."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.channels)
        self.positions = (
            nn.Parameter(torch.empty(config.context, config.channels))
            if config.positions == "learned"
            else None
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        """Shape: (B, T) int64 to (B, T, C)."""
        x_btc = self.tokens(tokens_bt)
        if self.positions is not None:
            x_btc = x_btc + self.positions[: tokens_bt.shape[1]]
        return cast(torch.Tensor, self.dropout(x_btc))


def rotary_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position. Shape: (context, D) each."""
    half = torch.arange(0, config.head_channels, 2, dtype=torch.float64)
    frequencies = config.rope_base ** (-half / config.head_channels)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float64), frequencies)
    angles = torch.cat([angles, angles], 1)
    return angles.cos().float(), angles.sin().float()


def rotate(x_bhtd: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor) -> torch.Tensor:
    """Rotates each pair (i, i + D/2) of channels by its position's angle."""
    left, right = x_bhtd.chunk(2, -1)
    turned = torch.cat([-right, left], -1)
    return x_bhtd * cos_td.to(x_bhtd.dtype) + turned * sin_td.to(x_bhtd.dtype)


class Attention(nn.Module):
    """Causal attention with one fused projection.

    Rows of `qkv` are ordered by key-value group: Q queries, one key, one value; a contiguous share
    of the rows is therefore a share of whole groups, and a tensor-parallel layer needs one product.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_channels = config.head_channels
        self.queries_per_group = config.heads // config.num_kv_heads
        rows = config.num_kv_heads * (self.queries_per_group + 2) * self.head_channels
        self.qkv = nn.Linear(config.channels, rows, bias=config.bias)
        self.out = nn.Linear(config.channels, config.channels, bias=config.bias)
        self.dropout = config.dropout
        self.is_rotary = config.positions == "rope"
        if self.is_rotary:
            cos, sin = rotary_tables(config)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(self, x_btc: torch.Tensor) -> torch.Tensor:
        """Shape: (B, T, C) to (B, T, C)."""
        qkv = self.qkv(x_btc)
        b, t, _ = qkv.shape
        per_group = self.queries_per_group
        qkv = qkv.view(b, t, -1, per_group + 2, self.head_channels).permute(0, 2, 3, 1, 4)
        groups = qkv.shape[1]  # of this rank
        q = qkv[:, :, :per_group].reshape(b, groups * per_group, t, self.head_channels)
        k, v = qkv[:, :, per_group], qkv[:, :, per_group + 1]
        if self.is_rotary:
            cos, sin = self.get_buffer("cos")[:t], self.get_buffer("sin")[:t]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if per_group > 1:
            k, v = (z.repeat_interleave(per_group, 1) for z in (k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return cast(torch.Tensor, self.out(mixed.transpose(1, 2).reshape(b, t, -1)))


class FeedForward(nn.Module):
    """Two layers with GELU, or three with a gate (SwiGLU)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        f = config.num_ffn_channels
        self.up = nn.Linear(config.channels, f, bias=config.bias)
        self.gate = (
            nn.Linear(config.channels, f, bias=config.bias)
            if config.activation == "swiglu"
            else None
        )
        self.down = nn.Linear(f, config.channels, bias=config.bias)

    def forward(self, x_btc: torch.Tensor) -> torch.Tensor:
        """Shape: (B, T, C) to (B, T, C)."""
        if self.gate is not None:
            hidden = F.silu(self.gate(x_btc)) * self.up(x_btc)
        else:
            hidden = F.gelu(self.up(x_btc), approximate="tanh")
        return cast(torch.Tensor, self.down(hidden))


class Block(nn.Module):
    """Attention, then a feed-forward layer or experts, each around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention = make_norm(config)
        self.attention = Attention(config)
        self.norm_ffn = make_norm(config)
        self.ffn: nn.Module = Experts(config) if config.experts else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_btc: torch.Tensor) -> torch.Tensor:
        """Shape: (B, T, C) to (B, T, C)."""
        x_btc = x_btc + self.dropout(self.attention(self.norm_attention(x_btc)))
        return cast(torch.Tensor, x_btc + self.dropout(self.ffn(self.norm_ffn(x_btc))))


class Decoder(nn.Module):
    """Layers `first` to `last` of the model; with the embedding before the first of all, and with
    the final norm and output layer behind the last of all."""

    def __init__(self, config: ModelConfig, layers: range | None = None) -> None:
        super().__init__()
        layers = range(config.layers) if layers is None else layers
        self.config = config
        self.layers = layers
        self.has_input = layers.start == 0
        self.has_output = layers.stop == config.layers
        self.embedding = Embedding(config) if self.has_input else None
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in layers})
        self.norm = make_norm(config) if self.has_output else None
        self.output: nn.Module | None = None
        if self.has_output:
            self.output = nn.Linear(config.channels, config.vocab_size, bias=False)
            if config.tied and self.embedding is not None:
                self.output.weight = self.embedding.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (B, T) int64, or (B, T, C) of the layers before, to (B, T, C), or (B, T, V)."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x


def name_in_whole(config: ModelConfig, name: str) -> str:
    """Tied weights are one parameter under two names; this is the one that counts."""
    if config.tied and name == "output.weight":
        return "embedding.tokens.weight"
    return name


def initial_value(config: ModelConfig, name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """The float32 value that a parameter starts from, whole.

    Matrices are normal with deviation 0.02, those that write to the residual stream smaller by
    sqrt(2 x layers) (GPT-2); biases are zeros, norms ones.
    """
    name = name_in_whole(config, name)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.rsplit(".", 2)[-2]:
        return torch.ones(shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    is_residual = name.endswith(("attention.out.weight", "down.weight", "weights.down"))
    deviation = 0.02 / (2 * config.layers) ** 0.5 if is_residual else 0.02
    return torch.randn(shape, generator=generator).mul_(deviation)


def next_token_loss(logits_btv: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token, in float32."""
    return F.cross_entropy(logits_btv.flatten(0, 1).float(), targets_bt.flatten())

"""What a run will need and take, before it starts: memory of a rank, step time, bubble.

Times are those of matrix products at a measured rate plus messages at a measured rate of copies;
they leave out everything else, so a real step takes longer. Memory counts parameters, gradients,
optimizer state and saved activations.
Source of the operation count: J. Kaplan et al., "Scaling laws for neural language models", 2020
(6 x parameters per token, and attention).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from pycomm.train.config import Config, ModelConfig
from pycomm.train.layout.degrees import Layout
from pycomm.train.model.decoder import Decoder
from pycomm.train.pipeline.schedule import Choice, Costs, choose

_OVERHEAD_S = 0.5e-3  # of a pass in Python
_HOP_S = 0.1e-3


def measure_matmul_flops(dtype: torch.dtype = torch.float32, seconds: float = 0.1) -> float:
    """Floating-point operations a second of one large product on this process's threads: the
    denominator of MFU. The best of some rounds."""
    n = 512
    a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def measure_copy_bytes_per_s(seconds: float = 0.05) -> float:
    """Bytes a second of a copy that fits no cache."""
    a = torch.zeros(1 << 24)
    b = torch.empty_like(a)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        b.copy_(a)
        best = min(best, time.perf_counter() - start)
    return a.numel() * 4 / best


@dataclass(frozen=True)
class Counts:
    """Parameters of some layers."""

    dense: int
    expert: int
    active: int  # that a token meets


def count_parameters(config: ModelConfig, layers: range | None = None) -> Counts:
    """Exactly, from a model without memory."""
    with torch.device("meta"):
        model = Decoder(config, layers)
    expert = sum(p.numel() for n, p in model.named_parameters() if ".ffn.weights." in n)
    total = sum(p.numel() for p in model.parameters())
    share = config.experts_per_token / config.experts if config.experts else 0
    return Counts(total - expert, expert, int(total - expert + expert * share))


def flops_per_token(config: ModelConfig, counts: Counts | None = None) -> float:
    """Forward and backward of one token, as MFU counts them."""
    counts = counts or count_parameters(config)
    tables = config.vocab_size * config.channels * (not config.tied)  # a lookup is no product
    tables += config.context * config.channels * (config.positions == "learned")
    attention = 12 * config.layers * config.channels * config.context
    return 6 * (counts.active - tables) + attention


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Prediction:
    """Of the rank that needs most."""

    num_parameters: int
    memory: Memory
    compute_s: float
    communication_s: float
    bubble: float

    @property
    def step_s(self) -> float:
        """If nothing overlaps."""
        return self.compute_s / (1 - self.bubble) + self.communication_s


def activation_bytes(config: ModelConfig, layout: Layout, layers: range) -> int:
    """Saved for the backward pass of one microbatch: what each layer's products and functions read,
    in float32."""
    tokens = layout.micro * config.context
    c, f = config.channels, config.num_ffn_channels
    kv = 2 * config.num_kv_heads * config.head_channels
    ffn_tokens = config.experts_per_token if config.experts else 1
    hidden = (3 if config.activation == "swiglu" else 2) * f * ffn_tokens
    split = (3 * c + kv + hidden) // layout.tensor
    whole = 6 * c // (layout.tensor if layout.sequence_parallel else 1)
    per_layer = tokens * 4 * (split + whole)
    ends = tokens * 4 * 3 * config.vocab_size if layers.stop == config.layers else 0
    return per_layer * len(layers) + ends


def predict_memory(config: Config, layout: Layout, rank: int, in_flight: int) -> Memory:
    """Of one rank of the pipeline."""
    model = config.model
    dense = expert = activations = 0
    for i in range(layout.stages_per_rank):
        layers = layout.layers_of_stage(rank + i * layout.pipeline, model.layers)
        counts = count_parameters(model, layers)
        dense += counts.dense
        expert += counts.expert
        activations += activation_bytes(model, layout, layers)
    split = dense // layout.tensor if layout.tensor > 1 else dense
    expert = expert // (layout.expert * layout.tensor)
    whole = split + expert
    sharded = split // layout.data + expert // layout.replica
    states = {"adamw": 2, "adam": 2, "sgd": 1 if config.optimizer.momentum else 0}
    held = (
        activations * -(-in_flight // layout.stages_per_rank)
        if layout.pipeline > 1
        else activations
    )
    return Memory(
        parameters=4 * (sharded if layout.zero == 3 else whole),
        gradients=4 * (sharded if layout.zero >= 2 else whole),
        optimizer=4 * states[config.optimizer.name] * (sharded if layout.zero else whole),
        activations=held,
    )


def make_choice(config: Config, layout: Layout, flops: float) -> Choice | None:
    """The pipeline's schedule, from the operation count at a rate of operations a second."""
    if layout.pipeline == 1:
        return None
    tokens = layout.micro * config.model.context
    per_stage = flops_per_token(config.model) * tokens / layout.num_stages / layout.tensor / flops
    costs = Costs(per_stage / 3, per_stage * 2 / 3, _OVERHEAD_S, _HOP_S)
    return choose(
        config.layout.schedule,
        layout.pipeline,
        layout.passes,
        layout.stages_per_rank,
        costs,
        may_split=layout.data == 1 and layout.zero == 0,
    )


def predict(
    config: Config, layout: Layout, flops: float, copy_bytes_per_s: float, choice: Choice | None
) -> Prediction:
    """Everything about a step."""
    model = config.model
    in_flight = choice.prediction.in_flight_max if choice else 1
    memories = [predict_memory(config, layout, r, in_flight) for r in range(layout.pipeline)]
    counts = count_parameters(model)
    tokens = layout.batch * model.context
    compute = flops_per_token(model) * tokens / layout.world_size / flops
    return Prediction(
        num_parameters=counts.dense + counts.expert,
        memory=max(memories, key=lambda m: m.total),
        compute_s=compute,
        communication_s=_message_bytes(config, layout) / copy_bytes_per_s,
        bubble=choice.prediction.bubble if choice else 0.0,
    )


def _message_bytes(config: Config, layout: Layout) -> float:
    """Bytes that a rank sends and receives in a step, each counted once."""
    model = config.model
    counts = count_parameters(model)
    own = counts.dense / layout.pipeline / layout.tensor
    n = layout.data
    rounds = 2.0 if layout.zero < 3 else 3.0
    data = rounds * (n - 1) / n * own * 4
    activations = layout.micro * model.context * model.channels * 4 * layout.passes
    layers = model.layers / layout.pipeline
    tensor = 4 * 2 * (layout.tensor - 1) / layout.tensor * activations * layers
    pipeline = 2 * activations * layout.stages_per_rank if layout.pipeline > 1 else 0.0
    routed = model.experts_per_token * activations * layers * 4
    expert = routed * (layout.expert - 1) / layout.expert
    return data + tensor + pipeline + expert

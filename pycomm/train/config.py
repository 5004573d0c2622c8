"""What a training run is: one frozen tree of settings, checked when it is made.

`pycomm.train.files.load_config` reads it from TOML, YAML or a DeepSpeed ds_config.json. Sizes are
counts (tokens, sequences, layers) unless a name ends in its unit.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Norm = Literal["layernorm", "rmsnorm"]
ScheduleName = Literal["auto", "gpipe", "1f1b", "interleaved", "zero_bubble"]


class Section(BaseModel):
    """A table of the file: unknown keys are refused with the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """A decoder. The defaults are a byte-level GPT of about 0.9 million parameters."""

    layers: int = Field(4, ge=1)
    channels: int = Field(128, ge=1, description="Width of the residual stream.")
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(0, ge=0, description="0: as many as heads; fewer: grouped queries.")
    ffn_channels: int = Field(0, ge=0, description="0: 4 x channels, or 8/3 x with swiglu.")
    context: int = Field(128, ge=1, description="Tokens in a sequence.")
    norm: Norm = "layernorm"
    positions: Literal["learned", "rope"] = "learned"
    rope_base: float = Field(10_000.0, gt=0)
    activation: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tied: bool = Field(True, description="The output layer uses the embedding's weights.")
    dropout: float = Field(0.0, ge=0, lt=1)
    norm_eps: float = Field(1e-5, gt=0)
    experts: int = Field(0, ge=0, description="0: dense. Otherwise experts in every layer.")
    experts_per_token: int = Field(2, ge=1)
    capacity_factor: float = Field(
        1.25, gt=0, description="An expert takes at most factor x its even share of a sequence."
    )
    aux_loss: float = Field(0.01, ge=0, description="Weight of the load-balancing loss.")
    vocab_size: int = Field(0, ge=0, description="0: the tokenizer's.")
    weights: str = Field("", description="A folder of safetensors (Hugging Face) to start from.")

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        if self.channels % self.heads:
            raise ValueError(f"channels {self.channels} is no multiple of heads {self.heads}")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.positions == "rope" and self.head_channels % 2:
            raise ValueError(f"rope needs an even head size, not {self.head_channels}")
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(f"a token cannot go to {self.experts_per_token} of {self.experts}")
        return self

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_channels(self) -> int:
        """Width of a head."""
        return self.channels // self.heads

    @property
    def num_ffn_channels(self) -> int:
        """Width of the feed-forward layer; with swiglu rounded up to a multiple of 8."""
        if self.ffn_channels:
            return self.ffn_channels
        if self.activation == "swiglu":
            return -(-self.channels // 3) * 8
        return 4 * self.channels


class DataConfig(Section):
    """Text to train on."""

    path: str = Field("", description="File, folder, glob or .jsonl; empty: Python's own source.")
    tokenizer: Literal["byte", "gpt2"] = "byte"
    text_key: str = Field("text", description="The field of a .jsonl line that holds the text.")
    validation: float = Field(0.05, gt=0, lt=1, description="Share kept aside.")


class LayoutConfig(Section):
    """How ranks share the work. data = 0: whatever remains of the world size."""

    data: int = Field(0, ge=0, description="Ranks, or groups of ranks, that see other samples.")
    tensor: int = Field(1, ge=1, description="Ranks that share every layer.")
    pipeline: int = Field(1, ge=1, description="Ranks in a row that have some layers each.")
    expert: int = Field(1, ge=1, description="Of the data ranks, how many share the experts.")
    zero: Literal[0, 1, 2, 3] = Field(
        0, description="1: optimizer sharded; 2: gradients too; 3: parameters too."
    )
    offload: bool = Field(
        False, description="With ZeRO, clip 0: update chunks beside the backward pass."
    )
    overlap: Literal["auto", "on", "off"] = Field(
        "auto", description="ZeRO's messages beside compute; auto: between hosts."
    )
    sequence_parallel: bool = Field(
        False, description="Between tensor-parallel layers, shard the sequence."
    )
    schedule: ScheduleName = "auto"
    stages_per_rank: int = Field(1, ge=1, description="With the interleaved schedule, 2 or more.")


class BatchConfig(Section):
    """Sequences: of a step, of one pass of one rank, and passes. Any two imply the third."""

    size: int = Field(0, ge=0, description="Sequences of an optimizer step, over all ranks.")
    micro: int = Field(0, ge=0, description="Sequences of one forward pass of one rank.")
    accumulation: int = Field(0, ge=0, description="Passes of a step; pipelines: microbatches.")


class OptimizerConfig(Section):
    """AdamW, SGD or another elementwise optimizer."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = Field(2e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="Of matrices; vectors are left alone.")
    momentum: float = Field(0.0, ge=0, lt=1)
    clip: float = Field(1.0, ge=0, description="Largest norm of the gradient; 0: no limit.")
    warmup: int = Field(20, ge=0, description="Steps from 0 to lr.")
    warmup_shape: Literal["linear", "log"] = "linear"
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr: float = Field(0.1, ge=0, le=1, description="Where the decay ends, as a share of lr.")


class PrecisionConfig(Section):
    """Of matrix products and messages; weights and optimizer stay float32."""

    compute: Literal["float32", "bfloat16", "float16"] = "float32"
    loss_scale: float = Field(0.0, ge=0, description="float16: 0 means dynamic.")
    initial_scale_power: int = Field(16, ge=0)
    growth_interval: int = Field(1000, ge=1, description="Good steps before the scale doubles.")
    hysteresis: int = Field(1, ge=1, description="Bad steps before the scale is halved.")
    min_loss_scale: float = Field(1.0, gt=0)


class CheckpointConfig(Section):
    """What survives a death."""

    every: int = Field(100, ge=0, description="Steps; 0: only at the end and on SIGTERM.")
    keep_last_n: int = Field(3, ge=1)
    async_save: bool = Field(True, description="Write while training goes on.")
    resume: bool = Field(True, description="Start from the newest whole checkpoint, if any.")


class RunConfig(Section):
    """The run itself."""

    out: Path = Path("run")
    steps: int = Field(400, ge=1)
    seed: int = Field(0, ge=0)
    deterministic: bool = Field(False, description="Equal bits on every run and resume.")
    backend: str = Field("pycomm", description="Of torch.distributed.")
    threads: int = Field(0, ge=0, description="Of a rank; 0: an even share of the processors.")
    pin: bool = Field(False, description="One processor a rank.")
    timeout_s: float = Field(300.0, gt=0, description="Of one collective operation.")
    max_restarts: int = Field(3, ge=0, description="After a rank has died.")


class WatchConfig(Section):
    """What a person sees."""

    every: int = Field(10, ge=1, description="Steps between lines without a terminal.")
    validate_every: int = Field(0, ge=0, description="Steps; 0: at the end only.")
    validation_sequences: int = Field(64, ge=1)
    tensorboard: bool = False
    prometheus_port: int = Field(0, ge=0, le=65535, description="On 127.0.0.1; 0: none.")
    sample_tokens: int = Field(300, ge=0, description="Text to write at the end.")


class Config(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    layout: LayoutConfig = LayoutConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    watch: WatchConfig = WatchConfig()


def make_config(values: dict[str, Any], source: str = "the configuration") -> Config:
    """Checks nested dictionaries and makes a Config of them.

    Raises:
        ValueError: one line per fault, each with its key; unknown keys with the nearest known one.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise ValueError(f"{source}: " + "; ".join(lines)) from None


def _explain(fault: Any) -> str:
    path = [str(part) for part in fault["loc"]]
    if fault["type"] != "extra_forbidden":
        return f"{'.'.join(path) or 'it'}: {fault['msg'].removeprefix('Value error, ')}"
    known: list[str] = list(Config.model_fields)
    if len(path) > 1:
        section = Config.model_fields[path[0]].annotation
        assert section is not None
        known = list(section.model_fields)
    return unknown_key(".".join(path), path[-1], known)


def unknown_key(full: str, key: str, known: list[str]) -> str:
    """The sentence about a key that does not exist."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(known)}"
    return f"there is no '{full}'; {hint}"

"""Degrees of parallelism and batch arithmetic, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from pycomm.train.config import BatchConfig, Config, ModelConfig

DEFAULT_MICRO = 12


@dataclass(frozen=True)
class Layout:
    """A product of degrees for a world size. Ranks are numbered pipeline first, tensor last."""

    world_size: int
    data: int  # replica * expert
    tensor: int
    pipeline: int
    expert: int
    zero: int
    sequence_parallel: bool
    micro: int  # sequences of one pass of one data rank
    passes: int  # of a step: accumulation, or microbatches of a pipeline
    stages_per_rank: int

    @property
    def replica(self) -> int:
        """Copies of every expert."""
        return self.data // self.expert

    @property
    def batch(self) -> int:
        """Sequences of an optimizer step."""
        return self.data * self.micro * self.passes

    @property
    def num_stages(self) -> int:
        """Parts that the layers are cut into."""
        return self.pipeline * self.stages_per_rank

    def describe(self) -> str:
        """Such as `data 4 (ZeRO-3) x tensor 2`."""
        parts = []
        if self.pipeline > 1:
            parts.append(f"pipeline {self.pipeline}")
        zero = f" (ZeRO-{self.zero})" if self.zero else ""
        if self.data > 1 or self.zero:
            parts.append(f"data {self.data}{zero}")
        if self.expert > 1:
            parts.append(f"expert {self.expert} of data {self.data}")
        if self.tensor > 1:
            sequence = " with sequence parallel" if self.sequence_parallel else ""
            parts.append(f"tensor {self.tensor}{sequence}")
        return " x ".join(parts) or "one rank"

    def layers_of_stage(self, stage: int, num_layers: int) -> range:
        """Consecutive layers; the first stages have one more where they do not divide evenly."""
        each, more = divmod(num_layers, self.num_stages)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))


def resolve(config: Config, world_size: int) -> Layout:
    """The layout of a run.

    Raises:
        ValueError: degrees or batch do not fit; says which, and what would.
    """
    wanted = config.layout
    others = wanted.tensor * wanted.pipeline
    data = wanted.data or max(world_size // others, 1)
    if data * others != world_size:
        asked = f"data {data} x tensor {wanted.tensor} x pipeline {wanted.pipeline}"
        raise ValueError(f"layout: {asked} needs {data * others} ranks, there are {world_size}")
    _check_model(config, data)
    batch = config.batch
    _check_offload(config)
    micro, passes = _resolve_batch(batch, data, wanted.pipeline)
    stages_per_rank = wanted.stages_per_rank
    if wanted.schedule == "interleaved" and stages_per_rank == 1:
        stages_per_rank = 2
    if wanted.pipeline == 1 and stages_per_rank > 1:
        raise ValueError("layout.stages_per_rank needs a pipeline of 2 or more")
    if stages_per_rank > 1 and wanted.schedule not in ("interleaved", "auto"):
        raise ValueError(f"layout.schedule {wanted.schedule} has one stage a rank")
    if wanted.pipeline * stages_per_rank > config.model.layers:
        raise ValueError(
            f"layout: {wanted.pipeline * stages_per_rank} stages for {config.model.layers} layers"
        )
    if stages_per_rank > 1 and passes % wanted.pipeline:
        raise ValueError(
            f"layout.schedule interleaved: {passes} microbatches are no multiple of "
            f"pipeline {wanted.pipeline}"
        )
    return Layout(
        world_size=world_size,
        data=data,
        tensor=wanted.tensor,
        pipeline=wanted.pipeline,
        expert=wanted.expert,
        zero=wanted.zero,
        sequence_parallel=wanted.sequence_parallel and wanted.tensor > 1,
        micro=micro,
        passes=passes,
        stages_per_rank=stages_per_rank,
    )


def _check_model(config: Config, data: int) -> None:
    wanted, model = config.layout, config.model
    if wanted.expert > 1 and not model.experts:
        raise ValueError("layout.expert needs a model with model.experts")
    if data % wanted.expert:
        raise ValueError(f"layout.expert {wanted.expert} does not divide data {data}")
    if model.experts % wanted.expert:
        raise ValueError(f"layout.expert {wanted.expert} does not divide {model.experts} experts")
    _check_tensor(model, wanted.tensor, wanted.sequence_parallel)


def _check_offload(config: Config) -> None:
    if not config.layout.offload:
        return
    if not config.layout.zero:
        raise ValueError("layout.offload needs layout.zero 1, 2 or 3")
    if config.layout.pipeline > 1:
        raise ValueError("layout.offload is not for pipelines")
    if config.precision.compute == "float16":
        raise ValueError(
            "layout.offload updates before the whole gradient is known, float16 must see it first; "
            "use bfloat16"
        )


def _check_tensor(model: ModelConfig, tensor: int, sequence_parallel: bool) -> None:
    for name, count in (("kv_heads", model.num_kv_heads), ("ffn_channels", model.num_ffn_channels)):
        if count % tensor:
            raise ValueError(f"layout.tensor {tensor} does not divide model.{name} {count}")
    if sequence_parallel and model.context % tensor:
        raise ValueError(f"layout.tensor {tensor} does not divide model.context {model.context}")
    if sequence_parallel and tensor > 1 and model.experts:
        raise ValueError("layout.sequence_parallel: routed experts need whole sequences")


def _resolve_batch(batch: BatchConfig, data: int, pipeline: int) -> tuple[int, int]:
    """Micro batch and passes; any two of size, micro and accumulation imply the third."""
    size, micro, passes = batch.size, batch.micro, batch.accumulation
    if size:
        if micro and passes and size != micro * passes * data:
            raise ValueError(
                f"batch: size {size} is not micro {micro} x accumulation {passes} x data {data}"
            )
        if micro:
            passes = _divide(size, micro * data, f"micro {micro} x data {data}")
        elif passes or pipeline > 1:
            passes = passes or _passes_for(size // data, pipeline)
            micro = _divide(size, passes * data, f"accumulation {passes} x data {data}")
        else:
            micro, passes = _divide(size, data, f"data {data}"), 1
        return micro, passes
    return micro or DEFAULT_MICRO, passes or (4 * pipeline if pipeline > 1 else 1)


def _divide(size: int, by: int, name: str) -> int:
    if size % by or size < by:
        raise ValueError(f"batch.size {size} is no multiple of {name} = {by}")
    return size // by


def _passes_for(sequences: int, pipeline: int) -> int:
    """As many microbatches as divide the sequences, up to four a stage."""
    return max(n for n in range(1, min(4 * pipeline, sequences) + 1) if sequences % n == 0)

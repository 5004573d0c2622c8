"""Builds this rank's parts of a model: made, split and wrapped layer by layer, so that no rank
ever holds more than one whole layer beside its own share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pycomm.train.config import Config
from pycomm.train.layout.degrees import Layout
from pycomm.train.layout.mesh import Meshes
from pycomm.train.layout.overlap import ReductionsInFlight, put_in_flight
from pycomm.train.layout.tensor import split_block, split_ends, split_experts
from pycomm.train.model.decoder import Decoder, initial_value, name_in_whole, rotary_tables
from pycomm.train.model.experts import Experts
from pycomm.train.model.hugging_face import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Part:
    """One stage of a model on this rank.

    `module` is called in training and has what wraps it; `plain` is the module inside, whose
    parameter names are those of the whole model.
    """

    module: nn.Module
    plain: nn.Module
    stage: int
    reductions: ReductionsInFlight | None = None
    has_one_pass: bool = True  # a step reduces each gradient once

    def set_last_pass(self, is_last: bool, zero: int) -> None:
        """Before a backward: gradients are reduced in the last pass of a step, with ZeRO-2 and 3 in
        every pass, so that no rank keeps whole ones."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(is_last or zero >= 2)
            if self.reductions is not None and zero >= 2:
                self.reductions.is_deferred = self.has_one_pass
            self.module.set_is_last_backward(is_last)
            self.module.set_reshard_after_backward(is_last or zero == 3)
        elif isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = is_last


ValueOf = Callable[[str, torch.Size], torch.Tensor]


def initial_values(config: Config) -> ValueOf:
    """What parameters start from, by name and shape: drawn from the seed, or read.

    Raises:
        ValueError: model.weights names no weights that fit.
    """
    model = config.model
    if not model.weights:
        return lambda name, shape: initial_value(model, name, shape, config.run.seed)
    weights = Weights(Path(model.weights).expanduser(), model)
    return lambda name, shape: weights(name_in_whole(model, name), shape)


def build_parts(config: Config, layout: Layout, meshes: Meshes) -> list[Part]:
    """This rank's stages, initialised from the run's seed."""
    rank = meshes.rank_in("pipeline")
    stages = [rank + layout.pipeline * i for i in range(layout.stages_per_rank)]
    return [_build(config, layout, meshes, stage) for stage in stages]


def wrap_user_module(module: nn.Module, config: Config, layout: Layout, meshes: Meshes) -> Part:
    """Data parallel or ZeRO for a module that we did not make: the layers of its lists and
    sequences are gathered one at a time. Rank 0's values count."""
    if meshes.data is None:
        return Part(module, module, 0)
    if layout.zero:  # DDP does it itself
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
    if layout.zero == 0:
        wrapped = DistributedDataParallel(
            module, process_group=meshes.data.get_group(), find_unused_parameters=True
        )
        return Part(wrapped, module, 0)
    for layer in _layers_of(module):
        _shard(layer, config, layout, meshes)
    _shard(module, config, layout, meshes)
    for child in module.modules():  # a layer that one rank did not use is reduced by all
        if isinstance(child, FSDPModule):
            child.set_reduce_scatter_unused_params(True)
    return _finish_part(module, _layers_of(module), config, layout, 0)


def _finish_part(
    module: nn.Module, layers: Iterable[nn.Module], config: Config, layout: Layout, stage: int
) -> Part:
    wanted = config.layout.overlap
    spans_hosts = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size)) < layout.world_size
    is_wanted = wanted == "on" or (wanted == "auto" and spans_hosts)
    is_sharded = isinstance(module, FSDPModule) and layout.zero > 0
    # FSDP2 casts and divides other gradients before anyone could wait for them.
    is_plain = all(p.dtype == torch.float32 for p in module.parameters())
    is_plain = is_plain and config.precision.compute != "float16"
    if not (is_wanted and is_sharded and is_plain and layout.pipeline == 1):
        return Part(module, module, stage)
    reductions = put_in_flight(cast(FSDPModule, module), list(layers))
    return Part(module, module, stage, reductions, has_one_pass=layout.passes == 1)


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists and sequences that have parameters."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    result = []
    for child in module.children():
        if not is_list:
            result += _layers_of(child)
        elif any(p.requires_grad for p in child.parameters()):
            result.append(child)
    return result


def _build(config: Config, layout: Layout, meshes: Meshes, stage: int) -> Part:
    layers = layout.layers_of_stage(stage, config.model.layers)
    value_of = initial_values(config)
    with torch.device("meta"):
        model = Decoder(config.model, layers)
    is_wrapped = meshes.data is not None and layout.data * max(layout.zero, 1) > 1
    is_ddp = is_wrapped and layout.zero == 0 and layout.world_size == layout.data
    is_ddp = is_ddp and layout.expert == 1
    wraps = is_wrapped and not is_ddp
    ignored: set[nn.Parameter] = set()
    for i, block in model.blocks.items():
        _materialise(model, block, f"blocks.{i}.", value_of)
        if meshes.tensor is not None:
            split_block(cast(Any, block), meshes.tensor, layout.sequence_parallel)
        if isinstance(block.ffn, Experts):
            split_experts(block.ffn, meshes.expert, meshes.tensor, meshes.whole)
            if wraps and layout.expert > 1:
                if meshes.replica is not None:
                    _wrap(block.ffn.weights, config, layout, meshes, meshes.replica)
                else:
                    ignored |= set(block.ffn.weights.parameters())
        if wraps:
            _wrap(block, config, layout, meshes, meshes.data, ignored)
    _materialise(model, model, "", value_of)
    if meshes.tensor is not None and layout.sequence_parallel:
        split_ends(model, meshes.tensor)
    if wraps:
        _wrap(model, config, layout, meshes, meshes.data, ignored)
    if is_ddp:
        assert meshes.data is not None
        wrapped = DistributedDataParallel(
            model, process_group=meshes.data.get_group(), gradient_as_bucket_view=True
        )
        return Part(wrapped, model, stage)
    return _finish_part(model, model.blocks.values(), config, layout, stage)


def _materialise(model: Decoder, module: nn.Module, prefix: str, value_of: ValueOf) -> None:
    """Gives every parameter below `module` that has no memory yet its initial value."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones once
    for path, child in module.named_modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in made:
                full = prefix + (f"{path}.{name}" if path else name)
                made[parameter] = nn.Parameter(value_of(full, parameter.shape))
            setattr(child, name, made[parameter])
        if "cos" in child._buffers and child.get_buffer("cos").is_meta:
            child._buffers["cos"], child._buffers["sin"] = rotary_tables(model.config)


def _wrap(
    module: nn.Module,
    config: Config,
    layout: Layout,
    meshes: Meshes,
    mesh: Any,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    if layout.zero:
        _shard(module, config, layout, meshes, mesh, ignored)
    else:
        policy = _precision(config)
        replicate(module, mesh=mesh, mp_policy=policy, ignored_params=ignored or None)


def _shard(
    module: nn.Module,
    config: Config,
    layout: Layout,
    meshes: Meshes,
    mesh: Any = None,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    # A pipeline passes each stage many times a step: gathering again for every backward of every
    # microbatch would cost more than the memory is worth.
    fully_shard(
        module,
        mesh=mesh if mesh is not None else meshes.data,
        reshard_after_forward=layout.zero == 3 and layout.pipeline == 1,
        mp_policy=_precision(config),
        ignored_params=ignored or None,
    )


def _precision(config: Config) -> MixedPrecisionPolicy:
    dtype = DTYPES[config.precision.compute]
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)

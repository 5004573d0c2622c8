"""Tensor and sequence parallel: torch's column and row styles on a decoder's layers.

The fused projection and the first feed-forward layer are split by columns, the second ones by rows:
a layer costs two all_reduces forward and two backward. With sequence parallel these become
reduce_scatter and all_gather, and what lies between holds a share of the sequence.
Source: M. Shoeybi et al., "Megatron-LM", 2019; V. Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pycomm.train.model.decoder import Block, Decoder
from pycomm.train.model.experts import Experts, ExpertWeights


def _gather_sequence(use_local_output: bool) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        use_local_output=use_local_output,
    )


def _gather_gradients() -> PrepareModuleInput:
    """Nothing forward; backward one all_reduce for all products that read this input."""
    return PrepareModuleInput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Replicate(),),
        use_local_output=False,
    )


def split_block(block: Block, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Parameters become DTensors on `mesh`; every rank holds the whole values before."""
    outputs = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=outputs),
    }
    if not isinstance(block.ffn, Experts):
        plan["ffn.up"] = ColwiseParallel()
        plan["ffn.down"] = RowwiseParallel(output_layouts=outputs)
        if block.ffn.gate is not None:
            plan["ffn"] = _gather_gradients()
            plan["ffn.gate"] = ColwiseParallel()
    if sequence_parallel:
        plan["norm_attention"] = SequenceParallel()
        plan["norm_ffn"] = SequenceParallel()
        plan["attention"] = plan["ffn"] = _gather_sequence(use_local_output=False)
    parallelize_module(block, mesh, plan, src_data_rank=None)


def split_ends(model: Decoder, mesh: DeviceMesh) -> None:
    """With sequence parallel: embedding and output layer see whole sequences."""
    if model.embedding is not None:
        style = PrepareModuleOutput(
            output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),)
        )
        parallelize_module(model.embedding, mesh, style)
    if model.norm is not None and model.output is not None:
        parallelize_module(model.norm, mesh, SequenceParallel(), src_data_rank=None)
        parallelize_module(model.output, mesh, _gather_sequence(use_local_output=True))


def split_experts(
    experts: Experts,
    expert_mesh: DeviceMesh | None,
    tensor_mesh: DeviceMesh | None,
    whole: DeviceMesh,
) -> None:
    """A rank of `expert_mesh` keeps its share of experts, of `tensor_mesh` of hidden channels."""
    weights = experts.weights
    assert isinstance(weights, ExpertWeights)
    for name, hidden in (("up", 2), ("gate", 2), ("down", 1)):
        parameter = getattr(weights, name)
        if parameter is None:
            continue
        if expert_mesh is not None and tensor_mesh is not None:
            mesh = whole["expert", "tensor"]
            value = distribute_tensor(
                parameter, mesh, [Shard(0), Shard(hidden)], src_data_rank=None
            )
        elif expert_mesh is not None:
            value = distribute_tensor(parameter, expert_mesh, [Shard(0)], src_data_rank=None)
        elif tensor_mesh is not None:
            value = distribute_tensor(parameter, tensor_mesh, [Shard(hidden)], src_data_rank=None)
        else:
            return
        setattr(weights, name, nn.Parameter(value))
    experts.group = None if expert_mesh is None else expert_mesh.get_group()
    experts.tensor_group = None if tensor_mesh is None else tensor_mesh.get_group()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; shares its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A rank's part as the DTensor that its parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

"""The device mesh of a layout, and the groups that come from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pycomm.train.layout.degrees import Layout


@dataclass(frozen=True)
class Meshes:
    """One mesh for each purpose; None where a degree is 1.

    `data` has the ranks that hold the same parts of the model and see other samples; `replica`
    those that hold the same experts; `expert` those that share them.
    """

    whole: DeviceMesh
    data: DeviceMesh | None
    replica: DeviceMesh | None
    expert: DeviceMesh | None
    tensor: DeviceMesh | None
    pipeline: DeviceMesh | None

    def rank_in(self, name: str) -> int:
        """This rank's place along a dimension; 0 where the degree is 1."""
        mesh = getattr(self, name)
        return 0 if mesh is None else int(mesh.get_local_rank())


def make_meshes(layout: Layout) -> Meshes:
    """Collective: every rank of the default group calls it."""
    if layout.expert > 1:
        names: tuple[str, ...] = ("pipeline", "replica", "expert", "tensor")
        shape = (layout.pipeline, layout.replica, layout.expert, layout.tensor)
    else:
        names = ("pipeline", "data", "tensor")
        shape = (layout.pipeline, layout.data, layout.tensor)  # type: ignore[assignment]
    whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
    is_split = layout.expert > 1
    data = whole["replica", "expert"]._flatten("data") if is_split else whole["data"]

    def of(name: str, degree: int) -> DeviceMesh | None:
        return whole[name] if degree > 1 else None

    return Meshes(
        whole=whole,
        data=data if layout.data > 1 or layout.zero else None,
        replica=of("replica", layout.replica) if layout.expert > 1 else None,
        expert=of("expert", layout.expert),
        tensor=of("tensor", layout.tensor),
        pipeline=of("pipeline", layout.pipeline),
    )


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """A one-dimensional mesh's group."""
    return None if mesh is None else mesh.get_group()

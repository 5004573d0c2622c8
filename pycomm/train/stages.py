"""A layout's pipeline on this rank: its parts, the links between ranks, and the schedule."""

from __future__ import annotations

from pycomm.train.config import Config
from pycomm.train.layout.build import DTYPES, Part
from pycomm.train.layout.degrees import Layout
from pycomm.train.layout.mesh import Meshes
from pycomm.train.pipeline.links import Links
from pycomm.train.pipeline.run import Loss, Pipeline
from pycomm.train.pipeline.schedule import Choice


def make_pipeline(
    config: Config,
    layout: Layout,
    meshes: Meshes,
    parts: list[Part],
    loss: Loss,
    choice: Choice | None,
) -> Pipeline | None:
    """None where there is no pipeline; with one, `choice` says the schedule."""
    if meshes.pipeline is None:
        return None
    assert choice is not None
    model = config.model
    time_share = model.context // (layout.tensor if layout.sequence_parallel else 1)
    group = meshes.pipeline.get_group()
    shape = (layout.micro, time_share, model.channels)
    links = Links(group, layout.num_stages, shape, DTYPES[config.precision.compute])
    by_stage = {part.stage: part for part in parts}

    def prepare(stage: int, is_last: bool) -> None:
        by_stage[stage].set_last_pass(is_last, layout.zero)

    modules = {stage: part.module for stage, part in by_stage.items()}
    actions = choice.schedule[group.rank()]
    return Pipeline(modules, layout.num_stages, actions, links, loss, prepare)

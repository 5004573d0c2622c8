"""A run's saves and resumes: what identifies it, what is saved, and what a failure means."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from pycomm.train.agreement import AgreedError
from pycomm.train.checkpoint import CheckpointError, Checkpoints
from pycomm.train.data.corpus import Corpus
from pycomm.train.engine import Engine, Progress
from pycomm.train.manifest import Found

# Of the model, what may differ between a checkpoint and a run that goes on from it.
_MODEL_MAY_DIFFER = {"weights", "dropout", "aux_loss", "capacity_factor"}


class RunCheckpoints:
    """All methods are collective."""

    def __init__(self, engine: Engine, corpus: Corpus | None, say: Callable[[str], None]) -> None:
        config = engine.config
        self._engine, self._corpus, self.say = engine, corpus, say
        self._checkpoints = Checkpoints(
            config.run.out / "checkpoints",
            config.checkpoint.keep_last_n,
            is_async=config.checkpoint.async_save,
            say=say,
            group=dist.new_group(),
        )
        self._is_saving = 0  # the step that is being written

    def resume(self) -> None:
        """Goes on from the newest whole checkpoint, if there is one.

        With checkpoint.resume=false a run starts anew and sets older checkpoints aside; a restart
        after a death goes on all the same.

        Raises:
            AgreedError: the checkpoint is another run's.
        """
        config, engine = self._engine.config, self._engine
        is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if not config.checkpoint.resume and not is_restart:
            self._checkpoints.set_aside()
            return
        found = self._checkpoints.newest()
        if found is None:
            return
        self._check_same_run(found)
        progress = Progress(**found.state["progress"])
        saved = self._checkpoints.names_in(found)
        engine.optimizer.make_state(found.state["optimizer_steps"], saved)
        self._checkpoints.load(found, engine.tensors())
        engine.restore(progress)
        self.say(f"going on after step {progress.step} of {found.path}")

    def save(self, step: int) -> None:
        """Saves, or begins to; a failure of this save or the one before is a warning."""
        engine = self._engine
        self._warn_of_failure()
        engine.share_buffers()
        state = {
            "progress": asdict(engine.progress),
            "optimizer_steps": engine.optimizer.steps_done,
            "identity": self._identity(),
            "layout": engine.layout.describe(),
        }
        self._is_saving = step
        try:
            self._checkpoints.save(step, engine.tensors(), state)
        except CheckpointError as error:
            self._warn(error)

    def finish(self, step: int) -> None:
        """Until step's checkpoint is there.

        Raises:
            CheckpointError: it is not.
        """
        self._checkpoints.wait()
        if self._is_saving != step:
            raise CheckpointError(f"step {step} was not saved")

    def _warn_of_failure(self) -> None:
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            self._warn(error)

    def _warn(self, error: CheckpointError) -> None:
        self._is_saving = 0
        self.say(f"warning: {error}; the run goes on, older checkpoints are as they were")

    def _check_same_run(self, found: Found) -> None:
        """Another model, other data or another seed under the same cursor would be another run."""
        there = found.state.get("identity", {})
        for name, value in self._identity().items():
            if there.get(name) != value:
                raise AgreedError(
                    f"checkpoint {found.path} was made with {name} {there.get(name)}, this run has "
                    f"{value}; give another run.out, or checkpoint.resume=false to start anew"
                )

    def _identity(self) -> dict[str, Any]:
        config, engine = self._engine.config, self._engine
        identity: dict[str, Any] = {
            "run.seed": config.run.seed,
            "optimizer.name": config.optimizer.name,
        }
        if self._corpus is None:
            identity["samples"] = len(engine.source)
            return identity
        identity["data"] = self._corpus.content
        identity["data.validation"] = config.data.validation
        for name, value in config.model.model_dump().items():
            if name not in _MODEL_MAY_DIFFER:
                identity[f"model.{name}"] = value
        return identity

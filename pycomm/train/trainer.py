"""START HERE: a run from its configuration to its end, on every rank.

    trainer = Trainer(load_config(Path("run.toml")))
    trainer.fit()

Ranks are those of torchrun, `pycomm run` or `pycomm train`; one process alone is a run too.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from pycomm.train.agreement import alike
from pycomm.train.complete import complete
from pycomm.train.config import Config
from pycomm.train.data.corpus import Corpus, check_length
from pycomm.train.data.source import Sequences, Source, UserData
from pycomm.train.engine import Engine, Loss, StepStats
from pycomm.train.layout.build import DTYPES, initial_values, wrap_user_module
from pycomm.train.layout.degrees import resolve
from pycomm.train.layout.mesh import make_meshes
from pycomm.train.model.decoder import next_token_loss
from pycomm.train.outputs import write_about, write_sample, write_timeline
from pycomm.train.predict import flops_per_token, make_choice, measure_matmul_flops
from pycomm.train.process import (
    FolderLock,
    StopFlag,
    communication_time,
    open_corpus_once,
    open_group,
    patient_group,
    set_up_process,
    slowest,
)
from pycomm.train.resume import RunCheckpoints
from pycomm.train.watch.line import Line
from pycomm.train.watch.records import Record, Sink, make_sinks

_TIMELINE_STEPS = (5, 2, 1)  # the last of these that a run reaches is drawn


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    step: int
    loss: float
    validation_loss: float | None
    was_stopped: bool  # by a signal; run it again to go on


class Trainer:
    """One rank of a run.

    Args:
        config: the run. With a model of one's own, `config.model` is not looked at.
        model: any module, for data parallel and ZeRO; by default the configured decoder.
        dataset: map-style, of (input, target) pairs; needed with a model of one's own.
        loss: of (output, target), a mean over the samples.

    Raises:
        ValueError: the configuration does not fit the ranks, the model or the data.
    """

    def __init__(
        self,
        config: Config,
        *,
        model: nn.Module | None = None,
        dataset: Sequence[Any] | None = None,
        loss: Loss | None = None,
    ) -> None:
        if (model is None) != (dataset is None) or (model is not None and loss is None):
            raise ValueError("a model of one's own comes with a dataset and a loss")
        self._owns_group = open_group(config)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        set_up_process(config, self._rank)
        self._patient = patient_group()
        with alike():
            self._lock = FolderLock(config.run.out) if self._rank == 0 else None
        self.corpus = open_corpus_once(config, self._patient) if dataset is None else None
        with alike():
            config, source = _complete(config, self.corpus, dataset)
            _check_model(model, config)
            self.layout = resolve(config, self._world_size)
        self.config = config
        self._flops = slowest(measure_matmul_flops(DTYPES[config.precision.compute]))
        meshes = make_meshes(self.layout)
        parts = None if model is None else [wrap_user_module(model, config, self.layout, meshes)]
        self.engine = Engine(
            config,
            self.layout,
            meshes,
            source,
            parts=parts,
            loss=loss or next_token_loss,
            choice=make_choice(config, self.layout, self._flops) if model is None else None,
        )
        self._is_text = model is None
        self._stop = StopFlag()

    def fit(self) -> Summary:
        """Trains from the newest checkpoint, or from the start, to `run.steps`.

        Raises:
            ValueError: a checkpoint does not fit the configuration.
            torch.distributed.DistBackendError: a rank was lost; start again to go on from the
                newest checkpoint.
        """
        config, out = self.config, self.config.run.out
        line = Line(config.run.steps, config.watch.every, enabled=self._rank == 0)
        checkpoints = RunCheckpoints(self.engine, self.corpus, line.say)
        checkpoints.resume()
        first = self.engine.progress.step
        if first >= config.run.steps:
            line.say(
                f"nothing is left to do: {out} has its {config.run.steps} steps; give more "
                "run.steps or another run.out"
            )
            return self._leave(Summary(first, float("nan"), None, False))
        sinks: list[Sink] = []
        with alike(self._patient):
            if self._rank == 0:
                (out / "config.json").write_text(config.model_dump_json(indent=1))
                sinks = make_sinks(config.watch, out, first, line.say)
                write_about(self.engine, self.corpus, self._flops)
        try:
            with self._stop, line:
                summary = self._loop(checkpoints, sinks, line)
        finally:
            for sink in sinks:
                sink.close()
        if not summary.was_stopped:
            write_sample(self.engine, self.corpus, line.say)
        return self._leave(summary)

    def _leave(self, summary: Summary) -> Summary:
        if self._owns_group:
            dist.barrier()
            dist.destroy_process_group()
        return summary

    # The loop ------------------------------------------------------------------------------

    def _loop(self, checkpoints: RunCheckpoints, sinks: list[Sink], line: Line) -> Summary:
        engine, config = self.engine, self.config
        loss, validation = float("nan"), None
        while engine.progress.step < config.run.steps:
            before = communication_time()
            stats = engine.train_step(stop=self._stop.is_set)
            communication = [b - a for a, b in zip(before, communication_time(), strict=True)]
            loss, step = stats.loss, stats.step
            is_last = step == config.run.steps
            every = config.watch.validate_every
            validation = self._validate(line) if is_last or (every and step % every == 0) else None
            record = self._record(stats, validation, *communication)
            line.show(record)
            for sink in sinks:
                sink.write(record)
            if step in _TIMELINE_STEPS:
                write_timeline(self.engine, step, line.say)
            if is_last or stats.stop or _is_due(step, config.checkpoint.every):
                checkpoints.save(step)
            if stats.stop:
                break
        checkpoints.finish(engine.progress.step)
        was_stopped = engine.progress.step < config.run.steps
        if was_stopped:
            line.say(
                f"stopped after step {engine.progress.step}, which is saved; the same command goes "
                "on from there"
            )
        return Summary(engine.progress.step, loss, validation, was_stopped)

    def _validate(self, line: Line) -> float | None:
        if self.corpus is None:
            return None
        source = Sequences(self.corpus.validation, self.config.model.context)
        try:
            return self.engine.evaluate(source, self.config.watch.validation_sequences)
        except ValueError as error:
            line.say(f"no validation: {error}")
            return None

    def _record(
        self, stats: StepStats, validation: float | None, spent: float, waited: float
    ) -> Record:
        """
        Args:
            spent: seconds of the step's operations.
            waited: seconds in which the step waited for them.
        """
        config, layout = self.config, self.layout
        tokens = layout.batch * (config.model.context if self._is_text else 1)
        mfu = None
        if self._is_text:
            peak = self._flops * self._world_size
            mfu = flops_per_token(config.model) * tokens / stats.seconds / peak
        is_known = config.run.backend == "pycomm" and self._world_size > 1
        has_experts = self._is_text and config.model.experts > 0
        return Record(
            step=stats.step,
            samples=self.engine.progress.samples,
            epoch=self.engine.progress.samples / len(self.engine.source),
            loss=stats.loss,
            validation_loss=validation,
            lr=stats.lr,
            grad_norm=stats.grad_norm,
            seconds=stats.seconds,
            tokens_per_s=tokens / stats.seconds,
            mfu=mfu,
            memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            communication_share=min(waited / stats.seconds, 1.0) if is_known else None,
            overlap=max(0.0, 1 - waited / spent) if is_known and spent > 0 else None,
            loss_scale=self.engine.scale.value,
            balance=stats.balance if has_experts else None,
            dropped=stats.dropped if has_experts else None,
            is_skipped=stats.is_skipped,
        )


def _complete(
    config: Config, corpus: Corpus | None, dataset: Sequence[Any] | None
) -> tuple[Config, Source]:
    """The configuration with what the data and given weights say, and where samples come from."""
    if corpus is None:
        assert dataset is not None
        if not len(dataset):
            raise ValueError("the dataset is empty")
        return config, UserData(dataset)
    config = complete(config, corpus.tokenizer.vocab_size)
    check_length(corpus, config.model.context)
    initial_values(config)  # that the weights' files are there
    return config, Sequences(corpus.training, config.model.context)


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _check_model(model: nn.Module | None, config: Config) -> None:
    wanted = config.layout
    if model is not None and max(wanted.tensor, wanted.pipeline, wanted.expert) > 1:
        raise ValueError("a model of one's own can be trained data parallel and with ZeRO")

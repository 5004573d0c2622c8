"""What a run writes beside its records: about.json, timeline.json, sample.txt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pycomm.train.data.corpus import Corpus, bigram_loss
from pycomm.train.engine import Engine
from pycomm.train.predict import make_choice
from pycomm.train.sample import generate

_BIGRAM_VOCABULARY_MAX = 1 << 10


def write_about(engine: Engine, corpus: Corpus | None, flops: float) -> None:
    """What the report shows beside the records; by one rank.

    Args:
        flops: of a rank, measured.
    """
    config, layout = engine.config, engine.layout
    about: dict[str, Any] = {
        "layout": layout.describe(),
        "world_size": layout.world_size,
        "backend": config.run.backend,
        "num_samples": len(engine.source),
        "matmul_flops_per_rank": flops,
    }
    choice = make_choice(config, layout, flops) if corpus is not None else None
    if choice is not None:
        about["schedule"], about["why"] = choice.name, choice.why
    if corpus is not None and corpus.tokenizer.vocab_size <= _BIGRAM_VOCABULARY_MAX:
        about["bigram_loss"] = bigram_loss(
            corpus.training, corpus.validation, corpus.tokenizer.vocab_size
        )
    (config.run.out / "about.json").write_text(json.dumps(about, indent=1))


def _write(path: Path, text: str, say: Callable[[str], None]) -> None:
    """A full disk costs a picture, not the run."""
    try:
        path.write_text(text)
    except OSError as error:
        say(f"warning: {path.name} is not written: {error}")


def write_timeline(engine: Engine, step: int, say: Callable[[str], None]) -> None:
    """What every rank did in its last step; collective."""
    rows: list[Any] = [None] * engine.layout.world_size
    dist.all_gather_object(rows, [asdict(span) for span in engine.spans])
    if dist.get_rank() == 0:
        text = json.dumps({"step": step, "ranks": rows})
        _write(engine.config.run.out / "timeline.json", text, say)


def write_sample(engine: Engine, corpus: Corpus | None, say: Callable[[str], None]) -> None:
    """A few words of what was learnt; collective."""
    config = engine.config
    if corpus is None or not config.watch.sample_tokens:
        return
    prompt = [int(token) for token in corpus.validation[0][: min(16, config.model.context)]]
    tokens = generate(engine, prompt, config.watch.sample_tokens)
    if dist.get_rank() == 0:
        text = corpus.tokenizer.decode(prompt + tokens)
        _write(config.run.out / "sample.txt", text, say)

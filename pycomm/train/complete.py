"""What a configuration leaves to others: the tokenizer's vocabulary, the sizes of given weights."""

from __future__ import annotations

from pathlib import Path

from pycomm.train.config import Config
from pycomm.train.model.hugging_face import read_config


def complete(config: Config, vocab_size: int) -> Config:
    """The configuration with everything in it.

    Raises:
        ValueError: what it says itself is at odds with the weights or the tokenizer.
    """
    model = config.model
    if model.weights:
        there = read_config(Path(model.weights).expanduser())
        for name in model.model_fields_set & set(there) - {"context", "capacity_factor"}:
            if getattr(model, name) != there[name]:
                raise ValueError(
                    f"model.{name} is {getattr(model, name)}, {model.weights} has {there[name]}; "
                    "leave it out"
                )
        given = {name: getattr(model, name) for name in model.model_fields_set}
        context = given.get("context", there["context"])
        if there.get("positions") != "rope" and context > there["context"]:
            raise ValueError(
                f"model.context is {context}, {model.weights} has positions for {there['context']}"
            )
        model = type(model).model_validate(there | given)
    if not model.vocab_size:
        model = model.model_copy(update={"vocab_size": vocab_size})
    if model.vocab_size < vocab_size:
        raise ValueError(
            f"model.vocab_size {model.vocab_size} is less than the tokenizer's {vocab_size}"
        )
    return config.model_copy(update={"model": model})

"""A run's newest checkpoint as a folder for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pycomm.train.checkpoint import load_alone
from pycomm.train.config import make_config
from pycomm.train.manifest import newest_alone
from pycomm.train.model import hugging_face_out
from pycomm.train.model.decoder import Decoder


def export(run: Path, folder: Path) -> int:
    """Writes Hugging Face safetensors and config.json; returns the checkpoint's step.

    Raises:
        ValueError: there is no whole checkpoint, or no architecture with the model's parts.
    """
    settings = run / "config.json"
    if not settings.is_file():
        raise ValueError(f"{run} holds no run: there is no {settings.name}")
    config = make_config(json.loads(settings.read_text()), str(settings))
    hugging_face_out.architecture(config.model)
    found = newest_alone(run / "checkpoints")
    if found is None:
        raise ValueError(f"{run} has no whole checkpoint")
    model = Decoder(config.model)
    tensors: dict[str, torch.Tensor] = {
        f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()
    }
    load_alone(found, tensors)
    hugging_face_out.write(model, folder)
    return found.step

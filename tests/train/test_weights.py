"""Weights go to Hugging Face's own models and come from them, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from pycomm.train.complete import complete
from pycomm.train.config import Config, make_config
from pycomm.train.model import hugging_face_out
from pycomm.train.model.decoder import Decoder
from tests.train.runs import GPT, LLAMA, config, engine_of, in_ranks, initialise

transformers = pytest.importorskip("transformers")

MODELS = {
    "gpt2": GPT,
    "llama": LLAMA,
    "llama_tied": LLAMA | {"tied": True, "rope_base": 5000.0},
    "mixtral": LLAMA | {"experts": 4, "capacity_factor": 4.0},
}


def randomised(model: Decoder) -> Decoder:
    """Every parameter different, biases and norms too."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def theirs_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODELS)
def test_their_model_computes_our_logits(name: str, tmp_path: Path) -> None:
    settings = make_config({"model": MODELS[name]}).model
    ours = Decoder(settings)
    initialise(ours, 0)
    hugging_face_out.write(randomised(ours).eval(), tmp_path)
    theirs = theirs_of(tmp_path)
    tokens = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "pipeline": 2}, {"zero": 3}])
def test_a_run_starts_from_their_weights(name: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """The first loss of a run, in any layout, is the loss of their model."""
    source = Decoder(make_config({"model": MODELS[name]}).model)
    initialise(source, 0)
    hugging_face_out.write(randomised(source), tmp_path)
    settings = complete(make_config({"model": {"weights": str(tmp_path)}}), 64)
    own: Config = config(settings.model.model_dump(), layout=layout, optimizer={"warmup": 1})
    num_ranks = 4 if layout else 1
    loss = in_ranks(num_ranks, lambda r, w: engine_of(own, w).train_step().loss).results[0]

    def theirs(rank: int, world: int) -> float:
        engine = engine_of(own.model_copy(update={"layout": Config().layout}), 1)
        inputs, targets = engine._batches(0, 1)
        with torch.no_grad():
            logits = theirs_of(tmp_path)(inputs[0]).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[0].flatten()))

    assert loss == pytest.approx(in_ranks(1, theirs).results[0], rel=1e-4)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = Decoder(make_config({"model": GPT}).model)
    initialise(model, 0)
    hugging_face_out.write(model, tmp_path)

    def completed(**given: Any) -> Config:
        return complete(make_config({"model": {"weights": str(tmp_path), **given}}), 64)

    assert completed().model.channels == 32
    assert completed(context=8).model.context == 8
    with pytest.raises(ValueError, match=r"model.channels is 64, .* has 32; leave it out"):
        completed(channels=64)
    with pytest.raises(ValueError, match="has positions for 16"):
        completed(context=32)
    with pytest.raises(ValueError, match="vocab_size 64 is less than the tokenizer's 257"):
        complete(make_config({"model": {"weights": str(tmp_path)}}), 257)
    there = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(there | {"model_type": "bert"}))
    with pytest.raises(ValueError, match="is of type 'bert'; gpt2, llama, mixtral are known"):
        completed()
    there = hugging_face_out.config_for(make_config({"model": LLAMA}).model)
    for change, told in (
        ({"rope_parameters": {"rope_type": "llama3"}}, "rotary positions of type 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, "rotary positions of type 'linear'"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"head_dim": 16}, "heads of 16 channels"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(there | change))
        with pytest.raises(ValueError, match=told):
            completed()
    with pytest.raises(ValueError, match="no Hugging Face architecture"):
        hugging_face_out.architecture(make_config({"model": GPT | {"norm": "rmsnorm"}}).model)

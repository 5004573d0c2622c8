"""Configurations from TOML, YAML and DeepSpeed's JSON; a fault is one line that says what to do."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from pycomm.train.config import Config, make_config
from pycomm.train.deepspeed import from_deepspeed
from pycomm.train.files import load_config
from pycomm.train.layout.degrees import resolve
from pycomm.train.optimizer import lr_at
from pycomm.train.precision import LossScale

DEEPSPEED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.05},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_num_steps": 10, "total_num_steps": 500},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "elastic_checkpoint": True,
    },
}


def test_toml_yaml_and_overrides_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[model]\nlayers = 6\n[layout]\ntensor = 2\n[run]\nout = "x"\n'
    )
    (tmp_path / "a.yaml").write_text("model: {layers: 6}\nlayout:\n  tensor: 2\nrun: {out: x}\n")
    (tmp_path / "a.json").write_text(json.dumps({"model": {"layers": 6}, "layout": {"tensor": 2}}))
    a = load_config(tmp_path / "a.toml")
    assert a == load_config(tmp_path / "a.yaml")
    assert a == load_config(tmp_path / "a.json", ("run.out=x",))
    assert a == load_config(None, ("model.layers=6", "layout.tensor=2", "run.out=x"))
    assert (a.model.layers, a.layout.tensor, a.run.out) == (6, 2, Path("x"))


def test_a_configuration_survives_being_written_down() -> None:
    config = load_config(None, ("model.experts=4", "optimizer.betas=[0.8, 0.9]"))
    assert make_config(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.lyers=3", "there is no 'model.lyers'; did you mean 'layers'?"),
        ("modle.layers=3", "there is no 'modle'; did you mean 'model'?"),
        ("layout.zzz=3", "there is no 'layout.zzz'; known here: data, tensor"),
        ("model.heads=3", "channels 128 is no multiple of heads 3"),
        ("model.kv_heads=3", "heads 4 is no multiple of kv_heads 3"),
        ("layout.zero=5", "layout.zero: Input should be 0, 1, 2 or 3"),
        ("model.layers=many", "model.layers: Input should be a valid integer"),
        ("run.steps=0", "run.steps: Input should be greater than or equal to 1"),
        ("steps=3", "'steps=3' is not of the form section.key=value"),
    ],
)
def test_a_fault_is_said_with_its_key(override: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        load_config(None, (override,))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", "[model\n", "Expected ']'"),
        ("a.yaml", "model: {layers: [1\n", "expected"),
        ("a.json", "{", "Expecting property name"),
        ("a.json", "[1]", "a table is wanted at the top, not a list"),
        ("a.ini", "x", "give a .toml, .yaml, .yml or .json file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    name: str, text: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        load_config(tmp_path / name)
    assert name in str(caught.value)
    assert told in str(caught.value)


def test_deepspeeds_keys(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DEEPSPEED))
    config = load_config(path)
    layout = resolve(config, 2)
    assert (layout.batch, layout.micro, layout.passes, layout.zero) == (16, 4, 2, 3)
    assert config.layout.offload
    assert config.precision.compute == "bfloat16"
    o = config.optimizer
    assert (o.name, o.lr, o.betas, o.eps, o.weight_decay) == (
        "adamw",
        3e-4,
        (0.8, 0.99),
        1e-7,
        0.05,
    )
    assert (o.clip, o.decay, o.warmup, config.run.steps) == (1.0, "linear", 10, 500)
    assert o.warmup_shape == "log"  # as DeepSpeed's is by default


def test_deepspeeds_defaults_are_deepspeeds() -> None:
    plain = make_config(from_deepspeed({"optimizer": {"type": "Adam"}})).optimizer
    assert (plain.name, plain.lr, plain.betas, plain.weight_decay) == (
        "adamw",
        1e-3,
        (0.9, 0.999),
        0,
    )
    old = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    assert make_config(from_deepspeed(old)).optimizer.name == "adam"
    fp16 = make_config(from_deepspeed({"fp16": {"enabled": True}})).precision
    assert (fp16.hysteresis, fp16.min_loss_scale, fp16.growth_interval) == (2, 1, 1000)


def test_deepspeeds_float16() -> None:
    config = make_config(
        from_deepspeed({"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale": 0}})
    )
    assert config.precision.compute == "float16"
    assert config.precision.initial_scale_power == 12
    assert config.precision.loss_scale == 0


def change(path: str, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(DEEPSPEED))
    table = values
    *parents, key = path.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    table[key] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("train_batch_sise", 8, "'train_batch_sise'; did you mean 'train_batch_size'?"),
        ("zero_optimization.stge", 2, "'zero_optimization.stge'; did you mean 'stage'?"),
        ("zero_optimization.offload_param.device", "nvme", "only cpu is there"),
        ("optimizer.type", "AdanW", "did you mean 'AdamW'?"),
        ("optimizer.params.betaz", 1, "did you mean 'betas'?"),
        ("scheduler.type", "OneCycle", "there is no 'scheduler.type OneCycle'"),
        ("fp16", {"enabled": True}, "bf16 and fp16 are both enabled"),
        ("amp", {"enabled": True}, "there is no 'amp'"),
        ("optimizer.params.bias_correction", False, "bias_correction false is not there"),
        ("scheduler.params.warmup_min_lr", 1e-5, "warm-up starts from 0"),
        ("optimizer", 3, "'optimizer' is not a table"),
    ],
)
def test_what_deepspeed_has_not_or_we_have_not_is_refused(path: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        from_deepspeed(change(path, value))
    assert told in str(caught.value)


def test_a_loss_scale_waits_out_its_hysteresis() -> None:
    config = make_config({"precision": {"compute": "float16", "hysteresis": 2}}).precision
    scale = LossScale(config)
    values = []
    for is_skipped in (True, True, True, False, True):
        scale.update(is_skipped)
        values.append(scale.value / 2**16)
    assert values == [1, 0.5, 0.25, 0.25, 0.125]


def test_warm_ups() -> None:
    linear, log = (
        make_config({"optimizer": {"lr": 1.0, "warmup": 10, "warmup_shape": shape}}).optimizer
        for shape in ("linear", "log")
    )
    assert [lr_at(linear, s, 100) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert lr_at(log, 0, 100) == 0
    assert lr_at(log, 9, 100) == 1.0
    assert lr_at(log, 4, 100) == pytest.approx(math.log(5) / math.log(10))
    assert lr_at(linear, 100, 100) == pytest.approx(0.1)  # min_lr


def test_every_key_says_what_it_means_or_is_plain() -> None:
    """`pycomm train --keys` is the reference: a key without a word has a name that says it all."""
    plain = {"layers", "heads", "norm", "positions", "activation", "bias", "dropout", "norm_eps"}
    plain |= {
        "rope_base",
        "experts_per_token",
        "tokenizer",
        "name",
        "lr",
        "betas",
        "eps",
        "compute",
    }
    plain |= {"momentum", "decay", "initial_scale_power", "keep_last_n", "out", "steps", "seed"}
    plain |= {"schedule", "validation_sequences", "tensorboard", "warmup_shape", "min_loss_scale"}
    for section, field in Config.model_fields.items():
        assert field.annotation is not None
        for name, entry in field.annotation.model_fields.items():
            assert entry.description or name in plain, f"{section}.{name}"

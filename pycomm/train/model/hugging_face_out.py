"""Weights to Hugging Face's safetensors: a folder that `transformers` loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pycomm.train.config import ModelConfig
from pycomm.train.model.decoder import Decoder
from pycomm.train.model.hugging_face import GPT2, LLAMA, MIXTRAL, their_name


def _split(config: ModelConfig, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    groups, d, rest = config.num_kv_heads, config.head_channels, qkv.shape[1:]
    each = config.heads // groups
    by_group = qkv.reshape(groups, each + 2, d, *rest)
    parts = (by_group[:, :each], by_group[:, each : each + 1], by_group[:, each + 1 :])
    return tuple(part.reshape(-1, *rest) for part in parts)


def architecture(config: ModelConfig) -> str:
    """The Hugging Face model type of a configuration.

    Raises:
        ValueError: none has this combination of parts.
    """
    has_llama_parts = (config.norm, config.positions, config.activation, config.bias) == (
        "rmsnorm",
        "rope",
        "swiglu",
        False,
    )
    has_gpt2_parts = (config.norm, config.positions, config.activation, config.bias) == (
        "layernorm",
        "learned",
        "gelu",
        True,
    )
    if has_llama_parts:
        return "mixtral" if config.experts else "llama"
    is_plain = not config.experts and config.tied and config.num_kv_heads == config.heads
    if has_gpt2_parts and is_plain:
        return "gpt2"
    raise ValueError(
        "no Hugging Face architecture that is known here has this model's parts: gpt2 is "
        "layernorm, learned, gelu, bias, tied; llama is rmsnorm, rope, swiglu, no bias; mixtral is "
        "llama with experts"
    )


def config_for(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model."""
    kind = architecture(config)
    if kind == "gpt2":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": config.layers,
            "n_embd": config.channels,
            "n_head": config.heads,
            "n_positions": config.context,
            "n_inner": config.num_ffn_channels,
            "vocab_size": config.vocab_size,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        }
    result = {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "num_hidden_layers": config.layers,
        "hidden_size": config.channels,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.context,
        "intermediate_size": config.num_ffn_channels,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
    }
    if kind == "mixtral":
        result["num_local_experts"] = config.experts
        result["num_experts_per_tok"] = config.experts_per_token
    return result


def write(model: Decoder, folder: Path) -> None:
    """A whole model as a folder that `transformers` loads.

    Raises:
        ValueError: there is no such architecture.
    """
    from safetensors.torch import save_file

    settings = config_for(model.config)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous().clone() for name, value in _theirs(model)}
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=1))


def _theirs(model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    config = model.config
    is_gpt2 = architecture(config) == "gpt2"
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if is_gpt2:
            theirs = f"transformer.{their_name(name, GPT2, 'h')}"
            if ".qkv." in name:
                value = torch.cat(_split(config, value))
            is_matrix = value.dim() == 2 and name.startswith("blocks.")
            yield theirs, value.t() if is_matrix else value
        elif ".qkv." in name:
            prefix = f"model.layers.{name.split('.')[1]}.self_attn"
            for letter, part in zip("qkv", _split(config, value), strict=True):
                yield f"{prefix}.{letter}_proj.weight", part
        elif ".ffn.weights." in name:
            _, layer, *_, kind = name.split(".")
            for e, expert in enumerate(value):
                prefix = f"model.layers.{layer}.block_sparse_moe.experts.{e}"
                yield f"{prefix}.{MIXTRAL[kind]}.weight", expert.t()
        else:
            yield their_name(name, LLAMA, "model.layers"), value

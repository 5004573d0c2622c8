"""Weights from Hugging Face's safetensors: GPT-2, Llama and Mixtral.

Our fused projection holds its rows by key-value group (see Attention); GPT-2 holds all queries, all
keys, all values, and its matrices transposed; Llama holds three matrices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pycomm.train.config import ModelConfig

Get = Callable[[str], torch.Tensor]


class Weights:
    """Tensors by name from a folder of safetensors; each is read when it is asked for."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Raises ValueError if there is no such folder, or none of a known architecture."""
        self._folder, self._config = folder, config
        self._type = read_type(folder)
        self._files = _where(folder)

    def __call__(self, name: str, shape: torch.Size) -> torch.Tensor:
        """A parameter's value, whole, in float32.

        Raises:
            ValueError: the file has no such tensor, or one of another shape.
        """
        make = _gpt2 if self._type == "gpt2" else _llama
        value = make(name, self._config, self._get).float()
        if name == "embedding.positions":
            value = value[: shape[0]]
        if name in ("embedding.tokens.weight", "output.weight") and len(value) < shape[0]:
            value = torch.cat([value, value.new_zeros(shape[0] - len(value), shape[1])])
        if value.shape != shape:
            told = f"{tuple(value.shape)}, the model wants {tuple(shape)}"
            raise ValueError(f"{self._folder}: '{name}' has shape {told}")
        return value.contiguous()

    def _get(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        for full in (name, f"transformer.{name}"):
            if full in self._files:
                with safe_open(self._files[full], framework="pt") as file:
                    tensor: torch.Tensor = file.get_tensor(full)
                    return tensor
        raise ValueError(f"{self._folder} has no tensor '{name}'")


def _where(folder: Path) -> dict[str, Path]:
    from safetensors import safe_open

    result: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            result |= dict.fromkeys(file.keys(), path)
    if not result:
        raise ValueError(f"model.weights: there are no .safetensors in {folder}")
    return result


def read_type(folder: Path) -> str:
    """gpt2, llama or mixtral.

    Raises:
        ValueError: it is none of them.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model.weights: there is no {path}")
    kind = str(json.loads(path.read_text()).get("model_type"))
    if kind not in ("gpt2", "llama", "mixtral"):
        raise ValueError(
            f"model.weights: {path} is of type '{kind}'; gpt2, llama, mixtral are known"
        )
    return kind


def read_config(folder: Path) -> dict[str, Any]:
    """Our model section as a folder's config.json says it; context is its largest."""
    kind = read_type(folder)
    there = json.loads((folder / "config.json").read_text())
    if kind == "gpt2":
        if there.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(f"model.weights: {folder} has another activation than gelu_new")
        return {
            "layers": there["n_layer"],
            "channels": there["n_embd"],
            "heads": there["n_head"],
            "context": there["n_positions"],
            "ffn_channels": there.get("n_inner") or 4 * there["n_embd"],
            "vocab_size": there["vocab_size"],
            "norm_eps": there.get("layer_norm_epsilon", 1e-5),
        }
    _refuse_unknown_parts(folder, there)
    result = {
        "layers": there["num_hidden_layers"],
        "channels": there["hidden_size"],
        "heads": there["num_attention_heads"],
        "kv_heads": there.get("num_key_value_heads") or there["num_attention_heads"],
        "context": there["max_position_embeddings"],
        "ffn_channels": there["intermediate_size"],
        "vocab_size": there["vocab_size"],
        "norm_eps": there["rms_norm_eps"],
        "rope_base": _rope_base(there),
        "norm": "rmsnorm",
        "positions": "rope",
        "activation": "swiglu",
        "bias": False,
        "tied": bool(there.get("tie_word_embeddings", False)),
    }
    if kind == "mixtral":
        result["experts"] = there["num_local_experts"]
        result["experts_per_token"] = there["num_experts_per_tok"]
        result["capacity_factor"] = float(there["num_local_experts"])  # it drops no token
    return result


def _refuse_unknown_parts(folder: Path, there: dict[str, Any]) -> None:
    """What would change the numbers without a word."""
    rope = there.get("rope_parameters") or there.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    heads = there["num_attention_heads"]
    head = there.get("head_dim") or there["hidden_size"] // heads
    for is_unknown, what in (
        (kind != "default", f"rotary positions of type '{kind}'"),
        (there.get("attention_bias") or there.get("mlp_bias"), "biases"),
        (there.get("hidden_act", "silu") != "silu", f"activation '{there.get('hidden_act')}'"),
        (head * heads != there["hidden_size"], f"heads of {head} channels"),
        (there.get("sliding_window"), "a sliding window"),
    ):
        if is_unknown:
            raise ValueError(f"model.weights: {folder} has {what}, which is not known here")


def _rope_base(there: dict[str, Any]) -> float:
    nested = there.get("rope_parameters") or {}
    return float(there.get("rope_theta") or nested.get("rope_theta") or 10_000.0)


def _fuse(config: ModelConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows (or biases) of queries, keys and values to rows by group."""
    groups, d, rest = config.num_kv_heads, config.head_channels, q.shape[1:]
    parts = [x.reshape(groups, -1, d, *rest) for x in (q, k, v)]
    return torch.cat(parts, 1).reshape(-1, *rest)


GPT2 = {
    "embedding.tokens.weight": "wte.weight",
    "embedding.positions": "wpe.weight",
    "norm": "ln_f",
    "norm_attention": "ln_1",
    "norm_ffn": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
LLAMA = {
    "embedding.tokens.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "norm": "model.norm",
    "norm_attention": "input_layernorm",
    "norm_ffn": "post_attention_layernorm",
    "attention.out": "self_attn.o_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.down": "mlp.down_proj",
    "ffn.router": "block_sparse_moe.gate",
}
MIXTRAL = {"gate": "w1", "down": "w2", "up": "w3"}


def their_name(name: str, table: dict[str, str], layers: str) -> str:
    """What Hugging Face calls one of our parameters."""
    if name in table:
        return table[name]
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{table[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"{layers}.{layer}.{table[inner]}.{kind}"


def _gpt2(name: str, config: ModelConfig, get: Get) -> torch.Tensor:
    value = get(their_name(name, GPT2, "h"))
    is_matrix = value.dim() == 2 and name.startswith("blocks.")
    value = value.t() if is_matrix else value
    return _fuse(config, *value.chunk(3)) if ".qkv." in name else value


def _llama(name: str, config: ModelConfig, get: Get) -> torch.Tensor:
    if ".qkv." in name:
        layer = name.split(".")[1]
        parts = (get(f"model.layers.{layer}.self_attn.{x}_proj.weight") for x in "qkv")
        return _fuse(config, *parts)
    if ".ffn.weights." in name:
        _, layer, *_, kind = name.split(".")
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        experts = [get(f"{prefix}.{e}.{MIXTRAL[kind]}.weight") for e in range(config.experts)]
        return torch.stack([expert.t() for expert in experts])
    return get(their_name(name, LLAMA, "model.layers"))

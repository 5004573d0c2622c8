"""Reads DeepSpeed's ds_config.json into our sections.

Source: the key names and their meaning are those of the public DeepSpeed configuration reference
(deepspeed.ai/docs/config-json). A key that changes what is computed is honoured or refused; one
that only steers DeepSpeed's own buffers is accepted, as our runtime decides by itself.
"""

from __future__ import annotations

from typing import Any

from pycomm.train.config import unknown_key

# Buffers and switches of DeepSpeed's runtime: ours overlaps and sizes its buckets by itself.
_ZERO_ACCEPTED = (
    "allgather_partitions allgather_bucket_size reduce_bucket_size overlap_comm reduce_scatter "
    "contiguous_gradients elastic_checkpoint round_robin_gradients sub_group_size "
    "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_param_persistence_threshold stage3_gather_16bit_weights_on_model_save"
).split()
_TOP_ACCEPTED = ("steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer")
# DeepSpeed's own, where a file leaves them out.
_OPTIMIZER_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": None,
    "momentum": 0.0,
}
_ONLY_DEEPSPEED = {
    "zero_optimization",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "scheduler",
    "bf16",
    "bfloat16",
    "fp16",
}
_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def is_deepspeed(values: dict[str, Any]) -> bool:
    """Whether a file has a key that only DeepSpeed has; both have an `optimizer`."""
    optimizer = values.get("optimizer")
    is_typed = isinstance(optimizer, dict) and "type" in optimizer
    return is_typed or any(k in _ONLY_DEEPSPEED or k.startswith("train_") for k in values)


class _Table:
    """A table whose keys are taken one by one; what is left at the end is unknown."""

    def __init__(self, values: Any, path: str, source: str) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"{source}: '{path}' is not a table")
        self._values, self._path, self._source = dict(values), path, source
        self._known: list[str] = []

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default; "auto" counts as absent."""
        self._known.append(key)
        value = self._values.pop(key, default)
        return default if value == "auto" else value

    def table(self, key: str) -> _Table:
        """A table below this one, empty if absent."""
        value = self.take(key)
        path = f"{self._path}.{key}" if self._path else key
        return _Table({} if value is None else value, path, self._source)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def refuse_rest(self, accepted: tuple[str, ...] | list[str] = ()) -> None:
        """Raises ValueError if a key is left that nobody knows."""
        known = [*self._known, *accepted]
        for key in self._values:
            if key not in accepted:
                full = f"{self._path}.{key}" if self._path else key
                raise ValueError(f"{self._source}: {unknown_key(full, key, known)}")


def from_deepspeed(values: dict[str, Any], source: str = "ds_config.json") -> dict[str, Any]:
    """Our sections with what a ds_config.json says.

    Raises:
        ValueError: an unknown key, with the nearest known one, or a value that cannot be honoured.
    """
    top = _Table(values, "", source)
    batch = {
        "size": top.take("train_batch_size", 0),
        "micro": top.take("train_micro_batch_size_per_gpu", 0),
        "accumulation": top.take("gradient_accumulation_steps", 0),
    }
    result: dict[str, Any] = {
        "batch": batch,
        "optimizer": _read_optimizer(top, source),
        "precision": _read_precision(top, source),
        "layout": _read_zero(top, source),
    }
    steps = result["optimizer"].pop("_steps", None)
    if steps is not None:
        result["run"] = {"steps": steps}
    top.refuse_rest(_TOP_ACCEPTED)
    return result


def _read_optimizer(top: _Table, source: str) -> dict[str, Any]:
    result: dict[str, Any] = {"clip": top.take("gradient_clipping", 0.0)}
    optimizer = top.table("optimizer")
    kind = optimizer.take("type", "AdamW")
    names = {"AdamW": "adamw", "Adam": "adamw", "SGD": "sgd"}
    if kind not in names:
        raise ValueError(f"{source}: {unknown_key(f'optimizer.type {kind}', kind, list(names))}")
    parameters = optimizer.table("params")
    # DeepSpeed's Adam decays weights as AdamW does, unless it is told otherwise.
    is_adamw = bool(parameters.take("adam_w_mode", True))
    result["name"] = names[kind] if is_adamw or kind == "SGD" else "adam"
    if parameters.take("bias_correction", True) is not True:
        raise ValueError(f"{source}: optimizer.params.bias_correction false is not there")
    for key, default in _OPTIMIZER_DEFAULTS.items():
        result[key] = parameters.take(key, default)
    if result["weight_decay"] is None:
        result["weight_decay"] = 0.01 if kind == "AdamW" else 0.0
    parameters.refuse_rest(("torch_adam",))
    optimizer.refuse_rest()
    result.update(_read_scheduler(top, source))
    return result


def _read_scheduler(top: _Table, source: str) -> dict[str, Any]:
    scheduler = top.table("scheduler")
    kind = scheduler.take("type")
    parameters = scheduler.table("params")
    result: dict[str, Any] = {"warmup": 0, "decay": "constant"}
    if kind is not None:
        if kind not in _SCHEDULERS:
            near = unknown_key(f"scheduler.type {kind}", kind, list(_SCHEDULERS))
            raise ValueError(f"{source}: {near}")
        result["decay"] = _SCHEDULERS[kind]
        result["warmup"] = parameters.take("warmup_num_steps", 1000)
        result["warmup_shape"] = parameters.take("warmup_type", "log")
        result["_steps"] = parameters.take("total_num_steps")
        lr = parameters.take("warmup_max_lr")
        if lr is not None:
            result["lr"] = lr
        for key in ("warmup_min_lr", "warmup_min_ratio"):
            if parameters.take(key, 0):
                raise ValueError(f"{source}: scheduler.params.{key}: warm-up starts from 0")
        result["min_lr"] = parameters.take("cos_min_ratio", 1e-4 if "Cosine" in kind else 0.0)
    parameters.refuse_rest()
    scheduler.refuse_rest()
    return result


def _read_precision(top: _Table, source: str) -> dict[str, Any]:
    bf16 = top.table("bf16" if "bf16" in top else "bfloat16")
    top.take("bf16"), top.take("bfloat16")
    fp16 = top.table("fp16")
    is_bf16, is_fp16 = bool(bf16.take("enabled", False)), bool(fp16.take("enabled", False))
    if is_bf16 and is_fp16:
        raise ValueError(f"{source}: bf16 and fp16 are both enabled")
    result: dict[str, Any] = {}
    if is_bf16:
        result["compute"] = "bfloat16"
    if is_fp16:
        result["compute"] = "float16"
        result["loss_scale"] = fp16.take("loss_scale", 0.0)
        result["initial_scale_power"] = fp16.take("initial_scale_power", 16)
        result["growth_interval"] = fp16.take("loss_scale_window", 1000)
        result["hysteresis"] = fp16.take("hysteresis", 2)
        result["min_loss_scale"] = fp16.take("min_loss_scale", 1)
    bf16.refuse_rest()
    others = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis")
    fp16.refuse_rest(() if is_fp16 else (*others, "min_loss_scale"))
    return result


def _read_zero(top: _Table, source: str) -> dict[str, Any]:
    zero = top.table("zero_optimization")
    result: dict[str, Any] = {"zero": zero.take("stage", 0)}
    for key in ("offload_optimizer", "offload_param"):
        offload = zero.table(key)
        device = offload.take("device", "none")
        if device not in ("none", "cpu"):
            raise ValueError(
                f"{source}: zero_optimization.{key}.device '{device}': only cpu is there"
            )
        if device == "cpu":
            result["offload"] = True
        offload.refuse_rest(("pin_memory", "buffer_count", "buffer_size", "max_in_cpu"))
    if zero.take("cpu_offload", False):
        result["offload"] = True
    zero.refuse_rest(_ZERO_ACCEPTED)
    return result

"""Reads a Hugging Face config.json: the keys that all families of the one decoder share.

An architecture file calls `decoder_config` with what its family does differently. Defaults are
those of transformers' config classes; sizes have none and must be in the file.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.models.config import ModelConfig, RopeConfig

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

_ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
"""Numbers that each kind cannot do without."""


def decoder_config(
    hf: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    sliding_window: tuple[int | None, ...] = (),
) -> ModelConfig:
    """The `ModelConfig` of config.json's content `hf`; the arguments are the family's own.

    Raises `CheckpointError` for a missing or malformed key, `UnsupportedError` for an activation
    or a kind of rope that the decoder does not have.
    """
    hidden_size = read_size(hf, "hidden_size")
    num_heads = read_size(hf, "num_attention_heads")
    num_kv_heads = read_size(hf, "num_key_value_heads", num_heads)
    head_dim = read_size(hf, "head_dim", default_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads {num_kv_heads} does not divide "
            f"num_attention_heads {num_heads}"
        )
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd; rope pairs its halves")
    hidden_act = hf.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise UnsupportedError(f"config.json: hidden_act {hidden_act!r} is not supported; use silu")
    return ModelConfig(
        architecture=str((hf.get("architectures") or ["?"])[0]),
        vocab_size=read_size(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_size(hf, "intermediate_size"),
        num_layers=read_size(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=read_size(hf, "max_position_embeddings"),
        rms_norm_eps=_number(hf, "rms_norm_eps", 1e-6),
        rope=rope_from_hf(hf),
        tie_word_embeddings=read_flag(hf, "tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        dtype=_dtype(hf),
        bos_token_id=next(iter(_token_ids(hf, "bos_token_id")), None),
        eos_token_ids=_token_ids(hf, "eos_token_id"),
    )


def rope_from_hf(hf: Mapping[str, Any]) -> RopeConfig:
    """The rope of a config.json: transformers 5's ``rope_parameters``, or the older
    ``rope_theta`` with ``rope_scaling``.

    The length that a model was trained for, which llama3 and yarn start from, is, first found:
    config.json's own ``original_max_position_embeddings``, that of the rope's parameters,
    ``max_position_embeddings``. It is put into `RopeConfig.parameters`.
    """
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"config.json: rope parameters {parameters!r} are not an object")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedError("config.json: rope parameters that differ by layer type")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedError(
            f"config.json: rope type {kind!r} is not supported; use {', '.join(ROPE_KINDS)}"
        )
    partial = parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedError(f"config.json: partial_rotary_factor {partial} is not supported")
    values = dict(parameters)
    for key in _ROPE_PARAMETERS[kind]:
        values[key] = _number(parameters, key)
    if kind in ("llama3", "yarn"):
        original = hf.get("original_max_position_embeddings") or parameters.get(
            "original_max_position_embeddings"
        )
        values["original_max_position_embeddings"] = original or read_size(
            hf, "max_position_embeddings"
        )
    theta = _number(parameters, "rope_theta", _number(hf, "rope_theta", 10000.0))
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta {theta} must be above 1")
    return RopeConfig(theta=theta, kind=kind, parameters=values)


def windows_by_layer_type(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's sliding window, as Qwen's configs spell it; empty when there is none."""
    window = hf.get("sliding_window", 4096)
    if not read_flag(hf, "use_sliding_window") or window is None:
        return ()
    num_layers = read_size(hf, "num_hidden_layers")
    first = int(_number(hf, "max_window_layers", 28))
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers"
        )
    size = read_size(hf, "sliding_window", 4096)
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def read_size(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer at `key`; a missing or null key gives `default`, or raises."""
    value = hf.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: the key {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} {value!r} is not a positive integer")
    return value


def read_flag(hf: Mapping[str, Any], key: str) -> bool:
    """The boolean at `key`; a missing or null key is False."""
    value = hf.get(key)
    if value not in (None, True, False):
        raise CheckpointError(f"config.json: {key} {value!r} is not true or false")
    return bool(value)


def _number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = hf.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: the key {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config.json: {key} {value!r} is not a number")
    return float(value)


def _dtype(hf: Mapping[str, Any]) -> torch.dtype:
    name = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise UnsupportedError(
            f"config.json: dtype {name!r} is not supported; use {', '.join(known)}"
        )
    return known[name]


def _token_ids(hf: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = hf.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"config.json: {key} {value!r} is not a token id or a list of them")
    return tuple(ids)

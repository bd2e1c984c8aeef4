"""Qwen3: queries and keys are normed head by head before rope; the head dim stands on its own."""

from collections.abc import Mapping
from typing import Any

from quantforge.models.arch.base import Architecture
from quantforge.models.config import ModelConfig
from quantforge.models.hf_config import decoder_config, read_flag, windows_by_layer_type


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """``head_dim`` is 128 where the file does not say, whatever the hidden size."""
    attention_bias = read_flag(hf, "attention_bias")
    return decoder_config(
        hf,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        default_head_dim=128,
        sliding_window=windows_by_layer_type(hf),
    )


ARCH = Architecture(hf_class="Qwen3ForCausalLM", config_from_hf=config_from_hf)

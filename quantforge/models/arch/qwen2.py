"""Qwen2 and Qwen2.5: biases on q, k and v, and sliding windows from some layer on if wanted."""

from collections.abc import Mapping
from typing import Any

from quantforge.models.arch.base import Architecture
from quantforge.models.config import ModelConfig
from quantforge.models.hf_config import decoder_config, windows_by_layer_type


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The biases are always there; config.json does not mention them."""
    return decoder_config(hf, qkv_bias=True, sliding_window=windows_by_layer_type(hf))


ARCH = Architecture(hf_class="Qwen2ForCausalLM", config_from_hf=config_from_hf)

"""Llama 1 to 3.x, and the many models that ship as one (SmolLM2, TinyLlama, Yi)."""

from collections.abc import Mapping
from typing import Any

from quantforge.models.arch.base import Architecture
from quantforge.models.config import ModelConfig
from quantforge.models.hf_config import decoder_config, read_flag


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """``attention_bias`` puts a bias on all four projections of attention."""
    attention_bias = read_flag(hf, "attention_bias")
    return decoder_config(
        hf,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=read_flag(hf, "mlp_bias"),
    )


ARCH = Architecture(hf_class="LlamaForCausalLM", config_from_hf=config_from_hf)

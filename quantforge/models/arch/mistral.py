"""Mistral: Llama without biases, with one sliding window for all layers (null from v0.2 on)."""

from collections.abc import Mapping
from typing import Any

from quantforge.models.arch.base import Architecture
from quantforge.models.config import ModelConfig
from quantforge.models.hf_config import decoder_config, read_size


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """``sliding_window`` holds for every layer; a file that does not say has 4096."""
    windows: tuple[int | None, ...] = ()
    if hf.get("sliding_window", 4096) is not None:
        window = read_size(hf, "sliding_window", 4096)
        windows = (window,) * read_size(hf, "num_hidden_layers")
    return decoder_config(hf, sliding_window=windows)


ARCH = Architecture(hf_class="MistralForCausalLM", config_from_hf=config_from_hf)

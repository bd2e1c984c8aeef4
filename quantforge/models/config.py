"""`ModelConfig`: what the one decoder needs to know of a model, whatever its family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, kind of scaling and that kind's parameters.

    `kind` is one of ``default``, ``linear``, ``dynamic``, ``llama3``, ``yarn``; `parameters` holds
    the values of config.json's ``rope_scaling`` or ``rope_parameters``.
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder, in elements or tokens unless a name says otherwise."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()
    """Window of each layer, in tokens; empty when every layer sees everything."""
    dtype: torch.dtype = torch.bfloat16
    """The dtype that the checkpoint declares."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, None for full attention."""
        return self.sliding_window[layer] if self.sliding_window else None

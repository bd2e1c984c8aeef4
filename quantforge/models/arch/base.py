"""`Architecture`: what one file of this folder declares about a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class InputGroup:
    """Linears of a block that read the same tensor, and who can absorb a scale of that tensor.

    `members` and `absorber` are names within a block (``self_attn.q_proj``). The absorber's output
    channels are the members' input channels. None: nothing can absorb a scale.
    """

    name: str
    members: tuple[str, ...]
    absorber: str | None = None
    absorber_is_value: bool = False
    """The absorber is v_proj: its channels repeat once a query head of the group."""


LLAMA_GROUPS = (
    InputGroup(
        name="qkv",
        members=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        absorber="input_layernorm",
    ),
    InputGroup(
        name="o",
        members=("self_attn.o_proj",),
        absorber="self_attn.v_proj",
        absorber_is_value=True,
    ),
    InputGroup(
        name="gate_up",
        members=("mlp.gate_proj", "mlp.up_proj"),
        absorber="post_attention_layernorm",
    ),
    InputGroup(name="down", members=("mlp.down_proj",), absorber="mlp.up_proj"),
)
"""The groups of every family whose block is named as Llama's, in the order they are computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A family: the class name in config.json, its config, its groups and its tensor names."""

    hf_class: str
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    input_groups: tuple[InputGroup, ...] = LLAMA_GROUPS
    block_prefix: str = "model.layers.{layer}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head"

"""What each family declares: its config, its input groups, and who can absorb a scale."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.models.arch.base import Architecture, InputGroup
from quantforge.models.attention import CausalAttention
from quantforge.models.config import ModelConfig
from quantforge.models.decoder import DecoderBlock, RMSNorm
from quantforge.models.linear import Linear
from quantforge.models.loader import (
    architecture_of,
    load_block,
    load_config,
    supported_architectures,
)
from quantforge.models.rope import RotaryEmbedding

ARCHS = ("llama", "mistral", "qwen2", "qwen3")

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def minimal(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    } | more


def block_of(folder: Path, layer: int = 0) -> tuple[DecoderBlock, ModelConfig, Architecture]:
    reader = CheckpointReader(folder)
    arch, config = architecture_of(reader.config), load_config(reader.config)
    settings: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    return load_block(reader, config, arch, layer, **settings), config, arch


def test_every_family_of_the_folder_is_found_by_its_class_name() -> None:
    assert set(supported_architectures()) == {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, ["LlamaForCausalLM"] * 2, "x"])
def test_an_unknown_family_is_refused_with_the_supported_ones(names: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"supported: LlamaForCausalLM, Mistral.*Qwen3"):
        load_config({"architectures": names})


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_size_is_named(key: str) -> None:
    config = {k: v for k, v in minimal().items() if k != key}
    with pytest.raises(CheckpointError, match=f"'{key}' is missing"):
        load_config(config)


@pytest.mark.parametrize("value", ["64", 0, -1, 1.5, True, [64]])
def test_a_malformed_size_is_refused_with_the_value_seen(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size .* is not a positive integer"):
        load_config(minimal(hidden_size=value))


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"num_key_value_heads": 3}, CheckpointError, "3 does not divide"),
        ({"head_dim": 15}, CheckpointError, "head_dim 15 is odd"),
        ({"hidden_act": "gelu"}, UnsupportedError, "'gelu' is not supported"),
        ({"tie_word_embeddings": "yes"}, CheckpointError, "'yes' is not true or false"),
        ({"dtype": "float8_e4m3fn"}, UnsupportedError, "'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, CheckpointError, "'</s>' is not a token id"),
        ({"rms_norm_eps": None, "rope_theta": "big"}, CheckpointError, "'big' is not a number"),
        ({"rope_theta": 0}, CheckpointError, "rope_theta 0.0 must be above 1"),
        ({"rope_scaling": [1]}, CheckpointError, "are not an object"),
    ],
)
def test_impossible_values_are_refused(
    more: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load_config(minimal(**more))


def test_keys_that_old_files_lack_have_transformers_defaults() -> None:
    config = load_config(minimal())
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rms_norm_eps, config.rope.theta, config.rope.kind) == (1e-6, 10000.0, "default")
    assert not config.tie_word_embeddings
    assert config.sliding_window == ()
    assert config.window(2) is None


@pytest.mark.parametrize(("key", "name"), [("dtype", "float16"), ("torch_dtype", "float32")])
def test_the_declared_dtype_is_read_under_both_names(key: str, name: str) -> None:
    assert load_config(minimal(**{key: name})).dtype == getattr(torch, name)


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (2, (2,)), ([2, 7], (2, 7))])
def test_end_tokens_may_be_none_one_or_several(value: Any, ids: tuple[int, ...]) -> None:
    assert load_config(minimal(eos_token_id=value)).eos_token_ids == ids


@pytest.mark.parametrize(
    ("architecture", "more", "windows"),
    [
        ("MistralForCausalLM", {}, (4096,) * 3),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MistralForCausalLM", {"sliding_window": 16}, (16,) * 3),
        ("LlamaForCausalLM", {"sliding_window": 16}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 16}, ()),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": None}, ()),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
            (None, None, 16),
        ),
    ],
)
def test_sliding_windows_follow_the_familys_rule(
    architecture: str, more: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert load_config(minimal(architectures=[architecture], **more)).sliding_window == windows


def test_layer_types_of_the_wrong_number_are_refused() -> None:
    more = {"use_sliding_window": True, "layer_types": ["full_attention"]}
    with pytest.raises(CheckpointError, match="1 entries for 3 layers"):
        load_config(minimal(architectures=["Qwen3ForCausalLM"], **more))


@pytest.mark.parametrize("arch", ARCHS)
def test_sizes_equal_what_transformers_wrote(arch: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(arch)
    written = json.loads((folder / "config.json").read_text())
    config = load_config(written)
    assert config.vocab_size == written["vocab_size"]
    assert config.num_layers == written["num_hidden_layers"]
    assert config.num_heads == written["num_attention_heads"]
    assert config.num_kv_heads == written["num_key_value_heads"]
    assert config.bos_token_id == 1
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize("arch", ARCHS)
def test_input_groups_name_every_linear_of_a_block_once(
    arch: str, tiny_model: Callable[..., Path]
) -> None:
    block, _, architecture = block_of(tiny_model(arch))
    members = [m for group in architecture.input_groups for m in group.members]
    linears = [n for n, m in block.named_modules() if isinstance(m, Linear)]
    assert sorted(members) == sorted(linears)


@pytest.mark.parametrize("group_name", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("arch", ARCHS)
def test_an_absorber_takes_a_scale_without_changing_the_block(
    arch: str, group_name: str, tiny_model: Callable[..., Path]
) -> None:
    block, config, architecture = block_of(tiny_model(arch))
    group = next(g for g in architecture.input_groups if g.name == group_name)
    x = torch.randn(12, config.hidden_size, generator=torch.Generator().manual_seed(0))
    rope = RotaryEmbedding(config)(torch.arange(12), torch.float32)
    before, _ = block(x, None, rope, CausalAttention(config, 1))
    smooth(block, config, group)
    after, _ = block(x, None, rope, CausalAttention(config, 1))
    assert float((after - before).norm() / before.norm()) <= 1e-5


def smooth(block: DecoderBlock, config: ModelConfig, group: InputGroup) -> None:
    """Divides the absorber's outputs by a random scale, multiplies the members' inputs by it."""
    assert group.absorber is not None
    absorber = block.get_submodule(group.absorber)
    assert isinstance(absorber, RMSNorm | Linear)
    size = absorber.weight.shape[0]
    scale = torch.rand(size, generator=torch.Generator().manual_seed(3)) + 0.5
    if isinstance(absorber, RMSNorm):
        absorber.weight = torch.nn.Parameter(absorber.weight / scale, requires_grad=False)
    else:
        bias = None if absorber.bias is None else absorber.bias / scale
        absorber.load_dense(absorber.weight / scale.unsqueeze(1), bias)
    if group.absorber_is_value:
        share = config.num_heads // config.num_kv_heads
        scale = scale.reshape(-1, config.head_dim).repeat_interleave(share, 0).flatten()
    for name in group.members:
        member = block.get_submodule(name)
        assert isinstance(member, Linear)
        member.load_dense(member.weight * scale, member.bias)

"""Rotary tables of every scaling kind equal transformers', bit for bit in float32."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quantforge.errors import CheckpointError, UnsupportedError
from quantforge.models.hf_config import rope_from_hf
from quantforge.models.loader import load_config
from quantforge.models.rope import RotaryEmbedding

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "llama3 without original length": LLAMA3,
    "yarn": YARN | {"original_max_position_embeddings": 64},
    "yarn without original length": YARN,
    "yarn betas": YARN | {"original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2},
    "yarn attention factor": YARN | {"attention_factor": 1.25},
    "yarn mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn untruncated": YARN | {"original_max_position_embeddings": 64, "truncate": False},
    "yarn shrinking": YARN | {"factor": 0.5},
}


def hf_config(rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 128,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_theta": 10000.0} | rope,
    } | more


def oracle(config: dict[str, Any]) -> LlamaRotaryEmbedding:
    """Transformers' embedding; it gets a copy, because it completes the parameters in place."""
    keys = copy.deepcopy({k: v for k, v in config.items() if k != "architectures"})
    return LlamaRotaryEmbedding(LlamaConfig(**keys))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_cos_and_sin_equal_transformers(kind: str, theta: float) -> None:
    config = hf_config(KINDS[kind] | {"rope_theta": theta})
    positions = torch.arange(900)  # beyond the maximum of 256 as well
    want_cos, want_sin = oracle(config)(torch.zeros(1), positions.unsqueeze(0))
    got = RotaryEmbedding(load_config(config))(positions, torch.float32)
    assert torch.equal(got.cos, want_cos[0])
    assert torch.equal(got.sin, want_sin[0])


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_top_level_original_length_goes_before_the_parameters_own(kind: str) -> None:
    config = hf_config(KINDS[kind], original_max_position_embeddings=32)
    positions = torch.arange(300)
    want, _ = oracle(config)(torch.zeros(1), positions.unsqueeze(0))
    assert torch.equal(RotaryEmbedding(load_config(config))(positions, torch.float32).cos, want[0])


def test_dynamic_frequencies_follow_the_longest_position_of_the_call() -> None:
    config = hf_config(KINDS["dynamic"])
    rotary, plain = RotaryEmbedding(load_config(config)), oracle(hf_config(KINDS["default"]))
    short = torch.arange(256)
    want, _ = plain(torch.zeros(1), short.unsqueeze(0))
    before = rotary(short, torch.float32).cos
    decode_far = rotary(torch.tensor([5, 700]), torch.float32).cos
    after = rotary(short, torch.float32).cos
    assert torch.equal(before, want[0])
    assert torch.equal(after, want[0])
    whole = rotary(torch.arange(701), torch.float32).cos
    assert torch.equal(decode_far, whole[[5, 700]])


def test_the_older_keys_mean_the_same_as_the_newer() -> None:
    new = hf_config(LLAMA3 | {"rope_theta": 500000.0})
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    del old["rope_scaling"]["rope_type"]
    left, right = RotaryEmbedding(load_config(old)), RotaryEmbedding(load_config(new))
    assert torch.equal(left.inv_freq, right.inv_freq)


def test_a_null_scaling_is_the_default_kind() -> None:
    rope = rope_from_hf({"rope_theta": 1000.0, "rope_scaling": None})
    assert (rope.kind, rope.theta) == ("default", 1000.0)


def test_tables_are_rounded_once_to_the_activations_dtype() -> None:
    rotary = RotaryEmbedding(load_config(hf_config(KINDS["yarn"])))
    positions = torch.arange(50)
    wide, narrow = rotary(positions, torch.float32), rotary(positions, torch.bfloat16)
    assert torch.equal(narrow.cos, wide.cos.bfloat16())
    assert torch.equal(narrow.sin, wide.sin.bfloat16())


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "longrope.*default, linear, dynamic"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"full_attention": {"rope_type": "default"}}, "differ by layer type"),
    ],
)
def test_a_rope_that_the_decoder_lacks_is_unsupported(rope: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        load_config(hf_config(rope))


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "linear"}, "'factor' is missing"),
        ({"rope_type": "llama3", "factor": 8.0}, "'low_freq_factor' is missing"),
        ({"rope_type": "linear", "factor": "2"}, "factor '2' is not a number"),
    ],
)
def test_a_scaling_without_its_numbers_is_a_bad_checkpoint(
    rope: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_config(hf_config(rope))

"""Random models of known shapes: sizes as published, activations that keep their size."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from quantforge.errors import UnsupportedError, UsageError
from quantforge.models.decoder import Decoder
from quantforge.models.linear import Linear, QuantizedInner
from quantforge.models.synthetic import SHAPES, shape_named, synthetic_decoder
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.engine import Engine
from quantforge.runtime.request import SamplingParams
from quantforge.schemes import PRESETS

CPU = torch.device("cpu")

PARAMETERS = {
    "llama-3.1-8b": 8030261248,
    "llama-3.1-70b": 70553706496,
    "qwen3-8b": 8190735360,
    "smollm2-135m": 134515008,
}
"""As the models' cards, or transformers' models of the same configuration, count them."""

SMALL = dataclasses.replace(
    SHAPES["llama-3.1-8b"],
    vocab_size=400,
    hidden_size=256,
    intermediate_size=384,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    config = shape_named(name)
    with torch.device("meta"):
        decoder = Decoder(config)
    linears = [module for module in decoder.modules() if isinstance(module, Linear)]
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    if config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    others = sum(parameter.numel() for parameter in decoder.parameters())
    assert weights + others == PARAMETERS[name]


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"known: llama-3\.1-8b"):
        shape_named("llama-9b")


@pytest.mark.parametrize("preset", [*PRESETS, None])
def test_every_scheme_gives_a_model_that_writes(preset: str | None) -> None:
    scheme = None if preset is None else PRESETS[preset]
    decoder = synthetic_decoder(SMALL, scheme, device=CPU, dtype=torch.float32, lm_head=scheme)
    inner = decoder.layers[0].mlp.down_proj.inner
    assert inner is not None
    if scheme is not None:
        assert isinstance(inner, QuantizedInner)
        assert inner.scheme == str(scheme)
    x = torch.randn(50, SMALL.intermediate_size, generator=torch.Generator().manual_seed(1))
    assert 0.8 < float(inner(x).std()) < 1.25  # inputs of variance 1 give outputs of variance 1
    engine = Engine(decoder, None, EngineConfig(max_model_len=64, max_num_seqs=2))
    found = engine.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=5, temperature=0))
    assert [len(completion.token_ids) for completion in found] == [5, 5]


def test_layers_and_seeds_have_weights_of_their_own() -> None:
    make: Callable[[int], Decoder] = lambda seed: synthetic_decoder(  # noqa: E731
        SMALL, None, device=CPU, dtype=torch.float32, seed=seed
    )
    one, again, other = make(1), make(1), make(2)
    weight = one.layers[0].mlp.down_proj.weight
    assert torch.equal(weight, again.layers[0].mlp.down_proj.weight)
    assert not torch.equal(weight, other.layers[0].mlp.down_proj.weight)
    assert not torch.equal(weight, one.layers[1].mlp.down_proj.weight)


def test_a_scheme_that_does_not_fit_the_shape_is_refused() -> None:
    config = dataclasses.replace(SMALL, hidden_size=192)
    with pytest.raises(UnsupportedError, match="group_size 128 does not divide"):
        synthetic_decoder(config, PRESETS["w4a16"], device=CPU, dtype=torch.float32)

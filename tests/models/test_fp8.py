"""FP8 models: logits as transformers with compressed-tensors and as a formula; joined; on ranks.

Legend: M tokens, K in features.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import UnsupportedError
from quantforge.models.attention import CausalAttention
from quantforge.models.decoder import Decoder, DecoderBlock
from quantforge.models.linear import Linear, QuantizedInner
from quantforge.models.loader import load_decoder
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.schemes import PRESETS, QuantScheme, TensorQuant

DYNAMIC, BLOCK = PRESETS["fp8_dynamic"], PRESETS["fp8_block"]
WEIGHT_ONLY = QuantScheme(weight=DYNAMIC.weight)
TENSOR = QuantScheme(
    weight=TensorQuant(num_bits=8, dtype="float", granularity="tensor"),
    activation=DYNAMIC.activation,
)
SCHEMES = [DYNAMIC, BLOCK, WEIGHT_ONLY, TENSOR]
WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Sizes that blocks and groups of 128 divide; k and v have 64 outputs: half a block."""

BOUNDARY = 1e-2
"""Bound on the relative error between two programs that quantize activations: where sums differ in
the last bit, a value between two codes may fall to either. Not quantizing them moves the logits of
these models by more than five times as much."""

TinyModel = Callable[..., Path]
QuantizedModel = Callable[[Path, Callable[[str], QuantScheme | None]], Path]


def load(folder: Path, **arguments: Any) -> Decoder:
    settings: dict[str, Any] = {"device": "cpu", "dtype": torch.float32} | arguments
    return load_decoder(CheckpointReader(folder), **settings)


def token_ids() -> Tensor:
    return torch.randint(3, 512, (30,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    positions = torch.arange(30)
    return decoder.logits(decoder(token_ids(), positions, CausalAttention(decoder.config, 1)))


@torch.inference_mode()
def oracle_logits(model: Any) -> Tensor:
    found: Tensor = model(token_ids().unsqueeze(0)).logits[0]
    return found


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def block_at(decoder: Decoder, layer: int) -> DecoderBlock:
    block = decoder.layers[layer]
    assert isinstance(block, DecoderBlock)
    return block


def compressed_model(folder: Path) -> Any:
    """transformers' model with the layers of compressed-tensors, which quantize their inputs."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def rounded_by_hand(x: Tensor, width: int) -> Tensor:
    """`x` [..., K] after E4M3 with one scale a `width` values: sign, exponent, three bits."""
    runs = x.unflatten(-1, (-1, width))
    scale = runs.abs().amax(-1, keepdim=True) / 448
    ratio = (runs / torch.where(scale == 0, 1.0, scale)).clamp(-448, 448)
    exponent = ratio.abs().clamp(min=2.0**-6).log2().floor()
    step = torch.exp2(exponent - 3)
    return ((ratio / step).round() * step * scale).flatten(-2)


@pytest.mark.parametrize("scheme", [DYNAMIC, BLOCK], ids=str)
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_logits_equal_transformers_with_quantized_activations(
    arch: str,
    merge: bool,
    scheme: QuantScheme,
    tiny_model: TinyModel,
    quantized_model: QuantizedModel,
    reference_model: Callable[..., Any],
) -> None:
    folder = quantized_model(tiny_model(arch, **WIDE), lambda _: scheme)
    ours = logits(load(folder, merge=merge))
    assert relative_error(ours, oracle_logits(compressed_model(folder))) <= BOUNDARY
    assert relative_error(ours, oracle_logits(reference_model(folder))) > 5 * BOUNDARY


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_logits_equal_dense_layers_whose_inputs_are_rounded_by_hand(
    scheme: QuantScheme,
    tiny_model: TinyModel,
    quantized_model: QuantizedModel,
    reference_model: Callable[..., Any],
) -> None:
    folder = quantized_model(tiny_model(**WIDE), lambda _: scheme)
    model = reference_model(folder)
    activation = scheme.activation
    if activation is not None:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("_proj"):
                width = activation.group_size or module.in_features
                module.register_forward_pre_hook(
                    lambda _, inputs, width=width: (rounded_by_hand(inputs[0], width),)
                )
    bound = 1e-5 if activation is None else BOUNDARY
    assert relative_error(logits(load(folder)), oracle_logits(model)) <= bound


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_are_those_that_compressed_tensors_decompresses(
    scheme: QuantScheme,
    tiny_model: TinyModel,
    quantized_model: QuantizedModel,
    reference_model: Callable[..., Any],
) -> None:
    folder = quantized_model(tiny_model(**WIDE), lambda _: scheme)
    reader, model = CheckpointReader(folder), reference_model(folder)
    for layer in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        ours = reader.linear(layer)
        assert isinstance(ours, QuantizedTensor)
        assert torch.equal(ours.dequantize(), model.get_submodule(layer).weight)


def test_channels_join_and_the_joined_product_is_that_of_the_parts(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    folder = quantized_model(tiny_model(**WIDE), lambda _: DYNAMIC)
    joined, apart = block_at(load(folder), 0), block_at(load(folder, merge=False), 0)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    qkv = joined.self_attn.qkv_proj
    assert qkv is not None
    names = ("q_proj", "k_proj", "v_proj")
    parts = [apart.self_attn.get_submodule(name)(x) for name in names]
    assert relative_error(qkv(x), torch.cat(parts, dim=1)) <= 1e-6
    assert joined.mlp.gate_up_proj is not None


@pytest.mark.parametrize(
    ("kv_heads", "is_joined"), [(2, False), (4, True)], ids=["half a block", "whole blocks"]
)
def test_blocks_join_only_where_parts_end_with_a_whole_block(
    kv_heads: int, is_joined: bool, tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    folder = quantized_model(tiny_model(**WIDE, num_key_value_heads=kv_heads), lambda _: BLOCK)
    decoder = load(folder)
    assert (block_at(decoder, 0).self_attn.qkv_proj is not None) == is_joined
    assert block_at(decoder, 0).mlp.gate_up_proj is not None
    assert relative_error(logits(decoder), logits(load(folder, merge=False))) <= BOUNDARY


def test_scales_of_tensors_that_differ_join_as_scales_of_channels(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    folder = quantized_model(tiny_model(), lambda _: TENSOR)
    joined, apart = block_at(load(folder), 0), block_at(load(folder, merge=False), 0)
    qkv, gate_up = joined.self_attn.qkv_proj, joined.mlp.gate_up_proj
    assert qkv is not None
    assert gate_up is not None
    assert isinstance(qkv.inner, QuantizedInner)
    assert qkv.inner.scheme == "fp8-channel+fp8-token-dynamic"
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    parts = [apart.self_attn.get_submodule(n)(x) for n in ("q_proj", "k_proj", "v_proj")]
    assert relative_error(qkv(x), torch.cat(parts, dim=1)) <= 1e-6


def test_projections_whose_inputs_are_quantized_otherwise_stay_apart(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    def mixed(layer: str) -> QuantScheme:
        return WEIGHT_ONLY if layer.endswith(("q_proj", "up_proj")) else DYNAMIC

    block = block_at(load(quantized_model(tiny_model(), mixed)), 0)
    assert block.self_attn.qkv_proj is None
    assert block.mlp.gate_up_proj is None


RANKS = {**WIDE, "head_dim": 64, "num_key_value_heads": 4, "attention_bias": True}


@pytest.mark.parametrize("scheme", [BLOCK, WEIGHT_ONLY], ids=str)
def test_the_outputs_of_two_ranks_sum_to_the_whole(
    scheme: QuantScheme, tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    folder = quantized_model(tiny_model(**RANKS), lambda _: scheme)
    whole = load(folder)
    ranks = [load(folder, rank=rank, world=2) for rank in range(2)]
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    want = block_at(whole, 1).mlp(x)
    parts = [block_at(rank, 1).mlp(x) for rank in ranks]
    assert relative_error(parts[0] + parts[1], want) <= BOUNDARY
    rope = whole.rotary(torch.arange(9), torch.float32)

    def attend(decoder: Decoder) -> Tensor:
        attention = block_at(decoder, 1).self_attn
        out: Tensor = attention(x, rope, CausalAttention(decoder.config, 1))
        return out

    assert relative_error(attend(ranks[0]) + attend(ranks[1]), attend(whole)) <= BOUNDARY


def test_a_rank_scales_a_token_over_its_own_inputs(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    folder = quantized_model(tiny_model(**RANKS), lambda _: DYNAMIC)
    weight = CheckpointReader(folder).linear("model.layers.0.mlp.down_proj")
    assert isinstance(weight, QuantizedTensor)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    x[:, 128:] *= 100  # the second rank's: they must not coarsen the first's
    down = block_at(load(folder, rank=0, world=2), 0).mlp.down_proj
    want = rounded_by_hand(x[:, :128], 128) @ weight.dequantize()[:, :128].T
    assert relative_error(down(x[:, :128]), want) <= 1e-6


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (WIDE, "q_proj: 2 ranks cut its 128 outputs into 64, which block rows 128 does not"),
        (
            {**RANKS, "intermediate_size": 384},
            "gate_proj: 2 ranks cut its 384 outputs into 192, which block rows 128 does not",
        ),
    ],
    ids=["attention", "mlp"],
)
def test_a_rank_boundary_inside_a_block_is_refused(
    sizes: dict[str, Any], words: str, tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    folder = quantized_model(tiny_model(**sizes), lambda _: BLOCK)
    with pytest.raises(UnsupportedError, match=words):
        load(folder, rank=0, world=2)


def test_a_group_of_activations_that_does_not_divide_is_refused_before_loading(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    folder = quantized_model(tiny_model(), lambda _: BLOCK)
    with pytest.raises(UnsupportedError, match=r"q_proj: one activation scale for 128 .* 64"):
        load(folder)


def test_activations_without_a_kernel_are_refused() -> None:
    weight = quantize(torch.randn(8, 16), DYNAMIC.weight)
    batch = TensorQuant(num_bits=8, dtype="float", granularity="tensor", dynamic=True)
    with pytest.raises(UnsupportedError, match=r"no kernel multiplies .* fp8-channel.fp8-tensor"):
        Linear(16, 8).load_quantized(weight, None, torch.float32, batch)


@pytest.mark.parametrize(
    ("mode", "kernel"), [("auto", "dequantize-once"), ("reference", "reference")]
)
def test_a_linear_names_its_scheme_and_kernel(
    mode: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTFORGE_KERNELS", mode)
    linear = Linear(16, 8)
    weight = quantize(torch.randn(8, 16), DYNAMIC.weight)
    linear.load_quantized(weight, None, torch.float32, DYNAMIC.activation)
    assert isinstance(linear.inner, QuantizedInner)
    assert linear.inner.scheme == "fp8-channel+fp8-token-dynamic"
    assert linear.inner.kernel == kernel

"""Schemes without a fused kernel: dequantized at load, named as such, equal to transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.checkpoint.base import SchemeGroup, format_for
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.checkpoint.writer import CheckpointWriter
from quantforge.errors import UnsupportedError
from quantforge.models.attention import CausalAttention
from quantforge.models.decoder import Decoder, DecoderBlock
from quantforge.models.linear import Linear, QuantizedInner, serving_kernel, serving_note
from quantforge.models.loader import load_decoder
from quantforge.qtensor import QuantizedTensor, global_scale_of, quantize
from quantforge.schemes import PRESETS, QuantScheme, with_group_size

NVFP4, MXFP4 = PRESETS["nvfp4a16"], PRESETS["mxfp4a16"]
W3, W2 = with_group_size(PRESETS["w3a16"], 32), with_group_size(PRESETS["w2a16"], 32)
SCHEMES = [NVFP4, MXFP4, W3, W2]
CPU = torch.device("cpu")

TinyModel = Callable[..., Path]
QuantizedModel = Callable[[Path, Callable[[str], QuantScheme | None]], Path]


def load(folder: Path, **arguments: Any) -> Decoder:
    settings: dict[str, Any] = {"device": "cpu", "dtype": torch.float32} | arguments
    return load_decoder(CheckpointReader(folder), **settings)


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    ids = torch.randint(3, 512, (30,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(30)
    return decoder.logits(decoder(ids, positions, CausalAttention(decoder.config, 1)))


@torch.inference_mode()
def oracle_logits(model: Any) -> Tensor:
    ids = torch.randint(3, 512, (30,), generator=torch.Generator().manual_seed(1))
    found: Tensor = model(ids.unsqueeze(0)).logits[0]
    return found


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def block_at(decoder: Decoder, layer: int) -> DecoderBlock:
    block = decoder.layers[layer]
    assert isinstance(block, DecoderBlock)
    return block


def share_global_scales(folder: Path) -> Path:
    """A copy of a dense model in NVFP4 whose q, k and v, and gate and up, share a global scale."""
    reader, output = CheckpointReader(folder), folder.with_name(f"{folder.name}-shared")
    layout = format_for(NVFP4)
    with CheckpointWriter(output) as writer:
        for name in reader.names():
            layer = name.removesuffix(".weight")
            prefix, _, short = layer.rpartition(".")
            if not name.endswith("_proj.weight"):
                writer.add(name, reader.tensor(name))
                continue
            trios = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
            peers = next((t for t in trios if short in t), (short,))
            weights = [reader.tensor(f"{prefix}.{p}.weight") for p in peers]
            shared = global_scale_of(weights, NVFP4.weight)
            qtensor = quantize(reader.tensor(name), NVFP4.weight, global_scale=shared)
            writer.add_linear(layer, qtensor, layout)
        group = SchemeGroup(targets=("Linear",), scheme=NVFP4)
        section = layout.quantization_config([group], ["lm_head"])
        writer.commit(reader.config | {"quantization_config": section})
    return output


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_logits_equal_transformers_on_the_decompressed_weights(
    scheme: QuantScheme,
    tiny_model: TinyModel,
    quantized_model: QuantizedModel,
    reference_model: Callable[..., Any],
) -> None:
    folder = quantized_model(tiny_model(), lambda _: scheme)
    # transformers gets FP4 weights through bfloat16: 2^-9 relative, in every weight
    bound = 1e-5 if scheme.weight.dtype == "int" else 1e-2
    assert relative_error(logits(load(folder)), oracle_logits(reference_model(folder))) <= bound


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_weight_is_dequantized_once_and_rounded_once(scheme: QuantScheme) -> None:
    weight = quantize(torch.randn(8, 64), scheme.weight)
    linear = Linear(64, 8)
    linear.load_quantized(weight, None, torch.bfloat16)
    assert isinstance(linear.inner, QuantizedInner)
    (dense,) = linear.inner.operands
    assert torch.equal(dense, weight.dequantize(torch.float32).to(torch.bfloat16))
    x = torch.randn(5, 64).to(torch.bfloat16)
    assert torch.equal(linear(x), x @ dense.T)


def test_a_shared_global_scale_joins_and_the_product_is_that_of_the_parts(
    tiny_model: TinyModel,
) -> None:
    folder = share_global_scales(tiny_model())
    joined, apart = block_at(load(folder), 0), block_at(load(folder, merge=False), 0)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    qkv = joined.self_attn.qkv_proj
    assert qkv is not None
    assert joined.mlp.gate_up_proj is not None
    parts = [apart.self_attn.get_submodule(n)(x) for n in ("q_proj", "k_proj", "v_proj")]
    assert relative_error(qkv(x), torch.cat(parts, dim=1)) <= 1e-6


def test_different_global_scales_stay_apart(
    tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    block = block_at(load(quantized_model(tiny_model(), lambda _: NVFP4)), 0)
    assert block.self_attn.qkv_proj is None
    assert block.mlp.gate_up_proj is None


@pytest.mark.parametrize("scheme", [NVFP4, MXFP4, W3], ids=str)
def test_the_outputs_of_two_ranks_sum_to_the_whole(
    scheme: QuantScheme, tiny_model: TinyModel, quantized_model: QuantizedModel
) -> None:
    folder = quantized_model(tiny_model(), lambda _: scheme)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    want = block_at(load(folder), 1).mlp(x)
    parts = [block_at(load(folder, rank=rank, world=2), 1).mlp(x) for rank in range(2)]
    assert relative_error(parts[0] + parts[1], want) <= 1e-5


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_path_is_named_with_its_reason(
    scheme: QuantScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serving_kernel(scheme, (64, 64), CPU, torch.float32) == ("dequantize-once", None)
    note = serving_note(scheme)
    assert note is not None
    assert note.startswith(f"dequantize-once: no fused kernel for {scheme};")
    monkeypatch.setenv("QUANTFORGE_KERNELS", "triton")
    kernel, reason = serving_kernel(scheme, (64, 64), CPU, torch.float32)
    assert kernel is None
    assert reason is not None
    assert f"no fused kernel for {scheme}" in reason


@pytest.mark.parametrize("name", ["w4a16", "w8a16", "fp8_dynamic"])
def test_schemes_with_a_kernel_have_no_note(name: str) -> None:
    assert serving_note(PRESETS[name]) is None


def test_a_loader_told_to_use_kernels_only_refuses_and_names_the_layer(
    tiny_model: TinyModel, quantized_model: QuantizedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantized_model(tiny_model(), lambda n: W3 if n.endswith("down_proj") else None)
    monkeypatch.setenv("QUANTFORGE_KERNELS", "triton")
    with pytest.raises(UnsupportedError, match="no fused kernel for int3-g32-asym"):
        load(folder)


def test_a_permuted_weight_multiplies_the_inputs_as_they_come() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    plain = quantize(torch.randn(8, 64), W2.weight)
    permuted: QuantizedTensor = replace(plain, permutation=order)
    x = torch.randn(5, 64)
    linear = Linear(64, 8)
    linear.load_quantized(permuted, None, torch.float32)
    expected = x[:, order] @ plain.dequantize().T
    assert relative_error(linear(x), expected) <= 1e-6

"""W8A8 models: logits as transformers with compressed-tensors; joined; on ranks.

Legend: M tokens, K in features.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.calibration.data import CalibrationSet
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import UnsupportedError
from quantforge.models.attention import CausalAttention
from quantforge.models.decoder import Decoder, DecoderBlock
from quantforge.models.linear import Linear, QuantizedInner
from quantforge.models.loader import load_decoder
from quantforge.models.partition import join, joinable
from quantforge.pipeline import quantize_model
from quantforge.plan import plan_quantization
from quantforge.qtensor import QuantizedTensor, quantize
from quantforge.recipe import QuantizeSection, Recipe
from quantforge.schemes import PRESETS

TinyModel = Callable[..., Path]

CPU = torch.device("cpu")
STATIC, INT8 = PRESETS["fp8_static"], PRESETS["w8a8_int8"]
NAMES = ("fp8_static", "w8a8_int8", "w8a8_int8_static")

BOUNDARY = 1e-2
"""Bound on the relative error between two programs that quantize activations: where sums differ in
the last bit, a value between two codes may fall to either."""


def token_ids() -> Tensor:
    return torch.randint(3, 512, (30,), generator=torch.Generator().manual_seed(1))


def quantized(folder: Path, output: Path, scheme: str, method: str = "rtn") -> Path:
    """`folder` as the pipeline quantizes it, calibrated on the very text of `token_ids`."""
    recipe = Recipe(source="test", quantize=QuantizeSection(method=method, scheme=scheme))
    plan = plan_quantization(CheckpointReader(folder), recipe.quantize)
    text = CalibrationSet(
        token_ids=token_ids().reshape(1, -1), id="text", sha256="1" * 64, sources={}, warnings=()
    )
    quantize_model(folder, output, recipe, plan, text, device=CPU, dtype=torch.float32)
    return output


def load(folder: Path, **arguments: Any) -> Decoder:
    settings: dict[str, Any] = {"device": "cpu", "dtype": torch.float32} | arguments
    return load_decoder(CheckpointReader(folder), **settings)


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    positions = torch.arange(30)
    return decoder.logits(decoder(token_ids(), positions, CausalAttention(decoder.config, 1)))


def compressed_logits(folder: Path) -> Tensor:
    """Of transformers' model with the layers of compressed-tensors, which quantize their inputs."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: Tensor = model(token_ids().unsqueeze(0)).logits[0]
    return found


def dequantized_logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(token_ids().unsqueeze(0)).logits[0]
    return found


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def block_at(decoder: Decoder, layer: int) -> DecoderBlock:
    block = decoder.layers[layer]
    assert isinstance(block, DecoderBlock)
    return block


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_logits_equal_transformers_with_quantized_inputs(
    arch: str,
    merge: bool,
    scheme: str,
    tiny_model: TinyModel,
    tmp_path: Path,
    reference_model: Callable[..., Any],
) -> None:
    folder = quantized(tiny_model(arch), tmp_path / "out", scheme)
    ours = logits(load(folder, merge=merge))
    assert relative_error(ours, compressed_logits(folder)) <= BOUNDARY
    plain = dequantized_logits(reference_model(folder))
    assert relative_error(ours, plain) > 1e-3, "the inputs were quantized"


@pytest.mark.parametrize("scheme", NAMES)
def test_projections_of_one_input_join_exactly(
    scheme: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = quantized(tiny_model(), tmp_path / "out", scheme)
    joined, apart = block_at(load(folder), 0), block_at(load(folder, merge=False), 0)
    qkv = joined.self_attn.qkv_proj
    assert qkv is not None
    assert joined.mlp.gate_up_proj is not None
    assert isinstance(qkv.inner, QuantizedInner)
    assert qkv.inner.scheme == str(PRESETS[scheme])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    parts = [apart.self_attn.get_submodule(n)(x) for n in ("q_proj", "k_proj", "v_proj")]
    assert relative_error(qkv(x), torch.cat(parts, dim=1)) <= 1e-6


def test_the_parts_of_a_merged_projection_are_written_with_one_scale(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    reader = CheckpointReader(quantized(tiny_model(), tmp_path / "out", "fp8_static"))
    source = CheckpointReader(next((tmp_path / "tiny").iterdir()))
    prefix = "model.layers.1."
    for names in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        for kind in ("weight_scale", "input_scale"):
            assert len({float(reader.tensor(f"{prefix}{n}.{kind}")) for n in names}) == 1
        largest = max(float(source.tensor(f"{prefix}{n}.weight").abs().max()) for n in names)
        stored = float(reader.tensor(f"{prefix}{names[0]}.weight_scale"))
        assert stored == pytest.approx(largest / 448, rel=1e-6)


def weight_of(scale: float | None, spread: float = 1.0) -> QuantizedTensor:
    made = quantize(torch.randn(8, 16) * spread, STATIC.weight)
    return replace(made, input_scale=None if scale is None else torch.tensor([scale]))


def test_weights_whose_input_scales_differ_stay_apart() -> None:
    assert joinable([weight_of(0.5), weight_of(0.5)])
    assert not joinable([weight_of(0.5), weight_of(0.25)])
    assert not joinable([weight_of(0.5), weight_of(None)])


def test_joining_changes_no_weight() -> None:
    parts = [weight_of(0.5), weight_of(0.5, spread=9)]
    joined = join(parts)
    assert isinstance(joined, QuantizedTensor)
    assert joined.quant.granularity == "channel"
    assert torch.equal(joined.dequantize(), torch.cat([p.dequantize() for p in parts]))
    assert joined.input_scale is not None
    assert joined.input_scale.tolist() == [0.5]
    alike = join([parts[0], parts[0]])
    assert isinstance(alike, QuantizedTensor)
    assert alike.quant == STATIC.weight
    assert alike.scale.shape == (1, 1)


RANKS = {"head_dim": 16, "attention_bias": True}


@pytest.mark.parametrize("scheme", ["fp8_static", "w8a8_int8_static"])
def test_the_outputs_of_two_ranks_sum_to_the_whole(
    scheme: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = quantized(tiny_model(**RANKS), tmp_path / "out", scheme)
    whole = load(folder)
    ranks = [load(folder, rank=rank, world=2) for rank in range(2)]
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    parts = [block_at(rank, 1).mlp(x) for rank in ranks]
    assert relative_error(parts[0] + parts[1], block_at(whole, 1).mlp(x)) <= BOUNDARY


def test_a_static_scheme_without_a_scale_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"fp8-tensor\+fp8-tensor needs an input_scale"):
        Linear(16, 8).load_quantized(weight_of(None), None, torch.float32, STATIC.activation)


@pytest.mark.parametrize(("mode", "kernel"), [("auto", "float-codes"), ("reference", "reference")])
def test_a_linear_names_its_scheme_and_kernel(
    mode: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTFORGE_KERNELS", mode)
    linear = Linear(16, 8)
    weight = quantize(torch.randn(8, 16), INT8.weight)
    linear.load_quantized(weight, None, torch.float32, INT8.activation)
    assert isinstance(linear.inner, QuantizedInner)
    assert linear.inner.scheme == "int8-channel-sym+int8-token-sym-dynamic"
    assert linear.inner.kernel == kernel


@pytest.mark.parametrize("group_size", [None, 16], ids=["channel", "group"])
def test_int8_weights_of_other_tools_are_served_without_quantized_inputs(
    group_size: int | None, tiny_model: TinyModel, reference_model: Callable[..., Any]
) -> None:
    """Layers stored by the package as ``int-quantized`` without ``input_activations``."""
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )

    from quantforge.checkpoint.base import SchemeGroup, format_named
    from quantforge.checkpoint.writer import CheckpointWriter
    from quantforge.schemes import QuantScheme, with_group_size

    scheme = with_group_size(QuantScheme(weight=INT8.weight), group_size)
    layout = format_named("int-quantized")
    reader = CheckpointReader(tiny_model())
    output = reader.folder.with_name("int8")
    section = layout.quantization_config(
        [SchemeGroup(targets=("Linear",), scheme=scheme)], ["lm_head"]
    )
    read = QuantizationConfig.model_validate(section)
    assert read.quantization_status == QuantizationStatus.COMPRESSED
    assert isinstance(read.config_groups["group_0"], QuantizationScheme)
    with CheckpointWriter(output) as writer:
        for name in reader.names():
            tensor = reader.tensor(name)
            if name.endswith("_proj.weight"):
                qtensor = quantize(tensor, scheme.weight)
                writer.add_linear(name.removesuffix(".weight"), qtensor, layout)
            else:
                writer.add(name, tensor)
        writer.commit(reader.config | {"quantization_config": section})
    ours = logits(load(output))
    assert relative_error(ours, dequantized_logits(reference_model(output))) <= 1e-5

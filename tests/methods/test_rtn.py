"""Rounding to nearest is compressed-tensors' rounding, and its reports tell the truth."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams

from quantforge.errors import RecipeError
from quantforge.methods._float_scale import search_float_scale
from quantforge.methods.base import load_method
from quantforge.methods.rtn import METHOD, RtnOptions
from quantforge.schemes import TensorQuant


def scheme(num_bits: int, symmetric: bool, group_size: int | None) -> TensorQuant:
    return TensorQuant(
        num_bits=num_bits,
        symmetric=symmetric,
        granularity="group" if group_size else "channel",
        group_size=group_size,
    )


CASES = [
    pytest.param(scheme(bits, symmetric, group), id=str(scheme(bits, symmetric, group)))
    for bits in (4, 8)
    for symmetric in (True, False)
    for group in (None, 32)
]


def round_by_the_package(weight: torch.Tensor, quant: TensorQuant) -> torch.Tensor:
    arguments = QuantizationArgs(
        num_bits=quant.num_bits,
        symmetric=quant.symmetric,
        strategy=quant.granularity,
        group_size=quant.group_size,
    )
    grouped = weight.reshape(len(weight), quant.num_groups(weight.shape[1]), -1)
    scale, zero_point = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
    return fake_quantize(weight, scale, zero_point, arguments)


@pytest.mark.parametrize("quant", CASES)
def test_weights_equal_those_that_compressed_tensors_rounds(
    quant: TensorQuant, tiny_model: Callable[..., Path], record_block: Callable[..., Any]
) -> None:
    task = record_block(tiny_model(), quant=quant).task
    result = METHOD.quantize_block(task, RtnOptions())
    assert result.qtensors.keys() == task.quant.keys()
    for name, qtensor in result.qtensors.items():
        expected = round_by_the_package(task.weights[name], quant)
        torch.testing.assert_close(qtensor.dequantize(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("quant", CASES)
def test_no_weight_moves_by_more_than_half_a_step(
    quant: TensorQuant, tiny_model: Callable[..., Path], record_block: Callable[..., Any]
) -> None:
    """An asymmetric zero point is rounded too, so the ends of a range may clip by half a step."""
    task = record_block(tiny_model(), quant=quant).task
    for name, qtensor in METHOD.quantize_block(task, RtnOptions()).qtensors.items():
        size = quant.group_size or task.weights[name].shape[1]
        step = qtensor.scale.repeat_interleave(size, dim=1)
        moved = (qtensor.dequantize() - task.weights[name]).abs()
        assert bool((moved <= step * 0.5001).all()), name


def test_reported_errors_equal_the_direct_ones(
    tiny_model: Callable[..., Path], record_block: Callable[..., Any]
) -> None:
    block = record_block(tiny_model())
    result = METHOD.quantize_block(block.task, RtnOptions())
    group_of = {m: g.name for g in block.task.groups for m in g.members}
    for report in result.reports:
        weight = block.task.weights[report.name].double()
        delta = result.qtensors[report.name].dequantize().double() - weight
        x = block.inputs[group_of[report.name]].double()
        output_error = (x @ delta.T).square().sum() / (x @ weight.T).square().sum()
        weight_error = delta.square().sum() / weight.square().sum()
        assert report.output_error == pytest.approx(float(output_error), rel=1e-4)
        assert report.weight_error == pytest.approx(float(weight_error), rel=1e-4)


def test_without_statistics_there_is_no_output_error(
    tiny_model: Callable[..., Path], record_block: Callable[..., Any]
) -> None:
    task = record_block(tiny_model()).task
    task.statistics = {}
    reports = METHOD.quantize_block(task, RtnOptions()).reports
    assert len(reports) == 7
    assert all(r.output_error is None and r.weight_error > 0 for r in reports)


def test_linears_without_a_scheme_stay_dense(
    tiny_model: Callable[..., Path], record_block: Callable[..., Any]
) -> None:
    task = record_block(tiny_model()).task
    task.quant = {"mlp.down_proj": task.quant["mlp.down_proj"]}
    assert METHOD.quantize_block(task, RtnOptions()).qtensors.keys() == {"mlp.down_proj"}


def test_rtn_needs_no_text_and_refuses_unknown_options() -> None:
    method = load_method("rtn")
    assert not method.needs_statistics
    with pytest.raises(RecipeError, match="unknown option 'clip'; known: float_scales"):
        method.parse_options({"clip": True})


FLOATS = [
    TensorQuant(num_bits=8, dtype="float", granularity="channel"),
    TensorQuant(num_bits=8, dtype="float", granularity="block", block_shape=(128, 128)),
]


@pytest.mark.parametrize("quant", FLOATS, ids=str)
def test_a_searched_float_scale_loses_no_more_than_the_largest_magnitude_needs(
    quant: TensorQuant,
) -> None:
    """Under every scale, and never by clamping: the largest weight keeps its code."""
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    plain = search_float_scale(weight, quant, torch.float32, 1)
    found = search_float_scale(weight, quant, torch.float32, 16)
    assert bool((found >= plain).all())
    assert bool((found < 2 * plain).all())
    assert not torch.equal(found, plain)

    def error(scale: torch.Tensor) -> torch.Tensor:
        rows, columns = quant.block_shape or (1, 300)
        spread = scale.repeat_interleave(rows, 0)[:200].repeat_interleave(columns, 1)[:, :300]
        rounded = (weight / spread).to(torch.float8_e4m3fn).float() * spread
        assert float(rounded.abs().max()) > 0.9 * float(weight.abs().max())
        squares = (rounded - weight).double().square()
        parts = [b.sum() for r in squares.split(rows) for b in r.split(columns, 1)]
        return torch.stack(parts)

    assert bool((error(found) <= error(plain)).all())
    assert float(error(found).sum()) < float(error(plain).sum())


def test_a_number_of_float_scales_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(RecipeError, match="float_scales 0 must lie within 1 to 256"):
        RtnOptions(float_scales=0)

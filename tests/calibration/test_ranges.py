"""Static input scales against sorted values, brute force, and hooks on transformers' model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from torch import Tensor

from quantforge.calibration.activations import Activations
from quantforge.calibration.ranges import (
    NUM_BINS,
    InputRange,
    Observer,
    RangeCapture,
    bin_edges,
    histogram,
    parse_observer,
    static_scale,
)
from quantforge.checkpoint.reader import CheckpointReader
from quantforge.errors import CalibrationError, RecipeError
from quantforge.models.arch.base import LLAMA_GROUPS
from quantforge.models.loader import architecture_of, load_block, load_config, load_embedding
from quantforge.schemes import TensorQuant

CPU = torch.device("cpu")
FP8 = TensorQuant(num_bits=8, dtype="float", granularity="tensor")
INT8 = TensorQuant(num_bits=8, granularity="tensor")
QUANTS = [pytest.param(FP8, id="fp8"), pytest.param(INT8, id="int8")]
LAST = {FP8: 448.0, INT8: 127.5}
ABSMAX, MSE = Observer(kind="absmax"), Observer(kind="mse")
QKV = LLAMA_GROUPS[0]


def values(count: int = 20_000, seed: int = 0) -> Tensor:
    """A bell with outliers fifty times as large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    x[::1000] *= 50
    return x


def seen_by(observer: Observer, *batches: Tensor) -> InputRange:
    capture = RangeCapture([QKV], observer)
    for batch in batches:
        capture.add("qkv", batch)
    return capture.results(0)[QKV]


def scale_by(observer: Observer, x: Tensor, quant: TensorQuant) -> float:
    return float(static_scale(seen_by(observer, x), quant, observer, torch.float32))


def test_a_bin_holds_the_values_between_its_edges() -> None:
    edges = bin_edges()
    assert edges.shape == (NUM_BINS + 1,)
    x = values(5000)
    counts = histogram(x.abs())
    assert counts.sum() == 5000
    used = counts.nonzero().squeeze(1)
    expected = torch.searchsorted(edges[:-1], x.abs(), right=True) - 1
    assert torch.equal(expected.unique(), used)
    assert torch.equal(torch.bincount(expected, minlength=NUM_BINS), counts)
    assert float((edges[used + 1] / edges[used]).max()) <= 1 + 2**-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_batches_add_up_in_any_order(dtype: torch.dtype) -> None:
    x = values().to(dtype)
    whole = seen_by(MSE, x)
    parts = seen_by(MSE, *x.flip(0).split(777))
    assert whole.absmax == parts.absmax == float(x.float().abs().max())
    assert whole.counts is not None
    assert parts.counts is not None
    assert torch.equal(whole.counts, parts.counts)


@pytest.mark.parametrize("quant", QUANTS)
def test_absmax_brings_the_largest_value_to_the_last_code(quant: TensorQuant) -> None:
    x = values()
    assert scale_by(ABSMAX, x, quant) == float(x.abs().max() / LAST[quant])
    assert seen_by(ABSMAX, x).counts is None


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("percentile", [99.99, 99.0, 50.0, 100.0])
def test_a_percentile_is_that_of_the_sorted_values(quant: TensorQuant, percentile: float) -> None:
    x = values()
    wanted = x.abs().sort().values[max(0, round(percentile / 100 * len(x)) - 1)]
    found = scale_by(Observer(kind="percentile", percentile=percentile), x, quant) * LAST[quant]
    assert float(wanted) <= found * (1 + 1e-6)
    assert found <= float(wanted) * (1 + 2**-9)


def squared_error(x: Tensor, quant: TensorQuant, scale: float) -> float:
    """By compressed-tensors' rounding of every value."""
    arguments = QuantizationArgs(num_bits=8, type=quant.dtype, strategy="tensor", dynamic=False)
    rounded = fake_quantize(x, torch.tensor([scale]), torch.zeros(1), arguments)
    return float((rounded.double() - x.double()).square().sum())


@pytest.mark.parametrize("quant", QUANTS)
def test_mse_finds_the_least_error_of_all_ranges(quant: TensorQuant) -> None:
    x = values()
    largest = float(x.abs().max())
    errors = {
        scale: squared_error(x, quant, scale)
        for scale in (largest / LAST[quant] * 2 ** (-i / 16) for i in range(81))
    }
    found = squared_error(x, quant, scale_by(MSE, x, quant))
    assert found <= min(errors.values()) * 1.01
    assert found <= errors[max(errors)]


def test_mse_clips_outliers_where_that_costs_less_than_coarse_steps() -> None:
    x = values(400_000)
    x[x.abs() > 5] = 5
    x[0] = 100.0
    assert scale_by(MSE, x, INT8) < 0.5 * scale_by(ABSMAX, x, INT8)


@pytest.mark.parametrize("observer", [ABSMAX, MSE, parse_observer("percentile")], ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_inputs_that_are_all_zero_get_scale_1(observer: Observer, quant: TensorQuant) -> None:
    assert scale_by(observer, torch.zeros(10), quant) == 1.0


def test_a_scale_has_the_dtype_that_it_is_stored_in() -> None:
    x = values()
    scale = static_scale(seen_by(MSE, x), FP8, MSE, torch.bfloat16)
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (1,))


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("observer", [ABSMAX, MSE], ids=str)
def test_inputs_that_are_not_finite_name_their_group(bad: float, observer: Observer) -> None:
    x = values(100)
    x[3] = bad
    with pytest.raises(CalibrationError, match=r"input of group 'qkv' of layer 0"):
        seen_by(observer, values(100), x, values(100))


@pytest.mark.parametrize(
    ("text", "observer"),
    [
        ("absmax", ABSMAX),
        ("mse", MSE),
        ("percentile", Observer(kind="percentile", percentile=99.99)),
        ("percentile:99.9", Observer(kind="percentile", percentile=99.9)),
    ],
)
def test_observers_are_named_by_strings(text: str, observer: Observer) -> None:
    assert parse_observer(text) == observer
    assert parse_observer(str(observer)) == observer


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("minmax", "'minmax'.* is not one of absmax, percentile, percentile:99.9, mse"),
        ("mse:2", "'mse:2'.* is not one of"),
        ("abs max", "did you mean 'absmax'"),
        ("percentile:", "a number from 50 to 100"),
        ("percentile:many", "a number from 50 to 100"),
        ("percentile:101", "a number from 50 to 100"),
        ("percentile:nan", "a number from 50 to 100"),
    ],
)
def test_an_unknown_observer_is_refused(text: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        parse_observer(text)


def test_ranges_of_a_block_are_those_of_transformers(
    tiny_model: Callable[..., Path], reference_model: Callable[..., Any]
) -> None:
    folder = tiny_model()
    reader = CheckpointReader(folder)
    arch, config = architecture_of(reader.config), load_config(reader.config)
    token_ids = torch.randint(3, 512, (5, 24), generator=torch.Generator().manual_seed(1))
    embedding = load_embedding(reader, arch, CPU, torch.float32)
    activations = Activations(
        token_ids, embedding, config, device=CPU, dtype=torch.float32, batch_tokens=50
    )
    before = activations.hidden.clone()
    capture = RangeCapture(arch.input_groups, MSE)
    block = load_block(reader, config, arch, 0, device=CPU, dtype=torch.float32)
    activations.observe(block, capture)
    assert torch.equal(activations.hidden, before)
    model, found = reference_model(folder), {}
    for group in arch.input_groups:
        module = model.get_submodule(f"model.layers.0.{group.members[-1]}")
        module.register_forward_pre_hook(
            lambda _, inputs, name=group.name: found.update({name: inputs[0]})
        )
    with torch.no_grad():
        model(token_ids)
    for group, seen in capture.results(0).items():
        assert seen.absmax == pytest.approx(float(found[group.name].abs().max()), rel=1e-5)
        assert seen.counts is not None
        assert int(seen.counts.sum()) == found[group.name].numel()

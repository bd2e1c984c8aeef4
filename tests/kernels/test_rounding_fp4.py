"""Rounding to E2M1 and its scales, against compressed-tensors and against the list of values."""

import pytest
import torch
from compressed_tensors.quantization.utils import generate_gparam
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from hypothesis import given, settings
from hypothesis import strategies as st
from quantforge_kernels.rounding import (
    mxfp4_scale,
    nvfp4_global_scale,
    nvfp4_scale,
    round_from_fp4,
    round_to_fp4,
)

ONE = torch.ones(1)
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIGNED = torch.cat([VALUES, -VALUES])


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 4


def test_codes_restore_to_the_sixteen_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(round_from_fp4(codes, ONE), SIGNED)
    assert torch.equal(round_to_fp4(SIGNED, ONE)[:8], codes[:8])
    assert torch.equal(round_to_fp4(SIGNED, ONE)[9:], codes[9:])


def test_no_other_value_is_nearer() -> None:
    x = noise(20_000)
    restored = round_from_fp4(round_to_fp4(x, ONE), ONE)
    nearest = (x.unsqueeze(1) - SIGNED).abs().amin(1)
    assert torch.equal((x - restored).abs(), nearest)


def test_values_and_signs_equal_those_of_compressed_tensors() -> None:
    halfway = (VALUES[1:] + VALUES[:-1]) / 2
    near = torch.cat([halfway, halfway.nextafter(torch.zeros(7)), halfway.nextafter(VALUES[1:])])
    x = torch.cat([noise(20_000, seed=1), near, -near, torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    expected = cast_to_fp4(x.clamp(-6, 6))
    found = round_from_fp4(round_to_fp4(x, ONE), ONE)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def test_halfway_goes_to_the_even_code() -> None:
    halfway = (VALUES[1:] + VALUES[:-1]) / 2
    assert round_to_fp4(halfway, ONE).tolist() == [0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("x", [6.1, 1e30, float("inf")])
def test_what_is_too_large_becomes_six(x: float) -> None:
    assert round_to_fp4(torch.tensor([x, -x]), ONE).tolist() == [7, 15]


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_powers_of_two_are_those_of_compressed_tensors(largest: float) -> None:
    x = torch.tensor([largest])
    exponent = generate_mx_scales(x) - 127
    assert torch.equal(mxfp4_scale(x), torch.exp2(exponent))


def test_a_power_of_two_brings_the_largest_magnitude_to_between_3_5_and_7() -> None:
    largest = noise(10_000).abs() + 1e-6
    ratio = largest / mxfp4_scale(largest)
    assert bool(((ratio >= 3.5) & (ratio < 7)).all())


def test_zero_and_nan_have_scales_that_show() -> None:
    found = mxfp4_scale(torch.tensor([0.0, float("nan"), float("inf")]))
    assert found[0] == 1
    assert bool(found[1:].isnan().all())
    assert bool(nvfp4_scale(torch.tensor([float("nan"), float("inf")]), ONE).isnan().all())


@pytest.mark.parametrize("largest", [0.06821, 3.0, 1e-12, 1e12])
def test_global_scales_are_those_of_compressed_tensors(largest: float) -> None:
    x = torch.tensor(largest)
    assert torch.equal(nvfp4_global_scale(x), generate_gparam(-x, x))


@pytest.mark.parametrize("largest", [0.0, float("nan"), 1e-44])
def test_a_weight_that_no_divisor_suits_gets_one(largest: float) -> None:
    assert nvfp4_global_scale(torch.tensor(largest)).tolist() == [1.0]


def test_scales_of_a_known_weight() -> None:
    largest = torch.tensor([0.0438, 0.0365, 0.0438, 0.06821])
    global_scale = nvfp4_global_scale(largest.amax())
    assert global_scale.item() == pytest.approx(448 * 6 / 0.06821)
    assert nvfp4_scale(largest, global_scale).tolist() == [288, 240, 288, 448]


def test_a_group_far_below_the_others_keeps_the_smallest_scale() -> None:
    assert nvfp4_scale(torch.tensor([1e-9, 0.0]), ONE).tolist() == [2**-9, 2**-9]

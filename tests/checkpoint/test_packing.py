"""Packing of codes, against compressed-tensors' own functions and against known words."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.checkpoint.compressed_tensors import pack_int, unpack_int

BITS = (2, 3, 4, 8)


@st.composite
def codes_and_bits(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    num_bits = draw(st.sampled_from(BITS))
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 140))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    half = 1 << (num_bits - 1)
    return torch.randint(-half, half, shape, generator=generator, dtype=torch.int8), num_bits


def words(packed: torch.Tensor) -> list[str]:
    return [f"{int(word) & 0xFFFFFFFF:08x}" for word in packed.flatten()]


@settings(max_examples=150, deadline=None)
@given(codes_and_bits())
def test_unpack_undoes_pack(case: tuple[torch.Tensor, int]) -> None:
    codes, num_bits = case
    unpacked = unpack_int(pack_int(codes, num_bits), num_bits, codes.shape[1])
    assert torch.equal(unpacked, codes)


@settings(max_examples=150, deadline=None)
@given(codes_and_bits())
def test_words_equal_those_of_compressed_tensors(case: tuple[torch.Tensor, int]) -> None:
    codes, num_bits = case
    packed = pack_int(codes, num_bits)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, pack_to_int32(codes, num_bits))
    assert torch.equal(unpack_from_int32(packed, num_bits, codes.shape), codes)


@settings(max_examples=100, deadline=None)
@given(codes_and_bits(), st.integers(0, 2**31))
def test_any_words_unpack_as_compressed_tensors_unpacks_them(
    case: tuple[torch.Tensor, int], seed: int
) -> None:
    codes, num_bits = case
    generator = torch.Generator().manual_seed(seed)
    shape = pack_int(codes, num_bits).shape
    noise = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
    expected = unpack_from_int32(noise, num_bits, codes.shape)
    assert torch.equal(unpack_int(noise, num_bits, codes.shape[1]), expected)


def test_four_bit_codes_fill_nibbles_from_the_lowest() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).reshape(1, 16)
    assert words(pack_int(codes, 4)) == ["76543210", "fedcba98"]


def test_three_bit_codes_cross_words() -> None:
    codes = torch.arange(-4, 4, dtype=torch.int8).repeat(4).reshape(1, 32)
    assert words(pack_int(codes, 3)) == ["88fac688", "c688fac6", "fac688fa"]


def test_ten_zero_points_fill_one_word_and_a_quarter() -> None:
    zero_points = torch.arange(-8, 2, dtype=torch.int8).reshape(1, 10)
    assert words(pack_int(zero_points, 4)) == ["76543210", "00000098"]


@pytest.mark.parametrize("num_bits", BITS)
def test_packing_takes_views_with_any_strides(num_bits: int) -> None:
    half = 1 << (num_bits - 1)
    codes = torch.randint(-half, half, (70, 33), dtype=torch.int8)
    packed = pack_int(codes.T, num_bits)
    assert torch.equal(packed, pack_to_int32(codes.T.contiguous(), num_bits))
    spread = packed.repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(unpack_int(spread, num_bits, 70), codes.T)

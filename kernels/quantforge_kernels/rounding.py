"""The one reference of elementwise rounding, which every fused kernel must reproduce exactly.

Rounding is to nearest, ties to even; values are clamped to the code range before the cast.
"""

import torch
from torch import Tensor

FP8_MAX = 448.0
"""The largest value of E4M3 (``float8_e4m3fn``), which has no infinity."""

E5M2_MAX = 57344.0
"""The largest finite value of E5M2 (``float8_e5m2``)."""


def round_to_int(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, code_min: int, code_max: int
) -> Tensor:
    """Integer codes ``clamp(round(x / scale + zero_point))`` as int8.

    `scale` and `zero_point` broadcast against `x`; the zero point is added before rounding, as
    compressed-tensors does. Computed in `x`'s dtype, which should be float32.
    """
    scaled = x / scale
    if zero_point is not None:
        scaled = scaled + zero_point.to(scaled.dtype)
    return scaled.round_().clamp_(code_min, code_max).to(torch.int8)


def round_from_int(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Values ``(codes - zero_point) * scale`` in float32 (exact for bf16 and fp16 scales)."""
    values = codes.to(torch.float32)
    if zero_point is not None:
        values = values - zero_point.to(torch.float32)
    return values * scale.to(torch.float32)


def round_to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of ``x / scale``, to nearest, ties to even; beyond ±448 they are ±448.

    The clamp comes before the cast, which would make NaN of what is too large. NaN stays NaN.
    `scale` broadcasts against `x`; computed in `x`'s dtype, which should be float32.
    """
    return (x / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def round_to_e5m2(x: Tensor, scale: Tensor) -> Tensor:
    """E5M2 codes of ``x / scale``, as `round_to_fp8`; beyond ±57344 they are ±57344."""
    return (x / scale).clamp_(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)


def round_from_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """Values ``codes * scale`` in float32 (exact for bf16 and fp16 scales)."""
    return codes.to(torch.float32) * scale.to(torch.float32)


def fp8_scale(largest: Tensor) -> Tensor:
    """The scale that brings the magnitude `largest` to ±448; 1 for one of zero."""
    scale = largest / FP8_MAX
    return torch.where(scale == 0, 1.0, scale)


def spread_blocks(scale: Tensor, block_shape: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """One scale a weight, [N, K] = `shape`, from one a block; blocks at the edges are cut."""
    rows, columns = block_shape
    tall = scale.repeat_interleave(rows, dim=0)[: shape[0]]
    return tall.repeat_interleave(columns, dim=1)[:, : shape[1]]


E2M1_MAX = 6.0

E4M3_SMALLEST = 2.0**-9
"""The smallest E4M3 number above zero."""


def round_to_fp4(x: Tensor, scale: Tensor) -> Tensor:
    """E2M1 codes (uint8, 0 .. 15) of ``x / scale``, to nearest, ties to even; at most ±6.

    Codes 0 .. 7 stand for 0, .5, 1, 1.5, 2, 3, 4, 6, and bit 3 is the sign; values below zero that
    round to zero become -0, code 8. The values lie on three lines, of steps 1/2, 1 and 2, and the
    code is the least of the three that the lines give. `scale` broadcasts against `x`; computed in
    `x`'s dtype, which should be float32.
    """
    scaled = x / scale
    size = scaled.abs().clamp_(max=E2M1_MAX)
    code = torch.minimum((size * 2).round_(), size.round() + 2)
    code = torch.minimum(code, (size / 2).round_() + 4)
    return code.to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)


def round_from_fp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Values ``E2M1(codes) * scale`` in float32: the largest of what the three lines give."""
    index = (codes & 7).to(torch.float32)
    size = torch.maximum(torch.maximum(index / 2, index - 2), index * 2 - 8)
    sign = 1 - (codes >> 3).to(torch.float32) * 2
    return size * sign * scale.to(torch.float32)


def nvfp4_global_scale(largest: Tensor) -> Tensor:
    """The divisor [1] that brings the largest magnitude of a weight to 448 * 6; 1 where it cannot.

    NVFP4 weights are ``E2M1(code) * scale / global_scale`` with an E4M3 scale for 16 inputs.
    """
    found = FP8_MAX * E2M1_MAX / largest.to(torch.float32)
    return torch.where(found.isfinite() & (found > 0), found, 1.0).reshape(1)


def nvfp4_scale(largest: Tensor, global_scale: Tensor) -> Tensor:
    """E4M3 numbers, in float32, that bring each group's magnitude `largest` to 6 under the global.

    One that would be zero is the smallest number instead, which loses least; NaN where a magnitude
    is not finite.
    """
    wanted = global_scale * (largest / E2M1_MAX)
    stored = wanted.clamp(max=FP8_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    return torch.where(largest.isfinite(), stored.clamp(min=E4M3_SMALLEST), torch.nan)


def mxfp4_scale(largest: Tensor) -> Tensor:
    """Powers of two, in float32, under which each group's magnitude `largest` lies in [3.5, 7).

    compressed-tensors' rule: the exponent of `largest` less 2, and one more where its mantissa is
    1.75 or above and would be rounded up. 1 for a group of zeros, NaN where it is not finite.
    """
    mantissa, exponent = torch.frexp(largest.to(torch.float32))  # mantissa in [0.5, 1)
    power = (exponent - 3 + (mantissa >= 0.875).to(exponent.dtype)).clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(mantissa), power)
    return torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), scale, torch.nan))

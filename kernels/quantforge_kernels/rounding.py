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

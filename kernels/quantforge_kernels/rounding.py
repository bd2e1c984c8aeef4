"""The one reference of elementwise rounding, which every fused kernel must reproduce exactly.

Rounding is to nearest, ties to even; values are clamped to the code range before the cast.
"""

import torch
from torch import Tensor


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

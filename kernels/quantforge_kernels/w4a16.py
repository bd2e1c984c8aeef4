"""Integer weights, 16- or 32-bit activations: ``y = x @ ((codes - zero_point) * scale).T + bias``.

The reference dequantizes to float32, rounds once to `x`'s dtype and multiplies. Problem keys:
``device`` ("cpu", "cuda"), ``dtype`` of x, ``shape`` (N, K), ``num_bits``, ``symmetric``,
``group_size`` (None for one scale a channel).

Legend: M tokens, N out features, K in features, G groups of K.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantforge_kernels.op import Candidate, Op
from quantforge_kernels.rounding import round_from_int


def dequantize(
    codes_NK: Tensor, scale_NG: Tensor, zero_point_NG: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The weight [N, K] in the scale's dtype, then in `dtype`: what a reader of the file sees."""
    n, k = codes_NK.shape
    grouped = round_from_int(
        codes_NK.reshape(n, scale_NG.shape[1], -1),
        scale_NG.unsqueeze(-1),
        None if zero_point_NG is None else zero_point_NG.unsqueeze(-1),
    )
    return grouped.reshape(n, k).to(scale_NG.dtype).to(dtype)


def reference(
    x_MK: Tensor,
    codes_NK: Tensor,
    scale_NG: Tensor,
    zero_point_NG: Tensor | None,
    bias_N: Tensor | None,
) -> Tensor:
    """``x @ dequantize(...).T + bias`` in `x`'s dtype."""
    weight = dequantize(codes_NK, scale_NG, zero_point_NG, x_MK.dtype)
    return F.linear(x_MK, weight, bias_N)


def _supports_dequantized(*, device: str, **problem: Any) -> str | None:
    return None if device == "cpu" else "keeps the whole weight dequantized: only for CPUs"


def _repack_dequantized(
    codes_NK: Tensor, scale_NG: Tensor, zero_point_NG: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor]:
    return (dequantize(codes_NK, scale_NG, zero_point_NG, dtype),)


def _run_dequantized(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return F.linear(x_MK, weight_NK, bias_N)


OP = Op(
    name="w4a16",
    reference=Candidate(name="reference", run=reference),
    candidates=(
        Candidate(
            name="dequantize-once",
            run=_run_dequantized,
            supports=_supports_dequantized,
            repack=_repack_dequantized,
        ),
    ),
)

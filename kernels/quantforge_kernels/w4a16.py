"""Integer weights, 16- or 32-bit activations: ``y = x @ ((codes - zero_point) * scale).T + bias``.

The reference dequantizes to float32, rounds once to `x`'s dtype and multiplies. Problem keys:
``device`` ("cpu", "cuda"), ``dtype`` of x, ``shape`` (N, K), ``num_bits``, ``symmetric``,
``group_size`` (None for one scale a channel).

``triton`` keeps the weight packed and multiplies codes, with scales on float32 sums: it rounds
``(code - zero_point) * scale`` nowhere, where the reference rounds it to 16 bits. From about 500
tokens on it dequantizes the weight as the reference does, into a temporary [N, K], for cuBLAS.

Legend: M tokens, N out features, K in features, G groups of K.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantforge_kernels.op import Candidate, Op
from quantforge_kernels.rounding import round_from_int
from quantforge_kernels.w4a16_layout import PackedWeight, pack, refuse_group


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


def _supports_triton(
    *,
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    num_bits: int,
    group_size: int | None,
    **problem: Any,
) -> str | None:
    if device != "cuda":
        return f"runs on cuda, not on {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, not {dtype}"
    if num_bits != 4:
        return f"takes 4 bits, not {num_bits}"
    if (reason := refuse_group(group_size, shape[1])) is not None:
        return reason
    if find_spec("triton") is None:
        return "triton is not installed"
    too_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return "needs compute capability 8.0" if too_old else None


def _repack_triton(
    codes_NK: Tensor, scale_NG: Tensor, zero_point_NG: Tensor | None, dtype: torch.dtype
) -> tuple[PackedWeight]:
    return (pack(codes_NK, scale_NG, zero_point_NG, dtype),)


def _run_triton(x_MK: Tensor, packed: PackedWeight, bias_N: Tensor | None) -> Tensor:
    from quantforge_kernels import w4a16_triton

    return w4a16_triton.run(x_MK, packed, bias_N)


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
        Candidate(
            name="triton",
            run=_run_triton,
            supports=_supports_triton,
            repack=_repack_triton,
        ),
    ),
)

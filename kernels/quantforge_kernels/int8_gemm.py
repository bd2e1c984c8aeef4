"""Int8 weights and inputs: ``y = (q(x) @ codes.T) * input scale * weight scale + bias``.

``q(x)`` are int8 codes of x, rounded to nearest (ties to even) and clamped to -128..127: under one
scale a token, ``max|x| / 127.5``, or under the one static `input_scale` where there is one. Sums of
products of codes are exact integers (int32 on hardware); they are rounded to float32, multiplied by
the input scale, then by the weight scale, the bias is added, and the result is rounded once to
`x`'s dtype.

Problem keys: ``device`` ("cpu", "cuda"), ``dtype`` of x, ``shape`` (N, K), ``static_input`` (True
for one static input scale, False for one a token).

Legend: M tokens, N out features, K in features.
"""

import torch
from torch import Tensor

from quantforge_kernels.op import Candidate, Op
from quantforge_kernels.rounding import round_to_int

CODE_MIN, CODE_MAX = -128, 127
STEPS = 127.5
"""Codes on either side of zero, as compressed-tensors counts them: half of 255."""

EXACT_TERMS = 1024
"""Products of two int8 codes, at most 2^14 each, that float32 sums exactly in any order (2^24)."""


def quantize_activations(x_MK: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 codes [M, K] of `x_MK`, and float32 scales: [M, 1], or [1] as given."""
    x = x_MK.to(torch.float32)
    if input_scale is None:
        scale = x.abs().amax(-1, keepdim=True) / STEPS
        scale = torch.where(scale == 0, 1.0, scale)
    else:
        scale = input_scale.to(torch.float32)
    return round_to_int(x, scale, None, CODE_MIN, CODE_MAX), scale


def reference(
    x_MK: Tensor,
    codes_NK: Tensor,
    scale: Tensor,
    input_scale: Tensor | None,
    bias_N: Tensor | None,
) -> Tensor:
    """The product, rounded to `x`'s dtype; `scale` is [N, 1], `input_scale` [1] or None.

    Sums are made in float64, where those of integers are exact.
    """
    codes_MK, step = quantize_activations(x_MK, input_scale)
    sums_MN = codes_MK.to(torch.float64) @ codes_NK.to(torch.float64).T
    return _scaled(sums_MN, step, scale, bias_N, x_MK.dtype)


def _scaled(
    sums_MN: Tensor, step: Tensor, scale: Tensor, bias_N: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = sums_MN.to(torch.float32) * step * scale.to(torch.float32).T
    if bias_N is not None:
        out = out + bias_N.to(torch.float32)
    return out.to(dtype)


def _supports_float_codes(*, device: str, **problem: object) -> str | None:
    return None if device == "cpu" else "keeps the codes as float32: only for CPUs"


def _repack_float_codes(
    codes_NK: Tensor, scale: Tensor, input_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    return codes_NK.to(torch.float32), scale, input_scale


def _run_float_codes(
    x_MK: Tensor,
    codes_NK: Tensor,
    scale: Tensor,
    input_scale: Tensor | None,
    bias_N: Tensor | None,
) -> Tensor:
    """As `reference`, bit for bit: float32 products of `EXACT_TERMS` columns at a time."""
    codes_MK, step = quantize_activations(x_MK, input_scale)
    x = codes_MK.to(torch.float32)
    if x.shape[1] <= EXACT_TERMS:
        return _scaled(x @ codes_NK.T, step, scale, bias_N, x_MK.dtype)
    pairs = zip(x.split(EXACT_TERMS, 1), codes_NK.split(EXACT_TERMS, 1), strict=True)
    sums_MN = torch.zeros(x.shape[0], codes_NK.shape[0], dtype=torch.float64, device=x.device)
    for part, weight in pairs:
        sums_MN += part @ weight.T
    return _scaled(sums_MN, step, scale, bias_N, x_MK.dtype)


OP = Op(
    name="int8_gemm",
    reference=Candidate(name="reference", run=reference),
    candidates=(
        Candidate(
            name="float-codes",
            run=_run_float_codes,
            supports=_supports_float_codes,
            repack=_repack_float_codes,
        ),
    ),
)

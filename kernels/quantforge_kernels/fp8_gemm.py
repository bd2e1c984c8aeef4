"""E4M3 weights, inputs as they are or quantized to E4M3 as they come: ``y = q(x) @ w.T + bias``.

``w = codes * scale`` in float32. ``q(x)`` is each run of `activation_group` inputs of a token,
rounded to E4M3 under its own scale ``max|x| / 448`` (the last run may be shorter); or, with an
`input_scale`, all of x under that one scale, what is beyond it clamped to ±448 times the scale.
Both products are in float32 and the result is rounded once to `x`'s dtype, as a kernel does that
multiplies codes and applies the scales to float32 sums.

Problem keys: ``device`` ("cpu", "cuda"), ``dtype`` of x, ``shape`` (N, K), ``block_shape`` (None
for one scale a channel or a tensor), ``activation_group`` (K for one scale a token, None where the
inputs are not quantized or have a static scale), ``static_input`` (whether they have).

Legend: M tokens, N out features, K in features, G runs of inputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantforge_kernels.op import Candidate, Op
from quantforge_kernels.rounding import fp8_scale, round_from_fp8, round_to_fp8, spread_blocks


def quantize_activations(x_MK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """E4M3 codes [M, K] and float32 scales [M, G] of `x_MK`, one scale a run of `group` inputs."""
    columns = x_MK.shape[1]
    padded = F.pad(x_MK.to(torch.float32), (0, -columns % group))
    grouped = padded.unflatten(1, (-1, group))
    scale_MG = fp8_scale(grouped.abs().amax(-1))
    codes = round_to_fp8(grouped, scale_MG.unsqueeze(-1))
    return codes.flatten(1)[:, :columns].contiguous(), scale_MG


def _round_activations(x_MK: Tensor, group: int | None, input_scale: Tensor | None) -> Tensor:
    """`x_MK` in float32 after quantizing and dequantizing; unchanged with neither group nor scale.

    `input_scale` [1] goes before `group`.
    """
    if input_scale is not None:
        step = input_scale.to(torch.float32)
        return round_from_fp8(round_to_fp8(x_MK.to(torch.float32), step), step)
    if group is None:
        return x_MK.to(torch.float32)
    codes_MK, scale_MG = quantize_activations(x_MK, group)
    spread = scale_MG.repeat_interleave(group, dim=1)[:, : x_MK.shape[1]]
    return round_from_fp8(codes_MK, spread)


def dequantize(codes_NK: Tensor, scale: Tensor, block_shape: tuple[int, int] | None) -> Tensor:
    """The weight [N, K] in float32; `scale` is [1, 1], [N, 1] or one a block."""
    if block_shape is not None:
        scale = spread_blocks(scale, block_shape, (codes_NK.shape[0], codes_NK.shape[1]))
    return round_from_fp8(codes_NK, scale)


def reference(
    x_MK: Tensor,
    codes_NK: Tensor,
    scale: Tensor,
    block_shape: tuple[int, int] | None,
    activation_group: int | None,
    input_scale: Tensor | None,
    bias_N: Tensor | None,
) -> Tensor:
    """``q(x) @ dequantize(...).T + bias`` in float32, rounded to `x`'s dtype."""
    weight = dequantize(codes_NK, scale, block_shape)
    return _run_dequantized(x_MK, weight, activation_group, input_scale, bias_N)


def _supports_dequantized(*, device: str, **problem: Any) -> str | None:
    return None if device == "cpu" else "keeps the whole weight dequantized: only for CPUs"


def _repack_dequantized(
    codes_NK: Tensor,
    scale: Tensor,
    block_shape: tuple[int, int] | None,
    activation_group: int | None,
    input_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, int | None, Tensor | None]:
    return dequantize(codes_NK, scale, block_shape), activation_group, input_scale


def _run_dequantized(
    x_MK: Tensor,
    weight_NK: Tensor,
    activation_group: int | None,
    input_scale: Tensor | None,
    bias_N: Tensor | None,
) -> Tensor:
    bias = None if bias_N is None else bias_N.to(torch.float32)
    rounded = _round_activations(x_MK, activation_group, input_scale)
    product = F.linear(rounded, weight_NK, bias)
    return product.to(x_MK.dtype)


OP = Op(
    name="fp8_gemm",
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

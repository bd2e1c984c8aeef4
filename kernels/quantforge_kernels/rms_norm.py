"""Root-mean-square norm, optionally after a residual addition.

``sum = x + residual``; ``normed = sum / sqrt(mean(sum^2) + eps) * weight``. Statistics are in
float32; the normalised value is rounded to x's dtype before the weight multiplies it, as
transformers does.
"""

from typing import Any

import torch
from torch import Tensor

from quantforge_kernels._triton import FLOATS, refuse_triton
from quantforge_kernels.op import Candidate, Op


def reference(
    x: Tensor, weight_D: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(normed, sum), both in x's shape [..., D] and dtype."""
    total = x if residual is None else x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * (wide * scale).to(total.dtype), total


def _supports_triton(*, device: str, dtype: torch.dtype, **problem: Any) -> str | None:
    return refuse_triton(device, dtype, FLOATS)


def _run_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from quantforge_kernels import rms_norm_triton

    return rms_norm_triton.run(*args)


OP = Op(
    name="rms_norm",
    reference=Candidate(name="reference", run=reference),
    candidates=(Candidate(name="triton", run=_run_triton, supports=_supports_triton),),
)

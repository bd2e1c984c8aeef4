"""Root-mean-square norm, optionally after a residual addition.

``sum = x + residual``; ``normed = sum / sqrt(mean(sum^2) + eps) * weight``. Statistics are in
float32; the normalised value is rounded to x's dtype before the weight multiplies it, as
transformers does.
"""

import torch
from torch import Tensor

from quantforge_kernels.op import Candidate, Op


def reference(
    x: Tensor, weight_D: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(normed, sum), both in x's shape [..., D] and dtype."""
    total = x if residual is None else x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * (wide * scale).to(total.dtype), total


OP = Op(name="rms_norm", reference=Candidate(name="reference", run=reference))

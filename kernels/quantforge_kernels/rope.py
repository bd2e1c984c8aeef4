"""Rotary position embedding, half-split layout (the first half of a head pairs with the second).

``out[:A/2] = x1 cos - x2 sin``, ``out[A/2:] = x2 cos + x1 sin`` (RoFormer, arXiv 2104.09864, in the
order that Hugging Face checkpoints use). Legend: T tokens, H heads, A head dim.
"""

from typing import Any

import torch
from torch import Tensor

from quantforge_kernels._triton import FLOATS, refuse_triton
from quantforge_kernels.op import Candidate, Op


def _rotate(x_THA: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> Tensor:
    first, second = x_THA.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x_THA * cos_TA.unsqueeze(1) + rotated * sin_TA.unsqueeze(1)


def reference(
    q_THA: Tensor, k_TJA: Tensor, cos_TA: Tensor, sin_TA: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys, in their own dtype."""
    return _rotate(q_THA, cos_TA, sin_TA), _rotate(k_TJA, cos_TA, sin_TA)


def _supports_triton(*, device: str, dtype: torch.dtype, **problem: Any) -> str | None:
    return refuse_triton(device, dtype, FLOATS)


def _run_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from quantforge_kernels import rope_triton

    return rope_triton.run(*args)


OP = Op(
    name="rope",
    reference=Candidate(name="reference", run=reference),
    candidates=(Candidate(name="triton", run=_run_triton, supports=_supports_triton),),
)

"""``silu(gate) * up``, the gated activation of Llama-like MLPs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantforge_kernels._triton import FLOATS, refuse_triton
from quantforge_kernels.op import Candidate, Op


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in the inputs' dtype; the inputs may be strided views."""
    return F.silu(gate) * up


def _supports_triton(*, device: str, dtype: torch.dtype, **problem: Any) -> str | None:
    return refuse_triton(device, dtype, FLOATS)


def _run_triton(*args: Any) -> Tensor:
    from quantforge_kernels import silu_mul_triton

    return silu_mul_triton.run(*args)


OP = Op(
    name="silu_mul",
    reference=Candidate(name="reference", run=reference),
    candidates=(Candidate(name="triton", run=_run_triton, supports=_supports_triton),),
)

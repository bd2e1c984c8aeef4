"""Weights that no fused kernel reads, dequantized once: ``y = x @ weight.T + bias``.

The weight is dense in the inputs' dtype from the moment a layer is built, and takes that much
memory; the product is an ordinary dense one. ``QUANTFORGE_KERNELS=triton`` refuses it like any
other fallback. Problem keys: ``scheme``, the weight's scheme in words, and what other ops have.

Legend: M tokens, N out features, K in features.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quantforge_kernels.op import Candidate, Op


def reference(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in the one dtype of all."""
    return F.linear(x_MK, weight_NK, bias_N)


def _refuse(*, scheme: str, **problem: Any) -> str:
    return f"no fused kernel for {scheme}"


OP = Op(
    name="dequantized",
    reference=Candidate(name="dequantize-once", run=reference),
    candidates=(Candidate(name="fused", run=reference, supports=_refuse),),
)

"""Scales of E4M3 weights that lose least: a float grid is coarse just above a power of two.

Any scale from ``max|w| / 448`` on holds every weight, and doubling it changes next to nothing (only
subnormals), so candidates within one octave cover all that there is. Where in its octave a scale
lies decides which weights fall on the coarse side of a power of two. On SmolLM2-135M the best of 16
lowers the squared error of a channel's weights by 10 %.

Legend: N out features, K in features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantforge.qtensor import minmax_scale, quantize
from quantforge.schemes import TensorQuant

FLOAT_SCALES = 16
"""Candidates within an octave."""


def search_float_scale(
    weight_NK: Tensor, quant: TensorQuant, scale_dtype: torch.dtype, candidates: int
) -> Tensor:
    """The scale of least squared error among `candidates` within an octave above min-max.

    Its shape is that of `minmax_scale`; with one candidate it is that scale. A larger scale wins
    only by a smaller error.
    """
    smallest, _ = minmax_scale(weight_NK, quant)
    best_error, best = None, smallest
    for step in range(candidates):
        scale = smallest * 2 ** (step / candidates)
        restored = quantize(weight_NK, quant, scale, scale_dtype=scale_dtype)
        delta = restored.dequantize(torch.float32) - weight_NK
        error = _sum_by_scale(delta.square(), quant)
        if best_error is None:
            best_error = error
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, scale, best)
    return best


def _sum_by_scale(values_NK: Tensor, quant: TensorQuant) -> Tensor:
    """Sums over what shares a scale, in the shape of the scale."""
    if quant.granularity == "tensor":
        return values_NK.sum().reshape(1, 1)
    if quant.block_shape is None:
        return values_NK.sum(1, keepdim=True)
    rows, columns = quant.block_shape
    padded = F.pad(values_NK, (0, -values_NK.shape[1] % columns, 0, -values_NK.shape[0] % rows))
    shape = (padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return padded.reshape(shape).sum((1, 3))

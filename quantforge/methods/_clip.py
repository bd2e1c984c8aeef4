"""Clipping: ranges of weight groups are shrunk where the inputs' second moment says that it helps.

Shared by the methods that end on a grid of scales. From AWQ (Lin et al., arXiv 2306.00978).

Legend: N out features, K in features, G groups of K, S group size.
"""

import torch
from torch import Tensor

from quantforge.methods.base import chunk_rows
from quantforge.qtensor import QuantizedTensor, minmax_scale, quantize
from quantforge.schemes import TensorQuant

MIN_SHRINK = 0.7
SHRINK_STEP = 0.025


def round_clipped(
    weight_NK: Tensor,
    quant: TensorQuant,
    second_moment: Tensor,
    scale_dtype: torch.dtype,
    *,
    min_shrink: float = MIN_SHRINK,
    shrink_step: float = SHRINK_STEP,
) -> QuantizedTensor:
    """The weight rounded to nearest under the shrunk ranges that lose least, group by group.

    `min_shrink` is the smallest share of its range that a group may keep.
    """
    shrink_NG = search_clip(
        weight_NK,
        quant,
        second_moment,
        scale_dtype,
        min_shrink=min_shrink,
        shrink_step=shrink_step,
    )
    scale, zero_point = minmax_scale(weight_NK, quant, shrink_NG)
    return quantize(weight_NK, quant, scale, zero_point, scale_dtype)


def search_clip(
    weight_NK: Tensor,
    quant: TensorQuant,
    second_moment: Tensor,
    scale_dtype: torch.dtype,
    *,
    min_shrink: float,
    shrink_step: float,
) -> Tensor:
    """Share of its range that each group keeps, [N, G].

    A group's own contribution to the output error, ``e G_gg e.T``, is minimised; the groups'
    interactions are left out, as in AWQ's clipping. Rows go by chunks, which keeps the temporary
    tensors small, where their scales are their own.
    """
    blocks = diagonal_blocks(second_moment, quant.num_groups(weight_NK.shape[1]))
    by_rows = quant.granularity in ("channel", "group")
    rows = chunk_rows(weight_NK) if by_rows else len(weight_NK)
    found = [
        _search_rows(part, quant, blocks, scale_dtype, min_shrink, shrink_step)
        for part in torch.split(weight_NK, rows)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _search_rows(
    weight_NK: Tensor,
    quant: TensorQuant,
    blocks: Tensor,
    scale_dtype: torch.dtype,
    min_shrink: float,
    shrink_step: float,
) -> Tensor:
    """`search_clip` of a few rows; `blocks` as `diagonal_blocks` gives them."""
    groups = len(blocks)
    steps = round((1 - min_shrink) / shrink_step)
    best_error, best_shrink = None, None
    for step in range(steps + 1):
        shrink = 1 - step * shrink_step
        scale, zero_point = minmax_scale(weight_NK, quant, shrink)
        restored = quantize(weight_NK, quant, scale, zero_point, scale_dtype)
        delta = restored.dequantize(torch.float32).sub_(weight_NK)
        delta = delta.reshape(len(weight_NK), groups, -1)
        error = _block_error(delta, blocks)
        if best_error is None or best_shrink is None:
            best_error, best_shrink = error, torch.ones_like(error)
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_shrink = torch.where(better, shrink, best_shrink)
    assert best_shrink is not None
    return best_shrink


def diagonal_blocks(second_moment: Tensor, groups: int) -> Tensor:
    """The blocks [G, S, S] on the diagonal of a Gram matrix, or [G, S] of a diagonal one."""
    if second_moment.dim() == 1:
        return second_moment.reshape(groups, -1)
    size = second_moment.shape[0] // groups
    tiles = second_moment.reshape(groups, size, groups, size)
    return tiles.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def _block_error(delta_NGS: Tensor, blocks: Tensor) -> Tensor:
    """``e G_gg e.T`` of each row and group, [N, G]."""
    if blocks.dim() == 2:
        return (delta_NGS.square() * blocks).sum(-1)
    delta_GNS = delta_NGS.transpose(0, 1)
    return (delta_GNS @ blocks).mul_(delta_GNS).sum(-1).T

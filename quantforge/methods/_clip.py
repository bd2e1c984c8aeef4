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
END_MOVES = (2, 1)
"""Steps by which each end of a range is moved by itself, either way, round after round."""


def round_clipped(
    weight_NK: Tensor,
    quant: TensorQuant,
    second_moment: Tensor,
    scale_dtype: torch.dtype,
    *,
    min_shrink: float = MIN_SHRINK,
    shrink_step: float = SHRINK_STEP,
    separate_ends: bool = False,
    global_scale: Tensor | None = None,
) -> QuantizedTensor:
    """The weight rounded to nearest under the shrunk ranges that lose least, group by group.

    `min_shrink` is the smallest share of its range that a group may keep; `global_scale` that of a
    scheme which has one.
    """
    low_NG, high_NG = search_clip(
        weight_NK,
        quant,
        second_moment,
        scale_dtype,
        min_shrink=min_shrink,
        shrink_step=shrink_step,
        separate_ends=separate_ends,
        global_scale=global_scale,
    )
    scale, zero_point = minmax_scale(weight_NK, quant, low_NG, high_NG, global_scale)
    return quantize(weight_NK, quant, scale, zero_point, scale_dtype, global_scale)


def search_clip(
    weight_NK: Tensor,
    quant: TensorQuant,
    second_moment: Tensor,
    scale_dtype: torch.dtype,
    *,
    min_shrink: float,
    shrink_step: float,
    separate_ends: bool = False,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shares of the lower and of the upper end of its range that each group keeps, [N, G] both.

    A group's own contribution to the output error, ``e G_gg e.T``, is minimised; the groups'
    interactions are left out, as in AWQ's clipping. Rows go by chunks, which keeps the temporary
    tensors small, where their scales are their own.
    """
    blocks = diagonal_blocks(second_moment, quant.num_groups(weight_NK.shape[1]))
    by_rows = quant.granularity in ("channel", "group")
    rows = chunk_rows(weight_NK) if by_rows else len(weight_NK)
    found = [
        _search_rows(
            part, quant, blocks, scale_dtype, min_shrink, shrink_step, separate_ends, global_scale
        )
        for part in torch.split(weight_NK, rows)
    ]
    lows, highs = zip(*found, strict=True)
    return torch.cat(lows), torch.cat(highs)


def _search_rows(
    weight_NK: Tensor,
    quant: TensorQuant,
    blocks: Tensor,
    scale_dtype: torch.dtype,
    min_shrink: float,
    shrink_step: float,
    separate_ends: bool,
    global_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`search_clip` of a few rows; `blocks` as `diagonal_blocks` gives them.

    Both ends together over all steps; then, where the grid has zero points and it is wanted, each
    end by itself.
    """
    rows, groups = len(weight_NK), len(blocks)
    ones = torch.ones(rows, groups, device=weight_NK.device)
    best = torch.full_like(ones, torch.inf)
    low, high = ones, ones

    def consider(new_low: Tensor, new_high: Tensor) -> None:
        nonlocal best, low, high
        new_low, new_high = (x.clamp(min_shrink, 1) for x in (new_low, new_high))
        scale, zero_point = minmax_scale(weight_NK, quant, new_low, new_high, global_scale)
        restored = quantize(weight_NK, quant, scale, zero_point, scale_dtype, global_scale)
        delta = restored.dequantize(torch.float32).sub_(weight_NK).reshape(rows, groups, -1)
        error = _block_error(delta, blocks)
        better = error < best
        best = torch.where(better, error, best)
        low, high = torch.where(better, new_low, low), torch.where(better, new_high, high)

    for step in range(round((1 - min_shrink) / shrink_step) + 1):
        consider(ones - step * shrink_step, ones - step * shrink_step)
    if separate_ends and not quant.symmetric:
        for move in END_MOVES:
            start_low, start_high = low, high
            for side in (-move, move):
                consider(start_low + side * shrink_step, high)
            for side in (-move, move):
                consider(low, start_high + side * shrink_step)
    return low, high


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

"""Scales fitted again once the codes are fixed, by least squares under the inputs' second moment.

With the codes fixed a restored row is linear in its scales, ``v = sum_g s_g q_g``, where q_g holds
the codes of group g less their zero point and zeros elsewhere. The scales that minimise
``(v - w) G (v - w)'`` solve one small system a row, ``A s = b`` with ``A[g, h] = q_g G q_h'`` and
``b[g] = q_g G w'``: the step of GPTQ's successors that work on the scales (as in GPTVQ's codebook
update, van Baalen et al., arXiv 2402.15319, section 3.3), here for all groups of a row at once.

Legend: N out features, K in features, G groups of K.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantforge.qtensor import QuantizedTensor

LARGEST_CHANGE = 2.0
"""A row keeps its scales where one of them would change by more than this factor."""


def refit_scales(
    qtensor: QuantizedTensor, target_NK: Tensor, second_moment: Tensor, damping: float
) -> QuantizedTensor:
    """`qtensor` with scales that bring it closest to `target_NK` under `second_moment` [K, K].

    `damping` times the mean diagonal is added to the diagonal, as for the codes. Rows whose system
    has no sound solution keep their scales; so do groups that are all zero.
    """
    old_NG = qtensor.scale.float()
    matrix_NGG, right_NG = _systems(qtensor, target_NK, second_moment, damping)
    diagonal = matrix_NGG.diagonal(dim1=1, dim2=2)
    empty_NG = diagonal == 0
    diagonal[empty_NG] = 1.0
    right_NG[empty_NG] = old_NG[empty_NG]
    lower, failed = torch.linalg.cholesky_ex(matrix_NGG)
    new_NG = torch.cholesky_solve(right_NG.unsqueeze(-1), lower).squeeze(-1)
    new_NG = new_NG.to(qtensor.scale.dtype)
    ratio = new_NG.float() / old_NG
    sound = ((ratio > 1 / LARGEST_CHANGE) & (ratio < LARGEST_CHANGE)).all(1) & (failed == 0)
    return replace(qtensor, scale=torch.where(sound.unsqueeze(1), new_NG, qtensor.scale))


def _systems(
    qtensor: QuantizedTensor, target_NK: Tensor, second_moment: Tensor, damping: float
) -> tuple[Tensor, Tensor]:
    """(A [N, G, G], b [N, G]) of every row."""
    rows, groups = qtensor.scale.shape
    codes_NGS = qtensor.codes.float().reshape(rows, groups, -1)
    if qtensor.zero_point is not None:
        codes_NGS = codes_NGS - qtensor.zero_point.float().unsqueeze(-1)
    size = codes_NGS.shape[2]
    damped = second_moment.clone()
    damped.diagonal().add_(damping * second_moment.diagonal().mean())
    matrix = codes_NGS.new_empty(rows, groups, groups)
    for group in range(groups):
        columns = slice(group * size, (group + 1) * size)
        products = (codes_NGS[:, group] @ damped[columns]).reshape(rows, groups, size)
        matrix[:, group] = (products * codes_NGS).sum(-1)
    right = ((target_NK @ damped).reshape(rows, groups, size) * codes_NGS).sum(-1)
    return matrix, right

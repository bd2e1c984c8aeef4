"""The factor of a second moment that GPTQ spreads errors with, made so that it does not fail.

GPTQ needs U, upper triangular, with ``U.T @ U = inverse(G)``. Factoring G from its last row
upwards, ``G = V @ V.T`` with V upper triangular, gives it without inverting G: ``U = inverse(V)``.
G is divided by its mean diagonal first; U enters GPTQ only through ratios of its entries.

Legend: K in features.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantforge.precision import ieee_products

RAISES = (3, 10, 30, 100)
MAX_DAMPING = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Factor:
    """`upper` [K, K] float32 in the column order `order` [K], or None: then round to nearest.

    `dead` [K] marks inputs that were zero in every token: their weights count as zero. `notes` say
    what was done and why, for the report.
    """

    upper: Tensor | None
    order: Tensor
    dead: Tensor
    notes: dict[str, Any]
    mean: float = 1.0

    def without_dead(self, weight_NK: Tensor) -> Tensor:
        """The weight with the columns of dead inputs set to zero."""
        return weight_NK.masked_fill(self.dead, 0.0)

    def column_losses(self) -> Tensor:
        """What a squared rounding error of each column costs GPTQ, [K]: ``1 / U[i, i]^2``.

        It is the variance of an input that the columns still to come do not explain.
        """
        assert self.upper is not None
        losses = torch.empty_like(self.upper.diagonal())
        losses[self.order] = self.upper.diagonal().square().reciprocal()
        return losses * self.mean

    def corrected(self, weight_NK: Tensor, cross_KK: Tensor, strength: float) -> Tensor:
        """``W + strength W C inverse(G)``, G damped: the weight to round where inputs have drifted.

        For ``C = E[d x']`` it minimises ``E|W (x + strength d) - V x|^2`` over V, and rounding it
        under G loses what rounding V loses there (GPTAQ, arXiv 2504.02692; Qronos, arXiv
        2505.11695).
        """
        assert self.upper is not None
        step = (weight_NK @ cross_KK)[:, self.order] * (strength / self.mean)
        step = step @ self.upper.T @ self.upper
        target = weight_NK.clone()
        target[:, self.order] += step
        return target


def factorise(moment: Tensor, *, damping: float, act_order: bool) -> Factor:
    """The factor of `moment` [K, K], which must be finite.

    `damping` times the mean diagonal is added to the diagonal. Where the factorisation fails, the
    damping is raised step by step up to 1; then all is tried again in float64; then there is none.
    At most four matrices of the size of `moment` are held at once, itself included.
    """
    diagonal = moment.diagonal()
    dead = diagonal == 0
    num_dead = int(dead.sum())
    if num_dead == len(diagonal):
        reason = "every input was zero in the calibration text"
        return _no_factor(moment, torch.zeros_like(dead), reason)
    mean = diagonal[~dead].abs().mean()
    order = torch.arange(len(diagonal), device=moment.device)
    if act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    ladder = _ladder(damping)
    for dtype in (torch.float32, torch.float64):
        for used in ladder:
            gram = _permuted(moment, mean, dead, order.flip(0)).to(dtype)
            with ieee_products():
                upper = _inverse_upper(gram, used)
            del gram
            if upper is None:
                continue
            notes: dict[str, Any] = {"damping": used, "act_order": act_order}
            if num_dead:
                notes["dead_columns"] = num_dead
            if dtype == torch.float64:
                notes["factorised_in"] = "float64"
                notes["damping_reason"] = f"no Cholesky factor in float32 at damping {ladder}"
            elif used != damping:
                tried = ladder[: ladder.index(used)]
                notes["damping_reason"] = f"no Cholesky factor at damping {tried}"
            return Factor(
                upper=upper.float(), order=order, dead=dead, notes=notes, mean=float(mean)
            )
    reason = f"no Cholesky factor in float32 or float64 at damping {ladder}"
    return _no_factor(moment, torch.zeros_like(dead), reason)


def _permuted(moment: Tensor, mean: Tensor, dead: Tensor, order: Tensor) -> Tensor:
    """`moment` over `mean` with rows and columns in `order`; 1 on the diagonal of dead inputs."""
    gram = moment[order.unsqueeze(1), order].div_(mean)
    dead = dead[order]
    gram.masked_fill_(dead.unsqueeze(1), 0.0).masked_fill_(dead, 0.0)
    gram.diagonal().masked_fill_(dead, 1.0)
    return gram


def _no_factor(moment: Tensor, dead: Tensor, reason: str) -> Factor:
    order = torch.arange(moment.shape[0], device=moment.device)
    return Factor(upper=None, order=order, dead=dead, notes={"fallback": f"rtn: {reason}"})


def _ladder(damping: float) -> tuple[float, ...]:
    """Rising shares of the mean diagonal, from `damping` to at most 1."""
    raised = (float(f"{damping * r:.6g}") for r in RAISES)  # 0.03, not 0.030000000000000002
    return (damping, *(r for r in raised if r <= MAX_DAMPING))


def _inverse_upper(reversed_KK: Tensor, damping: float) -> Tensor | None:
    """U with ``U.T @ U = inverse(gram + damping)``, or None where there is no finite one.

    `reversed_KK` is gram from its last row and column to the first, and is used up: its lower
    factor L, reversed again, is V, so that the reversed inverse of L is U.
    """
    reversed_KK.diagonal().add_(damping)
    lower, failed = torch.linalg.cholesky_ex(reversed_KK)
    if int(failed):
        return None
    inverse = reversed_KK.zero_().mT  # column-major, as the solver wants it: solved in place
    inverse.diagonal().fill_(1.0)
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower
    upper = inverse.flip(0, 1)
    finite = bool(upper.sum().isfinite()) or bool(upper.isfinite().all())
    return upper if finite else None

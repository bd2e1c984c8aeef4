"""Several roundings of one linear, and the choice between them on samples held out from fitting.

Legend: N out features, K in features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from quantforge.errors import CalibrationError
from quantforge.methods._factor import Factor
from quantforge.methods._refit import refit_scales
from quantforge.methods._rounding import round_on_grids
from quantforge.methods.base import BlockTask
from quantforge.models.arch.base import InputGroup
from quantforge.qtensor import QuantizedTensor

GridOf = Callable[[str, Tensor], QuantizedTensor]
"""The grid of a linear (its name) for a weight: the weight rounded to nearest on it."""

CLIP_BY = ("column", "diagonal", "block")
"""How errors are weighed while ranges are shrunk in front of GPTQ: each column by what GPTQ will
lose by an error in it (``1 / U[i, i]^2``), by its second moment, or by the whole block of second
moments of its group, which is right where nothing is spread (rounding to nearest)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One rounding of a linear: how reports call it, what is switched on, and what else to say."""

    method: str
    qtensor: QuantizedTensor
    notes: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """``gptq, mismatch 0.5, refit``: method and what is switched on."""
        return ", ".join([self.method, *(_worded(*item) for item in self.notes.items())])


def _worded(name: str, value: Any) -> str:
    return name if value is True else f"{name} {value}"


def column_candidates(
    task: BlockTask,
    group: InputGroup,
    factor: Factor,
    grid_of: GridOf,
    *,
    method: str,
    mismatch: float,
    refit: bool,
    damping: float,
) -> dict[str, list[Candidate]]:
    """GPTQ's roundings of the group's linears, by name; the plain one first.

    `mismatch` adds weights that make up for the inputs' drift, at half and at full strength;
    `refit` adds each rounding with its scales fitted again.
    """
    names = [m for m in group.members if m in task.quant]
    found: dict[str, list[Candidate]] = {name: [] for name in names}
    moment = task.statistics[group.name].second_moment
    for strength in strengths(mismatch) if factor.upper is not None else (0.0,):
        targets = {name: task.weights[name] for name in names}
        notes: dict[str, Any] = {}
        if strength:
            cross = task.cross[group.name]
            targets = {n: factor.corrected(w, cross, strength) for n, w in targets.items()}
            notes = {"mismatch": strength}
        targets = {n: factor.without_dead(w) for n, w in targets.items()}
        grids = {name: grid_of(name, target) for name, target in targets.items()}
        for name, qtensor in round_on_grids(targets, grids, factor).items():
            plain = Candidate(method=method, qtensor=qtensor, notes=notes, details=factor.notes)
            found[name].append(plain)
            if refit and factor.upper is not None and qtensor.quant.code_type == "int":
                fitted = refit_scales(qtensor, targets[name], moment, damping)
                found[name].append(replace(plain, qtensor=fitted, notes=notes | {"refit": True}))
    return found


def clip_measure(clip_by: str, moment: Tensor, factor: Factor) -> Tensor:
    """What a rounding error of each column counts while ranges are shrunk, see `CLIP_BY`."""
    if clip_by == "block":
        return moment
    if clip_by == "diagonal" or factor.upper is None:
        return moment.diagonal()
    return factor.column_losses()


def strengths(mismatch: float) -> tuple[float, ...]:
    """Strengths of the correction that are tried, none first."""
    return (0.0, mismatch / 2, mismatch) if mismatch else (0.0,)


def held_out_errors(
    task: BlockTask, group: InputGroup, name: str, candidates: Sequence[Candidate]
) -> list[float]:
    """Mean squared output error of each candidate on the held-out samples.

    Raises `CalibrationError` where none were held out.
    """
    if group.name not in task.held_out:
        raise CalibrationError(
            f"input group {group.name} of layer {task.layer} has no held-out statistics to "
            "compare candidates with; quantize with calibration text"
        )
    moments, weight = task.held_out[group.name], task.weights[name]
    return [moments.error(weight, c.qtensor.dequantize(weight.dtype)) for c in candidates]


def choose(
    task: BlockTask, group: InputGroup, name: str, candidates: Sequence[Candidate]
) -> tuple[Candidate, dict[str, Any]]:
    """The candidate with the least held-out error (the first of equals), and notes for the report.

    A single candidate is taken as it is.
    """
    if len(candidates) == 1:
        return candidates[0], {**candidates[0].details, **candidates[0].notes}
    errors = held_out_errors(task, group, name, candidates)
    best = min(range(len(errors)), key=errors.__getitem__)
    power = relative_to(task, group, name)
    table = {c.label: e / power for c, e in zip(candidates, errors, strict=True)}
    chosen = candidates[best]
    return chosen, {
        **chosen.details,
        **chosen.notes,
        "held_out_error": errors[best] / power,
        "held_out_errors": table,
    }


def relative_to(task: BlockTask, group: InputGroup, name: str) -> float:
    """The mean squared output of a linear on the held-out samples."""
    weight, moments = task.weights[name], task.held_out[group.name]
    return max(float(((weight @ moments.inputs) * weight).sum()), 1e-30)

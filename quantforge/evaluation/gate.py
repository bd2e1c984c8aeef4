"""The quality gate: measured figures against the limits of a recipe.

A limit is named after its metric: ``max_mean_kl`` bounds ``mean_kl`` from above, ``min_top1``
bounds ``top1`` from below, and a figure equal to its limit passes. The margin is positive on the
passing side. A limit whose metric was not measured, or is not a number, is an error, never a pass.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.errors import EXIT_GATE_FAILED, EXIT_OK, EvaluationError, RecipeError
from quantforge.recipe import GateSection

SETTINGS = ("dataset", "max_tokens", "window")
"""Fields of a gate section that say how to measure; every other field is a limit."""

ABSOLUTE = ("ppl", "bits_per_weight")
"""Metrics that need no baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateCheck:
    """One limit and what was found."""

    limit: str
    value: float
    threshold: float
    margin: float
    ok: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """Every check of a gate. It passes when all do."""

    checks: tuple[GateCheck, ...]

    @property
    def passed(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.passed else EXIT_GATE_FAILED

    def reasons(self) -> str:
        """Each limit that was not met, in one line; empty when the gate passed."""
        return "; ".join(
            f"{metric_of(c.limit)} is {c.value:.4g}, {c.limit} is {c.threshold:g} "
            f"(off by {-c.margin:.4g})"
            for c in self.checks
            if not c.ok
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "exit_code": self.exit_code,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


def gate_limits(section: GateSection) -> dict[str, float]:
    """The limits that `section` sets, by name. Raises `RecipeError` if it sets none."""
    values = dataclasses.asdict(section)
    limits = {k: v for k, v in values.items() if k not in SETTINGS and v is not None}
    if not limits:
        known = ", ".join(k for k in values if k not in SETTINGS)
        raise RecipeError(f"the gate sets no limit; set at least one of {known}")
    for name, threshold in limits.items():
        if not math.isfinite(threshold):
            raise RecipeError(f"gate: {name} is {threshold}; expected a finite number")
    return limits


def metric_of(limit: str) -> str:
    """``mean_kl`` of ``max_mean_kl``."""
    return limit.split("_", 1)[1]


def needs_baseline(section: GateSection) -> tuple[str, ...]:
    """The limits of `section` that compare with a baseline model."""
    return tuple(name for name in gate_limits(section) if metric_of(name) not in ABSOLUTE)


def evaluate_gate(section: GateSection, measured: Mapping[str, float]) -> GateResult:
    """Checks `measured` (metric -> value) against each limit of `section`.

    Raises `EvaluationError` if a limit's metric is missing or not a number, `RecipeError` if there
    is no limit.
    """
    return GateResult(
        checks=tuple(
            _check(name, threshold, measured) for name, threshold in gate_limits(section).items()
        )
    )


def _check(name: str, threshold: float, measured: Mapping[str, float]) -> GateCheck:
    metric = metric_of(name)
    if metric not in measured:
        raise EvaluationError(
            f"the gate limits {metric} ({name}: {threshold:g}), which was not measured; "
            f"measured: {', '.join(measured) or 'nothing'}"
        )
    value = float(measured[metric])
    if math.isnan(value):
        raise EvaluationError(f"the gate limits {metric} ({name}: {threshold:g}), which is NaN")
    margin = threshold - value if name.startswith("max_") else value - threshold
    return GateCheck(limit=name, value=value, threshold=threshold, margin=margin, ok=margin >= 0)

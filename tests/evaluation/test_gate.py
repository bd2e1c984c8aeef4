"""Limits against figures: pass, fail, and the errors that must never be a pass."""

import dataclasses
import math

import pytest

from quantforge.errors import EvaluationError, RecipeError
from quantforge.evaluation.gate import SETTINGS, evaluate_gate, gate_limits, needs_baseline
from quantforge.recipe import GateSection, load_recipe

MEASURED = {"ppl": 20.0, "ppl_ratio": 1.2, "mean_kl": 0.1, "top1": 0.8, "bits_per_weight": 4.5}


def test_a_gate_passes_when_every_limit_is_met() -> None:
    section = GateSection(max_ppl_ratio=1.25, min_top1=0.75, max_bits_per_weight=5.0)
    result = evaluate_gate(section, MEASURED)
    assert (result.passed, result.exit_code, result.reasons()) == (True, 0, "")
    assert [c.limit for c in result.checks] == ["max_ppl_ratio", "min_top1", "max_bits_per_weight"]
    assert [c.margin for c in result.checks] == pytest.approx([0.05, 0.05, 0.5])


def test_one_limit_that_is_missed_fails_the_gate_and_is_named() -> None:
    result = evaluate_gate(GateSection(max_ppl_ratio=1.25, min_top1=0.85), MEASURED)
    assert (result.passed, result.exit_code) == (False, 1)
    assert result.reasons() == "top1 is 0.8, min_top1 is 0.85 (off by 0.05)"


def test_a_figure_at_its_limit_passes() -> None:
    assert evaluate_gate(GateSection(max_ppl_ratio=1.2, min_top1=0.8), MEASURED).passed


def test_a_limit_whose_metric_was_not_measured_is_an_error() -> None:
    with pytest.raises(EvaluationError, match=r"p99_kl.*not measured; measured: ppl"):
        evaluate_gate(GateSection(max_p99_kl=1.0), MEASURED)


def test_nan_never_passes() -> None:
    with pytest.raises(EvaluationError, match="NaN"):
        evaluate_gate(GateSection(max_mean_kl=1.0), {"mean_kl": math.nan})


def test_infinity_fails_a_maximum() -> None:
    assert not evaluate_gate(GateSection(max_mean_kl=1.0), {"mean_kl": math.inf}).passed


@pytest.mark.parametrize("threshold", [math.nan, math.inf])
def test_a_threshold_that_is_no_number_is_refused(threshold: float) -> None:
    with pytest.raises(RecipeError, match="finite"):
        evaluate_gate(GateSection(max_mean_kl=threshold), MEASURED)


def test_a_gate_without_limits_is_refused_rather_than_passed() -> None:
    with pytest.raises(RecipeError, match=r"sets no limit.*max_ppl_ratio"):
        evaluate_gate(GateSection(), MEASURED)


def test_every_field_of_a_gate_section_is_a_setting_or_a_limit() -> None:
    names = {f.name for f in dataclasses.fields(GateSection)}
    assert set(SETTINGS) <= names
    limits = names - set(SETTINGS)
    assert all(name.startswith(("max_", "min_")) for name in limits)
    section = GateSection(**dict.fromkeys(limits, 1.0))
    assert set(gate_limits(section)) == limits


def test_a_limit_of_zero_is_a_limit() -> None:
    assert not evaluate_gate(GateSection(max_mean_kl=0.0), MEASURED).passed


def test_only_relative_limits_need_a_baseline() -> None:
    assert needs_baseline(GateSection(max_ppl=30.0, max_bits_per_weight=5.0)) == ()
    section = GateSection(max_ppl=30.0, min_top1=0.5, max_ppl_ratio=1.1)
    assert needs_baseline(section) == ("max_ppl_ratio", "min_top1")


def test_the_shipped_gate_has_relative_limits() -> None:
    section = load_recipe("ci_gate").gate
    assert section is not None
    assert {"max_ppl_ratio", "max_mean_kl", "min_top1"} <= set(needs_baseline(section))

"""Intervals: Student's quantiles against scipy, coverage against draws of a known truth."""

import numpy as np
import pytest
from scipy import stats

from quantforge.evaluation.uncertainty import ratio_interval, student_quantile


@pytest.mark.parametrize("freedom", [4, 7, 15, 147, 2000])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.995])
def test_student_quantiles_equal_scipys(freedom: int, probability: float) -> None:
    exact = stats.t.ppf(probability, freedom)
    assert student_quantile(probability, freedom) == pytest.approx(exact, rel=2e-2)


@pytest.mark.parametrize("count", [8, 40])
def test_the_95_percent_interval_covers_the_truth_in_92_to_98_percent(count: int) -> None:
    rng = np.random.default_rng(1)
    draws = 300
    covered = 0
    for draw in range(draws):
        counts = rng.integers(90, 110, size=count).astype(np.float64)
        sums = counts * rng.normal(0.3, 0.05, size=count)
        interval = ratio_interval(sums, counts, seed=draw)
        assert interval is not None
        covered += interval[0] <= 0.3 <= interval[1]
    assert 0.92 <= covered / draws <= 0.98


def test_the_interval_is_close_to_scipys_bootstrap_for_many_windows() -> None:
    rng = np.random.default_rng(2)
    counts = rng.integers(50, 150, size=200).astype(np.float64)
    sums = counts * rng.gamma(2.0, 0.1, size=200)
    theirs = stats.bootstrap(
        (sums, counts),
        lambda a, b, axis: a.sum(axis) / b.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    ours = ratio_interval(sums, counts)
    assert ours == pytest.approx((theirs.low, theirs.high), rel=0.02)


def test_fewer_than_two_windows_give_no_interval() -> None:
    assert ratio_interval(np.array([1.0]), np.array([2.0])) is None


def test_windows_that_agree_give_an_interval_of_no_width() -> None:
    interval = ratio_interval(np.full(5, 2.0), np.full(5, 4.0))
    assert interval == (0.5, 0.5)

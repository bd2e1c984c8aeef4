"""Confidence intervals by resampling whole windows, never single tokens.

Tokens of one window share their context, so they are not independent draws; windows nearly are. All
statistics here are ratios of two sums over windows (a mean per token is the sum of the windows'
sums over the sum of their counts), and one resample of windows serves numerator and denominator
alike, which is what makes a comparison of two models paired.

The plain percentile interval is too narrow for a handful of windows: a resample spreads
sqrt((n-1)/n) as much as it should, and its tails are a normal's where Student's t is due. Both are
mended by reading wider percentiles (Hesterberg, "What Teachers Should Know About the Bootstrap",
2015, section on the expanded percentile interval).
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95
BLOCK_RESAMPLES = 500

Interval = tuple[float, float]


def ratio_interval(
    numerator_W: NDArray[np.float64],
    denominator_W: NDArray[np.float64],
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Interval of ``sum(numerator) / sum(denominator)`` over W windows; None for fewer than two."""
    count = len(numerator_W)
    if count < 2:
        return None
    rng = np.random.default_rng(seed)
    ratios = []
    for _ in range(NUM_RESAMPLES // BLOCK_RESAMPLES):
        chosen_RW = rng.integers(0, count, size=(BLOCK_RESAMPLES, count))
        ratios.append(numerator_W[chosen_RW].sum(axis=1) / denominator_W[chosen_RW].sum(axis=1))
    tail = expanded_tail(count, confidence)
    low, high = np.quantile(np.concatenate(ratios), (tail, 1 - tail))
    return float(low), float(high)


def expanded_tail(count: int, confidence: float) -> float:
    """The percentile, as a fraction, at which to read the lower end for `count` windows."""
    t = student_quantile((1 + confidence) / 2, count - 1)
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * t)


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t by the Cornish-Fisher series (Abramowitz and Stegun 26.7.5).

    Within 0.3 % of the exact value from four degrees of freedom on, and 3 % too low at two.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term * float(freedom) ** -power for power, term in enumerate(terms))

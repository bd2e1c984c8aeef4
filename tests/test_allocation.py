"""The solver against every combination; the units against what runtimes merge."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge import allocation
from quantforge.allocation import Allocation, Choice, Frontier, Unit
from quantforge.schemes import PRESETS

SCHEME = PRESETS["w4a16"]
PRICES = st.tuples(st.integers(1, 60), st.integers(0, 40).map(lambda n: n / 8))
UNITS = st.lists(st.lists(PRICES, min_size=1, max_size=4), min_size=1, max_size=5)


def make(prices: list[list[tuple[int, float]]], factor: int = 1) -> list[Unit]:
    return [
        Unit(
            members=(f"layer.{i}",),
            num_weights=100,
            choices=tuple(
                Choice(scheme=SCHEME, num_bytes=factor * size, divergence=loss)
                for size, loss in options
            ),
        )
        for i, options in enumerate(prices)
    ]


def combinations(prices: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """(bytes, divergence) of every way to choose."""
    return [
        (sum(size for size, _ in chosen), sum(loss for _, loss in chosen))
        for chosen in itertools.product(*prices)
    ]


def is_one_of_each(units: list[Unit], found: Allocation) -> bool:
    return all(c in u.choices for u, c in zip(units, found.chosen, strict=True))


@settings(deadline=None)
@given(prices=UNITS, budget=st.integers(0, 400), factor=st.sampled_from([1, 7, 4096]))
def test_no_choice_within_the_budget_is_better(
    prices: list[list[tuple[int, float]]], budget: int, factor: int
) -> None:
    units = make(prices, factor)
    found = Frontier(units).within_bytes(budget * factor)
    fitting = [loss for size, loss in combinations(prices) if size <= budget]
    if found is None:
        assert not fitting
        return
    assert found.num_bytes <= budget * factor
    assert is_one_of_each(units, found)
    assert found.divergence == min(fitting)


@settings(deadline=None)
@given(prices=UNITS, limit=st.integers(0, 400).map(lambda n: n / 16))
def test_no_smaller_choice_meets_the_limit(
    prices: list[list[tuple[int, float]]], limit: float
) -> None:
    units = make(prices)
    found = Frontier(units).within_divergence(limit)
    meeting = [size for size, loss in combinations(prices) if loss <= limit]
    if found is None:
        assert not meeting
        return
    assert found.divergence <= limit
    assert is_one_of_each(units, found)
    assert found.num_bytes == min(meeting)


@settings(deadline=None)
@given(prices=UNITS, budget=st.integers(0, 400))
def test_coarse_steps_keep_the_budget(prices: list[list[tuple[int, float]]], budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocation, "MAX_STEPS", 10)
        found = Frontier(make(prices)).within_bytes(budget)
    least = min(size for size, _ in combinations(prices))
    assert (found is None) == (budget < least)
    assert found is None or found.num_bytes <= budget


def test_a_large_model_is_solved_as_a_library_solves_it() -> None:
    """32 blocks of four units and six choices, against scipy's mixed-integer solver."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    draw = np.random.default_rng(0)
    sizes = np.sort(draw.integers(1000, 9000, (128, 6)), axis=1)
    losses = np.sort(draw.random((128, 6)), axis=1)[:, ::-1]
    budget = int(sizes.mean() * 128)
    units = make(
        [
            list(zip(map(int, s), map(float, v), strict=True))
            for s, v in zip(sizes, losses, strict=True)
        ]
    )
    found = Frontier(units).within_bytes(budget)
    assert found is not None
    one_each = np.kron(np.eye(128), np.ones(6))
    solved: Any = milp(
        losses.ravel(),
        integrality=np.ones(768),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(sizes.ravel()[None, :].astype(float), -np.inf, budget),
        ],
        options={"mip_rel_gap": 1e-9},
    )
    assert found.num_bytes <= budget
    assert math.isclose(found.divergence, solved.fun, rel_tol=1e-6)

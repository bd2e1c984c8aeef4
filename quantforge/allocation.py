"""Chooses a scheme for every merge unit: the least KL divergence for given bits, or inversely.

Each unit (q/k/v of a block, gate/up, o, down) takes one of several schemes, which costs bytes and,
by the unit's sensitivity, KL divergence. Divergences of units add up, to second order. Choosing one
option a unit under a budget is the multiple-choice knapsack problem (Kellerer, Pferschy, Pisinger,
*Knapsack Problems*, ch. 11); bytes are whole multiples of a step, so that dynamic programming over
the steps solves it exactly, and for all budgets at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quantforge.schemes import QuantScheme

MAX_STEPS = 1 << 20
"""Steps of the budget; with more, bytes are rounded up to coarser ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What one scheme costs a unit: `num_bytes` on disk, and `divergence` (KL, nats a token)."""

    scheme: QuantScheme
    num_bytes: int
    divergence: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Linears that share a scheme, by full name, and the schemes that they can have."""

    members: tuple[str, ...]
    num_weights: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The choice of every unit. `divergence` is the prediction, the sum of those of the choices."""

    units: tuple[Unit, ...]
    chosen: tuple[Choice, ...]

    @property
    def num_bytes(self) -> int:
        return sum(choice.num_bytes for choice in self.chosen)

    @property
    def divergence(self) -> float:
        return sum(choice.divergence for choice in self.chosen)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / sum(unit.num_weights for unit in self.units)

    def schemes(self) -> dict[str, QuantScheme]:
        """The scheme of every linear, by full name."""
        pairs = zip(self.units, self.chosen, strict=True)
        return {name: choice.scheme for unit, choice in pairs for name in unit.members}


class Frontier:
    """The best choices of `units` for every budget; solved once, then asked."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(replace(unit, choices=_efficient(unit.choices)) for unit in units)
        self.least = sum(unit.choices[0].num_bytes for unit in self.units)
        extra = [[c.num_bytes - u.choices[0].num_bytes for c in u.choices] for u in self.units]
        span = sum(costs[-1] for costs in extra)
        self._step = max(math.gcd(*(c for costs in extra for c in costs)), 1)
        if span // self._step > MAX_STEPS:
            self._step = -(-span // MAX_STEPS)
        self._costs = [[-(-cost // self._step) for cost in costs] for costs in extra]
        self._best, self._taken = self._solve()

    def _solve(self) -> tuple[NDArray[np.float64], list[NDArray[np.uint8]]]:
        """(least divergence within each number of steps, each unit's choice there)."""
        size = 1 + sum(costs[-1] for costs in self._costs)
        best: NDArray[np.float64] = np.zeros(size)
        taken = []
        for unit, costs in zip(self.units, self._costs, strict=True):
            found = np.full(size, np.inf)
            which = np.zeros(size, dtype=np.uint8)
            for index, (choice, cost) in enumerate(zip(unit.choices, costs, strict=True)):
                value = best[: size - cost] + choice.divergence
                better = value < found[cost:]
                found[cost:][better] = value[better]
                which[cost:][better] = index
            best = found
            taken.append(which)
        return best, taken

    def _at(self, steps: int) -> Allocation:
        chosen = []
        for unit, costs, which in zip(
            reversed(self.units), reversed(self._costs), reversed(self._taken), strict=True
        ):
            index = int(which[steps])
            chosen.append(unit.choices[index])
            steps -= costs[index]
        return Allocation(units=self.units, chosen=tuple(reversed(chosen)))

    def within_bytes(self, budget: int) -> Allocation | None:
        """The allocation of least divergence in at most `budget` bytes, None where none fits."""
        if budget < self.least:
            return None
        return self._at(min((budget - self.least) // self._step, len(self._best) - 1))

    def within_divergence(self, limit: float) -> Allocation | None:
        """The smallest allocation of at most `limit` KL, None where none is so good."""
        enough = np.flatnonzero(self._best <= limit)
        return self._at(int(enough[0])) if len(enough) else None


def _efficient(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices by size, without those that a smaller one of no greater divergence replaces."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.num_bytes, c.divergence)):
        if not kept or choice.divergence < kept[-1].divergence:
            kept.append(choice)
    return tuple(kept)

"""Predictors judged by what was measured: spread of ratios, order of pairs, regret, inversions.

A constant factor that all predictions share changes no choice between policies; what does is how much the ratio
predicted / measured differs between them. So the score is its spread, max / min - 1, and the order of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from hrm.validation.noise import Array, bootstrap_medians, interval, least_difference

__all__ = ["Inversion", "Order", "Regret", "find_inversions", "order_of_pairs", "regret_of", "spread_of"]

FEWEST_PAIRS = 15
"""With fewer pairs that noise lets one tell apart, their order is not judged."""

SURE = 0.95
"""An inversion is beyond noise where so many of the resampled medians have it."""


def spread_of(
    predicted: Sequence[float], measured: Sequence[Sequence[float]], *, seed: int
) -> tuple[float, tuple[float, float]]:
    """Largest over smallest predicted / measured, less 1 [share], and its 95 % interval over resampled repeats.

    Parameters
    ----------
    predicted : sequence of float
        One per policy.
    measured : sequence of sequence of float
        Repeats of each.
    """
    ratios = [guess / median(repeats) for guess, repeats in zip(predicted, measured, strict=True)]
    resampled = np.asarray(predicted) / bootstrap_medians(measured, seed=seed)
    spreads: Array = resampled.max(axis=1) / resampled.min(axis=1) - 1.0
    return max(ratios) / min(ratios) - 1.0, interval(spreads)


@dataclass(frozen=True, slots=True)
class Order:
    """Pairs that noise lets one tell apart, and how many of them are predicted in their order."""

    pairs: int
    ordered: int

    @property
    def share(self) -> float | None:
        """Ordered right; None without pairs."""
        return self.ordered / self.pairs if self.pairs else None

    @property
    def tested(self) -> bool:
        """Whether there are enough pairs to say."""
        return self.pairs >= FEWEST_PAIRS


def order_of_pairs(predicted: Sequence[float], measured: Sequence[Sequence[float]], *, noise: float) -> Order:
    """Pairs whose medians differ by more than noise, and how many a predictor orders as they were measured.

    Equal predictions order nothing.
    """
    pairs = ordered = 0
    for one, other in combinations(range(len(predicted)), 2):
        difference = math.log(median(measured[one]) / median(measured[other]))
        repeats = min(len(measured[one]), len(measured[other]))
        if abs(difference) <= least_difference(noise, repeats):
            continue
        pairs += 1
        ordered += (predicted[one] - predicted[other]) * difference > 0.0
    return Order(pairs, ordered)


@dataclass(frozen=True, slots=True)
class Regret:
    """What the chosen plan gives away against the fastest that was measured.

    Attributes
    ----------
    best : int
        Index of the fastest.
    share : float
        1 - chosen / best; 0 where the chosen one is the fastest.
    low, high : float
        95 % interval over resampled repeats.
    """

    best: int
    share: float
    low: float
    high: float


def regret_of(rates: Sequence[Sequence[float]], *, chosen: Sequence[int], seed: int) -> Regret:
    """Regret of the chosen plan in throughput.

    Parameters
    ----------
    rates : sequence of sequence of float
        Repeats of every policy [token/s].
    chosen : sequence of int
        Indices of the chosen plan: it may be there more than once, and its repeats count together.
    """
    together = [rate for index in chosen for rate in rates[index]]
    others = [index for index in range(len(rates)) if index not in chosen]
    groups = [together, *(rates[index] for index in others)]
    medians = [median(each) for each in groups]
    top = max(range(len(groups)), key=lambda index: medians[index])
    resampled = bootstrap_medians(groups, seed=seed)
    low, high = interval(1.0 - resampled[:, 0] / resampled.max(axis=1))
    best = chosen[0] if top == 0 else others[top - 1]
    return Regret(best, 1.0 - medians[0] / medians[top], low, high)


@dataclass(frozen=True, slots=True)
class Inversion:
    """A pair that was predicted in one order and measured in the other.

    Attributes
    ----------
    first, second : int
        The first was predicted to be larger, and the second measured so.
    predicted, measured : float
        Ratios, both first over second: above and below 1.
    certainty : float
        Share of the resampled medians that have the measured order.
    """

    first: int
    second: int
    predicted: float
    measured: float
    certainty: float


def find_inversions(
    predicted: Sequence[float], measured: Sequence[Sequence[float]], *, seed: int
) -> tuple[Inversion, ...]:
    """Inversions beyond noise: those that hold in 95 % of resampled repeats; the largest measured difference first."""
    medians = [median(repeats) for repeats in measured]
    resampled = bootstrap_medians(measured, seed=seed)
    found = []
    for one, other in combinations(range(len(predicted)), 2):
        first, second = (one, other) if predicted[one] > predicted[other] else (other, one)
        if predicted[first] == predicted[second] or medians[first] >= medians[second]:
            continue
        certainty = float(np.mean(resampled[:, first] < resampled[:, second]))
        if certainty >= SURE:
            ratios = predicted[first] / predicted[second], medians[first] / medians[second]
            found.append(Inversion(first, second, *ratios, certainty))
    return tuple(sorted(found, key=lambda each: each.measured))

"""How far two measurements of the same thing lie apart: noise, what it lets one tell apart, and bars it allows.

Noise is the standard deviation of ln(seconds) of repeats, a share, taken from the median difference of two runs. A
policy is judged by the median of its repeats, whose own standard deviation is noise * sqrt(pi / (2 n)) for n of them
(for normal errors; a little too much for few).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import median

import numpy as np
import numpy.typing as npt

from hrm.errors import InputError

__all__ = [
    "SIGMAS",
    "bootstrap_medians",
    "interval",
    "least_difference",
    "median_noise",
    "pooled_noise",
    "tightest_regret",
    "tightest_spread",
]

SIGMAS = 2.0
"""Two policies are told apart when their medians differ by more than so many standard deviations of the difference."""

QUARTILE = 0.6744897501960817
"""Half of normal values lie within so many standard deviations."""

DRAWS = 4000
DRAWS_OF_NOISE = 40_000
CERTAIN = 0.95

Array = npt.NDArray[np.float64]


def pooled_noise(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation of ln(value) about its own group, from the median difference of two of a group [share].

    A run that was held up does not count for more than any other, as it does not in the median of a policy either.

    Parameters
    ----------
    groups : sequence of sequence of float
        Repeats of one policy each; groups of one say nothing.

    Raises
    ------
    InputError
        No group has two.
    """
    differences = [abs(math.log(one / other)) for values in groups for one, other in combinations(values, 2)]
    if not differences:
        raise InputError("one run of each plan says nothing of noise", where="--repeats", way_out="2 or more")
    return median(differences) / (QUARTILE * math.sqrt(2.0))


def median_noise(noise: float, repeats: int) -> float:
    """Standard deviation of the median of so many repeats [share]."""
    return noise if repeats < 3 else noise * math.sqrt(math.pi / (2.0 * repeats))


def least_difference(noise: float, repeats: int) -> float:
    """Smallest |ln(a / b)| of two medians that is more than noise."""
    return SIGMAS * math.sqrt(2.0) * median_noise(noise, repeats)


def tightest_spread(noise: float, repeats: int, policies: int, *, seed: int) -> float:
    """Spread that noise alone makes: what it stays below in 19 of 20 validations of a perfect predictor [share]."""
    draws = _normal(median_noise(noise, repeats), policies, seed)
    return float(np.quantile(np.exp(draws.max(axis=1) - draws.min(axis=1)) - 1.0, CERTAIN))


def tightest_regret(noise: float, repeats: int, policies: int, *, seed: int) -> float:
    """Regret that noise alone makes among so many equally fast policies, in 19 of 20 validations at most [share]."""
    draws = _normal(median_noise(noise, repeats), policies, seed)
    return float(np.quantile(1.0 - np.exp(draws[:, 0] - draws.max(axis=1)), CERTAIN))


def _normal(sigma: float, policies: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(0.0, sigma, (DRAWS_OF_NOISE, max(1, policies)))


def bootstrap_medians(groups: Sequence[Sequence[float]], *, seed: int, draws: int = DRAWS) -> Array:
    """Medians of resampled repeats [draws, policies]: every policy's own repeats, drawn with replacement."""
    generator = np.random.default_rng(seed)
    columns = []
    for values in groups:
        picked = generator.integers(len(values), size=(draws, len(values)))
        columns.append(np.median(np.asarray(values, dtype=np.float64)[picked], axis=1))
    return np.stack(columns, axis=1)


def interval(values: Array, share: float = CERTAIN) -> tuple[float, float]:
    """The middle `share` of resampled values."""
    rest = (1.0 - share) / 2.0
    low, high = np.quantile(values, (rest, 1.0 - rest))
    return float(low), float(high)

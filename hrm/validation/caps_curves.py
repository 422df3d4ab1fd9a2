"""Throughput against CPU memory, measured: what memory a throughput takes, and two schedules at the same throughput.

A curve is the best throughput with at most so much memory (a monotone envelope of the points), with straight lines in
between. Two curves are compared at throughputs that both reach; where there are none, they are not matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hrm.validation.noise import bootstrap_medians, interval

__all__ = ["SHARES", "Curve", "match_curves", "memory_needed"]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where curves are compared: from the lowest throughput that both reach (0) to the highest (1)."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one schedule, in order of their memory.

    Attributes
    ----------
    name : str
        The schedule.
    memory_bytes : tuple of float
        [byte], ascending.
    repeats : tuple of tuple of float
        Throughputs of each point [token/s]; one each where nothing was repeated.
    """

    name: str
    memory_bytes: tuple[float, ...]
    repeats: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> Array:
        """Of each point [token/s]."""
        return np.array([float(np.median(values)) for values in self.repeats])


def memory_needed(memory_bytes: Sequence[float], rates: Array, rate: float) -> float | None:
    """Least memory with which a throughput is reached, by the envelope of the points [byte]; None where it is not.

    At or below the throughput of the first point it is the first point's memory: with less, nothing was measured.
    """
    best = np.maximum.accumulate(rates)
    place = int(np.searchsorted(best, rate))
    if place == len(best):
        return None
    if place == 0:
        return float(memory_bytes[0])
    low, high = best[place - 1], best[place]
    share = (rate - low) / (high - low)
    return float(memory_bytes[place - 1] + share * (memory_bytes[place] - memory_bytes[place - 1]))


def _compare(curves: tuple[Curve, Curve], rates: tuple[Array, Array]) -> list[tuple[float, float, float]] | None:
    """At each share of the throughputs that both reach: that throughput, and what each needs; None where none is."""
    bests = [np.maximum.accumulate(each) for each in rates]
    low, high = max(best[0] for best in bests), min(best[-1] for best in bests)
    if low > high:
        return None
    rows = []
    for share in SHARES:
        rate = high if share == 1.0 else low + share * (high - low)
        needed = [memory_needed(curve.memory_bytes, best, rate) for curve, best in zip(curves, bests, strict=True)]
        assert needed[0] is not None and needed[1] is not None  # both reach the highest
        rows.append((float(rate), needed[0], needed[1]))
    return rows


def match_curves(first: Curve, second: Curve, *, seed: int) -> dict[str, Any]:
    """How many times the memory of one schedule another needs at the same throughput.

    Parameters
    ----------
    first, second : Curve
        The ratio is memory of the second over memory of the first.
    seed : int
        Of the resampled repeats; every resample has throughputs of its own that both reach.

    Returns
    -------
    dict
        ``matched``; ``reason`` where they are not; ``rows``: ``share`` (0 the lowest throughput that both reach, 1 the
        highest), ``tokens_per_s``, ``first_bytes``, ``second_bytes``, ``ratio``, ``low`` and ``high`` (95 % of the
        resamples, null where nothing was repeated); ``resamples_matched``: the share of resamples that have such
        throughputs.
    """
    names = {"first": first.name, "second": second.name}
    nothing: dict[str, Any] = {**names, "matched": False, "rows": [], "resamples_matched": None}
    for curve in (first, second):
        if not curve.memory_bytes:
            return {**nothing, "reason": f"no run of {curve.name} held its cap"}
    curves = (first, second)
    rows = _compare(curves, (first.medians, second.medians))
    ratios, share = _resampled(curves, seed)
    if rows is None:
        best = {curve.name: np.maximum.accumulate(curve.medians) for curve in curves}
        slow, fast = sorted(best, key=lambda name: float(best[name][-1]))
        why = (
            f"{slow} reaches {best[slow][-1]:,.4g} token/s at most, {fast} has {best[fast][0]:,.4g} with the least "
            "memory it ran in"
        )
        return {**nothing, "reason": why, "resamples_matched": share}
    found = []
    for place, (rate, one, other) in enumerate(rows):
        low, high = (None, None) if not len(ratios) else interval(ratios[:, place])
        found.append(
            {
                "share": SHARES[place],
                "tokens_per_s": rate,
                "first_bytes": one,
                "second_bytes": other,
                "ratio": other / one,
                "low": low,
                "high": high,
            }
        )
    return {**names, "matched": True, "reason": "", "rows": found, "resamples_matched": share}


def _resampled(curves: tuple[Curve, Curve], seed: int) -> tuple[Array, float | None]:
    """Ratios of resampled repeats [resamples, shares], and the share of resamples that have throughputs in common.

    No ratios, and None, where nothing was repeated.
    """
    if all(len(values) < 2 for curve in curves for values in curve.repeats):
        return np.empty((0, len(SHARES))), None
    medians = [bootstrap_medians(curve.repeats, seed=seed + place) for place, curve in enumerate(curves)]
    found = []
    for one, other in zip(*medians, strict=True):
        rows = _compare(curves, (one, other))
        if rows is not None:
            found.append([memory[1] / memory[0] for memory in ((row[1], row[2]) for row in rows)])
    return np.array(found).reshape(-1, len(SHARES)), len(found) / len(medians[0])

"""From measured seconds to the constants of a profile: shares of peaks, by the form in which `hrm.rates` prices them.

A layer on the GPU takes c + sum over its operators of max(f/F, m/B) + (1 - o) min(f/F, m/B) seconds, with f FLOPs and m
bytes as `hrm.cost` counts them; c is what a layer of small widths takes, F, B and o are fitted. An operator on the CPU
takes max(f/F, m/B); B is the measured read rate, F is fitted to experts of few and of many tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hrm.cost import Work

__all__ = [
    "GpuConstants",
    "Point",
    "bound_share",
    "fit_attention",
    "fit_cpu_flops",
    "fit_gpu",
    "fit_prefill",
    "price",
    "worst_error",
]


SOFT_FROM = 0.1
"""Misses from which a point pulls less: one that something else disturbed should not move the rest."""


TRIED_RATES = 2000
"""Values of F between the slowest and the fastest point: steps of a few thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Something measured: its operators, its seconds [s], and whether it has the fixed time of a layer."""

    name: str
    works: Sequence[Work]
    seconds: float
    fixed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConstants:
    """F [FLOP/s], B [byte/s], o [share] and c [s] of the formula above."""

    flops_per_s: float
    bytes_per_s: float
    overlap: float
    fixed_s: float


def price(point: Point, constants: GpuConstants) -> float:
    """Seconds of a point by the formula above [s]."""
    total = constants.fixed_s if point.fixed else 0.0
    for work in point.works:
        compute = float(work.flops) / constants.flops_per_s
        memory = float(work.bytes_touched) / constants.bytes_per_s
        total += max(compute, memory) + (1.0 - constants.overlap) * min(compute, memory)
    return total


def worst_error(points: Sequence[Point], constants: GpuConstants) -> float:
    """Largest |priced / measured - 1| of the points."""
    return max(abs(price(point, constants) / point.seconds - 1.0) for point in points)


def fit_gpu(
    points: Sequence[Point], *, fixed_s: float, peak_flops_per_s: float, peak_bytes_per_s: float
) -> GpuConstants:
    """F, B and o that price the points best, by ln(priced / measured), with a soft loss.

    Parameters
    ----------
    points : sequence of Point
        Layers in decode by micro-batch.
    fixed_s : float
        c, measured by itself: from large layers alone it cannot be told from B [s].
    peak_flops_per_s, peak_bytes_per_s : float
        What F and B are at most [FLOP/s, byte/s].
    """

    def constants_of(x: NDArray[np.float64]) -> GpuConstants:
        return GpuConstants(
            flops_per_s=peak_flops_per_s * math.exp(x[0]),
            bytes_per_s=peak_bytes_per_s * math.exp(x[1]),
            overlap=float(x[2]),
            fixed_s=fixed_s,
        )

    def misses(x: NDArray[np.float64]) -> list[float]:
        found = constants_of(x)
        return [math.log(price(point, found) / point.seconds) for point in points]

    bounds = ([-6.0, -4.0, 0.0], [0.0, 0.0, 1.0])
    fits = [
        least_squares(misses, (-0.5, -0.3, overlap), bounds=bounds, loss="soft_l1", f_scale=SOFT_FROM)
        for overlap in (0.1, 0.5, 0.9)
    ]
    best = min(fits, key=lambda found: float(found.cost))
    return constants_of(best.x)


def fit_attention(points: Sequence[Point], layer: GpuConstants, *, peak_bytes_per_s: float) -> float:
    """B of attention in decode [byte/s], the other constants as in a layer."""

    def misses(x: NDArray[np.float64]) -> list[float]:
        found = replace(layer, bytes_per_s=peak_bytes_per_s * math.exp(x[0]))
        return [math.log(price(point, found) / point.seconds) for point in points]

    found = least_squares(misses, [-0.3], bounds=([-4.0], [0.0]), loss="soft_l1", f_scale=SOFT_FROM)
    return float(peak_bytes_per_s * math.exp(found.x[0]))


def fit_prefill(points: Sequence[Point], decode: GpuConstants, *, peak_flops_per_s: float) -> float:
    """F of prefill [FLOP/s], the other constants as in decode."""

    def misses(x: NDArray[np.float64]) -> list[float]:
        found = replace(decode, flops_per_s=peak_flops_per_s * math.exp(x[0]))
        return [math.log(price(point, found) / point.seconds) for point in points]

    found = least_squares(misses, [-0.5], bounds=([-6.0], [0.0]))
    return float(peak_flops_per_s * math.exp(found.x[0]))


def fit_cpu_flops(points: Sequence[Point], *, bytes_per_s: float, least_flops_per_s: float) -> float:
    """F of the CPU [FLOP/s] that prices the points best, by ln(priced / measured), with a soft loss.

    A point that reading binds says nothing of F, also where it reads somewhat slower than B. Where none is bound by
    FLOPs, F is what the fastest reached.

    Parameters
    ----------
    points : sequence of Point
        Experts of one layer, by tokens; one operator each.
    bytes_per_s : float
        B [byte/s].
    least_flops_per_s : float
        What attention reaches: F must not slow it down, since its rate is that of its bytes [FLOP/s].
    """
    rates = [float(point.works[0].flops) / point.seconds for point in points]
    tried = np.geomspace(min(rates), max(rates), TRIED_RATES)

    def loss(flops_per_s: float) -> float:
        misses = [
            math.log(max(float(w.flops) / flops_per_s, float(w.bytes_touched) / bytes_per_s) / point.seconds)
            for point in points
            for w in point.works
        ]
        return math.fsum(2.0 * (math.sqrt(1.0 + (miss / SOFT_FROM) ** 2) - 1.0) for miss in misses)

    losses = [loss(float(rate)) for rate in tried]
    least = min(losses)
    best = next(float(rate) for rate, each in zip(tried, losses, strict=True) if each <= least + 1e-9)
    return max(least_flops_per_s, best)


def bound_share(value: float, whole: float) -> float:
    """value / whole, between 0.1 % and 100 %: what a profile takes."""
    return min(1.0, max(0.001, value / whole))

"""From measured seconds to the constants of a profile: shares of peaks, by the form in which `hrm.rates` prices them.

A layer on the GPU takes c + sum over its operators of max(f/F, m/B) + (1 - o) min(f/F, m/B) seconds, with f FLOPs and m
bytes as `hrm.cost` counts them; c is what a layer of small widths takes, F, B and o are fitted. An operator on the CPU
takes the same with an F, B and o of its own: B is the measured read rate, F and o are fitted to experts of few and of
many tokens.
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
    "fit_cpu",
    "fit_gpu",
    "fit_prefill",
    "price",
    "worst_error",
]


SOFT_FROM = 0.1
"""Misses from which a point pulls less: one that something else disturbed should not move the rest."""


TRIED_RATES = 2000
"""Values of F between the slowest point and the peak: steps of a few thousandths."""

TRIED_OVERLAPS = tuple(i / 50 for i in range(50, -1, -1))
"""Values of o on the CPU, the largest first."""

TIE = 1e-9
"""Losses that are as good as equal."""


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


def fit_cpu(
    points: Sequence[Point], *, bytes_per_s: float, least_flops_per_s: float, peak_flops_per_s: float
) -> tuple[float, float]:
    """F [FLOP/s] and o of the CPU that price the points best, by ln(priced / measured), with a soft loss.

    Points that reading binds say nothing of F where o is 1, also where they read somewhat slower than B. Where several
    price the points equally well, F is the least and o the largest of them.

    Parameters
    ----------
    points : sequence of Point
        Experts of one layer, by tokens; one operator each.
    bytes_per_s : float
        B [byte/s].
    least_flops_per_s, peak_flops_per_s : float
        Between which F lies: what attention reaches, which F must not slow down, since its rate is that of its bytes;
        and the fastest products [FLOP/s].
    """
    slowest = min(float(point.works[0].flops) / point.seconds for point in points)
    least_flops_per_s = min(max(slowest, least_flops_per_s), peak_flops_per_s)
    tried = np.geomspace(least_flops_per_s, peak_flops_per_s, TRIED_RATES)[:, None]
    seconds = np.array([point.seconds for point in points])
    memory = np.array([float(point.works[0].bytes_touched) for point in points]) / bytes_per_s
    compute = np.array([float(point.works[0].flops) for point in points]) / tried
    longer, shorter = np.maximum(compute, memory), np.minimum(compute, memory)
    best = (math.inf, 0.0, 1.0)
    for overlap in TRIED_OVERLAPS:
        misses = np.log((longer + (1.0 - overlap) * shorter) / seconds)
        losses = np.sum(2.0 * (np.sqrt(1.0 + (misses / SOFT_FROM) ** 2) - 1.0), axis=1)
        least = int(np.argmax(losses <= losses.min() + TIE))
        if losses[least] < best[0] - TIE:
            best = (float(losses[least]), float(tried[least, 0]), float(overlap))
    return best[1], best[2]


def bound_share(value: float, whole: float) -> float:
    """value / whole, between 0.1 % and 100 %: what a profile takes."""
    return min(1.0, max(0.001, value / whole))

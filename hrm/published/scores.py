"""How close predictions come to measurements: errors, order of pairs, intervals.

The error of a row is |predicted / measured - 1|. A row that was measured but not predicted is missed: it counts as
infinitely wrong in median and 90th percentile, as wrongly ordered in every pair, and as outside its interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from hrm.published.rows import Row

__all__ = [
    "Intervals",
    "PairOrder",
    "Scored",
    "Summary",
    "group_scores",
    "interval_coverage",
    "pair_order",
    "point_of",
    "quantile",
    "score_row",
    "summarise",
]

APART = 1.15
"""Two measurements are told apart when one is more than 15 % above the other."""

Point = tuple[Hashable, ...]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One row beside what a model says of it; any unit, the same for all.

    Attributes
    ----------
    id, setting, system : str
    point : tuple
        Rows with the same point are repeats of it.
    measured, predicted : float or None
        None: not measured; not predicted.
    low, high : float or None
        Interval of the prediction.
    """

    id: str
    setting: str
    system: str
    point: Point
    measured: float | None
    predicted: float | None
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted / measured."""
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted / self.measured

    @property
    def error(self) -> float | None:
        """|predicted / measured - 1|; infinite where the row is missed, None where it was not measured."""
        if self.measured is None:
            return None
        ratio = self.ratio
        return math.inf if ratio is None else abs(ratio - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Errors of a group of rows; infinite where a missed row decides, nan where nothing is predicted.

    Attributes
    ----------
    count, missed : int
        Measured rows, and how many of them have no prediction.
    median_error, p90_error : float
        Of all measured rows, missed ones at infinity.
    mean_error : float
        Of the predicted ones.
    bias : float
        exp of the median log-ratio, minus 1: +0.1 is 10 % too fast. Of the predicted ones.
    worst_id : str
        Missed rows first, then by error.
    worst_error : float
    """

    count: int
    missed: int
    median_error: float
    p90_error: float
    mean_error: float
    bias: float
    worst_id: str
    worst_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOrder:
    """Pairs within a setting more than 15 % apart: how many, and how many the model orders as measured."""

    pairs: int
    ordered: int

    @property
    def share(self) -> float:
        """Ordered right; nan without pairs."""
        return self.ordered / self.pairs if self.pairs else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Measured rows with an interval asked of them, how many lie in theirs, and the geometric mean of high / low."""

    count: int
    covered: int
    mean_width: float

    @property
    def coverage(self) -> float:
        """Share that lies inside; nan without rows."""
        return self.covered / self.count if self.count else math.nan


def point_of(row: Row) -> Point:
    """What makes rows repeats of one point: all that was chosen, but N, which counts the requests that finished."""
    return (
        row.setting,
        row.system,
        row.workload,
        row.prompt_len,
        row.padded,
        row.gen_len,
        row.micro_batch_size,
        row.num_micro_batches,
    )


def score_row(row: Row, predicted: float | None, interval: tuple[float, float] | None = None) -> Scored:
    """A row's throughput beside a prediction of it [token/s]."""
    low, high = interval if interval is not None else (None, None)
    return Scored(
        id=row.id,
        setting=row.setting,
        system=row.system,
        point=point_of(row),
        measured=row.measured_tokens_per_s,
        predicted=predicted,
        low=low,
        high=high,
    )


def quantile(values: Iterable[float], share: float) -> float:
    """Quantile with linear interpolation between order statistics; values may be infinite, nan without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    rest = place - below
    if rest == 0.0 or ordered[below] == ordered[below + 1]:
        return ordered[below]
    return ordered[below] + rest * (ordered[below + 1] - ordered[below])


def summarise(scored: Iterable[Scored]) -> Summary:
    """Errors of a group; rows that were not measured are left out."""
    measured = [each for each in scored if each.measured is not None]
    errors = {each.id: each.error for each in measured if each.error is not None}
    ratios = [each.ratio for each in measured if each.ratio is not None]
    found = [error for error in errors.values() if math.isfinite(error)]
    worst = max(errors, key=lambda key: errors[key], default="")
    return Summary(
        count=len(measured),
        missed=len(measured) - len(ratios),
        median_error=quantile(errors.values(), 0.5),
        p90_error=quantile(errors.values(), 0.9),
        mean_error=sum(found) / len(found) if found else math.nan,
        bias=math.exp(quantile(map(math.log, ratios), 0.5)) - 1.0 if ratios else math.nan,
        worst_id=worst,
        worst_error=errors[worst] if worst else math.nan,
    )


def group_scores(scored: Iterable[Scored], key: Callable[[Scored], Key]) -> dict[Key, list[Scored]]:
    """Rows by a key, in order of first appearance."""
    groups: dict[Key, list[Scored]] = {}
    for each in scored:
        groups.setdefault(key(each), []).append(each)
    return groups


def pair_order(scored: Sequence[Scored], *, within_system: bool = False) -> PairOrder:
    """Pairs within a setting whose measurements are more than 15 % apart, and how many are predicted in their order.

    Repeats of one point are no pair: whatever tells them apart is noise. Equal predictions order nothing.

    Parameters
    ----------
    within_system : bool
        Only pairs of one system.
    """
    pairs = ordered = 0
    for first, second in combinations(scored, 2):
        if first.setting != second.setting or first.point == second.point:
            continue
        if within_system and first.system != second.system:
            continue
        if first.measured is None or second.measured is None:
            continue
        slow, fast = (first, second) if first.measured < second.measured else (second, first)
        assert slow.measured is not None and fast.measured is not None
        if fast.measured <= APART * slow.measured * (1 + 1e-9):  # 115 is not more than 15 % above 100
            continue
        pairs += 1
        if slow.predicted is not None and fast.predicted is not None:
            ordered += slow.predicted < fast.predicted
    return PairOrder(pairs=pairs, ordered=ordered)


def interval_coverage(scored: Iterable[Scored]) -> Intervals:
    """How many measurements lie in the interval of their prediction, and how wide the intervals are.

    A row without an interval counts as not covered, unless no row has one.
    """
    measured = [each for each in scored if each.measured is not None]
    widths = [math.log(each.high / each.low) for each in measured if each.low is not None and each.high is not None]
    if not widths:
        return Intervals(count=0, covered=0, mean_width=math.nan)
    covered = sum(
        each.low <= each.measured <= each.high
        for each in measured
        if each.measured is not None and each.low is not None and each.high is not None
    )
    return Intervals(count=len(measured), covered=covered, mean_width=math.exp(sum(widths) / len(widths)))

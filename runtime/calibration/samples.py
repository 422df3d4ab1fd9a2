"""Measurements: repeated after a warm-up, with median and spread. Knows nothing of what is measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Sample", "Samples", "Stopwatch", "median_of", "spread_of"]

LEAST_REPEATS = 3
Unit = Literal["byte/s", "FLOP/s", "s", "byte"]


def median_of(values: Sequence[float]) -> float:
    """The median, NaN of nothing."""
    return statistics.median(values) if values else math.nan


def spread_of(values: Sequence[float]) -> float:
    """Distance of the quartiles over the median [share]; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / median_of(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement.

    Attributes
    ----------
    name : str
        Unique, e.g. ``"copy host_to_device pinned 64 MiB"``; what ran beside it follows after ``" while "``.
    unit : {"byte/s", "FLOP/s", "s", "byte"}
    values : tuple of float
        One per repeat.
    """

    name: str
    unit: Unit
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the repeats."""
        return median_of(self.values)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median [share]."""
        return spread_of(self.values)


@dataclass(slots=True)
class Samples:
    """All measurements by name, in the order in which they were made, and what was left out and why."""

    by_name: dict[str, Sample] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, unit: Unit, values: Sequence[float]) -> Sample:
        """Keep one; a name comes once."""
        if name in self.by_name:
            raise ValueError(f"{name} is measured twice")
        self.by_name[name] = found = Sample(name=name, unit=unit, values=tuple(values))
        return found

    def add_rate(self, name: str, unit: Unit, amount: float, seconds: Sequence[float]) -> Sample:
        """Keep `amount` over each of the seconds."""
        return self.add(name, unit, [amount / each for each in seconds])

    def skip(self, what: str, why: str) -> None:
        """Say that something was not measured."""
        self.skipped[what] = why

    def starting(self, prefix: str) -> list[Sample]:
        """Those whose name begins so."""
        return [sample for name, sample in self.by_name.items() if name.startswith(prefix)]

    def __getitem__(self, name: str) -> Sample:
        return self.by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self.by_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times what is called again and again.

    Attributes
    ----------
    repeats : int
        Values of one measurement.
    least_s : float
        A repeat lasts at least so long: what is shorter is called several times in a row [s].
    most_s : float
        What takes longer than this is not repeated as often: all repeats together take about so long [s].
    clock : callable
        Seconds, ever more [s].
    late : callable
        Whether three repeats must do from now on.
    """

    repeats: int
    least_s: float = 0.004
    most_s: float = 2.0
    clock: Callable[[], float] = time.perf_counter
    late: Callable[[], bool] = lambda: False

    def measure(self, run: Callable[[], object], finish: Callable[[], object] = lambda: None) -> list[float]:
        """Seconds of one call, of every repeat, after a warm-up that is not counted [s].

        Parameters
        ----------
        run : callable
            What is timed.
        finish : callable
            Called before the clock is read: waits for what `run` only issued.
        """
        run()
        finish()
        once = self._time(run, finish, 1)
        calls = max(1, min(10_000, math.ceil(self.least_s / max(once, 1e-9))))
        allowed = LEAST_REPEATS if self.late() else int(self.most_s / max(once, 1e-9))
        repeats = min(self.repeats, max(LEAST_REPEATS, allowed))
        return [self._time(run, finish, calls) for _ in range(repeats)]

    def _time(self, run: Callable[[], object], finish: Callable[[], object], calls: int) -> float:
        began = self.clock()
        for _ in range(calls):
            run()
        finish()
        return (self.clock() - began) / calls

"""What a benchmark says: lines with a result and the bar it has to reach, printed or as JSON."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Line", "Section", "Settings", "median", "print_section", "section_json", "spread", "tell", "timed"]

WIDTH = 78
_BEGAN = time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One result. `bar` is the least it has to be; None where it is only told."""

    what: str
    value: float
    unit: str = ""
    bar: float | None = None
    digits: int = 2

    @property
    def met(self) -> bool:
        """Whether the bar is reached, if there is one."""
        return self.bar is None or self.value >= self.bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one part of the benchmark measured.

    Attributes
    ----------
    lines : list of Line
    notes : list of str
        What one has to know to read them.
    samples : dict
        Every single measurement, by name.
    """

    title: str
    lines: list[Line]
    notes: list[str] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether every bar is reached."""
        return all(line.met for line in self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes
    ----------
    rounds : int
        Repeats, interleaved, of which medians count.
    folder : Path
        Temporary folder, on the disk that is measured.
    cgroup : Path or None
        Folder of a memory cgroup in which one with a limit may be made.
    """

    rounds: int
    folder: Path
    cgroup: Path | None = None


def tell(text: str) -> None:
    """Say how far it is, on stderr."""
    print(f"[{time.perf_counter() - _BEGAN:5.0f} s] {text}", file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    """The one in the middle."""
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> str:
    """Median, least and most, as words."""
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Append the seconds of a block [s]."""
    began = time.perf_counter()
    yield
    into.append(time.perf_counter() - began)


def print_section(section: Section) -> None:
    """Print a section as a table."""
    print(f"\n{section.title:{WIDTH}} {'result':>9} {'bar':>7}")
    for line in section.lines:
        bar = "" if line.bar is None else f"{line.bar:7.2f}  {'met' if line.met else 'MISSED'}"
        value = f"{line.value:.{line.digits}f}"
        print(f"{line.what:{WIDTH}} {value:>9} {bar or line.unit}")
    for note in section.notes:
        print(f"  - {note}")
    sys.stdout.flush()


def section_json(section: Section) -> dict[str, Any]:
    """A section as JSON."""
    return {
        "title": section.title,
        "lines": [
            {"what": each.what, "value": each.value, "unit": each.unit, "bar": each.bar, "met": each.met}
            for each in section.lines
        ],
        "notes": section.notes,
        "samples": section.samples,
    }

"""Arenas: what is held on each level in the plan's own terms, and a refusal of what the plan did not foresee.

Buffers that are there all along are reserved against their term; what tasks take and give back is counted as they run,
against the peak of the level.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from hrm.errors import InputError
from hrm.graph import Hold
from hrm.units import GIB

__all__ = ["Arena", "Arenas"]

SLACK_BYTES = 64 * 1024
"""Per buffer: alignment of the matrices in it, which the plan does not count."""

WEIGHT_TERMS = (
    "resident expert weights",
    "expert weights",
    "expert weight slots",
    "non-expert weights",
    "non-expert weight slots",
    "embedding",
    "lm_head",
    "lm_head buffers",
    "weight staging buffers",
    "disk landing buffers",
)
"""Terms whose size follows from the model's weights, and not from the requests."""


class Arena:
    """One level: terms with their planned bytes, and what was really reserved of each.

    `rounding` is what whole requests and blocks can add to terms of the plan, which does not count it [byte].
    """

    def __init__(
        self, level: str, terms: Mapping[str, float], peak: float, rounding: Mapping[str, float] | None = None
    ) -> None:
        self.level, self.planned, self.peak = level, dict(terms), peak
        self.rounding = dict(rounding or {})
        self.reserved: dict[str, int] = {}
        self.buffers: dict[str, int] = {}

    def room(self, term: str) -> float:
        """What buffers of a term may take, whole requests and blocks included [byte]."""
        return self.planned.get(term, 0.0) + self.rounding.get(term, 0.0)

    def reserve(self, term: str, size: int) -> None:
        """Count a buffer against its term, and all of them against the peak of the level.

        Raises
        ------
        InputError
            The plan has no such term on this level, or less of it than this takes, or not for all at once.
        """
        if size <= 0:
            return
        total = self.reserved.get(term, 0) + size
        count = self.buffers.get(term, 0) + 1
        planned = self.planned.get(term, 0.0)
        if total > self.room(term) * (1.0 + 1e-9) + SLACK_BYTES * count:
            raise InputError(
                f"{term} would take {total / GIB:.4f} GiB of {self.level} memory, the plan foresees "
                f"{planned / GIB:.4f} GiB",
                where=f"{self.level} arena",
                way_out=_way_out(term),
            )
        every = sum(self.reserved.values()) + size
        slack = SLACK_BYTES * (sum(self.buffers.values()) + 1)
        if every > (self.peak + sum(self.rounding.values())) * (1.0 + 1e-9) + slack:
            raise InputError(
                f"with {size / GIB:.4f} GiB for {term}, buffers would take {every / GIB:.4f} GiB of {self.level} "
                f"memory, the plan's peak is {self.peak / GIB:.4f} GiB",
                where=f"{self.level} arena",
                way_out=_way_out(term),
            )
        self.reserved[term], self.buffers[term] = total, count

    def release(self, term: str, size: int) -> None:
        """Give a buffer back."""
        if size > 0:
            self.reserved[term] -= size
            self.buffers[term] -= 1


def _way_out(term: str) -> str:
    """Weights are as many as the checkpoint has; everything else comes with the requests."""
    if term in WEIGHT_TERMS:
        return "the plan was made for other formats or layers: hrm plan for this checkpoint"
    return "a plan for these requests (their number and lengths): hrm plan --prompts FILE"


class Arenas:
    """All levels, with what running tasks hold of them."""

    def __init__(self, levels: Mapping[str, Arena], standing: Mapping[str, float]) -> None:
        self.levels = dict(levels)
        self.held = {level: standing.get(level, 0.0) for level in self.levels}
        self.highest = dict(self.held)
        self._lock = threading.Lock()

    def __getitem__(self, level: str) -> Arena:
        return self.levels[level]

    def acquire(self, holds: Iterable[Hold], task: object) -> None:
        """What a task takes when it starts.

        Raises
        ------
        InputError
            It would exceed the peak the plan states for the level; names task and term.
        """
        with self._lock:
            for hold in holds:
                self.held[hold.level] += hold.bytes
                arena = self.levels[hold.level]
                if self.held[hold.level] > arena.peak * (1.0 + 1e-6) + 1.0:
                    raise InputError(
                        f"{task} takes {hold.bytes / GIB:.4f} GiB for {hold.term}: {self.held[hold.level] / GIB:.4f} "
                        f"GiB would be held, the plan's peak is {arena.peak / GIB:.4f} GiB",
                        where=f"{hold.level} arena",
                    )
                self.highest[hold.level] = max(self.highest[hold.level], self.held[hold.level])

    def give_back(self, holds: Iterable[Hold]) -> None:
        """What a task gives back when it ends."""
        with self._lock:
            for hold in holds:
                self.held[hold.level] -= hold.bytes

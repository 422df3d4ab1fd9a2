"""Whether a trace keeps the rule of its graph: lanes in issue order, one task at a time, dependencies first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hrm.graph import Lane, TaskId
from hrm.trace import Span

__all__ = ["Violation", "find_violation"]


class Violation(NamedTuple):
    """A task that started too early: `rule` is "order", "one at a time" or "dependency".

    `early_s` is how much too early, before `other` started (order) or ended (the others) [s].
    """

    rule: str
    task: TaskId
    other: TaskId
    lane: Lane
    early_s: float

    def __str__(self) -> str:
        if self.rule == "order":
            said = f"started before {self.other}, which is issued before it on {self.lane}"
        elif self.rule == "dependency":
            said = f"started before {self.other}, which it waits for, had ended"
        else:
            said = f"started before {self.other}, the one before it on {self.lane}, had ended"
        return f"{self.task} {said}: {self.early_s:.4g} s too early"


def find_violation(
    spans: Sequence[Span], before: Sequence[Sequence[int]], *, clock_error_s: float = 0.0
) -> Violation | None:
    """The first task, in issue order, that broke the rule; None where all kept it.

    Parameters
    ----------
    spans : sequence of Span
        In issue order.
    before : sequence of sequence of int
        For each, the indices of those it waits for, all earlier.
    clock_error_s : float
        How far the clocks of two lanes, or two readings of one, may be apart [s].
    """
    last: dict[Lane, Span] = {}
    for span, others in zip(spans, before, strict=True):
        latest = span.start_s + clock_error_s
        previous = last.get(span.lane)
        if previous is not None and previous.start_s > latest:
            return _violation("order", span, previous, previous.start_s)
        if previous is not None and previous.end_s > latest:
            return _violation("one at a time", span, previous, previous.end_s)
        for index in others:
            if spans[index].end_s > latest:
                return _violation("dependency", span, spans[index], spans[index].end_s)
        last[span.lane] = span
    return None


def _violation(rule: str, span: Span, other: Span, since_s: float) -> Violation:
    return Violation(rule, span.task, other.task, span.lane, since_s - span.start_s)

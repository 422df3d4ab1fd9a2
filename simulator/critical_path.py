"""The critical path of one decode step: the chain of tasks and waits that its seconds are made of.

Walked back from the end of the step: a task could start when the last of its dependencies and the task before it on
its lane were done, so the one of those that ended last is what it waited for. What comes out has no holes: its pieces
add up to the seconds of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hrm.errors import InputError
from hrm.graph import Lane, Op, TaskGraph, TaskId
from hrm.trace import Trace, check_same_tasks

__all__ = ["WAITING", "Segment", "Window", "find_critical_path", "seconds_on_path", "step_window"]

WAITING = "waiting"
"""What a piece is called in which nothing ran that the step waited for; a simulated run has none."""


class Window(NamedTuple):
    """A stretch of a run: [s] from its start."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its length [s]."""
        return self.end_s - self.start_s


class Segment(NamedTuple):
    """A piece of the path: a task as far as it lies in the window, or None while nothing ran [s]."""

    task: TaskId | None
    start_s: float
    end_s: float


def step_window(graph: TaskGraph, trace: Trace, step: int) -> Window:
    """A decode step, from the last token of the step before (or the start of the trace) to its own last token.

    Raises
    ------
    InputError
        The trace does not have the step, or is not of that graph.
    """
    check_same_tasks(graph, trace.spans)
    return Window(_step_end(graph, trace, step - 1)[0], trace.spans[_last_sample(graph, trace, step)].end_s)


def find_critical_path(graph: TaskGraph, trace: Trace, step: int) -> tuple[Segment, ...]:
    """What the seconds of a decode step are made of, oldest first.

    Parameters
    ----------
    graph : TaskGraph
    trace : Trace
        Of that graph; simulated or measured.
    step : int
        A decode step that the trace has.

    Returns
    -------
    tuple of Segment
        Without holes or overlap, from the start of the step (`step_window`) to its end.

    Raises
    ------
    InputError
        The trace does not have the step, or is not of that graph.
    """
    window = step_window(graph, trace, step)
    previous = _previous_on_lane(graph)
    path: list[Segment] = []
    index: int | None = _last_sample(graph, trace, step)
    reached = window.end_s
    while index is not None and reached > window.start_s:
        span = trace.spans[index]
        if span.end_s < reached:
            ended = max(span.end_s, window.start_s)
            path.append(Segment(None, ended, reached))
            reached = ended
        started = min(max(span.start_s, window.start_s), reached)
        if started < reached:
            path.append(Segment(span.task, started, reached))
            reached = started
        index = _waited_for(graph, trace, previous, index)
    if reached > window.start_s:
        path.append(Segment(None, window.start_s, reached))
    return tuple(reversed(path))


def seconds_on_path(path: Sequence[Segment]) -> dict[str, float]:
    """Seconds of a path by kind of task, and of waiting if there is any; the largest first [s]."""
    seconds: dict[str, float] = {}
    for segment in path:
        name = WAITING if segment.task is None else segment.task.op.value
        seconds[name] = seconds.get(name, 0.0) + segment.end_s - segment.start_s
    return dict(sorted(seconds.items(), key=lambda entry: -entry[1]))


def _step_end(graph: TaskGraph, trace: Trace, step: int) -> tuple[float, int | None]:
    """End of the last token of a decode step, and whose it is; the start of the trace where it has no such step."""
    samples = (
        index
        for index, task in enumerate(graph.tasks)
        if task.id.op is Op.SAMPLE and task.id.phase == "decode" and task.id.step == step
    )
    found = max(samples, key=lambda index: trace.spans[index].end_s, default=None)
    if found is None:
        return min((span.start_s for span in trace.spans), default=0.0), None
    return trace.spans[found].end_s, found


def _last_sample(graph: TaskGraph, trace: Trace, step: int) -> int:
    found = _step_end(graph, trace, step)[1]
    if found is None:
        raise InputError(f"the trace has no decode step {step}", where="critical path")
    return found


def _previous_on_lane(graph: TaskGraph) -> list[int | None]:
    last: dict[Lane, int] = {}
    previous: list[int | None] = []
    for index, task in enumerate(graph.tasks):
        previous.append(last.get(task.lane))
        last[task.lane] = index
    return previous


def _waited_for(graph: TaskGraph, trace: Trace, previous: Sequence[int | None], index: int) -> int | None:
    """The dependency, or the task before on the lane, that ended last; of two at one instant the dependency."""
    before = previous[index]
    candidates = (*graph.before[index], *(() if before is None else (before,)))
    return max(candidates, key=lambda other: trace.spans[other].end_s, default=None)  # max keeps the first of equals

"""Trace: when every task ran. Simulated and measured runs give the same type; JSON and Chrome/Perfetto out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hrm.errors import InputError
from hrm.graph import Lane, Op, Task, TaskGraph, TaskId

__all__ = ["Span", "Trace", "check_same_tasks", "chrome_events", "holds_over_time"]


class Span(NamedTuple):
    """One task as it ran: [s] from the start of the run."""

    task: TaskId
    lane: Lane
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans in the order of their graph, with what the run was.

    Attributes
    ----------
    spans : tuple of Span
    kind : {"simulated", "measured", "emulated"}
    memory : mapping of str to tuple of (float, float)
        By level: (time [s], bytes held) whenever it changes.
    """

    spans: tuple[Span, ...]
    kind: str
    memory: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    @property
    def makespan_s(self) -> float:
        """End of the last task [s]."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self) -> dict[Lane, float]:
        """Seconds each lane is busy [s]."""
        busy: dict[Lane, float] = {}
        for span in self.spans:
            busy[span.lane] = busy.get(span.lane, 0.0) + span.end_s - span.start_s
        return busy

    def seconds_by_op(self) -> dict[Op, float]:
        """Seconds of all tasks of each kind [s]."""
        total: dict[Op, float] = {}
        for span in self.spans:
            total[span.task.op] = total.get(span.task.op, 0.0) + span.end_s - span.start_s
        return total


def check_same_tasks(graph: TaskGraph, spans: Sequence[Span]) -> None:
    """Refuse spans that are not those of a graph, task by task in its order.

    Raises
    ------
    InputError
        The trace is of another plan, schedule or range of steps; the first task that differs is named.
    """
    way_out = "the trace of this very plan, schedule and range of steps"
    for number, (task, span) in enumerate(zip(graph.tasks, spans, strict=False)):
        if task.id != span.task:
            fact = f"is not of this graph: task {number} is {span.task}, in the graph {task.id}"
            raise InputError(fact, where="trace", way_out=way_out)
        if task.lane != span.lane:
            fact = f"is not of this graph: {task.id} ran on {span.lane}, in the graph it is on {task.lane}"
            raise InputError(fact, where="trace", way_out=way_out)
    first = min(len(graph), len(spans))
    if len(spans) < len(graph):
        fact = f"is not of this graph: it ends before task {first}, {graph.tasks[first].id}"
        raise InputError(fact, where="trace", way_out=way_out)
    if len(spans) > len(graph):
        fact = f"is not of this graph, which ends before task {first} of the trace, {spans[first].task}"
        raise InputError(fact, where="trace", way_out=way_out)


def chrome_events(graph: TaskGraph, trace: Trace) -> dict[str, Any]:
    """The trace in the Chrome/Perfetto JSON format: a track per lane, flow arrows, counters of memory per level.

    Raises
    ------
    InputError
        The trace is not of that graph.
    """
    check_same_tasks(graph, trace.spans)
    tracks = {lane: number for number, lane in enumerate(graph.lanes, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": f"hrm, {trace.kind}"}}
    ]
    for lane, number in tracks.items():
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": str(lane)}})
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    flow = 0
    for position, (task, span) in enumerate(zip(graph.tasks, trace.spans, strict=True)):
        track = tracks[task.lane]
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": track,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "name": str(task.id),
                "cat": task.id.op.value,
                "args": _arguments(task),
            }
        )
        for other in graph.before[position]:
            first = trace.spans[other]
            if tracks[first.lane] == track:
                continue  # order on one track needs no arrow
            flow += 1
            common = {"pid": 1, "cat": "dependency", "name": "after", "id": flow}
            events.append(
                {
                    "ph": "s",
                    "tid": tracks[first.lane],
                    "ts": max(first.end_s * 1e6 - 0.01, first.start_s * 1e6),
                    **common,
                }
            )
            events.append({"ph": "f", "bp": "e", "tid": track, "ts": span.start_s * 1e6, **common})
    for level, samples in trace.memory.items():
        for time, held in samples:
            events.append(
                {"ph": "C", "pid": 1, "ts": time * 1e6, "name": f"{level} memory", "args": {"GiB": held / 2**30}}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _arguments(task: Task) -> dict[str, Any]:
    found: dict[str, Any] = {}
    flops = sum(float(operator.work.flops) for operator in task.operators)
    moved = task.bytes_moved or sum(float(operator.work.bytes_touched) for operator in task.operators)
    if flops:
        found["flops"] = flops
    if moved:
        found["bytes"] = moved
    return found


def holds_over_time(
    graph: TaskGraph, spans: Sequence[Span], start: Mapping[str, float]
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Bytes held per level whenever they change, from what the tasks acquire and release.

    Parameters
    ----------
    graph : TaskGraph
    spans : sequence of Span
        Of its tasks.
    start : mapping of str to float
        Bytes held by level when the first one starts [byte].

    Returns
    -------
    dict of str to tuple of (float, float)
        By level: (time [s], bytes held).

    Raises
    ------
    InputError
        The spans are not of that graph.
    """
    check_same_tasks(graph, spans)
    changes: dict[str, list[tuple[float, int, float]]] = {level: [] for level in start}
    for task, span in zip(graph.tasks, spans, strict=True):
        for hold in task.acquires:
            changes.setdefault(hold.level, []).append((span.start_s, 1, hold.bytes))
        for hold in task.releases:
            changes.setdefault(hold.level, []).append((span.end_s, 0, -hold.bytes))
    result = {}
    for level, events in changes.items():
        held = start.get(level, 0.0)
        samples = [(0.0, held)]
        for time, _, size in sorted(events):  # what is given back at an instant makes room for what is taken
            held += size
            samples.append((time, held))
        result[level] = tuple(samples)
    return result

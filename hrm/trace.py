"""Trace: when every task ran. Simulated and measured runs give the same type; JSON and Chrome/Perfetto out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hrm.graph import Lane, Op, Task, TaskGraph, TaskId

__all__ = ["Span", "Trace", "chrome_events"]


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


def chrome_events(graph: TaskGraph, trace: Trace) -> dict[str, Any]:
    """The trace in the Chrome/Perfetto JSON format: a track per lane, flow arrows, counters of memory per level."""
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
    """Bytes held per level whenever they change, from what the tasks acquire and release."""
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

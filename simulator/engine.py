"""Replay of a task graph, event by event, in SimPy: one process per lane, tasks in issue order.

The rule is the graph's: a task starts when its lane is free and its dependencies are done. Without sharing a task takes
its duration, and every end equals `hrm.graph.finish_times` to the last bit; with sharing it proceeds at the speed that
what runs beside it leaves (`simulator.contention`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from hrm.errors import InputError
from hrm.graph import LaneKind, Task, TaskGraph
from hrm.trace import Span, Trace
from simulator.contention import Sharing, progressive_filling
from simulator.durations import Durations

__all__ = ["simulate"]

Process = Generator[simpy.Event, Any, None]


def simulate(graph: TaskGraph, durations: Durations, sharing: Sharing | None = None) -> Trace:
    """Replay a graph.

    Parameters
    ----------
    graph : TaskGraph
    durations : callable
        Task -> seconds alone [s].
    sharing : Sharing, optional
        What lanes share; None = every task as if alone.

    Returns
    -------
    Trace
        Spans in the order of the graph's tasks.

    Raises
    ------
    InputError
        A duration is negative or not a number, or tasks never ran; the first one is named.
    """
    environment = simpy.Environment()
    done = [environment.event() for _ in graph.tasks]
    times: list[tuple[float, float] | None] = [None] * len(graph)
    shared = None if sharing is None else _Shared(environment, sharing)

    def lane(indices: tuple[int, ...]) -> Process:
        for index in indices:
            for other in graph.before[index]:
                if not done[other].processed:
                    yield done[other]
            task = graph.tasks[index]
            seconds = durations(task)
            if not seconds >= 0.0 or seconds == float("inf"):
                raise InputError(f"{task.id} would take {seconds} s", where="simulation")
            start = environment.now
            if shared is None:
                yield environment.timeout(seconds)
            else:
                yield shared.start(task, seconds)
            times[index] = (start, environment.now)
            done[index].succeed()

    by_lane: dict[Any, list[int]] = {}
    for index, task in enumerate(graph.tasks):
        by_lane.setdefault(task.lane, []).append(index)
    for indices in by_lane.values():
        environment.process(lane(tuple(indices)))
    environment.run()
    spans = []
    for task, ran in zip(graph.tasks, times, strict=True):
        if ran is None:
            raise InputError(f"{task.id} never ran: what it waits for did not happen", where="simulation")
        spans.append(Span(task.id, task.lane, *ran))
    return Trace(spans=tuple(spans), kind="simulated")


class _Shared:
    """Tasks that run beside each other, each with seconds left at full speed; one clock wakes at the next end."""

    def __init__(self, environment: simpy.Environment, sharing: Sharing) -> None:
        self._environment = environment
        self._sharing = sharing
        self._running: list[list[Any]] = []  # [task, seconds left, demand, speed, event]
        self._since = 0.0
        self._version = 0

    def start(self, task: Task, seconds: float) -> simpy.Event:
        """Start a task; the event happens when it is done."""
        event = self._environment.event()
        self._advance()
        self._running.append([task, seconds, self._sharing.demand(task, seconds), 0.0, event])
        self._reschedule()
        return event

    def _advance(self) -> None:
        elapsed = self._environment.now - self._since
        self._since = self._environment.now
        for entry in self._running:
            entry[1] = max(0.0, entry[1] - elapsed * entry[3])

    def _reschedule(self) -> None:
        kinds = {entry[0].lane.kind for entry in self._running}
        both = LaneKind.H2D in kinds and LaneKind.D2H in kinds
        tops = [self._sharing.duplex.get(entry[0].lane.kind, 1.0) if both else 1.0 for entry in self._running]
        speeds = progressive_filling([entry[2] for entry in self._running], tops, self._sharing.capacities)
        soonest = float("inf")
        for entry, speed in zip(self._running, speeds, strict=True):
            entry[3] = speed
            if speed > 0.0:
                soonest = min(soonest, entry[1] / speed)
        self._version += 1
        if soonest < float("inf"):
            self._environment.process(self._wake(soonest, self._version))

    def _wake(self, delay: float, version: int) -> Process:
        yield self._environment.timeout(delay)
        if version != self._version:
            return  # something started or ended meanwhile
        self._advance()
        tiny = 1e-12 * max(1.0, self._environment.now)
        ended = [entry for entry in self._running if entry[1] <= tiny * max(entry[3], 1e-9) or entry[1] <= 1e-15]
        if not ended and self._running:
            ended = [min(self._running, key=lambda entry: entry[1] / max(entry[3], 1e-300))]
        self._running = [entry for entry in self._running if entry not in ended]
        for entry in ended:
            entry[4].succeed()
        if self._running:
            self._reschedule()

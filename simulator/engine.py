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
from hrm.graph import Lane, LaneKind, Task, TaskGraph
from hrm.trace import Span, Trace
from simulator.contention import Demand, Sharing, progressive_filling
from simulator.durations import Durations

__all__ = ["simulate"]

Process = Generator[simpy.Event, Any, None]

LAST = 2
"""Priority of what is done once everything else of an instant is (SimPy: 0 is urgent, 1 normal)."""


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
    times: list[tuple[float, float] | None] = [None] * len(graph)
    by_lane: dict[Lane, list[int]] = {}
    for index, task in enumerate(graph.tasks):
        by_lane.setdefault(task.lane, []).append(index)
    awaited: dict[int, simpy.Event] = {}  # ends that a lane waits for just now; most are over before anyone does
    shared = None if sharing is None else _Shared(environment, sharing)

    def lane(indices: list[int]) -> Process:
        for index in indices:
            for other in graph.before[index]:
                if times[other] is None:
                    if other not in awaited:
                        awaited[other] = environment.event()
                    yield awaited[other]
            task = graph.tasks[index]
            seconds = durations(task)
            if not 0.0 <= seconds < float("inf"):
                raise InputError(f"{task.id} would take {seconds} s", where="simulation")
            start = environment.now
            if shared is not None and seconds > 0.0:
                yield shared.start(task, seconds)
            else:
                yield environment.timeout(seconds)
            times[index] = (start, environment.now)
            if index in awaited:
                awaited.pop(index).succeed()

    for indices in by_lane.values():
        environment.process(lane(indices))
    environment.run()
    spans = []
    for task, ran in zip(graph.tasks, times, strict=True):
        if ran is None:
            raise InputError(f"{task.id} never ran: what it waits for did not happen", where="simulation")
        spans.append(Span(task.id, task.lane, *ran))
    return Trace(spans=tuple(spans), kind="simulated")


class _Running:
    """A task that runs: seconds left at full speed, and its speed."""

    __slots__ = ("demand", "event", "kind", "left", "speed")

    def __init__(self, left: float, demand: Demand, kind: LaneKind, event: simpy.Event) -> None:
        self.left, self.demand, self.kind, self.event = left, demand, kind, event
        self.speed = 0.0


class _Shared:
    """Tasks that run beside each other.

    Speeds are settled once per instant, after all that starts and ends in it; a clock then wakes at the next end.
    """

    def __init__(self, environment: simpy.Environment, sharing: Sharing) -> None:
        self._environment = environment
        self._sharing = sharing
        self._running: list[_Running] = []
        self._since = 0.0
        self._settling = False
        self._version = 0
        self._known: dict[tuple[tuple[int, LaneKind], ...], tuple[list[float], list[Demand]]] = {}

    def start(self, task: Task, seconds: float) -> simpy.Event:
        """Start a task; the event happens when it is done."""
        event = self._environment.event()
        self._advance()
        self._running.append(_Running(seconds, self._sharing.demand(task, seconds), task.lane.kind, event))
        self._settle_last()
        return event

    def _advance(self) -> None:
        elapsed = self._environment.now - self._since
        if elapsed > 0.0:
            self._since = self._environment.now
            for entry in self._running:
                entry.left = max(0.0, entry.left - elapsed * entry.speed)

    def _settle_last(self) -> None:
        if not self._settling:
            self._settling = True
            self._at(0.0, self._settle, LAST)

    def _at(self, delay: float, then: Any, priority: int) -> None:
        event = simpy.Event(self._environment)
        event._ok, event._value = True, None  # an event that has happened, as simpy.Timeout makes it
        assert event.callbacks is not None
        event.callbacks.append(then)
        self._environment.schedule(event, priority=priority, delay=delay)  # type: ignore[arg-type]

    def _settle(self, _: simpy.Event) -> None:
        self._settling = False
        self._version += 1
        if not self._running:
            return
        soonest = float("inf")
        for entry, speed in zip(self._running, self._speeds(), strict=True):
            entry.speed = speed
            if speed > 0.0:
                soonest = min(soonest, entry.left / speed)
        if soonest < float("inf"):
            version = self._version
            self._at(soonest, lambda _: self._wake(version), 1)

    def _speeds(self) -> list[float]:
        """Speed of every task that runs; the same few combinations come again and again."""
        key = tuple([(id(entry.demand), entry.kind) for entry in self._running])
        found = self._known.get(key)
        if found is None:
            kinds = {entry.kind for entry in self._running}
            both = LaneKind.H2D in kinds and LaneKind.D2H in kinds
            tops = [self._sharing.duplex.get(entry.kind, 1.0) if both else 1.0 for entry in self._running]
            demands = [entry.demand for entry in self._running]
            speeds = progressive_filling(demands, tops, self._sharing.capacities)
            found = self._known[key] = (speeds, demands)  # the demands live on, so that their ids stay theirs
        return found[0]

    def _wake(self, version: int) -> None:
        if version != self._version or self._settling:
            return  # something started or ended meanwhile
        self._advance()
        tiny = 1e-12 * max(1.0, self._environment.now)
        ended = [entry for entry in self._running if entry.left <= max(tiny * entry.speed, 1e-15)]
        if not ended:
            ended = [min(self._running, key=lambda entry: entry.left / max(entry.speed, 1e-300))]
        self._running = [entry for entry in self._running if entry not in ended]
        for entry in ended:
            entry.event.succeed()
        self._settle_last()

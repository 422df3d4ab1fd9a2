"""The executor: one worker per lane, tasks in issue order, dependencies as events.

Host lanes (CPU, staging, disk, and all lanes where the accelerator is emulated) wait for what a task depends on, run
it, and say it is done. A lane of a real GPU is a stream: its worker issues kernels and copies and lets the *stream*
wait for other streams, so between GPU lanes the host never blocks; only for what happens in CPU memory does it wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Task, TaskGraph
from hrm.trace import Span, Trace, holds_over_time
from runtime.arena import Arenas
from runtime.clock import Clock
from runtime.device import Device, no_room
from runtime.threads import settle_thread

__all__ = ["Pace", "execute"]

Run = Callable[[Task], Callable[[], None] | None]
"""Runs a task; what it returns is to be done in CPU memory once the task is done on the device."""

Pace = Callable[[Task], float]
"""Seconds a copy shall take at least [s], for demonstrations."""

STREAM_KINDS = (LaneKind.GPU, LaneKind.H2D, LaneKind.D2H)


class _Aborted(Exception):  # noqa: N818 (no error of its own)
    """Another lane failed."""


class _Progress:
    """What is issued and what is done, and who waits for it."""

    def __init__(self, count: int) -> None:
        self.issued, self.done = bytearray(count), bytearray(count)
        self.failure: tuple[Task, BaseException] | None = None
        self._changed = threading.Condition()
        self._wanted: dict[int, int] = {}  # task -> lanes that wait for it

    def wait(self, flags: bytearray, index: int) -> None:
        """Until a flag is set; raises where another lane failed."""
        if flags[index]:
            return
        with self._changed:
            self._wanted[index] = self._wanted.get(index, 0) + 1
            while not flags[index] and self.failure is None:
                self._changed.wait()
            self._wanted[index] -= 1
            if self.failure is not None:
                raise _Aborted

    def set(self, flags: bytearray, index: int) -> None:
        """Set a flag and wake who waits for it."""
        flags[index] = 1
        with self._changed:
            if self._wanted.get(index):
                self._changed.notify_all()

    def fail(self, task: Task, error: BaseException) -> None:
        """Stop all lanes."""
        with self._changed:
            if self.failure is None:
                self.failure = (task, error)
            self._changed.notify_all()


@dataclass(slots=True)
class _Shared:
    graph: TaskGraph
    run: Run
    device: Device
    arenas: Arenas | None
    clock: Clock
    progress: _Progress
    starts: list[Any]
    ends: list[Any]
    pace: Pace | None
    streams: Mapping[Lane, Any]


def execute(
    graph: TaskGraph,
    run: Run,
    device: Device,
    *,
    arenas: Arenas | None = None,
    held_before: Mapping[str, float] | None = None,
    pace: Pace | None = None,
    streams: Mapping[Lane, Any] | None = None,
) -> Trace:
    """Run every task of a graph.

    Parameters
    ----------
    run : callable
        Runs one task, on the calling thread and in its stream.
    arenas : Arenas, optional
        Count what tasks take and give back, and refuse what exceeds the plan. On CUDA, where a task is issued long
        before it runs, what is held is worked out from the spans afterwards instead.
    held_before : mapping, optional
        Bytes by level held when the first task starts, for the trace.
    pace : callable, optional
        Least seconds of each copy; a lane waits for the rest.
    streams : mapping, optional
        CUDA stream of each lane of the GPU.

    Returns
    -------
    Trace
        Measured, or emulated.

    Raises
    ------
    InputError
        From a task; names it.
    """
    count = len(graph)
    shared = _Shared(
        graph,
        run,
        device,
        arenas,
        Clock(cuda=device.cuda),
        _Progress(count),
        [None] * count,
        [None] * count,
        pace,
        streams or {},
    )
    running: list[tuple[threading.Thread, threading.Event]] = []
    try:
        for lane in graph.lanes:
            ended = threading.Event()
            worker = threading.Thread(target=_work, args=(shared, lane, ended), name=f"lane {lane}", daemon=True)
            running.append((worker, ended))
            worker.start()
        for _, ended in running:  # not by joining: a join that is interrupted takes the thread for ended
            ended.wait()
    except BaseException:  # interrupted: lanes stop after the task they are in
        shared.progress.fail(graph.tasks[0], KeyboardInterrupt())
        running = [(worker, ended) for worker, ended in running if worker.ident is not None]
        for _, ended in running:
            ended.wait()
        raise
    finally:
        for worker, _ in running:
            worker.join()
    if shared.progress.failure is not None:
        task, error = shared.progress.failure
        if device.cuda:  # what was issued still uses memory that is about to be given back
            with suppress(Exception):
                torch.cuda.synchronize()
        if isinstance(error, InputError):
            raise error
        if isinstance(error, torch.OutOfMemoryError):
            raise no_room(error, task=str(task.id)) from None
        raise RuntimeError(f"{task.id} failed: {type(error).__name__}: {error}") from error
    if device.cuda:
        torch.cuda.synchronize()
    spans = tuple(_span(shared, index, task) for index, task in enumerate(graph.tasks))
    memory = holds_over_time(graph, spans, held_before) if held_before is not None else {}
    return Trace(spans, device.trace_kind, memory)


def _span(shared: _Shared, index: int, task: Task) -> Span:
    start, end = shared.starts[index], shared.ends[index]
    if not isinstance(start, float):
        start, end = shared.clock.of_event(start), shared.clock.of_event(end)
    return Span(task.id, task.lane, start, end)


def _work(shared: _Shared, lane: Lane, ended: threading.Event) -> None:
    """One lane's worker."""
    device, on_stream = shared.device, shared.device.cuda and lane.kind in STREAM_KINDS
    stream = shared.streams.get(lane) if on_stream else None
    index = -1
    try:
        settle_thread(*device.lane_cores(lane.kind))
        with torch.inference_mode(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            for index in shared.graph.of_lane(lane):
                if stream is not None:
                    _issue(shared, index, lane, stream)
                else:
                    _run_here(shared, index)
    except _Aborted:
        pass
    except BaseException as error:
        shared.progress.fail(shared.graph.tasks[max(index, 0)], error)
    finally:
        ended.set()


def _run_here(shared: _Shared, index: int) -> None:
    """A task of a host lane."""
    task, progress = shared.graph.tasks[index], shared.progress
    for other in shared.graph.before[index]:
        progress.wait(progress.done, other)
        if shared.streams and shared.graph.tasks[other].lane in shared.streams:
            shared.ends[other].synchronize()
    if progress.failure is not None:
        raise _Aborted
    if shared.arenas is not None and not shared.device.cuda:
        shared.arenas.acquire(task.acquires, task.id)
    start = shared.clock.now()
    finish = shared.run(task)
    if finish is not None:
        finish()
    end = shared.clock.now()
    if shared.pace is not None:
        end = _wait_until(shared, start + shared.pace(task), end)
    shared.starts[index], shared.ends[index] = start, end
    if shared.arenas is not None and not shared.device.cuda:
        shared.arenas.give_back(task.releases)
    progress.issued[index] = 1
    progress.set(progress.done, index)


def _wait_until(shared: _Shared, when: float, now: float) -> float:
    pause = threading.Event()
    while now < when:
        pause.wait(when - now)
        now = shared.clock.now()
    return now


def _issue(shared: _Shared, index: int, lane: Lane, stream: Any) -> None:
    """A task of a GPU lane: issued on its stream, which waits for the others'."""
    task, progress = shared.graph.tasks[index], shared.progress
    for other in shared.graph.before[index]:
        before = shared.graph.tasks[other].lane
        if before == lane:
            continue
        if before in shared.streams:
            progress.wait(progress.issued, other)
            stream.wait_event(shared.ends[other])
        else:
            progress.wait(progress.done, other)
    if progress.failure is not None:
        raise _Aborted
    # A host lane that waits for the end sleeps: spinning would take a core from attention on the CPU.
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    start.record(stream)
    finish = shared.run(task)
    end.record(stream)
    shared.starts[index], shared.ends[index] = start, end
    if finish is not None:  # in CPU memory, so whoever waits for the task waits for this too
        end.synchronize()
        finish()
    progress.issued[index] = 1
    progress.set(progress.done, index)

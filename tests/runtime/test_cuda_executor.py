"""The executor's lanes of a real GPU, on streams that run what they are given later (`fake_cuda`)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeEvent, FakeStream, current_stream, fake_cuda

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.trace_order import find_violation
from runtime.clock import Clock
from runtime.device import Device
from runtime.executor import execute

ON_STREAMS = (Lane(LaneKind.GPU, 0), Lane(LaneKind.H2D, 0), Lane(LaneKind.D2H, 0))
ON_THE_HOST = (Lane(LaneKind.CPU), Lane(LaneKind.PIN), Lane(LaneKind.DISK))
GPU = Device("cuda", False, (0,))
CLOCK_ERROR_S = 5e-4
"""Of the fake, whose events are reached on threads that the host schedules."""


def make_graph(seed: int, count: int = 60) -> TaskGraph:
    """Tasks on random lanes after up to three random earlier ones."""
    source = random.Random(seed)
    tasks: list[Task] = []
    for number in range(count):
        lane = source.choice(ON_STREAMS + ON_THE_HOST)
        after = tuple(each.id for each in source.sample(tasks, min(len(tasks), source.randrange(4))))
        tasks.append(Task(id=TaskId(Op.EMBED, "decode", 0, 0, number), lane=lane, after=after))
    return TaskGraph(tasks)


def run_graph(graph: TaskGraph, body: Callable[[Task], Callable[[], None] | None]) -> Any:
    streams = {lane: FakeStream() for lane in ON_STREAMS}
    with fake_cuda(list(streams.values())):
        return execute(graph, body, GPU, streams=streams)


@pytest.mark.parametrize("seed", range(8))
def test_every_task_meets_what_it_waits_for_whether_on_a_stream_or_in_cpu_memory(seed: int) -> None:
    graph, source = make_graph(seed), random.Random(seed + 100)
    pauses = [source.random() * 2e-3 for _ in graph.tasks]
    leaves_something = [source.random() < 0.3 for _ in graph.tasks]
    number = {task.id: place for place, task in enumerate(graph.tasks)}
    ran, over, early = [False] * len(graph), [False] * len(graph), []

    def body(task: Task) -> Callable[[], None] | None:
        mine = number[task.id]

        def work() -> None:
            early.extend((task.id, graph.tasks[other].id) for other in graph.before[mine] if not over[other])
            time.sleep(pauses[mine])
            ran[mine] = True
            if not leaves_something[mine]:
                over[mine] = True

        def finish() -> None:  # in CPU memory, after the work on the stream
            assert ran[mine]
            time.sleep(pauses[mine] / 2)
            over[mine] = True

        if task.lane in ON_STREAMS:
            current_stream().give(work)
        else:
            work()
        return finish if leaves_something[mine] else None

    trace = run_graph(graph, body)
    assert all(over) and not early
    assert [span.task for span in trace.spans] == [task.id for task in graph.tasks]
    assert trace.kind == "measured"
    assert find_violation(trace.spans, graph.before, clock_error_s=CLOCK_ERROR_S) is None


def test_between_lanes_of_the_gpu_the_host_does_not_wait() -> None:
    """A copy and the kernel after it are both issued while the copy is held up."""
    load = Task(id=TaskId(Op.LOAD_WEIGHTS, "decode", 0, 0), lane=ON_STREAMS[1])
    compute = Task(id=TaskId(Op.EMBED, "decode", 0, 0), lane=ON_STREAMS[0], after=(load.id,))
    issued, ran = threading.Event(), []

    def body(task: Task) -> None:
        if task is load:
            current_stream().give(lambda: ran.append((task.id, issued.wait(20))))
        else:
            current_stream().give(lambda: ran.append((task.id, True)))
            issued.set()

    run_graph(TaskGraph((load, compute)), body)
    assert ran == [(load.id, True), (compute.id, True)]


@pytest.mark.parametrize("lane", [ON_STREAMS[0], ON_THE_HOST[0]])
def test_a_task_that_fails_stops_all_lanes_and_is_named(lane: Lane) -> None:
    graph = make_graph(3)
    bad = next(task for task in graph.tasks if task.lane == lane)

    def body(task: Task) -> None:
        if task is bad:
            raise ValueError("no such row")

    with pytest.raises(RuntimeError, match=f"{bad.id} failed: ValueError: no such row"):
        run_graph(graph, body)


def test_a_gpu_without_room_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2 * 2**30)

    def body(task: Task) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of ..."
        )

    task = Task(id=TaskId(Op.EMBED, "decode", 0, 0), lane=ON_STREAMS[0])
    with pytest.raises(InputError) as caught:
        run_graph(TaskGraph((task,)), body)
    assert str(caught.value).startswith(
        "GPU memory: embed/decode/s0/l0: CUDA out of memory. Tried to allocate 1.00 GiB; torch holds 3.00 GiB, of "
        "which 2.00 GiB were in use at most"
    )


def test_time_of_events_is_as_fine_after_hours_as_at_the_start() -> None:
    """Milliseconds in float32, as the device gives them, are 0.5 ms apart after 2 h."""

    class Coarse(FakeEvent):
        def elapsed_time(self, other: FakeEvent) -> float:
            return float(torch.tensor((other.seconds - self.seconds) * 1e3, dtype=torch.float32))

    def at(seconds: float) -> Coarse:
        event = Coarse()
        event.seconds = seconds
        return event

    clock, origin = Clock(cuda=False), at(0.0)
    clock._anchor, took, plain = origin, [], []
    for second in range(7200):
        start, end = at(second * 1.0001), at(second * 1.0001 + 1e-4)
        took.append(clock.of_event(end) - clock.of_event(start))
        plain.append((origin.elapsed_time(end) - origin.elapsed_time(start)) * 1e-3)
    assert max(abs(each - 1e-4) for each in took) < 2e-6
    assert min(plain) == 0.0 and max(plain) > 2e-4  # counted from the start alone: nothing, or five times as much
    assert clock.of_event(at(7200.0)) == pytest.approx(7200.0, abs=1e-3)


# Memory


class Driver:
    """Notes what is page-locked."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.locked = status, {}  # type: ignore[var-annotated]

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert address not in self.locked, "the driver refuses what is locked already"
        if self.status == 0:
            self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_page_locked_memory_is_exactly_as_large_as_asked_and_unlocked_before_it_goes_back(driver: Driver) -> None:
    pinned, plain = GPU.pinned_bytes(5_000_000), GPU.host_bytes(8192)
    GPU.lock_pages(plain)
    assert sorted(driver.locked.values()) == [8192, 5_000_000]
    part = pinned[4096:].view(torch.int32)
    del pinned
    assert len(driver.locked) == 2  # a view is still there
    del part
    assert list(driver.locked.values()) == [8192]
    GPU.unlock_pages(plain)
    assert driver.locked == {}
    GPU.lock_pages(plain)
    del plain
    assert driver.locked == {}
    assert GPU.pinned_bytes(0).numel() == 0


def test_without_a_gpu_nothing_is_page_locked(driver: Driver) -> None:
    cpu = Device("cpu", False, (0,))
    memory = cpu.pinned_bytes(4096)
    cpu.lock_pages(memory)
    cpu.unlock_pages(memory)
    assert driver.locked == {} and memory.numel() == 4096


def test_memory_the_driver_does_not_lock_is_refused_with_its_size(driver: Driver) -> None:
    driver.status = 2
    with pytest.raises(InputError, match=r"does not page-lock 0\.50 GiB \(CUDA error 2\)"):
        GPU.pinned_bytes(2**29)


@pytest.mark.parametrize(("asked", "share"), [(14e9, 0.1), (280e9, 1.0), (-1.0, 0.0)])
def test_a_larger_gpu_is_held_to_the_memory_of_the_planned_one(
    monkeypatch: pytest.MonkeyPatch, asked: float, share: float
) -> None:
    said: list[float] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=140e9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", said.append)
    GPU.limit_gpu_memory(asked)
    Device("cpu", False, (0,)).limit_gpu_memory(asked)
    assert said == [pytest.approx(share)]

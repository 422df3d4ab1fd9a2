"""The executor on a CPU: the rule of the graph, what ends a run early, and what a trace of it says."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrm.errors import InputError
from hrm.graph import Hold, Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.trace_order import find_violation
from runtime.arena import Arena, Arenas
from runtime.device import Device
from runtime.executor import execute
from runtime.threads import lane_threads

LANES = (
    Lane(LaneKind.GPU, 0),
    Lane(LaneKind.H2D, 0),
    Lane(LaneKind.D2H, 0),
    Lane(LaneKind.CPU),
    Lane(LaneKind.PIN),
    Lane(LaneKind.DISK),
)
GPU, UP, DOWN, CPU = LANES[:4]
CORES = tuple(sorted(os.sched_getaffinity(0)))
HERE = Device("cpu", False, CORES)


def name(number: int) -> TaskId:
    return TaskId(Op.EMBED, "decode", 0, 0, number)


def graph_of(*rows: tuple[Lane, tuple[int, ...]]) -> TaskGraph:
    """Tasks 0, 1, ... each on a lane after some earlier ones."""
    return TaskGraph(
        Task(name(number), lane, tuple(name(other) for other in after)) for number, (lane, after) in enumerate(rows)
    )


def nothing(task: Task) -> None:
    """Take no time."""


def lanes_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lane ")]


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Tasks on any lanes after any earlier ones."""
    count = draw(st.integers(1, 40))
    rows = []
    for number in range(count):
        after = draw(st.lists(st.integers(0, number - 1), unique=True, max_size=3)) if number else []
        rows.append((draw(st.sampled_from(LANES)), tuple(after)))
    return graph_of(*rows)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_any_graph_ends_and_every_task_ran_once_after_what_it_waits_for(graph: TaskGraph, source: Any) -> None:
    pauses = [source.choice((0.0, 0.0, 2e-4, 1e-3)) for _ in graph.tasks]
    over: set[TaskId] = set()
    ran: list[TaskId] = []
    early: list[tuple[TaskId, TaskId]] = []

    def run(task: Task) -> Callable[[], None] | None:
        early.extend((task.id, other) for other in task.after if other not in over)
        ran.append(task.id)
        time.sleep(pauses[task.id.micro_batch or 0])
        if source.random() < 0.3:
            return lambda: over.add(task.id)  # what comes after it is part of the task
        over.add(task.id)
        return None

    trace = execute(graph, run, HERE)
    assert not early
    assert sorted(ran) == sorted(task.id for task in graph.tasks)
    for lane in graph.lanes:
        mine = [graph.tasks[number].id for number in graph.of_lane(lane)]
        assert [each for each in ran if each in set(mine)] == mine
    assert [span.task for span in trace.spans] == [task.id for task in graph.tasks]
    assert find_violation(trace.spans, graph.before) is None
    assert not lanes_left()


def test_lanes_run_beside_each_other() -> None:
    """Each waits until the other has begun: one after the other they never would."""
    meet = threading.Barrier(2, timeout=20.0)

    def run(task: Task) -> None:
        meet.wait()

    trace = execute(graph_of((GPU, ()), (UP, ())), run, HERE)
    first, second = trace.spans
    assert first.start_s < second.end_s and second.start_s < first.end_s


def test_what_a_task_leaves_to_be_done_is_done_before_anyone_who_waits_for_it() -> None:
    said: list[str] = []

    def run(task: Task) -> Callable[[], None]:
        said.append(f"run {task.id.micro_batch}")
        return lambda: said.append(f"finish {task.id.micro_batch}")

    execute(graph_of((UP, ()), (GPU, (0,)), (DOWN, (1,))), run, HERE)
    assert said == ["run 0", "finish 0", "run 1", "finish 1", "run 2", "finish 2"]


# Ends that come early


@settings(max_examples=30, deadline=None)
@given(graphs(), st.data())
def test_a_task_that_fails_stops_all_lanes_and_is_named(graph: TaskGraph, data: st.DataObject) -> None:
    failing = data.draw(st.sampled_from(graph.tasks)).id
    ran: list[TaskId] = []

    def run(task: Task) -> None:
        ran.append(task.id)
        if task.id == failing:
            raise ValueError("no such tensor")

    with pytest.raises(RuntimeError) as raised:
        execute(graph, run, HERE)
    assert str(raised.value) == f"{failing} failed: ValueError: no such tensor"
    assert isinstance(raised.value.__cause__, ValueError)
    assert not lanes_left()
    waiting = {failing}
    for task in graph.tasks:
        if waiting & set(task.after):
            waiting.add(task.id)
    assert not (waiting - {failing}) & set(ran)


def test_a_lane_that_waits_for_the_one_that_failed_ends() -> None:
    """The GPU waits for a copy that never comes; the copy lane has more to do and does not do it."""

    def run(task: Task) -> None:
        if task.lane == UP:
            time.sleep(0.02)
            raise OSError("gone")

    began = time.perf_counter()
    with pytest.raises(RuntimeError, match="embed/decode/s0/l0/b1 failed: OSError: gone"):
        execute(graph_of((GPU, ()), (UP, ()), (GPU, (1,)), (UP, ()), (CPU, (2, 3))), run, HERE)
    assert time.perf_counter() - began < 10.0
    assert not lanes_left()


def test_what_is_left_to_be_done_may_fail_too() -> None:
    def fail() -> None:
        raise ValueError("late")

    with pytest.raises(RuntimeError, match="embed/decode/s0/l0/b0 failed: ValueError: late"):
        execute(graph_of((DOWN, ()), (GPU, (0,))), lambda task: fail, HERE)


def test_an_input_error_comes_as_it_is() -> None:
    error = InputError("no room", where="disk", way_out="a larger one")

    def run(task: Task) -> None:
        raise error

    with pytest.raises(InputError) as raised:
        execute(graph_of((LANES[5], ()), (GPU, (0,))), run, HERE)
    assert raised.value is error
    assert not lanes_left()


def test_an_interrupt_ends_every_lane_after_the_task_it_is_in() -> None:
    begun, ran = threading.Event(), []

    def run(task: Task) -> None:
        ran.append(task.id)
        begun.set()
        time.sleep(0.1)

    def interrupt() -> None:
        begun.wait(20.0)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            execute(graph_of((GPU, ()), (UP, ()), *[(GPU, (0,))] * 200), run, HERE)
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)
    assert not lanes_left()
    assert len(ran) < 100


# Pace, threads, memory


def test_a_paced_task_lasts_at_least_as_long_as_it_is_told() -> None:
    trace = execute(graph_of((UP, ()), (GPU, ())), nothing, HERE, pace=lambda task: 0.03 if task.lane == UP else 0.0)
    paced, free = (span.end_s - span.start_s for span in trace.spans)
    assert 0.03 <= paced < 1.0
    assert free < 0.03


def test_a_task_that_takes_longer_than_its_pace_is_not_slowed() -> None:
    trace = execute(graph_of((UP, ())), lambda task: time.sleep(0.05), HERE, pace=lambda task: 0.001)
    assert 0.05 <= trace.spans[0].end_s - trace.spans[0].start_s < 0.5


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_the_emulated_gpu_has_a_core_of_its_own_and_the_cpu_the_others() -> None:
    cores: dict[Lane, set[int]] = {}
    threads: dict[Lane, int] = {}

    def run(task: Task) -> None:
        cores[task.lane], threads[task.lane] = os.sched_getaffinity(0), lane_threads()

    before = os.sched_getaffinity(0), torch.get_num_threads()
    execute(graph_of((GPU, ()), (CPU, ()), (UP, ())), run, HERE)
    assert cores == {GPU: {CORES[-1]}, CPU: set(CORES[:-1]), UP: set(CORES)}
    assert threads == {GPU: 1, CPU: len(CORES) - 1, UP: 1}
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def holding(lane: Lane, number: int, after: tuple[int, ...], takes: float, gives: float) -> Task:
    holds = [(Hold("gpu", "activations", size),) if size else () for size in (takes, gives)]
    return Task(name(number), lane, tuple(name(other) for other in after), acquires=holds[0], releases=holds[1])


def test_memory_over_time_is_what_tasks_take_and_give_back() -> None:
    graph = TaskGraph([holding(GPU, 0, (), 30.0, 10.0), holding(GPU, 1, (0,), 5.0, 25.0)])
    trace = execute(graph, nothing, HERE, held_before={"gpu": 100.0, "cpu": 7.0})
    assert [held for _, held in trace.memory["gpu"]] == [100.0, 130.0, 120.0, 125.0, 100.0]
    assert trace.memory["cpu"] == ((0.0, 7.0),)


@pytest.mark.parametrize(("peak", "fits"), [(130.0, True), (128.0, False)])
def test_a_task_that_would_take_more_than_the_peak_is_refused_by_name(peak: float, fits: bool) -> None:
    graph = TaskGraph([holding(GPU, 0, (), 20.0, 0.0), holding(UP, 1, (0,), 10.0, 0.0)])
    arenas = Arenas({"gpu": Arena("GPU", {}, peak)}, {"gpu": 100.0})
    if fits:
        execute(graph, nothing, HERE, arenas=arenas)
        assert arenas.highest == {"gpu": 130.0}
        return
    with pytest.raises(InputError, match=r"embed/decode/s0/l0/b1 takes .* for activations"):
        execute(graph, nothing, HERE, arenas=arenas)

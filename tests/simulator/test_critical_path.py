"""The critical path: by hand on a few tasks, and on any policy of the tiny machine."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from tiny_policies import Case, cases

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.rates import derive_rates
from hrm.schedules import Steps, schedule_graph
from hrm.trace import Span, Trace
from simulator.contention import sharing_of
from simulator.critical_path import WAITING, Segment, find_critical_path, seconds_on_path, step_window
from simulator.durations import roofline_durations, table_durations
from simulator.engine import simulate

GPU, CPU, H2D = Lane(LaneKind.GPU, 0), Lane(LaneKind.CPU), Lane(LaneKind.H2D, 0)


def task_id(op: Op, step: int = 1, layer: int = 0) -> TaskId:
    return TaskId(op, "decode", step, layer)


BEFORE = task_id(Op.SAMPLE, step=0)
LOAD, PRE, POST, SAMPLE = (task_id(op) for op in (Op.LOAD_WEIGHTS, Op.PRE_ATTENTION, Op.POST_ATTENTION, Op.SAMPLE))
GRAPH = TaskGraph(
    [
        Task(BEFORE, GPU),
        Task(LOAD, H2D),
        Task(PRE, GPU, (BEFORE,)),
        Task(POST, GPU, (PRE, LOAD)),
        Task(SAMPLE, GPU, (POST,)),
    ]
)


def trace_of(**seconds: float) -> Trace:
    """The graph with these seconds; others take one."""
    return simulate(GRAPH, table_durations({op: seconds.get(op.value, 1.0) for op in Op}))


def test_a_long_copy_is_critical_as_far_as_it_lies_in_the_step() -> None:
    # sample 0-1 | copy 0-5, pre 1-2, post 5-6, sample 6-7: the copy counts from the start of the step, at 1
    trace = trace_of(load_weights=5.0)
    assert find_critical_path(GRAPH, trace, 1) == (
        Segment(LOAD, 1.0, 5.0),
        Segment(POST, 5.0, 6.0),
        Segment(SAMPLE, 6.0, 7.0),
    )
    assert seconds_on_path(find_critical_path(GRAPH, trace, 1)) == {
        "load_weights": 4.0,
        "post_attention": 1.0,
        "sample": 1.0,
    }


def test_a_short_copy_is_not_critical() -> None:
    assert [segment.task for segment in find_critical_path(GRAPH, trace_of(), 1)] == [PRE, POST, SAMPLE]


def test_of_two_that_end_together_the_dependency_is_critical_and_not_the_lane() -> None:
    other = task_id(Op.ATTENTION)
    graph = TaskGraph(
        [
            Task(BEFORE, GPU),
            Task(LOAD, H2D, (BEFORE,)),
            Task(other, GPU, (BEFORE,)),
            Task(SAMPLE, GPU, (LOAD,)),
        ]
    )
    trace = simulate(graph, table_durations(dict.fromkeys(Op, 1.0)))
    assert [segment.task for segment in find_critical_path(graph, trace, 1)] == [LOAD, SAMPLE]


def test_a_task_can_wait_for_its_lane_alone() -> None:
    other = task_id(Op.ATTENTION)
    graph = TaskGraph([Task(BEFORE, GPU), Task(other, GPU), Task(SAMPLE, GPU, (BEFORE,))])
    trace = simulate(graph, table_durations({Op.SAMPLE: 1.0, Op.ATTENTION: 3.0}))
    assert seconds_on_path(find_critical_path(graph, trace, 1)) == {"attention": 3.0, "sample": 1.0}


def test_what_nothing_ran_in_is_waiting() -> None:
    # As measured: half a second between two tasks, and a task that began before the one it waited for ended
    measured = Trace(
        (
            Span(BEFORE, GPU, 0.0, 1.0),
            Span(LOAD, H2D, 0.0, 1.0),
            Span(PRE, GPU, 1.5, 2.0),
            Span(POST, GPU, 1.75, 3.0),
            Span(SAMPLE, GPU, 3.25, 4.0),
        ),
        "measured",
    )
    path = find_critical_path(GRAPH, measured, 1)
    assert seconds_on_path(path) == {"post_attention": 1.25, WAITING: 0.75, "sample": 0.75, "pre_attention": 0.25}
    assert sum(segment.end_s - segment.start_s for segment in path) == 3.0


def test_the_first_step_of_a_trace_starts_with_the_trace() -> None:
    trace = trace_of(load_weights=5.0)
    assert step_window(GRAPH, trace, 0) == (0.0, 1.0)
    assert step_window(GRAPH, trace, 1) == (1.0, 7.0)
    with pytest.raises(InputError, match="no decode step 2"):
        find_critical_path(GRAPH, trace, 2)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_pieces_follow_each_other_and_add_up_to_the_step_exactly(case: Case) -> None:
    if case.steps.last == 0:
        return
    profile = case.layout.scenario.profile
    rates = derive_rates(profile, case.layout.scenario.formats)
    graph = schedule_graph(case.layout, case.schedule, Steps(first=0, last=2))
    trace = simulate(graph, roofline_durations(rates), sharing_of(profile, rates))
    for step in (0, 1):
        window, path = step_window(graph, trace, step), find_critical_path(graph, trace, step)
        assert (path[0].start_s, path[-1].end_s) == window
        assert all(first.end_s == second.start_s for first, second in pairwise(path))
        assert all(segment.task is not None for segment in path)  # simulated: whatever starts late waited for a task
        total = math.fsum(seconds_on_path(path).values())
        assert total == pytest.approx(window.seconds, rel=1e-12)


def test_a_trace_of_another_graph_is_refused_and_the_first_task_that_differs_is_named() -> None:
    other = TaskGraph([*GRAPH.tasks[:3], Task(POST, GPU, (PRE,)), Task(task_id(Op.SAMPLE, step=2), GPU, (POST,))])
    for use in (find_critical_path, step_window):
        with pytest.raises(InputError, match="task 4 is sample/decode/s1/l0, in the graph sample/decode/s2/l0"):
            use(other, trace_of(), 2)
        with pytest.raises(InputError, match="ends before task 4, sample/decode/s1/l0"):
            use(GRAPH, Trace(trace_of().spans[:4], "measured"), 1)

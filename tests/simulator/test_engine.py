"""The engine: equal to the closed form without sharing, between the bounds always, and never quiet about a dead end."""

import math

import pytest
from hypothesis import given, settings
from tiny_policies import Case, cases

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId, finish_times
from hrm.rates import derive_rates
from hrm.schedules import schedule_graph
from simulator.contention import sharing_of
from simulator.durations import Durations, roofline_durations
from simulator.engine import simulate

GPU, CPU = Lane(LaneKind.GPU, 0), Lane(LaneKind.CPU)
FIRST, SECOND = TaskId(Op.PRE_ATTENTION, "decode", 0, 0), TaskId(Op.ATTENTION, "decode", 0, 0)
GRAPH = TaskGraph([Task(FIRST, GPU), Task(SECOND, CPU, (FIRST,))])


def durations_of(case: Case) -> Durations:
    scenario = case.layout.scenario
    return roofline_durations(derive_rates(scenario.profile, scenario.formats))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_without_sharing_every_end_is_the_closed_form_to_the_last_bit(case: Case) -> None:
    graph, seconds = schedule_graph(*case), durations_of(case)
    assert [span.end_s for span in simulate(graph, seconds).spans] == finish_times(graph, seconds)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_busiest_lane_to_serial_sum_bound_the_makespan_and_sharing_never_helps(case: Case) -> None:
    graph, seconds = schedule_graph(*case), durations_of(case)
    scenario = case.layout.scenario
    lanes: dict[Lane, float] = dict.fromkeys(graph.lanes, 0.0)
    for task in graph.tasks:
        lanes[task.lane] += seconds(task)
    alone = simulate(graph, seconds)
    shared = simulate(graph, seconds, sharing_of(scenario.profile, derive_rates(scenario.profile, scenario.formats)))
    for trace in (alone, shared):
        assert max(lanes.values()) <= trace.makespan_s * (1 + 1e-9)
        assert trace.makespan_s <= sum(lanes.values()) * (1 + 1e-9)
    for before, after in zip(alone.spans, shared.spans, strict=True):
        assert after.end_s >= before.end_s * (1 - 1e-9)
    if case.schedule == "serial" and case.layout.gpus == 1:  # of several GPUs, each does one thing after the other
        assert alone.makespan_s == pytest.approx(sum(lanes.values()))
        assert shared.makespan_s == pytest.approx(alone.makespan_s)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_lanes_never_overlap_and_dependencies_hold_in_issue_order(case: Case) -> None:
    graph, scenario = schedule_graph(*case), case.layout.scenario
    sharing = sharing_of(scenario.profile, derive_rates(scenario.profile, scenario.formats))
    for used in (None, sharing):
        trace = simulate(graph, durations_of(case), used)
        assert [span.task for span in trace.spans] == [task.id for task in graph.tasks]
        free = dict.fromkeys(graph.lanes, 0.0)
        for task, before, span in zip(graph.tasks, graph.before, trace.spans, strict=True):
            assert span.lane == task.lane
            assert free[span.lane] <= span.start_s <= span.end_s
            assert all(trace.spans[other].end_s <= span.start_s for other in before)
            free[span.lane] = span.end_s


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_duration_that_is_none_names_its_task(seconds: float) -> None:
    with pytest.raises(InputError, match="attention/decode/s0/l0 would take"):
        simulate(GRAPH, lambda task: 1.0 if task.id == FIRST else seconds)


def test_the_first_task_that_never_ran_is_named() -> None:
    """No graph passes its own check with a circle, so one is put in behind its back."""
    graph = TaskGraph(GRAPH.tasks)
    graph.before = ((1,), (0,))
    with pytest.raises(InputError, match="pre_attention/decode/s0/l0 never ran"):
        simulate(graph, lambda task: 1.0)


def test_an_empty_graph_takes_no_time() -> None:
    assert simulate(TaskGraph([]), lambda task: 1.0).makespan_s == 0.0

"""Traces: totals, memory over time, and the Chrome/Perfetto document, on four tasks by hand."""

import json
from typing import Any

import pytest

from hrm.errors import InputError
from hrm.graph import Hold, Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.trace import Span, Trace, chrome_events, holds_over_time

GPU, H2D = Lane(LaneKind.GPU, 0), Lane(LaneKind.H2D, 0)
LOAD, PRE, POST, AGAIN = (
    TaskId(op, "decode", 0, layer)
    for op, layer in ((Op.LOAD_WEIGHTS, 0), (Op.PRE_ATTENTION, 0), (Op.POST_ATTENTION, 0), (Op.LOAD_WEIGHTS, 1))
)
SLOT = (Hold("gpu", "weight slots", 64.0),)
GRAPH = TaskGraph(
    [
        Task(LOAD, H2D, bytes_moved=64.0, acquires=SLOT),
        Task(PRE, GPU),
        Task(POST, GPU, (PRE, LOAD), releases=SLOT),
        Task(AGAIN, H2D, (POST,), bytes_moved=64.0, acquires=SLOT),
    ]
)
SPANS = (
    Span(LOAD, H2D, 0.0, 0.003),
    Span(PRE, GPU, 0.0, 0.001),
    Span(POST, GPU, 0.003, 0.005),
    Span(AGAIN, H2D, 0.005, 0.008),
)
MEMORY = holds_over_time(GRAPH, SPANS, {"gpu": 100.0, "cpu": 7.0})
TRACE = Trace(spans=SPANS, kind="simulated", memory=MEMORY)


def events(kind: str) -> list[dict[str, Any]]:
    document = json.loads(json.dumps(chrome_events(GRAPH, TRACE)))
    return [event for event in document["traceEvents"] if event["ph"] == kind]


def test_totals() -> None:
    assert TRACE.makespan_s == 0.008
    assert TRACE.busy_s() == pytest.approx({H2D: 0.006, GPU: 0.003})
    assert TRACE.seconds_by_op() == pytest.approx(
        {Op.LOAD_WEIGHTS: 0.006, Op.PRE_ATTENTION: 0.001, Op.POST_ATTENTION: 0.002}
    )
    assert Trace(spans=(), kind="simulated").makespan_s == 0.0


def test_memory_is_given_back_before_it_is_taken_at_the_same_instant() -> None:
    assert MEMORY["gpu"] == ((0.0, 100.0), (0.0, 164.0), (0.005, 100.0), (0.005, 164.0))
    assert MEMORY["cpu"] == ((0.0, 7.0),)


def test_a_track_per_lane() -> None:
    names = {event["tid"]: event["args"]["name"] for event in events("M") if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["gpu0", "host_to_device0"]
    tracks = {event["name"]: names[event["tid"]] for event in events("X")}
    assert tracks == {str(span.task): str(span.lane) for span in SPANS}


def test_tasks_are_called_as_in_the_graph_and_last_microseconds() -> None:
    found = [(event["name"], event["ts"], event["dur"]) for event in events("X")]
    assert [name for name, _, _ in found] == [str(task.id) for task in GRAPH.tasks]
    assert [start for _, start, _ in found] == pytest.approx([0.0, 0.0, 3000.0, 5000.0])
    assert [length for _, _, length in found] == pytest.approx([3000.0, 1000.0, 2000.0, 3000.0])
    assert events("X")[0]["args"] == {"bytes": 64.0}


def test_an_arrow_for_every_dependency_between_two_tracks_starts_within_its_task() -> None:
    track = {event["name"]: event["tid"] for event in events("X")}
    starts, ends = events("s"), events("f")
    assert [event["tid"] for event in starts] == [track[str(LOAD)], track[str(POST)]]  # pre and post share a track
    assert [event["tid"] for event in ends] == [track[str(POST)], track[str(AGAIN)]]
    assert [event["id"] for event in starts] == [event["id"] for event in ends] == [1, 2]
    assert [event["ts"] for event in starts] == pytest.approx([3000.0, 5000.0], abs=0.02)
    assert starts[0]["ts"] < 3000.0  # at its very end a viewer would find no slice to tie it to
    assert [event["ts"] for event in ends] == pytest.approx([3000.0, 5000.0])


def test_memory_is_a_counter_per_level() -> None:
    assert {event["name"] for event in events("C")} == {"gpu memory", "cpu memory"}
    assert [e["args"]["GiB"] * 2**30 for e in events("C") if e["name"] == "gpu memory"] == [100, 164, 100, 164]


OTHER = TaskId(Op.POST_ATTENTION, "decode", 0, 0, 1)


@pytest.mark.parametrize(
    ("spans", "fact"),
    [
        ((*SPANS[:2], Span(OTHER, GPU, 0.003, 0.005), SPANS[3]), f"task 2 is {OTHER}, in the graph {POST}"),
        ((SPANS[1], SPANS[0], *SPANS[2:]), f"task 0 is {PRE}, in the graph {LOAD}"),
        (
            (*SPANS[:3], SPANS[3]._replace(lane=GPU)),
            f"{AGAIN} ran on gpu0, in the graph it is on host_to_device0",
        ),
        (SPANS[:3], f"ends before task 3, {AGAIN}"),
        ((*SPANS, Span(OTHER, GPU, 1.0, 2.0)), f"which ends before task 4 of the trace, {OTHER}"),
        ((), f"ends before task 0, {LOAD}"),
    ],
)
def test_spans_of_another_graph_are_refused_and_the_first_task_that_differs_is_named(
    spans: tuple[Span, ...], fact: str
) -> None:
    for use in (lambda: chrome_events(GRAPH, Trace(spans, "measured")), lambda: holds_over_time(GRAPH, spans, {})):
        with pytest.raises(InputError) as raised:
            use()
        assert fact in str(raised.value)
        assert str(raised.value).startswith("trace: is not of this graph")

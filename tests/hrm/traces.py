"""Four tasks of two layers, simulated and measured by hand: whole seconds, so that every sum is exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.schedules import Steps
from hrm.trace import Span, Trace
from hrm.trace_files import TraceDocument, TraceFacts

GPU, H2D = Lane(LaneKind.GPU, 0), Lane(LaneKind.H2D, 0)
LOAD, PRE, POST, AGAIN = (
    TaskId(op, "decode", 3, layer, page=page, device=0)
    for op, layer, page in (
        (Op.LOAD_WEIGHTS, 0, 0),
        (Op.PRE_ATTENTION, 0, None),
        (Op.POST_ATTENTION, 0, None),
        (Op.LOAD_WEIGHTS, 1, 0),
    )
)
GRAPH = TaskGraph([Task(LOAD, H2D), Task(PRE, GPU), Task(POST, GPU, (PRE, LOAD)), Task(AGAIN, H2D, (POST,))])
PREDICTED = (2.0, 1.0, 2.0, 3.0)
SIMULATED = ((0.0, 3.0), (0.0, 1.0), (3.0, 5.0), (5.0, 8.0))
MEASURED = ((10.0, 14.0), (10.0, 11.0), (14.0, 17.0), (17.0, 20.0))
FACTS = TraceFacts(plan="0123456789abcdef", schedule="cgopipe", layers=2, model="tiny", hardware="box", workload="two")


def spans_of(*times: tuple[float, float], graph: TaskGraph = GRAPH) -> tuple[Span, ...]:
    """Spans of the tasks of a graph that ran then [s]."""
    return tuple(Span(task.id, task.lane, *ran) for task, ran in zip(graph.tasks, times, strict=True))


def document(
    *times: tuple[float, float],
    kind: str = "simulated",
    graph: TaskGraph = GRAPH,
    predicted: tuple[float, ...] | None = None,
    file: str = "",
    steps: Steps = Steps(first=3, last=4),
    **facts: Any,
) -> TraceDocument:
    """A trace as it would be read."""
    return TraceDocument(
        file=file or f"{kind}.json",
        trace=Trace(spans=spans_of(*times, graph=graph), kind=kind),
        before=graph.before,
        predicted_s=predicted,
        steps=steps,
        facts=replace(FACTS, **facts),
        hrm_version="1.2.3",
    )


SIMULATION = document(*SIMULATED, predicted=PREDICTED)
MEASUREMENT = document(*MEASURED, kind="measured")

"""A trace as one JSON file that Perfetto opens and that is read back exactly, simulated or measured alike.

The events of `hrm.trace.chrome_events`, and beside them, under the key "hrm", the spans themselves in columns: task,
lane, start and end to the last bit, what each waits for, what the cost model says each takes, and of what plan,
schedule and steps they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrm import __version__
from hrm.errors import InputError
from hrm.graph import TaskGraph, TaskId
from hrm.schedules import Steps
from hrm.trace import Span, Trace, chrome_events
from hrm.trace_columns import TRACE_WAY_OUT, column_of, lanes_of, number_in, numbers_of, seconds_of, texts_of, value_of
from hrm.trace_facts import TraceFacts, facts_of_plan, fingerprint_plan
from hrm.trace_names import parse_task

__all__ = [
    "KINDS",
    "TraceDocument",
    "TraceFacts",
    "facts_of_plan",
    "fingerprint_plan",
    "read_trace",
    "trace_document",
    "write_trace",
]

FORMAT = 1
KINDS = ("simulated", "measured", "emulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDocument:
    """A trace as it was read.

    Attributes
    ----------
    file : str
    trace : Trace
        Spans in issue order.
    before : tuple of tuple of int
        For each span, the indices of those it had to wait for.
    predicted_s : tuple of float or None
        What the cost model says each task takes alone [s]; None where the writer did not know.
    steps : Steps
        Which passes it covers.
    facts : TraceFacts
    hrm_version : str
        Of the writer.
    """

    file: str
    trace: Trace
    before: tuple[tuple[int, ...], ...]
    predicted_s: tuple[float, ...] | None
    steps: Steps
    facts: TraceFacts
    hrm_version: str


# Writing


def trace_document(
    graph: TaskGraph, trace: Trace, *, plan_facts: TraceFacts, predicted_s: Sequence[float] | None = None
) -> dict[str, Any]:
    """The JSON document of a trace: what Perfetto shows, and "hrm", which `read_trace` reads.

    Raises
    ------
    InputError
        The trace is not of that graph, of no known kind, or a span ends before it starts or at no number.
    """
    if trace.kind not in KINDS:
        raise InputError(f"{trace.kind!r} is no kind of trace", where="trace", way_out=f"one of {', '.join(KINDS)}")
    events = chrome_events(graph, trace)
    for span in trace.spans:
        _check_span(span, "trace")
    if predicted_s is not None and len(predicted_s) != len(graph):
        raise InputError(f"{len(predicted_s)} predictions for {len(graph)} tasks", where="trace")
    numbers = {lane: number for number, lane in enumerate(graph.lanes)}
    steps = _steps_of(graph)
    # Last: readers of the format that know no other keys may stop here.
    return events | {
        "hrm": {
            "format": FORMAT,
            "hrm_version": __version__,
            "kind": trace.kind,
            "plan": plan_facts.plan,
            "schedule": plan_facts.schedule,
            "steps": {"prefill": steps.prefill, "first": steps.first, "last": steps.last},
            "layers": plan_facts.layers,
            "model": plan_facts.model,
            "hardware": plan_facts.hardware,
            "workload": plan_facts.workload,
            "paced": [str(lane) for lane in plan_facts.paced],
            "clock_error_s": float(plan_facts.clock_error_s),
            "origin": dict(plan_facts.origin),
            "lanes": [str(lane) for lane in graph.lanes],
            "task": [str(span.task) for span in trace.spans],
            "lane": [numbers[span.lane] for span in trace.spans],
            "start_s": [float(span.start_s) for span in trace.spans],
            "end_s": [float(span.end_s) for span in trace.spans],
            "predicted_s": None if predicted_s is None else [float(seconds) for seconds in predicted_s],
            "after": [list(before) for before in graph.before],
            "memory": {
                level: {"time_s": [float(time) for time, _ in samples], "bytes": [float(held) for _, held in samples]}
                for level, samples in trace.memory.items()
            },
        }
    }


def write_trace(
    graph: TaskGraph,
    trace: Trace,
    path: Path,
    *,
    plan_facts: TraceFacts,
    predicted_s: Sequence[float] | None = None,
) -> None:
    """Write a trace that Perfetto and chrome://tracing open, and that `read_trace` reads back exactly.

    Parameters
    ----------
    graph : TaskGraph
    trace : Trace
        Of that graph.
    path : Path
    plan_facts : TraceFacts
    predicted_s : sequence of float, optional
        What the cost model says each task of the graph takes alone [s].

    Raises
    ------
    InputError
        The trace is not of that graph or makes no sense, or the file cannot be written.
    """
    document = trace_document(graph, trace, plan_facts=plan_facts, predicted_s=predicted_s)
    try:
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise InputError("a prediction, or memory held, is no number", where=str(path)) from None
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def _steps_of(graph: TaskGraph) -> Steps:
    """Which passes a graph covers."""
    steps = {task.id.step for task in graph.tasks if task.id.phase == "decode"}
    prefill = any(task.id.phase == "prefill" for task in graph.tasks)
    return Steps(prefill, min(steps), max(steps) + 1) if steps else Steps(prefill)


def _check_span(span: Span, where: str) -> None:
    if not (math.isfinite(span.start_s) and math.isfinite(span.end_s)):
        raise InputError(f"{span.task} ran from {span.start_s} to {span.end_s} s", where=where)
    if span.end_s < span.start_s:
        raise InputError(f"{span.task} ends at {span.end_s} s, before it starts at {span.start_s} s", where=where)


# Reading


def read_trace(path: Path) -> TraceDocument:
    """Read what `write_trace` wrote.

    Raises
    ------
    InputError
        The file cannot be read, is no JSON, no such trace or one of another format: names file and key.
    """
    where = str(path)
    held = _load(path)
    if not isinstance(held, dict) or not isinstance(held.get("hrm"), dict):
        known = isinstance(held, dict) and "traceEvents" in held
        fact = "is a trace without the key 'hrm'" if known else "is not a trace"
        raise InputError(fact, where=where, way_out=TRACE_WAY_OUT)
    document: dict[str, Any] = held["hrm"]
    where = f"{where}: hrm"
    if document.get("format") != FORMAT:
        raise InputError(
            f"is {document.get('format')!r:.80}", where=f"{where}.format", way_out=f"a trace of format {FORMAT}"
        )
    kind = value_of(document, "kind", str, where)
    if kind not in KINDS:
        raise InputError(f"is {kind!r:.80}", where=f"{where}.kind", way_out=f"one of {', '.join(KINDS)}")
    spans = _read_spans(document, where)
    count = len(spans)
    predicted = None if document.get("predicted_s") is None else seconds_of(document, "predicted_s", where, count)
    return TraceDocument(
        file=str(path),
        trace=Trace(spans=spans, kind=kind, memory=_read_memory(document, where)),
        before=_read_before(document, where, count),
        predicted_s=predicted,
        steps=_read_steps(document, where),
        facts=_read_facts(document, where),
        hrm_version=value_of(document, "hrm_version", str, where),
    )


def _load(path: Path) -> Any:
    where = str(path)

    def refuse(constant: str) -> None:
        raise InputError(f"holds {constant}, which is no number", where=where, way_out=TRACE_WAY_OUT)

    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=refuse)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=where, way_out=TRACE_WAY_OUT) from None
    except UnicodeDecodeError:
        raise InputError("is not a text file in UTF-8", where=where, way_out=TRACE_WAY_OUT) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"is not valid JSON: {error.msg} at {place}", where=where, way_out=TRACE_WAY_OUT) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of nested brackets
        raise InputError("is not JSON that can be read", where=where, way_out=TRACE_WAY_OUT) from None


def _read_spans(document: Mapping[str, Any], where: str) -> tuple[Span, ...]:
    lanes = lanes_of(document, "lanes", where)
    names = texts_of(document, "task", where)
    count = len(names)
    starts, ends = (numbers_of(document, key, where, count) for key in ("start_s", "end_s"))
    spans = []
    seen: dict[TaskId, int] = {}
    for index, (name, number) in enumerate(zip(names, column_of(document, "lane", where, count), strict=True)):
        try:
            task = parse_task(name)
        except InputError as error:
            raise InputError(error.fact, where=f"{where}.task[{index}]", way_out=error.way_out) from None
        if seen.setdefault(task, index) != index:
            raise InputError(f"{name} is there twice", where=f"{where}.task[{index}]", way_out=TRACE_WAY_OUT)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(lanes):
            fact = f"{number!r:.80} is no number of one of the {len(lanes)} lanes"
            raise InputError(fact, where=f"{where}.lane[{index}]", way_out=TRACE_WAY_OUT)
        span = Span(task, lanes[number], starts[index], ends[index])
        _check_span(span, f"{where}.end_s[{index}]")
        spans.append(span)
    return tuple(spans)


def _read_before(document: Mapping[str, Any], where: str, count: int) -> tuple[tuple[int, ...], ...]:
    found = []
    for index, before in enumerate(column_of(document, "after", where, count)):
        place = f"{where}.after[{index}]"
        if not isinstance(before, list):
            raise InputError("is no list", where=place, way_out=TRACE_WAY_OUT)
        for other in before:
            if isinstance(other, bool) or not isinstance(other, int) or not 0 <= other < index:
                raise InputError(f"{other!r:.80} is no task issued earlier", where=place, way_out=TRACE_WAY_OUT)
        found.append(tuple(before))
    return tuple(found)


def _read_steps(document: Mapping[str, Any], where: str) -> Steps:
    steps = value_of(document, "steps", dict, where)
    place = f"{where}.steps"
    return Steps(*(value_of(steps, key, bool if key == "prefill" else int, place) for key in Steps._fields))  # type: ignore[arg-type]


def _read_facts(document: Mapping[str, Any], where: str) -> TraceFacts:
    origin = value_of(document, "origin", dict, where)
    clock_error = number_in(document.get("clock_error_s", 0.0), f"{where}.clock_error_s")
    if clock_error < 0.0:
        raise InputError(f"{clock_error} s is less than nothing", where=f"{where}.clock_error_s", way_out=TRACE_WAY_OUT)
    return TraceFacts(
        **{key: value_of(document, key, str, where) for key in ("plan", "schedule", "model", "hardware", "workload")},
        layers=value_of(document, "layers", int, where),
        paced=lanes_of(document, "paced", where),
        clock_error_s=clock_error,
        origin={key: value_of(origin, key, str, f"{where}.origin") for key in origin},
    )


def _read_memory(document: Mapping[str, Any], where: str) -> dict[str, tuple[tuple[float, float], ...]]:
    levels = value_of(document, "memory", dict, where)
    found = {}
    for level in levels:
        place = f"{where}.memory.{level:.80}"
        columns = value_of(levels, level, dict, f"{where}.memory")
        times, held = (numbers_of(columns, key, place) for key in ("time_s", "bytes"))
        if len(times) != len(held):
            raise InputError(f"has {len(times)} times and {len(held)} sizes", where=place, way_out=TRACE_WAY_OUT)
        found[level] = tuple(zip(times, held, strict=True))
    return found

"""Two traces of the same tasks beside each other: where the seconds of the second differ from those of the first.

Joined by task, so that every number is predicted, simulated and measured in one row. Lanes that were paced, that is,
told how long to take, are shown and marked, and say nothing about accuracy.
"""

from __future__ import annotations

import csv
import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrm.errors import InputError
from hrm.graph import Lane, Op, TaskId
from hrm.trace_files import TraceDocument, read_trace
from hrm.trace_order import find_violation

__all__ = ["Joined", "check_kept", "diff_documents", "diff_files", "join_traces", "labels_of"]

WAY_OUT = "two traces of one plan, schedule and range of steps"
OF_A_LAYER = (Op.PRE_ATTENTION, Op.ATTENTION, Op.POST_ATTENTION, Op.EXPERTS, Op.LOAD_HIDDEN, Op.ALL_REDUCE)
"""What a layer is done with when the last of these is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Tasks of two traces in the issue order of the first, column by column.

    Attributes
    ----------
    tasks : tuple of TaskId
    lanes : tuple of Lane
    predicted_s : tuple of float or None
        By the cost model, alone [s]; of the first trace that knows.
    first_s, second_s : tuple of float
        Durations [s].
    first_end_s, second_end_s : tuple of float
        Ends [s].
    paced : tuple of bool
        Whether the lane was paced in either trace.
    """

    tasks: tuple[TaskId, ...]
    lanes: tuple[Lane, ...]
    predicted_s: tuple[float, ...] | None
    first_s: tuple[float, ...]
    second_s: tuple[float, ...]
    first_end_s: tuple[float, ...]
    second_end_s: tuple[float, ...]
    paced: tuple[bool, ...]


def diff_files(first: Path, second: Path, *, output: Path | None = None, top: int = 10) -> dict[str, Any]:
    """Compare two trace files; write every task to a CSV file where asked.

    Raises
    ------
    InputError
        A file is no trace, the traces are not of the same tasks, or the CSV file cannot be written.
    """
    if top < 1:
        raise InputError(f"{top} tasks", where="--top", way_out="1 or more")
    if output is not None:
        _check_output(output, (first, second))
    documents = read_trace(first), read_trace(second)
    found = diff_documents(*documents, top=top)
    if output is not None:
        _write_tasks(join_traces(*documents), labels_of(*documents), output)
    return found


def labels_of(first: TraceDocument, second: TraceDocument) -> tuple[str, str]:
    """What each is called: its kind; first and second where both are of one kind."""
    kinds = first.trace.kind, second.trace.kind
    return kinds if kinds[0] != kinds[1] else ("first", "second")


def join_traces(first: TraceDocument, second: TraceDocument) -> Joined:
    """Join two traces by task.

    Raises
    ------
    InputError
        One has a task that the other has not, or on another lane; the first such task is named.
    """
    others = {span.task: index for index, span in enumerate(second.trace.spans)}
    for index, span in enumerate(first.trace.spans):
        if span.task not in others:
            raise _other_tasks(first, second, span.task, index)
    if len(others) > len(first.trace.spans):
        known = {span.task for span in first.trace.spans}
        index, task = next((index, task) for task, index in others.items() if task not in known)
        raise _other_tasks(second, first, task, index)
    order = [others[span.task] for span in first.trace.spans]
    pairs = [(span, second.trace.spans[index]) for span, index in zip(first.trace.spans, order, strict=True)]
    for span, other in pairs:
        if span.lane != other.lane:
            fact = f"{span.task} ran on {other.lane}, in {first.file} on {span.lane}"
            raise InputError(fact, where=second.file, way_out=WAY_OUT)
    predicted = first.predicted_s
    if predicted is None and second.predicted_s is not None:
        predicted = tuple([second.predicted_s[index] for index in order])
    paced = {*first.facts.paced, *second.facts.paced}
    return Joined(
        tasks=tuple([span.task for span, _ in pairs]),
        lanes=tuple([span.lane for span, _ in pairs]),
        predicted_s=predicted,
        first_s=tuple([span.end_s - span.start_s for span, _ in pairs]),
        second_s=tuple([other.end_s - other.start_s for _, other in pairs]),
        first_end_s=tuple([span.end_s for span, _ in pairs]),
        second_end_s=tuple([other.end_s for _, other in pairs]),
        paced=tuple([span.lane in paced for span, _ in pairs]),
    )


def diff_documents(first: TraceDocument, second: TraceDocument, *, top: int = 10) -> dict[str, Any]:
    """Two traces beside each other as one JSON document (docs/cli.md); ratios are second over first.

    Raises
    ------
    InputError
        They are not of the same tasks.
    """
    joined = join_traces(first, second)
    layers = max(first.facts.layers, second.facts.layers)
    lengths = _length_s(first), _length_s(second)
    differs = _differences(first, second)
    if not differs and joined.tasks != tuple([span.task for span in second.trace.spans]):
        differs.append({"what": "order of issue", "first": "one", "second": "another"})
    bound = None
    if joined.predicted_s is not None:
        bound = max(_sums(map(str, joined.lanes), joined.predicted_s).values(), default=0.0)
    return {
        "labels": list(labels_of(first, second)),
        "first": _description(first),
        "second": _description(second),
        "differs": differs,
        "tasks": len(joined.tasks),
        "makespan": _row(bound, *lengths),
        "layer_latency": _layer_latency(joined, layers),
        "accuracy": _accuracy(joined),
        "by_op": _table(joined, [task.op.value for task in joined.tasks]),
        "by_lane": [
            {**row, "first_idle_s": lengths[0] - row["first_s"], "second_idle_s": lengths[1] - row["second_s"]}
            for row in _table(joined, [str(lane) for lane in joined.lanes])
        ],
        "by_layer": sorted(_table(joined, [task.layer for task in joined.tasks]), key=lambda row: row["name"]),
        "top": _most_different(joined, top),
    }


def check_kept(document: dict[str, Any]) -> None:
    """Refuse a trace that did not keep to its graph.

    Raises
    ------
    InputError
        A task started out of order or before what it waits for had ended; the first such task is named.
    """
    for key in ("first", "second"):
        if document[key]["violation"] is not None:
            raise InputError(document[key]["violation"], where=document[key]["file"])


def _other_tasks(having: TraceDocument, lacking: TraceDocument, task: TaskId, index: int) -> InputError:
    fact = f"has no {task}, which is task {index} of {having.file}"
    differences = _differences(having, lacking)
    said = "; ".join(f"{each['what']}: {each['first']} and {each['second']}" for each in differences)
    return InputError(fact + (f"; they differ in {said}" if said else ""), where=lacking.file, way_out=WAY_OUT)


def _steps_in_words(document: TraceDocument) -> str:
    prefill, first, last = document.steps
    words = ["prefill"] if prefill else []
    if last > first:
        words.append(f"decode step {first}" if last == first + 1 else f"decode steps {first} to {last - 1}")
    return " and ".join(words) or "nothing"


def _differences(first: TraceDocument, second: TraceDocument) -> list[dict[str, str]]:
    """What the traces say of themselves that is not the same."""
    said = {
        what: (str(getattr(first.facts, what)), str(getattr(second.facts, what)))
        for what in ("plan", "schedule", "layers", "model", "hardware", "workload")
    }
    said["steps"] = (_steps_in_words(first), _steps_in_words(second))
    return [{"what": what, "first": one, "second": other} for what, (one, other) in said.items() if one != other]


def _description(document: TraceDocument) -> dict[str, Any]:
    facts, spans = document.facts, document.trace.spans
    violation = find_violation(spans, document.before, clock_error_s=facts.clock_error_s)
    return {
        "file": document.file,
        "kind": document.trace.kind,
        "hrm_version": document.hrm_version,
        "plan": facts.plan,
        "schedule": facts.schedule,
        "steps": _steps_in_words(document),
        "layers": facts.layers,
        "model": facts.model,
        "hardware": facts.hardware,
        "workload": facts.workload,
        "paced": [str(lane) for lane in facts.paced],
        "clock_error_s": facts.clock_error_s,
        "origin": dict(facts.origin),
        "dependencies": sum(map(len, document.before)),
        "violation": None if violation is None else str(violation),
    }


def _length_s(document: TraceDocument) -> float:
    """From the start of the first task to the end of the last [s]."""
    spans = document.trace.spans
    return max((span.end_s for span in spans), default=0.0) - min((span.start_s for span in spans), default=0.0)


def _row(predicted: float | None, first: float, second: float) -> dict[str, Any]:
    return {
        "predicted_s": predicted,
        "first_s": first,
        "second_s": second,
        "ratio": second / first if first > 0.0 else None,
    }


def _sums(keys: Iterable[Hashable], seconds: Iterable[float]) -> dict[Any, float]:
    found: dict[Any, float] = {}
    for key, each in zip(keys, seconds, strict=True):
        found[key] = found.get(key, 0.0) + each
    return found


def _table(joined: Joined, keys: Sequence[Hashable]) -> list[dict[str, Any]]:
    """A row per key, in order of first use: seconds of all its tasks."""
    first, second = _sums(keys, joined.first_s), _sums(keys, joined.second_s)
    predicted = None if joined.predicted_s is None else _sums(keys, joined.predicted_s)
    count = Counter(keys)
    paced = Counter(key for key, told in zip(keys, joined.paced, strict=True) if told)
    return [
        {
            "name": key,
            "tasks": count[key],
            "paced": "none" if not paced[key] else "all" if paced[key] == count[key] else "some",
            **_row(None if predicted is None else predicted[key], first[key], second[key]),
        }
        for key in first
    ]


def _accuracy(joined: Joined) -> dict[str, Any] | None:
    """How near the durations of the first trace come to those of the second, over lanes that were not paced."""
    pairs = [
        (one, other)
        for one, other, paced in zip(joined.first_s, joined.second_s, joined.paced, strict=True)
        if not paced
    ]
    if not pairs:
        return None
    first, second = (sum(column) for column in zip(*pairs, strict=True))
    apart = sum(abs(other - one) for one, other in pairs)
    lanes = dict.fromkeys(str(lane) for lane, paced in zip(joined.lanes, joined.paced, strict=True) if not paced)
    return {
        "tasks": len(pairs),
        "lanes": list(lanes),
        "first_s": first,
        "second_s": second,
        "ratio": second / first if first > 0.0 else None,
        "error": apart / second if second > 0.0 else None,
    }


def _most_different(joined: Joined, top: int) -> dict[str, Any]:
    """Tasks whose durations differ most, and what they make up of all differences."""
    apart = [abs(other - one) for one, other in zip(joined.first_s, joined.second_s, strict=True)]
    chosen = [i for i in heapq.nlargest(top, range(len(apart)), key=apart.__getitem__) if apart[i] > 0.0]
    whole = sum(apart)
    return {
        "share": sum(apart[i] for i in chosen) / whole if whole > 0.0 else None,
        "tasks": [
            {
                "name": str(joined.tasks[i]),
                "lane": str(joined.lanes[i]),
                "paced": "all" if joined.paced[i] else "none",
                **_row(
                    None if joined.predicted_s is None else joined.predicted_s[i], joined.first_s[i], joined.second_s[i]
                ),
                "difference_s": joined.second_s[i] - joined.first_s[i],
            }
            for i in chosen
        ],
    }


def _layer_latency(joined: Joined, layers: int) -> dict[str, Any] | None:
    """Seconds per layer of decode, from the end of the first to the end of the last layer of a step; mean over steps.

    Predicted is the busiest lane of a layer, as in Eq. 12. None where no step has two layers.
    """
    first, second = (_layer_ends(joined.tasks, ends) for ends in (joined.first_end_s, joined.second_end_s))
    steps = {step for step, layer in first if layer == 0 and (step, layers - 1) in first}
    count = len(steps) * (layers - 1)
    if count < 1:
        return None
    predicted = None
    if joined.predicted_s is not None:
        seconds = _sums(
            ((task.phase, task.step, task.layer, lane) for task, lane in zip(joined.tasks, joined.lanes, strict=True)),
            joined.predicted_s,
        )
        busiest: dict[tuple[int, int], float] = {}
        for (phase, step, layer, _), each in seconds.items():
            if phase == "decode" and step in steps and 0 < layer < layers:
                busiest[step, layer] = max(each, busiest.get((step, layer), 0.0))
        predicted = sum(busiest.values()) / count
    return _row(predicted, *(sum(e[step, layers - 1] - e[step, 0] for step in steps) / count for e in (first, second)))


def _layer_ends(tasks: Sequence[TaskId], ends: Sequence[float]) -> dict[tuple[int, int], float]:
    """When each layer of each decode step was done [s]."""
    found: dict[tuple[int, int], float] = {}
    for task, end in zip(tasks, ends, strict=True):
        if task.phase == "decode" and task.op in OF_A_LAYER:
            key = (task.step, task.layer)
            found[key] = max(end, found.get(key, end))
    return found


# The CSV file


def _check_output(output: Path, inputs: Sequence[Path]) -> None:
    where = f"--output: {output}"
    if output.suffix.lower() != ".csv":
        raise InputError("is not a file this writes", where=where, way_out="a name that ends in .csv")
    if not output.absolute().parent.is_dir():
        raise InputError("its folder does not exist", where=where)
    if output.resolve() in {path.resolve() for path in inputs}:
        raise InputError("is also a trace to compare", where=where, way_out="another file")


def _write_tasks(joined: Joined, labels: tuple[str, str], output: Path) -> None:
    """Every task in a line; seconds."""
    one, other = labels
    head = ("task", "op", "phase", "step", "layer", "micro_batch", "page", "device", "part", "lane", "paced")
    try:
        with output.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow([*head, "predicted_s", f"{one}_s", f"{other}_s", "difference_s"])
            for i, task in enumerate(joined.tasks):
                predicted = None if joined.predicted_s is None else joined.predicted_s[i]
                first, second = joined.first_s[i], joined.second_s[i]
                told = int(joined.paced[i])
                rows.writerow([task, *task, joined.lanes[i], told, predicted, first, second, second - first])
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=f"--output: {output}") from None

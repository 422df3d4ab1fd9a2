"""Trace files: read back to the last bit, opened by Perfetto as before, refused with file and key."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import AGAIN, FACTS, GPU, GRAPH, H2D, LOAD, MEASURED, POST, PREDICTED, SIMULATED, spans_of

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.schedules import Steps
from hrm.trace import Span, Trace, chrome_events
from hrm.trace_files import fingerprint_plan, read_trace, trace_document, write_trace
from hrm.trace_names import parse_lane, parse_task

COUNT = st.integers(0, 10**9 - 1)
MAYBE = st.none() | COUNT
TASKS = st.builds(
    TaskId, st.sampled_from(Op), st.sampled_from(["prefill", "decode"]), COUNT, COUNT, MAYBE, MAYBE, MAYBE, MAYBE
)
LANES = st.builds(Lane, st.sampled_from(LaneKind), MAYBE)
MEMORY = {"gpu": ((0.0, 100.0), (0.1, 1 / 3)), "cpu": ((0.0, 7.0),)}
TRACE = Trace(spans=spans_of(*SIMULATED), kind="simulated", memory=MEMORY)


@given(TASKS)
def test_the_name_of_a_task_says_which_it_is(task: TaskId) -> None:
    assert parse_task(str(task)) == task


@given(LANES)
def test_the_name_of_a_lane_says_which_it_is(lane: Lane) -> None:
    assert parse_lane(str(lane)) == lane


def test_a_task_by_hand() -> None:
    assert parse_task("load_weights/decode/s3/l7/p2") == TaskId(Op.LOAD_WEIGHTS, "decode", 3, 7, page=2)
    assert parse_task("all_reduce/prefill/s-1/l0/b1/g2/part0") == TaskId(
        Op.ALL_REDUCE, "prefill", -1, 0, micro_batch=1, device=2, part=0
    )
    assert parse_lane("host_to_device0") == Lane(LaneKind.H2D, 0)
    assert parse_lane("cpu") == Lane(LaneKind.CPU)


@pytest.mark.parametrize(
    "name", ["", "embed", "embed/decode/s0", "embed/decode/s0/l0/p1/b1", "embed/decode/s00/l0", "Embed/decode/s0/l0 "]
)
def test_other_names_are_no_tasks(name: str) -> None:
    with pytest.raises(InputError, match="is no task"):
        parse_task(name)


SECONDS = st.floats(0.0, 1e9) | st.floats(0.0, 1e-6)


@st.composite
def graphs_with_times(draw: st.DrawFn) -> tuple[TaskGraph, tuple[Span, ...]]:
    """Any tasks on any lanes after any earlier ones, at any times."""
    names = draw(st.lists(TASKS, unique=True, max_size=8))
    tasks, spans = [], []
    for number, name in enumerate(names):
        after = draw(st.lists(st.sampled_from(names[:number]), unique=True, max_size=3)) if number else []
        tasks.append(Task(name, draw(LANES), tuple(after)))
        start, end = sorted((draw(SECONDS), draw(SECONDS)))
        spans.append(Span(name, tasks[-1].lane, start, end))
    return TaskGraph(tasks), tuple(spans)


@given(graphs_with_times(), st.sampled_from(["simulated", "measured", "emulated"]), st.booleans())
def test_any_trace_is_read_back_to_the_last_bit(
    ran: tuple[TaskGraph, tuple[Span, ...]], kind: str, predicts: bool
) -> None:
    graph, spans = ran
    memory = {"gpu": tuple((span.start_s, span.end_s) for span in spans)}
    predicted = tuple(span.end_s for span in spans) if predicts else None
    facts = replace(FACTS, paced=graph.lanes[:1], clock_error_s=1e-6 / 3, origin={"device": "GPU, 16 GB"})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(graph, Trace(spans, kind, memory), path, plan_facts=facts, predicted_s=predicted)
        found = read_trace(path)
    assert (found.trace.spans, found.trace.kind, found.trace.memory) == (spans, kind, memory)
    assert (found.before, found.predicted_s, found.facts) == (graph.before, predicted, facts)


def test_what_perfetto_shows_comes_first_and_is_as_before() -> None:
    document = trace_document(GRAPH, TRACE, plan_facts=FACTS)
    assert list(document) == ["traceEvents", "displayTimeUnit", "hrm"]
    assert {key: document[key] for key in ("traceEvents", "displayTimeUnit")} == chrome_events(GRAPH, TRACE)


def test_the_passes_are_read_off_the_graph(tmp_path: Path) -> None:
    first = Task(TaskId(Op.EMBED, "prefill", 0, 0), GPU)
    for tasks, steps in (
        ((first,), Steps(prefill=True)),
        ((first, Task(PRE_OF_9, GPU)), Steps(prefill=True, first=9, last=10)),
        ((Task(LOAD, H2D), Task(PRE_OF_9, GPU)), Steps(first=3, last=10)),
    ):
        graph = TaskGraph(tasks)
        spans = spans_of(*[(0.0, 1.0)] * len(tasks), graph=graph)
        write_trace(graph, Trace(spans, "measured"), tmp_path / "x.json", plan_facts=FACTS)
        assert read_trace(tmp_path / "x.json").steps == steps


PRE_OF_9 = TaskId(Op.PRE_ATTENTION, "decode", 9, 0)


@pytest.mark.parametrize(
    ("trace", "predicted", "fact"),
    [
        (Trace(spans_of(*MEASURED), "guessed"), None, "'guessed' is no kind of trace"),
        (Trace(spans_of(*SIMULATED[:3], (5.0, 4.0)), "measured"), None, f"{AGAIN} ends at 4.0 s, before it starts"),
        (Trace(spans_of(*SIMULATED[:3], (5.0, float("inf"))), "measured"), None, f"{AGAIN} ran from 5.0 to inf s"),
        (Trace(spans_of(*SIMULATED)[:3], "measured"), None, f"it ends before task 3, {AGAIN}"),
        (TRACE, PREDICTED[:2], "2 predictions for 4 tasks"),
        (TRACE, (*PREDICTED[:3], float("nan")), "a prediction, or memory held, is no number"),
    ],
)
def test_no_file_is_written_of_what_makes_no_sense(
    trace: Trace, predicted: tuple[float, ...] | None, fact: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(InputError) as raised:
        write_trace(GRAPH, trace, path, plan_facts=FACTS, predicted_s=predicted)
    assert fact in str(raised.value)
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.x\.json: cannot be written: No such file"):
        write_trace(GRAPH, TRACE, tmp_path / "none" / "x.json", plan_facts=FACTS)


# What is refused


def refusal(path: Path) -> str:
    """What is said of a file, without its folder."""
    with pytest.raises(InputError) as raised:
        read_trace(path)
    assert raised.value.where.startswith(str(path))
    return str(raised.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "is not valid JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        (b"\xff\xfe", "is not a text file in UTF-8"),
        (b"[" * 100_000, "is not JSON that can be read"),
        (b"[]", "is not a trace"),
        (b'{"hrm": 1}', "is not a trace"),
        (b'{"traceEvents": []}', "is a trace without the key 'hrm'"),
        (b'{"hrm": {"format": NaN}}', "holds NaN, which is no number"),
    ],
)
def test_what_is_no_trace_is_refused(text: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    assert refusal(path).startswith(said)
    assert refusal(path).endswith("(what hrm simulate PLAN --trace FILE writes, or a run of the plan)")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "x.json").startswith("cannot be read: No such file or directory")


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda hrm: hrm.update(format=2), "hrm.format: is 2 (a trace of format 1)"),
    (lambda hrm: hrm.pop("format"), "hrm.format: is None"),
    (lambda hrm: hrm.update(kind="guessed"), "hrm.kind: is 'guessed' (one of simulated, measured, emulated)"),
    (lambda hrm: hrm.pop("schedule"), "hrm.schedule: is missing or no text"),
    (lambda hrm: hrm.update(layers=True), "hrm.layers: is missing or no whole number"),
    (lambda hrm: hrm["steps"].update(prefill=0), "hrm.steps.prefill: is missing or no flag"),
    (lambda hrm: hrm["steps"].pop("last"), "hrm.steps.last: is missing or no whole number"),
    (lambda hrm: hrm["lanes"].append("gpu-1"), "hrm.lanes[2]: 'gpu-1' is no lane (one of gpu, cpu, "),
    (lambda hrm: hrm.update(paced=[0]), "hrm.paced[0]: 0 is no text"),
    (lambda hrm: hrm["task"].__setitem__(1, "rest"), "hrm.task[1]: 'rest' is no task"),
    (lambda hrm: hrm["task"].__setitem__(1, str(LOAD)), f"hrm.task[1]: {LOAD} is there twice"),
    (lambda hrm: hrm["task"].pop(), "hrm.start_s: has 4 entries for 3 tasks"),
    (lambda hrm: hrm["lane"].__setitem__(0, 2), "hrm.lane[0]: 2 is no number of one of the 2 lanes"),
    (lambda hrm: hrm["lane"].__setitem__(0, -1), "hrm.lane[0]: -1 is no number of one of the 2 lanes"),
    (lambda hrm: hrm["start_s"].__setitem__(3, "5"), "hrm.start_s[3]: '5' is no number"),
    (lambda hrm: hrm["start_s"].__setitem__(3, 10**400), "hrm.start_s[3]: 1000"),
    (lambda hrm: hrm["end_s"].__setitem__(2, 2.5), f"hrm.end_s[2]: {POST} ends at 2.5 s, before it starts at 3.0 s"),
    (lambda hrm: hrm["predicted_s"].__setitem__(0, -1), "hrm.predicted_s[0]: -1.0 s is less than nothing"),
    (lambda hrm: hrm["predicted_s"].pop(), "hrm.predicted_s: has 3 entries for 4 tasks"),
    (lambda hrm: hrm["after"].__setitem__(2, [2]), "hrm.after[2]: 2 is no task issued earlier"),
    (lambda hrm: hrm["after"].__setitem__(2, 1), "hrm.after[2]: is no list"),
    (lambda hrm: hrm.update(clock_error_s=-1e-6), "hrm.clock_error_s: -1e-06 s is less than nothing"),
    (lambda hrm: hrm.update(origin={"date": 1}), "hrm.origin.date: is missing or no text"),
    (lambda hrm: hrm["memory"]["gpu"]["bytes"].pop(), "hrm.memory.gpu: has 2 times and 1 sizes"),
    (lambda hrm: hrm["memory"].update(gpu=[]), "hrm.memory.gpu: is missing or no object"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=[said.split(":")[0] for _, said in CHANGES])
def test_what_is_wrong_in_a_trace_is_named_by_its_key(
    change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    document = trace_document(GRAPH, TRACE, plan_facts=FACTS, predicted_s=PREDICTED)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    assert read_trace(path).predicted_s == PREDICTED  # fine until it is changed
    change(document["hrm"])
    path.write_text(json.dumps(document))
    assert refusal(path).startswith(said)


# Fingerprints

PLAN: dict[str, Any] = {
    "inputs": {
        "hardware": {"name": "box", "document": {"gpu": {"memory": "16 GB"}}},
        "model": {"name": "tiny", "config": {"hidden_size": 8}},
        "workload": {"prompt_lengths": [3, 4], "generation_length": 2, "num_requests": 2, "padded": False},
        "weights_dtype": None,
        "pins": {},
    },
    "policy": {"batch_size": 2},
    "solver": {"seconds": 0.1},
}


def test_how_a_plan_was_found_is_not_in_its_fingerprint() -> None:
    other = PLAN | {"solver": {"seconds": 9.0}, "inputs": PLAN["inputs"] | {"pins": {"batch": 2}}}
    assert fingerprint_plan(other) == fingerprint_plan(PLAN)
    assert len(fingerprint_plan(PLAN)) == 16


@pytest.mark.parametrize(
    "other",
    [
        PLAN | {"policy": {"batch_size": 1}},
        PLAN | {"inputs": PLAN["inputs"] | {"weights_dtype": "int4"}},
        PLAN | {"inputs": PLAN["inputs"] | {"workload": PLAN["inputs"]["workload"] | {"prompt_lengths": [3, 5]}}},
        PLAN | {"inputs": PLAN["inputs"] | {"model": {"name": "tiny", "config": {"hidden_size": 9}}}},
        PLAN | {"inputs": PLAN["inputs"] | {"hardware": {"name": "box", "document": {}}}},
    ],
)
def test_another_policy_machine_model_or_workload_has_another_fingerprint(other: dict[str, Any]) -> None:
    assert fingerprint_plan(other) != fingerprint_plan(PLAN)

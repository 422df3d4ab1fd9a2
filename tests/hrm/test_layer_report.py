"""The report of one measured layer, on a timeline made by hand."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.layer_report import layer_document, layer_latencies, print_layer
from hrm.model_files import load_model
from hrm.trace import Span, Trace

GPU, H2D = Lane(LaneKind.GPU, 0), Lane(LaneKind.H2D, 0)
LAYERS = 5


def graph_of_layers() -> TaskGraph:
    """A page of weights, then pre- and post-attention, of every layer: 3 s on the link, 1 s + 1 s on the GPU."""
    tasks = []
    for layer in range(LAYERS):
        load = TaskId(Op.LOAD_WEIGHTS, "decode", 7, layer, page=0, device=0)
        pre = TaskId(Op.PRE_ATTENTION, "decode", 7, layer, 0, device=0)
        post = TaskId(Op.POST_ATTENTION, "decode", 7, layer, 0, device=0)
        tasks += [Task(load, H2D, bytes_moved=6e9), Task(pre, GPU), Task(post, GPU, (pre, load))]
    return TaskGraph(tasks)


def trace_of(graph: TaskGraph, load_s: float, kind: str = "measured") -> Trace:
    """Loads one after the other; a layer's post-attention ends a second after its load."""
    spans = []
    for task in graph.tasks:
        end = (task.id.layer + 1) * load_s
        start = {Op.LOAD_WEIGHTS: end - load_s, Op.PRE_ATTENTION: end - 1.0, Op.POST_ATTENTION: end}[task.id.op]
        long = load_s if task.id.op is Op.LOAD_WEIGHTS else 1.0
        spans.append(Span(task.id, task.lane, start, start + long))
    return Trace(tuple(spans), kind)


def document_of(
    load_s: float,
    *,
    kind: str = "measured",
    same_machine: bool | None = True,
    measured: list[Trace] | None = None,
) -> dict:
    graph = graph_of_layers()
    facts = {
        "title": "One layer",
        "step": 7,
        "schedule": "cgopipe",
        "device": "a GPU",
        "hardware": "t4",
        "same_machine": same_machine,
    }
    predicted = [3.0 if task.id.op is Op.LOAD_WEIGHTS else 1.0 for task in graph.tasks]
    return layer_document(
        graph,
        predicted,
        trace_of(graph, 3.0, "simulated"),
        measured or [trace_of(graph, load_s, kind), trace_of(graph, load_s, kind)],
        counted=range(2, LAYERS - 1),
        touched=[(4, 6), (4, 5)],
        model=load_model("mixtral-8x7b"),
        facts=facts,
    )


def test_a_layer_lasts_from_the_end_of_the_one_before_to_its_own() -> None:
    graph = graph_of_layers()
    assert layer_latencies(graph, trace_of(graph, 4.0)) == [4.0] * (LAYERS - 1)


def test_measured_latency_stands_beside_the_bound_the_busiest_lane_and_the_simulator() -> None:
    latency = document_of(4.5)["latency"]
    assert latency["measured_s"] == 4.5
    assert latency["bound_s"] == latency["busiest_lane_s"] == latency["simulated_s"] == 3.0
    assert latency["busiest_lane"] == "host_to_device0"
    assert latency["measured_over_bound"] == latency["measured_over_simulated"] == 1.5


def test_copies_are_priced_per_layer_with_the_rate_they_ran_at() -> None:
    (copy,) = document_of(4.0)["copies"]
    assert copy == {
        "copy": "D3 weights to the GPU",
        "bytes": 6e9,
        "predicted_s": 3.0,
        "measured_s": 4.0,
        "measured_bytes_per_s": 1.5e9,
    }


def test_touched_experts_stand_beside_uniform_routing() -> None:
    experts = document_of(3.0)["experts"]
    assert experts["touched"] == 5.5
    assert experts["touched_if_uniform"] == pytest.approx(8 * (1 - 0.75**4))
    assert experts["tokens_per_micro_batch"] == 4


@pytest.mark.parametrize(("load_s", "holds"), [(3.0, True), (3.29, True), (3.31, False)])
def test_the_form_fails_where_layers_stay_more_than_a_tenth_above_the_bound(load_s: float, holds: bool) -> None:
    assert document_of(load_s)["verdict"]["holds"] is holds


@pytest.mark.parametrize(
    ("kind", "same_machine", "words"),
    [
        ("measured", True, "verdict: the form max(link, CPU, GPU) fails here: 4 of 4 layers took over 1.10 x it."),
        ("measured", False, "verdict: not tested: the rates are those of t4, this is a GPU (4 of 4 layers"),
        ("measured", None, "verdict: not tested: the rates are those of t4, this is a GPU (4 of 4 layers"),
        ("emulated", None, "verdict: not tested. The accelerator is emulated"),
    ],
)
def test_only_what_is_measured_on_the_profiles_own_machine_gives_a_verdict(
    kind: str, same_machine: bool | None, words: str
) -> None:
    document = document_of(5.0, kind=kind, same_machine=same_machine)
    tested = kind == "measured" and same_machine is True
    verdict = document["verdict"]
    assert (verdict["tested"], verdict["holds"]) == (tested, False if tested else None)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_layer(document, console)
    assert words in console.export_text()


def test_the_busiest_lane_by_prediction_is_measured_too_though_another_was_busier() -> None:
    graph = graph_of_layers()
    spans = [
        Span(span.task, span.lane, span.start_s, span.start_s + (9.0 if span.lane == GPU else 2.0))
        for span in trace_of(graph, 3.0).spans
    ]
    latency = document_of(3.0, measured=[Trace(tuple(spans), "measured")])["latency"]
    assert (latency["busiest_lane"], latency["busiest_lane_measured_s"]) == ("host_to_device0", 2.0)


def test_the_document_is_json() -> None:
    assert json.loads(json.dumps(document_of(3.0)))["layers_measured"] == 4

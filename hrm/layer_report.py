"""One layer measured, beside what the model and the simulator say of it: the falsifier of the model's form.

Eq. 12 says that a layer takes as long as its busiest resource: T = max(link, T_cpu, T_gpu). Where the measured latency
stays above that with the same rates, the form is wrong there, whatever the constants; by how much, and where the time
goes, is what this reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, Any

from hrm.cost import experts_touched
from hrm.errors import InputError
from hrm.graph import LaneKind, Op, Task, TaskGraph
from hrm.output_files import check_folder
from hrm.scenario import Scenario
from hrm.trace import Trace
from hrm.trace_files import facts_of_plan, write_trace

if TYPE_CHECKING:
    from rich.console import Console

    from hrm.model import ModelSpec

__all__ = ["check_trace_folder", "layer_document", "layer_latencies", "print_layer", "save_layer_traces"]

COPIES: Mapping[str, tuple[Op, int | None]] = {
    "D1 QKV to the CPU": (Op.OFFLOAD_QKV, None),
    "D2 hidden states to the GPU": (Op.LOAD_HIDDEN, 1),
    "D3 weights to the GPU": (Op.LOAD_WEIGHTS, None),
    "D4 KV cache to the GPU": (Op.LOAD_KV, None),
}
"""The four kinds of copies of the paper (Figure 6), by kind of task and part."""

EQ_12_LANES = (LaneKind.H2D, LaneKind.CPU, LaneKind.GPU)

TRACES = ("simulated", "measured")
"""Names of the two trace files."""

HOLDS = 1.10
"""Measured over bound up to which the form is said to hold here."""


def layer_latencies(graph: TaskGraph, trace: Trace) -> list[float]:
    """Seconds from the end of the layer before to the end of each layer but the first [s].

    A layer ends with the last task that computes it, or brings what the CPU computed of it back.
    """
    ends: dict[int, float] = {}
    layers = {task.id.layer for task in graph.tasks if task.id.op is Op.PRE_ATTENTION}
    for task, span in zip(graph.tasks, trace.spans, strict=True):
        ends_it = task.id.op in (Op.POST_ATTENTION, Op.EXPERTS) or (task.id.op is Op.LOAD_HIDDEN and task.id.part == 2)
        if ends_it and task.id.layer in layers:
            ends[task.id.layer] = max(ends.get(task.id.layer, 0.0), span.end_s)
    ordered = [ends[layer] for layer in sorted(ends)]
    return [late - early for early, late in pairwise(ordered)]


def layer_document(
    graph: TaskGraph,
    predicted_s: Sequence[float],
    simulated: Trace,
    measured: Sequence[Trace],
    *,
    counted: range,
    touched: Sequence[tuple[int, int]],
    model: ModelSpec,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything as one JSON document.

    Parameters
    ----------
    predicted_s : sequence of float
        Seconds of every task alone, from the profile's rates [s].
    measured : sequence of Trace
        Passes over the same graph.
    counted : range
        Layers in the steady state.
    touched : sequence of (int, int)
        Tokens, and experts they chose, of every micro-batch and layer.
    facts : mapping
        Plan, machine, device: copied in. There is a verdict only where `same_machine` is True: rates of another
        machine, or of one that may be another, do not test the form.
    """
    lanes = _lanes(graph, predicted_s, measured, counted)
    kinds = {kind.value for kind in EQ_12_LANES}
    bound = max((row["predicted_s"] for row in lanes if row["kind"] in kinds), default=0.0)
    busiest = max(lanes, key=lambda row: row["predicted_s"])
    latencies = [layer_latencies(graph, trace)[layer - 1] for trace in measured for layer in counted]
    simulated_s = mean(layer_latencies(graph, simulated)[layer - 1] for layer in counted)
    middle = median(latencies)
    low, high = _spread(latencies)
    tested = measured[0].kind == "measured" and facts["same_machine"] is True
    above = sum(latency > bound * HOLDS for latency in latencies)
    return {
        **facts,
        "kind": measured[0].kind,
        "layers_measured": len(latencies),
        "latency": {
            "measured_s": middle,
            "measured_p10_s": low,
            "measured_p90_s": high,
            "bound_s": bound,
            "busiest_lane": busiest["lane"],
            "busiest_lane_s": busiest["predicted_s"],
            "busiest_lane_measured_s": busiest["measured_s"],
            "simulated_s": simulated_s,
            "measured_over_bound": middle / bound if bound else None,
            "measured_over_busiest_lane": middle / busiest["predicted_s"] if busiest["predicted_s"] else None,
            "measured_over_simulated": middle / simulated_s if simulated_s else None,
        },
        "verdict": {
            "tested": tested,
            "layers_above": above,
            "holds": above < 0.9 * len(latencies) if tested else None,
            "threshold": HOLDS,
        },
        "lanes": lanes,
        "copies": _copies(graph, predicted_s, measured, counted),
        "experts": _experts(touched, model),
        "latencies_s": latencies,
    }


def _spread(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    tenths = quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def _layer_sums(
    graph: TaskGraph, seconds: Sequence[float], counted: range, key: Sequence[str | None]
) -> dict[str, list[float]]:
    """By what `key` says of each task, the sum over every counted layer."""
    found: dict[str, list[float]] = {name: [0.0] * len(counted) for name in key if name is not None}
    for task, value, name in zip(graph.tasks, seconds, key, strict=True):
        if name is not None and task.id.layer in counted:
            found[name][task.id.layer - counted.start] += value
    return found


def _durations(trace: Trace) -> list[float]:
    return [span.end_s - span.start_s for span in trace.spans]


def _rows(
    graph: TaskGraph,
    predicted_s: Sequence[float],
    measured: Sequence[Trace],
    counted: range,
    key: Sequence[str | None],
) -> dict[str, dict[str, float]]:
    """Predicted seconds and bytes of a layer, and the median of the measured ones, by what `key` says of each task."""
    predicted = _layer_sums(graph, predicted_s, counted, key)
    moved = _layer_sums(graph, [task.bytes_moved for task in graph.tasks], counted, key)
    passes = [_layer_sums(graph, _durations(trace), counted, key) for trace in measured]
    return {
        name: {
            "bytes": mean(moved[name]),
            "predicted_s": mean(predicted[name]),
            "measured_s": median(value for each in passes for value in each[name]),
        }
        for name in predicted
    }


def _lanes(
    graph: TaskGraph, predicted_s: Sequence[float], measured: Sequence[Trace], counted: range
) -> list[dict[str, Any]]:
    rows = _rows(graph, predicted_s, measured, counted, [str(task.lane) for task in graph.tasks])
    return [{"lane": str(lane), "kind": lane.kind.value, **rows[str(lane)]} for lane in graph.lanes]


def _copies(
    graph: TaskGraph, predicted_s: Sequence[float], measured: Sequence[Trace], counted: range
) -> list[dict[str, Any]]:
    def name(task: Task) -> str | None:
        for label, (op, part) in COPIES.items():
            if task.id.op is op and (part is None or task.id.part == part):
                return label
        return None

    rows = _rows(graph, predicted_s, measured, counted, [name(task) for task in graph.tasks])
    return [
        {
            "copy": label,
            **rows[label],
            "measured_bytes_per_s": rows[label]["bytes"] / rows[label]["measured_s"]
            if rows[label]["measured_s"] > 0
            else None,
        }
        for label in COPIES
        if label in rows
    ]


def _experts(touched: Sequence[tuple[int, int]], model: ModelSpec) -> dict[str, Any] | None:
    """Experts that micro-batches really touched, beside E * (1 - (1 - k/E)^B) of uniform routing."""
    if not model.is_moe or not touched:
        return None
    tokens = median(tokens for tokens, _ in touched)
    return {
        "experts": model.n_experts,
        "top_k": model.top_k,
        "tokens_per_micro_batch": tokens,
        "touched": mean(count for _, count in touched),
        "touched_if_uniform": mean(float(experts_touched(model, float(count))) for count, _ in touched),
    }


def check_trace_folder(folder: Path) -> None:
    """Refuse, before anything is measured, a folder that the traces could not be written to.

    Raises
    ------
    InputError
        It is a file, or the system does not let it be made or written to.
    """
    check_folder(folder, [f"{name}.json" for name in TRACES], f"--trace: {folder}")


def save_layer_traces(
    folder: Path,
    graph: TaskGraph,
    predicted_s: Sequence[float],
    simulated: Trace,
    measured: Trace,
    *,
    scenario: Scenario,
    plan: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """Write both traces into a folder, for `hrm diff` and Perfetto.

    Raises
    ------
    InputError
        The folder or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror or error}", where=f"--trace: {folder}") from None
    for name, trace in zip(TRACES, (simulated, measured), strict=True):
        origin = {"device": str(facts["device"]) if name == "measured" else str(facts["hardware"])}
        clock = 2e-5 + measured.makespan_s * 2.0**-23 if trace.kind == "measured" else 0.0
        about = facts_of_plan(scenario, plan, schedule=str(facts["schedule"]), clock_error_s=clock, origin=origin)
        write_trace(
            graph,
            trace,
            folder / f"{name}.json",
            plan_facts=about,
            predicted_s=predicted_s if name == "simulated" else None,
        )


def print_layer(document: Mapping[str, Any], console: Console) -> None:
    """Show it to a person."""
    from rich.table import Table

    from hrm.gantt import lane_in_words
    from hrm.trace_names import parse_lane

    def words(lane: str) -> str:
        return lane_in_words(parse_lane(lane), several=False)

    latency, verdict = document["latency"], document["verdict"]
    console.print(f"{document['title']}", markup=False, highlight=False)
    console.print(
        f"{document['layers_measured']} layers in the steady state of decode step {document['step']}, "
        f"schedule {document['schedule']}, on {document['device']}",
        markup=False,
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("latency of a layer", "ms", "measured /"):
        table.add_column(heading, justify="left" if heading.startswith("lat") else "right")
    spread = f"{latency['measured_p10_s'] * 1e3:.3f} to {latency['measured_p90_s'] * 1e3:.3f}"
    table.add_row(f"measured, median (p10 to p90: {spread})", f"{latency['measured_s'] * 1e3:.3f}", "")
    rows = (
        ("max(link, CPU, GPU), Eq. 12 with the profile's rates", "bound_s", "measured_over_bound"),
        (
            f"busiest lane ({words(latency['busiest_lane'])})",
            "busiest_lane_s",
            "measured_over_busiest_lane",
        ),
        ("simulated", "simulated_s", "measured_over_simulated"),
    )
    for label, key, ratio in rows:
        shown = "-" if latency[ratio] is None else f"{latency[ratio]:.2f}"
        table.add_row(label, f"{latency[key] * 1e3:.3f}", shown)
    console.print(table)
    lanes = Table(box=None, pad_edge=False, title="milliseconds of a layer, by lane", title_justify="left")
    for heading in ("lane", "predicted", "measured", "measured / predicted"):
        lanes.add_column(heading, justify="left" if heading == "lane" else "right")
    for row in document["lanes"]:
        lanes.add_row(words(row["lane"]), *_pair(row))
    console.print(lanes)
    if document["copies"]:
        copies = Table(box=None, pad_edge=False, title="copies of a layer", title_justify="left")
        for heading in ("copy", "MB", "predicted ms", "measured ms", "measured / predicted", "GB/s"):
            copies.add_column(heading, justify="left" if heading == "copy" else "right")
        for row in document["copies"]:
            rate = row["measured_bytes_per_s"]
            copies.add_row(
                row["copy"], f"{row['bytes'] / 1e6:,.2f}", *_pair(row), "-" if rate is None else f"{rate / 1e9:.2f}"
            )
        console.print(copies)
    experts = document["experts"]
    if experts is not None:
        console.print(
            f"experts touched by a micro-batch of {experts['tokens_per_micro_batch']:,.0f} tokens: "
            f"{experts['touched']:.2f} of {experts['experts']}; E(1-(1-k/E)^B) = {experts['touched_if_uniform']:.2f} "
            f"for uniform routing",
            markup=False,
            highlight=False,
        )
    console.print(_verdict(document, verdict), markup=False, highlight=False)


def _pair(row: Mapping[str, Any]) -> tuple[str, str, str]:
    ratio = f"{row['measured_s'] / row['predicted_s']:.2f}" if row["predicted_s"] > 0 else "-"
    return f"{row['predicted_s'] * 1e3:,.3f}", f"{row['measured_s'] * 1e3:,.3f}", ratio


def _verdict(document: Mapping[str, Any], verdict: Mapping[str, Any]) -> str:
    count = f"{verdict['layers_above']} of {document['layers_measured']} layers took over {verdict['threshold']:.2f} x"
    if document["kind"] == "emulated":
        return (
            f"verdict: not tested. The accelerator is emulated on this CPU; the rates are those of "
            f"{document['hardware']}, so ratios to them say nothing ({count} max(link, CPU, GPU))."
        )
    if not verdict["tested"]:
        return (
            f"verdict: not tested: the rates are those of {document['hardware']}, this is {document['device']} "
            f"({count} max(link, CPU, GPU))."
        )
    word = "holds" if verdict["holds"] else "fails"
    return f"verdict: the form max(link, CPU, GPU) {word} here: {count} it."

"""Tables of a simulated run on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hrm.gantt import op_in_words
from hrm.graph import Op
from hrm.units import GB, GIB
from simulator.critical_path import WAITING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["bare_table", "bubble_in_words", "print_replay", "tables_of_replay"]

COPY_WORDS = {
    "D1": "D1: QKV, device to host",
    "D2": "D2: hidden states, host to device",
    "D3": "D3: weights, host to device",
    "D4": "D4: KV cache, host to device",
    "other": "other: stores to the host, staging, disk, between GPUs",
}
LEVEL_WORDS = {"gpu": "GPU memory", "cpu": "CPU memory", "disk": "disk"}


def print_replay(document: Mapping[str, Any], console: Console) -> None:
    """Print what `simulator.summary.simulate_command` found."""
    from rich.markup import escape

    shared = "with contention" if document["contention"] else "without contention"
    layers, every = document["layers"], document["layers_of_model"]
    part = f", {layers} of {every} layers," if layers < every else ""
    what = f"{document['model']}{part} on {document['hardware']}, {document['workload']}"
    replayed = f"{document['tasks']:,} tasks replayed in {document['simulate_seconds']:.2f} s"
    console.print(escape(f"{what}, schedule {document['schedule']}, {shared}: {replayed}"))
    for table in tables_of_replay(document):
        console.print(table)
    console.print(bubble_in_words(document))


def bubble_in_words(document: Mapping[str, Any]) -> str:
    """The bubble in words: what the schedule leaves idle above the bound."""
    latency, bubble = document["step_latency_s"], document["bubble_s"]
    if document["step"] is None:
        return "one generated token: it comes out of prefill, there is no decode step"
    bound = latency - bubble
    text = f"bound by the busiest lane: {bound:.4g} s per step, {document['bound_layer_latency_s']:.4g} s per layer; "
    if bubble < -1e-6 * latency:  # work of the step was done ahead of it, which the steps after it pay for
        return text + f"{-bubble:.4g} s of it ran ahead, in the step before"
    return text + f"bubble above it {max(0.0, bubble):.4g} s per step, {max(0.0, bubble) / latency:.1%}"


def tables_of_replay(document: Mapping[str, Any]) -> list[Table]:
    """Tables of a run: predicted beside simulated; lanes, critical path, copies and memory of one decode step."""
    tables = [_against_prediction(document)]
    if document["step"] is not None:
        tables += [_lanes(document), _path(document), _copies(document)]
    memory = _memory(document)
    return tables if memory is None else [*tables, memory]


def bare_table(*heads: str) -> Table:
    """Text in the first column, numbers in the others."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    return table


def _against_prediction(document: Mapping[str, Any]) -> Table:
    table = bare_table("", "predicted", "simulated", "predicted / simulated")
    names = {
        "throughput_tokens_per_s": "throughput, token/s",
        "prefill_s": "prefill, s",
        "decode_s": "decode, s",
        "step_latency_s": "the decode step in the middle, s",
        "layer_latency_s": "per layer of it, s",
    }
    for key, words in names.items():
        ratio = document["predicted_over_simulated"][key]
        table.add_row(
            words,
            f"{document['predicted'][key]:,.4g}",
            f"{document[key]:,.4g}" if document[key] else "-",
            "-" if ratio is None else f"{ratio:.3f}",
        )
    return table


def _seconds(seconds: float) -> str:
    return "<0.001" if 0.0 < seconds < 0.0005 else f"{seconds:,.3f}"


def _percent(share: float) -> str:
    return "<0.1%" if 0.0 < share < 0.0005 else f"{share:.1%}"


def _lane_text(lane: str, lanes: Mapping[str, Any]) -> str:
    """A lane in words; which GPU it belongs to only where there are several."""
    kind = lane.rstrip("0123456789")
    device = lane.removeprefix(kind)
    words = {"gpu": "GPU", "cpu": "CPU"}.get(kind, kind.replace("_", " "))
    several = len({name.removeprefix(name.rstrip("0123456789")) for name in lanes} - {""}) > 1
    if not (several and device):
        return words
    return f"GPU {device}" if kind == "gpu" else f"{words}, GPU {device}"


def _lanes(document: Mapping[str, Any]) -> Table:
    table = bare_table(f"lanes in decode step {document['step']}", "busy, s", "of the step")
    lanes = document["lanes"]
    for lane, use in sorted(lanes.items(), key=lambda entry: -entry[1]["busy_s"]):
        table.add_row(_lane_text(lane, lanes), _seconds(use["busy_s"]), _percent(use["utilisation"]))
    return table


def _path(document: Mapping[str, Any]) -> Table:
    table = bare_table("critical path of the step", "s", "share")
    for name, seconds in document["critical_path"].items():
        words = name if name == WAITING else op_in_words(Op(name))
        table.add_row(words, _seconds(seconds), _percent(seconds / document["step_latency_s"]))
    return table


def _copies(document: Mapping[str, Any]) -> Table:
    table = bare_table("copies of the step", "GB", "s")
    for name, copied in document["copies"].items():
        none = copied["bytes"] == 0.0
        table.add_row(
            COPY_WORDS[name],
            "-" if none else f"{copied['bytes'] / GB:,.4g}",
            "-" if none else _seconds(copied["seconds"]),
        )
    return table


def _memory(document: Mapping[str, Any]) -> Table | None:
    """Peaks beside the plan's; None where the trace has no memory."""
    held = {level: use for level, use in document["memory"].items() if use["peak_bytes"] is not None}
    if not held:
        return None
    table = bare_table("peak of memory", "plan, GiB", "these steps, GiB")
    for level, use in held.items():
        table.add_row(
            LEVEL_WORDS.get(level, level),
            f"{use['stated_peak_bytes'] / GIB:,.2f}",
            f"{use['peak_bytes'] / GIB:,.2f}",
        )
    return table

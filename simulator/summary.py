"""What a person sees of a simulated run, beside what the plan predicted; and the same as a JSON document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrm.errors import InputError
from hrm.graph import TaskGraph
from hrm.prediction import Prediction
from hrm.trace import Trace, chrome_events
from simulator.replay import Replay

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["replay_document", "replay_tables", "save_trace"]


def replay_document(replay: Replay, prediction: Prediction, schedule: str, *, contention: bool) -> dict[str, Any]:
    """The run as one JSON document; ratios are predicted over simulated."""
    simulated = {
        "throughput_tokens_per_s": replay.throughput_tokens_per_s,
        "prefill_s": replay.prefill_s,
        "decode_s": replay.decode_s,
        "layer_latency_s": replay.layer_latency_s,
    }
    predicted = {name: float(getattr(prediction, name)) for name in simulated}
    return {
        "schedule": schedule,
        "contention": contention,
        **simulated,
        "bound_layer_latency_s": replay.bound_layer_latency_s,
        "bubble_s": replay.layer_latency_s - replay.bound_layer_latency_s,
        "lanes": {
            lane: {"busy_s": busy, "utilisation": replay.utilisation[lane]} for lane, busy in replay.busy_s.items()
        },
        "seconds_by_op": dict(replay.seconds_by_op),
        "predicted": predicted,
        "predicted_over_simulated": {
            name: predicted[name] / value if value else None for name, value in simulated.items()
        },
        "tasks": replay.tasks,
        "simulate_seconds": replay.simulate_seconds,
    }


def replay_tables(document: dict[str, Any]) -> list[Table]:
    """Tables of a run: predicted beside simulated, and the lanes of one decode step."""
    from rich import box
    from rich.table import Table

    first = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("", "predicted", "simulated", "predicted / simulated"):
        first.add_column(head, justify="right" if head else "left")
    names = {
        "throughput_tokens_per_s": "throughput, token/s",
        "prefill_s": "prefill, s",
        "decode_s": "decode, s",
        "layer_latency_s": "per layer in the middle step, s",
    }
    for key, words in names.items():
        ratio = document["predicted_over_simulated"][key]
        first.add_row(
            words,
            f"{document['predicted'][key]:,.4g}",
            f"{document[key]:,.4g}",
            "-" if ratio is None else f"{ratio:.3f}",
        )
    lanes = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("lane, in the middle decode step", "seconds", "busy"):
        lanes.add_column(head, justify="left" if "lane" in head else "right")
    for lane, use in sorted(document["lanes"].items(), key=lambda entry: -entry[1]["busy_s"]):
        lanes.add_row(lane.rstrip("0123456789").replace("_", " "), f"{use['busy_s']:.4g}", f"{use['utilisation']:.0%}")
    return [first, lanes]


def save_trace(graph: TaskGraph, trace: Trace, path: Path) -> None:
    """Write a trace that Perfetto and chrome://tracing open.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    try:
        path.write_text(json.dumps(chrome_events(graph, trace)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None

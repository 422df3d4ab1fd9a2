"""What a run of one batch took, from its spans: the same definitions as in simulation.

Prefill ends with the last token it gives, decode with its own last; a step lasts from the last token before it to its
own last. Where a run was cut into graphs their lengths add up; making graphs, while every lane is idle, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hrm.graph import Op
from hrm.trace import Span, Trace
from hrm.validation.forecasts import COPIES
from hrm.validation.records import RawPiece, pieces_of

__all__ = ["MeasuredRun", "measure_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run of one batch.

    Attributes
    ----------
    prefill_s, decode_s : float
        [s]
    throughput_tokens_per_s : float
        Generated tokens over both [token/s].
    layer_latency_s, prefill_layer_s : float
        Per layer: of a decode step, mean over steps; of prefill [s].
    steps_s : tuple of float
        Per layer, of every decode step [s].
    ops_s, copies_s : mapping of str to float
        Seconds of all tasks of a kind in a layer of decode, mean over the steps but first and last where there are
        others; D1 to D4 [s].
    """

    prefill_s: float
    decode_s: float
    throughput_tokens_per_s: float
    layer_latency_s: float
    prefill_layer_s: float
    steps_s: tuple[float, ...]
    ops_s: Mapping[str, float]
    copies_s: Mapping[str, float]


def measure_run(run: Mapping[str, Any], *, layers: int, requests: int, generated: int) -> MeasuredRun:
    """What a run took, from its record.

    Parameters
    ----------
    run : mapping
        As `hrm.validation.records` has it.
    layers, requests, generated : int
        Of the model, of the batch, and tokens for each.
    """
    pieces = pieces_of(run)
    prefill, decode, steps = 0.0, 0.0, []
    for piece in pieces:
        ahead = 0.0
        if piece.steps.prefill:
            ahead = piece.trace.makespan_s
            if piece.steps.last > piece.steps.first:
                ahead = _last_sample(piece.trace, "prefill", 0)
            prefill += ahead
        before = ahead
        for step in range(piece.steps.first, piece.steps.last):
            end = _last_sample(piece.trace, "decode", step)
            steps.append((end - before) / layers)
            before = end
        decode += before - ahead
    inner = range(1, len(steps) - 1) if len(steps) > 2 else range(len(steps))
    ops: dict[str, float] = {}
    copies: dict[str, float] = {}
    for span in _decode_spans(pieces):
        if span.task.step not in inner:
            continue
        seconds = (span.end_s - span.start_s) / (layers * len(inner))
        ops[span.task.op.value] = ops.get(span.task.op.value, 0.0) + seconds
        for name, (op, part) in COPIES.items():
            if span.task.op is op and (part is None or span.task.part == part):
                copies[name] = copies.get(name, 0.0) + seconds
    return MeasuredRun(
        prefill_s=prefill,
        decode_s=decode,
        throughput_tokens_per_s=requests * generated / (prefill + decode),
        layer_latency_s=decode / (layers * max(1, generated - 1)),
        prefill_layer_s=prefill / layers,
        steps_s=tuple(steps),
        ops_s=ops,
        copies_s=copies,
    )


def _decode_spans(pieces: Sequence[RawPiece]) -> list[Span]:
    return [span for piece in pieces for span in piece.trace.spans if span.task.phase == "decode"]


def _last_sample(trace: Trace, phase: str, step: int) -> float:
    return max(
        span.end_s
        for span in trace.spans
        if span.task.op is Op.SAMPLE and span.task.phase == phase and span.task.step == step
    )

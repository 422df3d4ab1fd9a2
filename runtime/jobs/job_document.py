"""A job as one JSON document: what it was, what it took, and what was predicted of it (docs/jobs.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hrm.gantt import LANE_WORDS
from hrm.graph import Lane, Phase
from runtime.device_names import device_name, same_gpu
from runtime.jobs.job_watch import JobWatch, Stretch
from runtime.jobs.options import JobOptions
from runtime.jobs.preparation import Work
from runtime.jobs.prices import Price, price_stretches
from runtime.machine_facts import describe_machine
from runtime.run_document import memory_rows

__all__ = ["Measured", "describe_job", "describe_measured"]

MOST_POINTS = 400
"""Of the timeline: more are not seen in a figure."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """What was measured of a job, however it ended.

    Attributes
    ----------
    load_s, run_s, bookkeeping_s : float
        Until all weights were where the plan has them; from then to the end; of that, writing results [s].
    phases : mapping
        Seconds by phase, those of laying out included [s].
    loading, running : mapping of str to int
        Peaks of memory by level [byte].
    on_disk : int
        Size of the file that is the disk tier [byte].
    """

    watch: JobWatch
    load_s: float = 0.0
    run_s: float = 0.0
    bookkeeping_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    loading: Mapping[str, int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    on_disk: int = 0


def describe_job(options: JobOptions, work: Work) -> dict[str, Any]:
    """What is known of a job before it runs."""
    scenario = work.job.scenario
    return {
        "model": scenario.model.name,
        "hardware": scenario.profile.name,
        "plan": str(work.job.file),
        "schedule": work.job.schedule,
        "device": work.machine.kind,
        "device_name": device_name(work.machine),
        "emulated": work.machine.emulated,
        "same_gpu": same_gpu(scenario.profile.gpu.name, work.machine),
        "input": str(options.source),
        "output": str(options.output),
        "temperature": options.sampling.temperature,
        "top_p": options.sampling.top_p,
        "seed": options.sampling.seed,
        "requests": len(work.requests),
        "finished_before": work.before,
        "refused": [{"line": fault.line, "why": fault.fact} for fault in work.faults],
        "batches": [len(batch.requests) for batch in work.batches],
        "finished": 0,
        "generated_tokens": 0,
        "stopped": False,
    }


def describe_measured(work: Work, measured: Measured, rates: Sequence[float]) -> dict[str, Any]:
    """What a job took, beside the cost model's account of the same graphs; ratios are predicted over measured.

    Parameters
    ----------
    work : Work
    measured : Measured
    rates : sequence of float
        Predicted for every batch, were all its requests to run to the plan's length [token/s].
    """
    scenario, watch = work.job.scenario, measured.watch
    prices = price_stretches(scenario, work.batches, watch.stretches)
    tokens = watch.stretches[-1].tokens if watch.stretches else 0
    found: dict[str, float] = {
        "throughput_tokens_per_s": tokens / measured.run_s if measured.run_s > 0.0 else 0.0,
        "prefill_s": measured.phases.get("prefill", 0.0),
        "decode_s": measured.phases.get("decode", 0.0),
    }
    seconds = {phase: math.fsum(each.seconds for each in prices[phase]) for phase in prices}
    whole = math.fsum(seconds.values())
    predicted = {
        "throughput_tokens_per_s": tokens / whole if whole > 0.0 else 0.0,
        "prefill_s": seconds["prefill"],
        "decode_s": seconds["decode"],
    }
    sizes = [len(batch.requests) for batch in work.batches]
    relative = math.fsum(size / rate for size, rate in zip(sizes, rates, strict=True))
    return {
        "finished": watch.reasons.total(),
        "finish_reasons": dict(watch.reasons),
        "prompt_tokens": watch.prompt_tokens,
        "generated_tokens": watch.done_tokens,
        "load_s": measured.load_s,
        "run_s": measured.run_s,
        **found,
        "bookkeeping_s": measured.bookkeeping_s,
        "laid_out_s": watch.laid_out_s,
        "predicted": predicted,
        "predicted_over_measured": {
            key: predicted[key] / value if value > 0.0 else None for key, value in found.items()
        },
        "predicted_throughput_tokens_per_s": sum(sizes) / relative,
        "lanes": _lanes(watch, prices, found),
        "timeline": _timeline(watch.stretches, prices),
        "memory": memory_rows(
            scenario,
            work.job.policy,
            emulated=work.machine.emulated,
            loading=measured.loading,
            running=measured.running,
            on_disk=measured.on_disk,
        ),
        "machine": describe_machine(work.machine),
    }


def _lanes(
    watch: JobWatch, prices: Mapping[Phase, Sequence[Price]], found: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """By lane: seconds busy, measured and predicted, and what with."""
    order, rows = list(LANE_WORDS), {}
    lanes: set[Lane] = {lane for _, lane, _ in watch.busy_s}
    ran = found["prefill_s"] + found["decode_s"]
    for lane in sorted(lanes, key=lambda lane: (order.index(lane.kind), lane.device or 0)):
        row: dict[str, Any] = {}
        tasks: dict[str, dict[str, float]] = {}
        for phase in prices:
            mine = {op.value: took for (at, on, op), took in watch.busy_s.items() if at == phase and on == lane}
            row[f"{phase}_s"] = math.fsum(mine.values())
            row[f"predicted_{phase}_s"] = math.fsum(each.lanes.get(lane.kind.value, 0.0) for each in prices[phase])
            tasks[phase] = dict(sorted(mine.items(), key=lambda pair: -pair[1]))
        row["utilisation"] = (row["prefill_s"] + row["decode_s"]) / ran if ran > 0.0 else 0.0
        rows[str(lane)] = row | {"tasks": tasks}
    return rows


def _timeline(stretches: Sequence[Stretch], prices: Mapping[Phase, Sequence[Price]]) -> list[dict[str, Any]]:
    """Tokens by when they were there, measured and predicted, as few points as a figure needs."""
    left = {phase: iter(prices[phase]) for phase in prices}
    points, predicted = [], 0.0
    for each in stretches:
        predicted += next(left[each.phase]).seconds
        points.append(
            {
                "batch": each.batch,
                "phase": each.phase,
                "requests": each.requests,
                "at_s": each.end_s,
                "predicted_at_s": predicted,
                "tokens": each.tokens,
            }
        )
    every = -(-len(points) // MOST_POINTS) or 1
    return [
        point
        for number, point in enumerate(points)
        if number % every == 0
        or number == len(points) - 1
        or points[number + 1]["batch"] != point["batch"]  # where a batch ends, and its prefill, shows in any case
        or point["phase"] == "prefill"
    ]

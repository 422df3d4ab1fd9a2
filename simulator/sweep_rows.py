"""The rows of one point of a sweep: for each schedule the best plan, predicted and simulated, beside the bound.

A point that does not fit, or that makes no sense, is a row with a reason. The bound is what the cost model predicts for
the same machine if its CPU memory were no limit, under whatever schedule is best then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from hrm.errors import HrmError, InfeasibleError, InputError
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.prediction import Prediction
from hrm.scenario import Scenario
from hrm.units import GIB
from simulator.sweep_points import NOT_SEARCHED, Study, profile_keys, scenario_at, settled_pins
from simulator.sweep_values import SECTIONS, Point

if TYPE_CHECKING:
    from simulator.replay import Replay

__all__ = ["BOUND_TIMES", "Bounds", "Row", "solve_point"]

Row = dict[str, Any]

BOUND_TIMES: Final = 100.0
"""CPU memory of the bound: so many times the largest of the sweep."""

GROWN: Final = 1.001
"""A throughput that a longer batch would raise by more than this is limited by the hours."""

_LIMITS: Final = {
    "gpu": "GPU memory",
    "gpu_memory": "GPU memory (0.86 of the card)",
    "cpu": "CPU memory",
    "cpu_memory": "CPU memory (0.8 of the host)",
    "disk": "disk space",
    "lock": "the limit of page-locked memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Throughput where CPU memory is no limit, and what binds then."""

    tokens_per_s: float | None
    bottleneck: str
    limits: str


Bounds = dict[Point, Bound]
"""Bounds found so far by what they depend on, which is not the CPU memory."""


def solve_point(study: Study, point: Point, bounds: Bounds) -> list[Row]:
    """The rows of a point, one per schedule; what does not fit has a reason in place of numbers."""
    varied: Row = {axis.name: value for axis, value in zip(study.axes, point, strict=True)}
    try:
        scenario, pins = scenario_at(study, point)
    except InputError as error:
        return [varied | {"schedule": name, "reason": _one_line(error)} for name in study.schedules]
    for axis in study.axes:
        if axis.times or len(axis.keys) > 1 or axis.keys[0] in SECTIONS:
            for key in profile_keys(axis, study.profiles[_hw_of(study, point)]):
                varied[key] = scenario.profile.quantities[key].value
    bound = _bound_of(study, point, bounds)
    shared: Row = {
        "bound_tokens_per_s": bound.tokens_per_s,
        "bound_bottleneck": bound.bottleneck,
        "bound_limits": bound.limits,
    }
    return [varied | {"schedule": name} | shared | _solved(study, scenario, pins, name) for name in study.schedules]


def _hw_of(study: Study, point: Point) -> str:
    names = [value for axis, value in zip(study.axes, point, strict=True) if axis.keys == ("hw",)]
    return str(names[0]) if names else study.hw


def _solved(study: Study, scenario: Scenario, pins: Pins, name: str) -> Row:
    """What one schedule makes of a scenario."""
    try:
        settled = settled_pins(pins, name)
        policy, prediction = _plan_of(study, scenario, settled, name)
    except HrmError as error:
        return {"reason": _why(error)}
    priced = name != "static_experts"  # experts on both sides are in the simulator only
    row: Row = {
        "predicted_tokens_per_s": prediction.throughput_tokens_per_s if priced else None,
        "bottleneck": prediction.bottleneck if priced else "",
        "limits": _limits(study, scenario, settled, policy, prediction, searched=name not in NOT_SEARCHED),
        "ran": policy.schedule if name == "best" else name,
        "batch_size": policy.batch_size,
        "micro_batch_size": policy.micro_batch_size,
        "num_micro_batches": policy.num_micro_batches,
        "attention_on_gpu": int(policy.attention_on_gpu),
        "ffn_on_gpu": int(policy.ffn_on_gpu),
        "weights_on_gpu": policy.weights_on_gpu,
        "weights_on_cpu": max(0.0, 1.0 - policy.weights_on_gpu - policy.weights_on_disk),
        "weights_on_disk": policy.weights_on_disk,
        "kv_on_gpu": policy.kv_on_gpu,
        "kv_on_cpu": max(0.0, 1.0 - policy.kv_on_gpu - policy.kv_on_disk),
        "kv_on_disk": policy.kv_on_disk,
        "gpu_peak_bytes": prediction.memory["gpu"].peak_bytes,
        "cpu_peak_bytes": prediction.memory["cpu"].peak_bytes,
        "cpu_limit_bytes": prediction.memory["cpu"].limit_bytes,
        "batch_seconds": prediction.batch_s if priced and study.cost_model == "full" else None,
    }
    if study.simulate:
        from simulator.replay import replay_plan

        try:
            replay = replay_plan(scenario, policy, row["ran"], contention=study.contention)
            row["simulated_tokens_per_s"] = replay.throughput_tokens_per_s
            if not priced:
                row |= {"bottleneck": _busiest(replay), "batch_seconds": replay.prefill_s + replay.decode_s}
        except InputError as error:
            row["reason"] = f"not simulated: {_one_line(error)}"
    return row


def _busiest(replay: Replay) -> str:
    """Phase and lane that set the larger part of a simulated run; of prefill only that it does."""
    if replay.prefill_s > replay.decode_s:
        return "prefill"
    return f"decode: {max(replay.busy_s, key=lambda lane: replay.busy_s[lane]).rstrip('0123456789')}"


def _plan_of(study: Study, scenario: Scenario, pins: Pins, name: str) -> tuple[Policy, Prediction]:
    """The best plan of a schedule: of the search, or of those it does not have."""
    if name not in NOT_SEARCHED:
        return _find(study, scenario, pins, explain=True)
    from simulator.own_plans import Candidates, cpu_only_plan

    if name == "cpu_only":
        return cpu_only_plan(scenario, pins, study.max_hours)
    from hrm.schedules import SCHEDULES
    from simulator.replay import replay_plan

    tried = Candidates(scenario=scenario, pins=pins, max_hours=study.max_hours).of(SCHEDULES[name])
    return max(
        tried,
        key=lambda entry: replay_plan(scenario, entry[0], name, contention=study.contention).throughput_tokens_per_s,
    )


def _find(
    study: Study, scenario: Scenario, pins: Pins, *, explain: bool, hours: float = 0.0
) -> tuple[Policy, Prediction]:
    if study.cost_model == "paper":
        from hrm.paper_search import find_paper_policy

        paper = find_paper_policy(scenario, pins)
        return paper.policy, paper.prediction
    from hrm.search import find_policy

    if pins.weights_on_gpu:  # experts computed on the CPU keep no weights on the GPU (F_g = 0: r_w = 0)
        if pins.ffn_on_gpu is False:
            raise InputError(
                "experts computed on the CPU keep no weights on the GPU", where="--weights-on-gpu", way_out="0"
            )
        pins = replace(pins, ffn_on_gpu=True)
    pins.check_counts(scenario.workload.num_requests)
    found = find_policy(scenario, pins, max_hours=hours or study.max_hours, explain=explain)
    return found.policy, found.prediction


def _bound_of(study: Study, point: Point, bounds: Bounds) -> Bound:
    """The best prediction where CPU memory is no limit, once for all points that differ in nothing else."""
    alone = [axis.keys == ("cpu.memory",) for axis in study.axes]
    key = tuple(value for value, is_memory in zip(point, alone, strict=True) if not is_memory)
    if key not in bounds:
        largest = tuple(
            max(axis.values, key=float) if is_memory else value
            for axis, value, is_memory in zip(study.axes, point, alone, strict=True)
        )
        bounds[key] = _solve_bound(study, largest)
    return bounds[key]


def _solve_bound(study: Study, point: Point) -> Bound:
    try:
        memory = scenario_at(study, point)[0].profile.cpu.memory_bytes
        scenario, pins = scenario_at(study, point, cpu_memory_bytes=min(1e18, BOUND_TIMES * memory))
        policy, prediction = _find(study, scenario, pins, explain=False)
    except HrmError:
        return Bound(tokens_per_s=None, bottleneck="", limits="")
    return Bound(
        tokens_per_s=prediction.throughput_tokens_per_s,
        bottleneck=prediction.bottleneck,
        limits=_limits(study, scenario, pins, policy, prediction),
    )


def _limits(
    study: Study, scenario: Scenario, pins: Pins, policy: Policy, prediction: Prediction, *, searched: bool = True
) -> str:
    """What bounds the batch besides memory: "requests" where it holds all, "hours" where a longer one is better."""
    if study.cost_model == "paper" or pins.batch_size is not None:
        return ""
    requests = scenario.workload.num_requests
    if policy.batch_size >= requests:
        return "requests"
    if not searched:
        return ""  # what a longer batch would give is not looked at
    fewer = max(1, prediction.num_batches - 1)
    larger = -(-requests // fewer)
    if prediction.batch_s * larger / policy.batch_size <= study.max_hours * 3600.0:
        return ""
    _, unhurried = _find(study, scenario, pins, explain=False, hours=1e6)
    return "hours" if unhurried.throughput_tokens_per_s > GROWN * prediction.throughput_tokens_per_s else ""


def _why(error: HrmError) -> str:
    """A reason in few words: which limit by how much, where the error says so."""
    if isinstance(error, InfeasibleError) and error.limit in _LIMITS and error.missing_bytes > 0:
        return f"does not fit: {error.missing_bytes / GIB:,.2f} GiB over {_LIMITS[error.limit]}"
    return _one_line(error)


def _one_line(error: HrmError) -> str:
    return " ".join(str(error).split()).replace("#", "no. ")

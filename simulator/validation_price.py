"""What the simulator says of a candidate of `hrm validate run`: a batch of it, and a layer of decode task by task."""

from __future__ import annotations

from typing import Any

from hrm.gantt import layer_panel
from hrm.graph import Task
from hrm.policy import Policy
from hrm.rates import derive_rates
from hrm.scenario import Scenario
from hrm.schedules import Steps
from hrm.validation.fitting import Simulator
from hrm.validation.forecasts import COPIES, Forecast, forecast_of
from hrm.validation.procedure import Forecaster
from hrm.validation.records import piece_document
from hrm.validation.trace_fit import Seconds
from simulator.critical_path import step_window
from simulator.durations import roofline_durations
from simulator.replay import replay_plan, step_trace

__all__ = ["forecaster", "middle_layers", "simulate_candidate", "simulate_contexts", "trace_simulator"]

CONTEXTS = 5
"""Decode steps whose latency is shown over the context."""


def simulate_candidate(scenario: Scenario, policy: Policy, schedule: str) -> Forecast:
    """Simulate one batch: seconds of its phases, and of a layer in the middle of decode by kind of task.

    Raises
    ------
    InputError
        The schedule cannot run the policy.
    """
    replay = replay_plan(scenario, policy, schedule)
    found = forecast_of(scenario, policy, replay.prefill_s, replay.decode_s)
    steps = scenario.workload.generation_length - 1
    if steps == 0:
        return found | {"ops": {}, "copies": {}}
    step = steps // 2
    graph, trace = step_trace(scenario, policy, schedule, step=step)
    alone = roofline_durations(derive_rates(scenario.profile, scenario.formats))
    ops: dict[str, dict[str, float]] = {}
    copies: dict[str, dict[str, float]] = {}
    layers = scenario.model.n_layers
    for task, span in zip(graph.tasks, trace.spans, strict=True):
        if task.id.phase != "decode" or task.id.step != step:
            continue
        for rows, name in ((ops, task.id.op.value), (copies, _copy_of(task))):
            if name is not None:
                row = rows.setdefault(name, {"alone_s": 0.0, "simulated_s": 0.0, "bytes": 0.0})
                row["alone_s"] += alone(task) / layers
                row["simulated_s"] += (span.end_s - span.start_s) / layers
                row["bytes"] += task.bytes_moved / layers
    return found | {"ops": ops, "copies": copies}


def _copy_of(task: Task) -> str | None:
    for name, (op, part) in COPIES.items():
        if task.id.op is op and (part is None or task.id.part == part):
            return name
    return None


def simulate_contexts(scenario: Scenario, policy: Policy, schedule: str) -> list[dict[str, Any]]:
    """Seconds of a layer in a few decode steps from the first to the last: latency over the context."""
    steps = scenario.workload.generation_length - 1
    wanted = sorted({1 + round(i * (steps - 3) / (CONTEXTS - 1)) for i in range(CONTEXTS)}) if steps > 3 else []
    found = []
    for step in wanted:
        graph, trace = step_trace(scenario, policy, schedule, step=step)
        seconds = step_window(graph, trace, step).seconds / scenario.model.n_layers
        context = scenario.workload.mean_prompt_tokens + step + 1
        found.append({"step": step, "context_tokens": context, "layer_s": seconds})
    return found


def middle_layers(scenario: Scenario, policy: Policy, schedule: str) -> dict[str, Any] | None:
    """Two layers of decode as simulated, to be drawn beside the measured ones; None without a decode step."""
    steps = scenario.workload.generation_length - 1
    if steps == 0:
        return None
    step = steps // 2
    _, trace = step_trace(scenario, policy, schedule, step=step)
    panel = layer_panel(trace, step, title="")
    spans = piece_document(Steps(first=step, last=step + 1), panel.trace.spans, trace.kind)
    marks = [list(mark) for mark in panel.marks]
    return {"step": step, "start_s": panel.start_s, "end_s": panel.end_s, "marks": marks, "spans": spans}


def forecaster() -> Forecaster:
    """All of it, as `hrm.validation` takes it."""
    return Forecaster(simulate_candidate, simulate_contexts, middle_layers)


def seconds_alone(scenario: Scenario) -> Seconds:
    """Seconds of a task alone, by the rates of any profile with the formats of a scenario."""
    return lambda profile: roofline_durations(derive_rates(profile, scenario.formats))


def trace_simulator() -> Simulator:
    """What `hrm fit --trace` takes of the simulator."""
    return Simulator(seconds_alone, simulate_candidate)

"""What the rates of a profile say of a range of steps: every task alone, and replayed with what lanes share."""

from __future__ import annotations

from hrm.graph import TaskGraph
from hrm.layout import Layout
from hrm.policy import Policy
from hrm.rates import derive_rates
from hrm.scenario import Scenario
from hrm.schedules import Steps, schedule_graph
from hrm.trace import Trace
from simulator.contention import sharing_of
from simulator.durations import roofline_durations
from simulator.engine import simulate

__all__ = ["price_steps"]


def price_steps(
    scenario: Scenario, policy: Policy, schedule: str, steps: Steps
) -> tuple[TaskGraph, list[float], Trace]:
    """Graph of some steps, seconds of every task alone [s], and its replay.

    Raises
    ------
    InputError
        The schedule cannot run the policy.
    """
    rates = derive_rates(scenario.profile, scenario.formats)
    graph = schedule_graph(Layout(scenario, policy), schedule, steps)
    alone = roofline_durations(rates)
    trace = simulate(graph, roofline_durations(rates, shared=True), sharing_of(scenario.profile, rates))
    return graph, [alone(task) for task in graph.tasks], trace

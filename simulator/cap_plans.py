"""What `hrm validate memory` asks of the simulator: the best plan of a schedule on a machine, by simulation."""

from __future__ import annotations

from collections.abc import Callable

from hrm.errors import InputError
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.scenario import Scenario
from hrm.schedules import SCHEDULES
from hrm.validation.candidates import as_run, settled
from hrm.validation.caps_study import Theory
from simulator.compare import take_fastest
from simulator.own_plans import Candidates
from simulator.replay import replay_plan
from simulator.validation_price import simulate_candidate

__all__ = ["best_plan_of", "cap_theory"]


def best_plan_of(scenario: Scenario, max_hours: float, schedule: str, why_not: Callable[[Policy], str]) -> Policy:
    """Of several plans that the cost model finds for a schedule, the one whose batch simulation puts first.

    Raises
    ------
    InfeasibleError
        None fits.
    InputError
        None of them can be run.
    """
    tried = Candidates(scenario=scenario, pins=Pins(), max_hours=max_hours).of(SCHEDULES[schedule])

    def rate(policy: Policy) -> float:
        batch = settled(scenario, policy)
        why = why_not(batch)
        if why:
            raise InputError(why)
        return replay_plan(as_run(scenario, policy.batch_size), batch, schedule).throughput_tokens_per_s

    return settled(scenario, take_fastest(tried, rate))


def cap_theory() -> Theory:
    """All of it, as `hrm.validation` takes it."""
    return Theory(best_plan_of, simulate_candidate)

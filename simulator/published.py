"""A row that was measured, simulated: the policy that ran, under the schedule of the system that ran it."""

from __future__ import annotations

from hrm.published.constants import Values
from hrm.published.model import policy_of_row, scenario_for
from hrm.published.rows import Row
from hrm.published.settings import find_system
from hrm.published.systems import behaviour_of
from simulator.replay import Replay, replay_plan

__all__ = ["replay_row"]


def replay_row(row: Row, values: Values) -> Replay:
    """Simulate a row.

    A system whose copies and computation do not overlap does one thing after the other, on each GPU of a pipeline.

    Parameters
    ----------
    row : Row
    values : mapping of str to float
        Constants by name; those left out have their public value.

    Raises
    ------
    InputError, InfeasibleError
        The row cannot be predicted; the message says why.
    """
    system = find_system(row)
    behaviour = behaviour_of(system)
    policy, _ = policy_of_row(row)
    scenario = scenario_for(row, values, num_requests=policy.batch_size)
    schedule = system.schedule if behaviour.overlaps else "serial"
    return replay_plan(scenario, policy, schedule, gathers_weights=behaviour.gathers_weights)

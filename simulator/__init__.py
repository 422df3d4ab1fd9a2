"""Discrete-event simulation of a plan's task graph.

The cost model of `hrm` says how long each lane (GPU, CPU, either direction of the link, staging copy, disk) is busy and
takes the longest as the time of a pass. It does not see lanes wait for each other. The simulator walks the tasks of a
schedule one by one, and so prices those waits and the bandwidth that lanes share.

It imports `hrm`, never `runtime` and never torch.

The names below are imported when they are first used.
"""

from typing import TYPE_CHECKING

from hrm.lazy_names import import_lazily

if TYPE_CHECKING:
    from simulator.compare import Comparison, compare_schedules
    from simulator.plan_replay import Simulation, draw_timeline, simulate_plan, simulate_policy
    from simulator.plan_sweep import Sweep, draw_sweep, sweep_plans

__all__ = [
    "Comparison",
    "Simulation",
    "Sweep",
    "compare_schedules",
    "draw_sweep",
    "draw_timeline",
    "simulate_plan",
    "simulate_policy",
    "sweep_plans",
]

_MODULES = {
    "Comparison": "compare",
    "Simulation": "plan_replay",
    "Sweep": "plan_sweep",
    "compare_schedules": "compare",
    "draw_sweep": "plan_sweep",
    "draw_timeline": "plan_replay",
    "simulate_plan": "plan_replay",
    "simulate_policy": "plan_replay",
    "sweep_plans": "plan_sweep",
}

__getattr__, __dir__ = import_lazily(__name__, _MODULES)

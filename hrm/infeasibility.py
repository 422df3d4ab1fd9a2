"""When no plan fits: which limit, by how much at the smallest batch, and the nearest change that would fit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hrm.errors import InfeasibleError
from hrm.full_program import LIMITS, build_program, excess_of, least_excess
from hrm.memory import GPU_RESERVE_SHARE
from hrm.pins import Pins
from hrm.points import candidate_batches, point_classes, prefill_choice
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes, measure_sizes
from hrm.units import GIB

__all__ = ["explain_infeasibility", "least_excesses"]

GPU = ("gpu_memory_decode", "gpu_memory_prefill")
WORDS = {"gpu": "GPU memory", "cpu": "CPU memory", "disk": "disk space", "lock": "page-locked memory", "hours": "time"}
GROUPS = {
    "gpu": GPU,
    "cpu": ("cpu_memory",),
    "disk": ("disk_memory",),
    "lock": ("lock_limit", "lock_limit_weights"),
    "hours": ("max_hours",),
}


def least_excesses(
    scenario: Scenario, sizes: Sizes, rates: Rates, pins: Pins, max_seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """How far the smallest batch is from fitting.

    Returns
    -------
    together : dict of str to float
        Excess of each limit [byte or s] where their sum is least.
    alone : dict of str to float
        For each limit, the least excess of it alone, every other one kept; missing where that cannot help.
    """
    grid = candidate_batches(scenario.workload.num_requests, pins)
    index = int(np.argmin(grid.size))
    together: tuple[float, dict[str, float]] | None = None
    alone: dict[str, float] = {}
    for point in point_classes(scenario, grid, pins):
        here = point.at(index)
        size = float(pins.prefill_micro_batch_size or 1)
        prefill = prefill_choice(scenario, here.size, size)
        for name, limits in [("", tuple(LIMITS)), *GROUPS.items()]:
            program = build_program(
                scenario, sizes, rates, here, pins, prefill, max_seconds=max_seconds, elastic=limits
            )
            if not any(excess_of(limit) in program.unknowns for limit in limits):
                continue
            solution = program.minimise(least_excess(program))
            if solution.status == "infeasible":
                continue
            excess = {group: solution.values.get(excess_of(members[0]), 0.0) for group, members in GROUPS.items()}
            if name:
                alone[name] = min(alone.get(name, float("inf")), excess[name])
            elif together is None or solution.objective < together[0]:
                together = (solution.objective, excess)
    return ({} if together is None else together[1]), alone


def explain_infeasibility(
    scenario: Scenario, sizes: Sizes, rates: Rates, pins: Pins, max_hours: float, *, try_int4: bool = True
) -> InfeasibleError:
    """The error for a scenario without a plan, with the limit, the excess and the nearest change that would fit."""
    together, alone = least_excesses(scenario, sizes, rates, pins, max_hours * 3600.0)
    size = int(candidate_batches(scenario.workload.num_requests, pins).size.min())
    broken = _broken(together)
    main = max(broken, key=lambda name: broken[name] if name != "hours" else 0.0, default="")
    model, profile = scenario.model, scenario.profile
    parts = [f"{_amount(name, value)} over the limit of {WORDS[name]}" for name, value in broken.items()]
    said = " and ".join(parts) if parts else "the pinned variables contradict each other or the limits"
    ways = [_more(name, value) for name, value in _broken(alone).items()]
    if len(broken) > 1 or (broken and not ways):
        ways.append(" and ".join(_more(name, value) for name, value in broken.items()))
    if profile.disk is None and broken.keys() == {"cpu"}:
        ways.append(f"a disk that holds {math.ceil(broken['cpu'] / 1e9)} GB")
    if try_int4 and scenario.formats.weights is None and scenario.formats.linear(model) not in ("int4", "mxfp4"):
        quantised = replace(scenario, formats=replace(scenario.formats, weights="int4"))
        left, _ = least_excesses(quantised, measure_sizes(quantised), rates, pins, max_hours * 3600.0)
        if left and not _broken(left):
            ways.append("--weights-dtype int4")
    if pins.given:
        ways.append(f"fewer pinned variables than {', '.join(sorted(pins.given))}")
    nearest = f"; what would fit: {', or '.join(ways)}" if ways else ""
    return InfeasibleError(
        f"no plan fits {model.name} on {profile.name}: at the smallest batch ({size} request{'s' if size > 1 else ''}) "
        f"it is {said}{nearest}",
        limit=main,
        missing_bytes=broken.get(main, 0.0) if main != "hours" else 0.0,
    )


def _broken(excess: dict[str, float]) -> dict[str, float]:
    """Limits that are exceeded by more than rounding."""
    return {name: value for name, value in excess.items() if value > (1e3 if name != "hours" else 1e-3)}


def _amount(name: str, value: float, *, up: bool = False) -> str:
    """An excess as a person reads it, rounded up where it is what would be enough."""
    digits, unit, share = (1, "hours", value / 3600.0) if name == "hours" else (2, "GiB", value / GIB)
    if up:
        share = math.ceil(share * 10**digits + 1e-6) / 10**digits
    return f"{share:.{digits}f} {unit}"


def _more(name: str, value: float) -> str:
    """How much more of a resource would be enough; of GPU memory a share stays in reserve."""
    needed = value / (1.0 - GPU_RESERVE_SHARE) if name == "gpu" else value
    return f"{_amount(name, needed, up=True)} more {WORDS[name]}"

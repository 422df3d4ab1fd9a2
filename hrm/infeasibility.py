"""When no plan fits: which limit, by how much at the smallest batch, and the nearest change that would fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from hrm.errors import InfeasibleError
from hrm.full_program import LIMITS, build_program, excess_of, least_excess
from hrm.pins import Pins
from hrm.points import Grid, Point, candidate_batches, prefill_choice
from hrm.policy import WeightSlots
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes
from hrm.units import GIB

__all__ = ["explain_infeasibility", "least_excesses"]

GPU = ("gpu_memory_decode", "gpu_memory_prefill")
WORDS = {"gpu": "GPU memory", "cpu": "CPU memory", "disk": "disk space", "lock": "page-locked memory", "hours": "time"}
GROUPS = {
    "gpu": GPU,
    "cpu": ("cpu_memory",),
    "disk": ("disk_memory",),
    "lock": ("lock_limit",),
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
    for here in _points(scenario, pins, grid, index):
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
            excess = {
                group: max(solution.values.get(excess_of(limit), 0.0) for limit in members)
                for group, members in GROUPS.items()
            }
            if name:
                alone[name] = min(alone.get(name, float("inf")), excess[name])
            elif together is None or solution.objective < together[0]:
                together = (solution.objective, excess)
    return ({} if together is None else together[1]), alone


def _points(scenario: Scenario, pins: Pins, grid: Grid, index: int) -> list[Point]:
    """One batch of the grid in every class of points that the pins leave."""

    def choices(pinned: bool | None) -> tuple[bool, ...]:
        return (True, False) if pinned is None else (pinned,)

    every: tuple[WeightSlots, ...] = (1, 2, "experts")
    slots = every if pins.weight_slots is None else (pins.weight_slots,)
    if scenario.model.streamed_experts < 3:
        slots = tuple(each for each in slots if each != "experts") or (1,)
    return [
        Point(
            size=float(grid.size[index]),
            micro_batch=float(grid.micro_batch[index]),
            micro_batches=float(grid.micro_batches[index]),
            attention_on_gpu=a,
            ffn_on_gpu=f,
            slots=s,
        )
        for a, f, s in product(choices(pins.attention_on_gpu), choices(pins.ffn_on_gpu), slots)
    ]


def explain_infeasibility(
    scenario: Scenario, sizes: Sizes, rates: Rates, pins: Pins, max_hours: float, *, try_int4: bool = True
) -> InfeasibleError:
    """The error for a scenario without a plan, with the limit, the excess and the nearest change that would fit."""
    together, alone = least_excesses(scenario, sizes, rates, pins, max_hours * 3600.0)
    size = int(candidate_batches(scenario.workload.num_requests, pins).size.min())
    broken = {name: value for name, value in together.items() if value > (1e3 if name != "hours" else 1e-6)}
    main = max(broken, key=lambda name: broken[name] if name != "hours" else 0.0, default="")
    model, profile = scenario.model, scenario.profile
    parts = [f"{_amount(name, value)} over the limit of {WORDS[name]}" for name, value in broken.items()]
    said = " and ".join(parts) if parts else "the pinned variables contradict each other or the limits"
    ways = [f"{_amount(name, value)} more {WORDS[name]}" for name, value in alone.items() if value > 0]
    if profile.disk is None and "cpu" in broken:
        ways.append(f"a disk that holds {broken['cpu'] / 1e9:.0f} GB")
    if try_int4 and scenario.formats.weights is None and scenario.formats.linear(model) not in ("int4", "mxfp4"):
        quantised = replace(scenario, formats=replace(scenario.formats, weights="int4"))
        from hrm.scenario import measure_sizes

        smaller = measure_sizes(quantised)
        left, _ = least_excesses(quantised, smaller, rates, pins, max_hours * 3600.0)
        if left and all(value <= 1e3 for value in left.values()):
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


def _amount(name: str, value: float) -> str:
    if name == "hours":
        return f"{value / 3600.0:.1f} hours"
    return f"{value / GIB:.2f} GiB"

"""What a little more of a resource would buy: marginal values from the duals of the winning program.

With every integer fixed the program is linear, and its duals say how the seconds of a batch change per byte of a limit
(weak points: the batch itself may not grow, so a resource that only a larger batch could use shows as worth nothing;
`--explain` solves anew instead). For a rate the envelope theorem gives the same: multipliers times change of the rows.
"""

from __future__ import annotations

from dataclasses import replace

from hrm.affine import Affine
from hrm.full_program import build_program
from hrm.memory import GPU_RESERVE_SHARE
from hrm.pins import Pins
from hrm.rates import Rates
from hrm.rows import Row, objective_of, rows_of
from hrm.scenario import Scenario, Sizes
from hrm.search import SolvedPoint
from hrm.units import GIB

__all__ = ["marginal_values"]

GB_PER_S = 1e9


def marginal_values(
    scenario: Scenario,
    sizes: Sizes,
    rates: Rates,
    pins: Pins,
    solved: SolvedPoint,
    throughput: float,
    max_seconds: float,
) -> dict[str, float]:
    """Token/s that one more GiB of a memory, or one more GB/s of a rate, would add at this batch.

    Parameters
    ----------
    throughput : float
        Of the plan [token/s].

    Returns
    -------
    dict of str to float
        gpu_memory_gib, cpu_memory_gib [token/s per GiB]; link_gb_per_s, cpu_bandwidth_gb_per_s, disk_read_gb_per_s
        [token/s per GB/s].
    """
    program = build_program(scenario, sizes, rates, solved.point, pins, solved.prefill, max_seconds=max_seconds)
    program.fix({name: solved.values[name] for name in program.integers})
    solution = program.minimise(objective_of(sizes))
    if solution.status == "infeasible" or solution.objective <= 0:
        return {}
    per_second = throughput / solution.objective
    duals = solution.duals
    limits = {
        "gpu_memory_gib": ("gpu_memory_decode", "gpu_memory_prefill"),
        "cpu_memory_gib": ("cpu_memory",),
    }
    plannable = {"gpu_memory_gib": GIB * (1.0 - GPU_RESERVE_SHARE), "cpu_memory_gib": GIB}
    found = {
        key: max(0.0, -sum(duals.get(name, 0.0) for name in names)) * plannable[key] * per_second
        for key, names in limits.items()
    }

    def rows_at(changed: Rates) -> list[Row]:
        return rows_of(
            scenario,
            sizes,
            changed,
            solved.point,
            solved.prefill,
            max_seconds=max_seconds,
            pin_allowed=True,
            pin_required=pins.pin_weights is True,
        )

    base = {row.name: row.left for row in rows_at(rates)}
    faster = {
        "link_gb_per_s": replace(rates, h2d_bytes_per_s=rates.h2d_bytes_per_s + GB_PER_S),
        "cpu_bandwidth_gb_per_s": replace(
            rates,
            cpu_bytes_per_s=rates.cpu_bytes_per_s + GB_PER_S,
            cpu_attention_bytes_per_s=rates.cpu_attention_bytes_per_s + GB_PER_S,
        ),
    }
    if rates.disk_read_bytes_per_s:
        faster["disk_read_gb_per_s"] = replace(rates, disk_read_bytes_per_s=rates.disk_read_bytes_per_s + GB_PER_S)
    for key, changed in faster.items():
        saved = 0.0
        for row in rows_at(changed):
            multiplier = -duals.get(row.name, 0.0)
            if multiplier > 0:
                saved += multiplier * _value(base[row.name] - row.left, solution.values)
        found[key] = max(0.0, saved) * per_second
    return found


def _value(expression: Affine, values: dict[str, float]) -> float:
    return float(expression.at(values))

"""Lower bounds on the seconds of a batch, for every batch and micro-batch size at once.

A class of points shares A_g, F_g and the weight slots; its rows (`hrm.rows`) have arrays for coefficients, one entry
per (N, mu). For any multipliers >= 0 on the rows, the objective plus multipliers times rows, minimised over nothing but
each unknown's own range, is a lower bound on the program's optimum (weak duality). That minimum is a sum of closed
forms, so one pass bounds every batch; multipliers that are the duals of one solved point are tight there and close
to tight at its neighbours. A point whose bound is above the incumbent is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from hrm.affine import Affine, total
from hrm.full_cost import DENSE, EMBEDDING, EXPERTS_ON_DISK, EXPERTS_ON_GPU, HEAD, KV_ON_DISK, KV_ON_GPU, RING
from hrm.pins import Pins
from hrm.points import Grid, Point, prefill_choices
from hrm.rates import Rates
from hrm.rows import PIN, PREFILL, STEP, choice_name, objective_of, rows_of, tops_of
from hrm.scenario import Scenario, Sizes

__all__ = ["BoundedClass", "bound_class", "combinations_of", "discard", "tighten"]

Array = npt.NDArray[np.float64]
Combination = tuple[bool, bool]  # non-expert weights and lm_head resident on the GPU


@dataclass(slots=True)
class BoundedClass:
    """Bounds of one class of points; tightened in place as multipliers become known.

    Attributes
    ----------
    point : Point
        With arrays over the open part of the grid.
    rows : dict of str to Affine
        By name, arrays for coefficients.
    lows, tops : dict of str to float or ndarray
        Ranges of the unknowns.
    num_choices : int
        Prefill choices.
    bounds : dict of combination to ndarray
        Lower bound on the seconds of a batch [s], by placement of non-expert weights and lm_head.
    """

    point: Point
    rows: dict[str, Affine]
    lows: dict[str, Any]
    tops: dict[str, Any]
    num_choices: int
    objective: Affine
    bounds: dict[Combination, Array] = field(default_factory=dict)

    @property
    def lowest(self) -> Array:
        """Bound of each batch over all combinations [s]."""
        return np.minimum.reduce(list(self.bounds.values()))

    def best_combination(self, index: int) -> Combination:
        """Combination with the lowest bound at one batch."""
        return min(self.bounds, key=lambda combination: float(self.bounds[combination][index]))


def combinations_of(pins: Pins) -> list[Combination]:
    """Placements of non-expert weights and lm_head that the pins leave."""

    def choices(pinned: bool | None) -> tuple[bool, ...]:
        return (True, False) if pinned is None else (pinned,)

    return list(product(choices(pins.dense_weights_on_gpu), choices(pins.lm_head_on_gpu)))


def bound_class(
    scenario: Scenario,
    sizes: Sizes,
    rates: Rates,
    grid: Grid,
    point: Point,
    pins: Pins,
    ladder: tuple[int, ...],
    *,
    max_seconds: float,
) -> BoundedClass:
    """Rows of a class over the whole grid, with first bounds from multipliers guessed for each lane in turn.

    The guess puts the whole objective on one lane of decode and one of prefill, and prices GPU memory so that a byte of
    experts there is worth what it saves the lane; the best of the guesses counts.
    """
    choices = prefill_choices(scenario, sizes, rates, point, pins, ladder)
    rows = {
        row.name: row.left
        for row in rows_of(
            scenario,
            sizes,
            rates,
            point,
            choices,
            max_seconds=max_seconds,
            pin_allowed=pins.pin_weights is not False,
            pin_required=pins.pin_weights is True,
        )
    }
    tops = dict(tops_of(scenario, sizes, point))
    lows: dict[str, Any] = {name: 0.0 for name in tops}
    if point.ring:
        lows[RING] = 2.0 * sizes.expert_bytes
    for name, share, whole in (
        (EXPERTS_ON_GPU, pins.weights_on_gpu, sizes.streamed_bytes),
        (EXPERTS_ON_DISK, pins.weights_on_disk, sizes.streamed_bytes),
        (KV_ON_GPU, pins.kv_on_gpu, tops[KV_ON_GPU]),
        (KV_ON_DISK, pins.kv_on_disk, tops[KV_ON_DISK]),
    ):
        if share is not None:
            tops[name] = np.minimum(share * np.asarray(whole), tops[name])
            if name in (EXPERTS_ON_GPU, EXPERTS_ON_DISK):
                lows[name] = tops[name]  # KV cache is cut to whole requests, so it may be less
    for name, pinned in ((PIN, pins.pin_weights), (EMBEDDING, pins.embedding_on_gpu)):
        lows[name], tops[name] = (0.0, 1.0) if pinned is None else (float(pinned),) * 2
    bounded = BoundedClass(
        point=point,
        rows=rows,
        lows=lows,
        tops=tops,
        num_choices=len(choices),
        objective=objective_of(sizes),
    )
    shape = np.asarray(point.size).shape
    feasible = _may_fit(bounded)
    for combination in combinations_of(pins):
        bounded.bounds[combination] = np.where(feasible[combination], 0.0, np.inf) + np.zeros(shape)
    for multipliers in _guesses(bounded, sizes):
        tighten(bounded, multipliers)
    return bounded


def tighten(bounded: BoundedClass, multipliers: Mapping[str, float | Array]) -> None:
    """Raise the bounds of a class by one set of multipliers on its rows.

    Parameters
    ----------
    multipliers : mapping of str to float or ndarray
        Seconds of objective per unit of each row; negative ones count as zero. Those of the decode lanes are scaled to
        add up to the decode steps, those of the prefill lanes to 1, so that the seconds drop out.
    """
    for combination, value in _dual_values(bounded, multipliers, objective=1.0).items():
        np.maximum(bounded.bounds[combination], value, out=bounded.bounds[combination])


def discard(bounded: BoundedClass, multipliers: Mapping[str, float | Array]) -> None:
    """Discard the batches where these multipliers prove that no values meet all rows (Farkas' lemma).

    Parameters
    ----------
    multipliers : mapping of str to float or ndarray
        On the rows, from a program that minimises how far rows are from being met.
    """
    hours = float(multipliers.get("max_hours", 0.0))
    for combination, value in _dual_values(bounded, multipliers, objective=hours).items():
        bound = bounded.bounds[combination]
        bound[value > 1e-6] = np.inf


def _dual_values(
    bounded: BoundedClass, multipliers: Mapping[str, float | Array], objective: float
) -> dict[Combination, Any]:
    """Least value over the ranges of `objective` times the seconds plus multipliers times rows."""
    lagrangian = _weigh(bounded, multipliers, objective)
    constant, parts, choice = _minimise(bounded, lagrangian)
    values = {}
    for combination in bounded.bounds:
        value = constant + choice
        for on, name in zip(combination, (DENSE, HEAD), strict=True):
            if on:
                value = value + parts[name]
        values[combination] = value
    return values


def _weigh(bounded: BoundedClass, multipliers: Mapping[str, float | Array], objective: float) -> Affine:
    wanted = {unknown: objective * bounded.objective.coefficient(unknown) for unknown in (STEP, PREFILL)}
    sums: dict[str, Any] = {STEP: 0.0, PREFILL: 0.0}
    kept: dict[str, Any] = {}
    for name, row in bounded.rows.items():
        weight = np.maximum(multipliers.get(name, 0.0), 0.0)
        if not np.any(weight):
            continue
        kept[name] = weight
        if name != "max_hours":
            for unknown in (STEP, PREFILL):
                if row.coefficient(unknown):
                    sums[unknown] = sums[unknown] + weight
    terms = []
    for name, weight in kept.items():
        row = bounded.rows[name]
        unknown = next((u for u in (STEP, PREFILL) if row.coefficient(u)), None)
        if name == "max_hours":
            row = Affine(row.constant) if objective != 1.0 else Affine()  # a bound may do without it
        elif unknown is not None:
            weight = weight * (wanted[unknown] / sums[unknown])
            coefficients = {key: value for key, value in row.coefficients.items() if key != unknown}
            row = Affine(row.constant, coefficients)  # the seconds drop out of the sum
        terms.append(row * weight)
    return total(terms)


def _minimise(bounded: BoundedClass, lagrangian: Affine) -> tuple[Any, dict[str, Any], Any]:
    """Least value over the ranges: (without what the combination decides, that per name, of the prefill choice)."""
    constant: Any = np.asarray(lagrangian.constant, dtype=np.float64)
    named: dict[str, Any] = {DENSE: 0.0, HEAD: 0.0}
    choice: Any = 0.0
    if bounded.num_choices > 1:
        choice = np.minimum.reduce(
            np.broadcast_arrays(
                *[
                    np.asarray(lagrangian.coefficient(choice_name(i)), dtype=np.float64)
                    for i in range(bounded.num_choices)
                ]
            )
        )
    for name, coefficient in lagrangian.coefficients.items():
        if name in named:
            named[name] = coefficient
        elif not name.startswith("prefill_choice"):
            low, top = bounded.lows.get(name, 0.0), bounded.tops.get(name, 1.0)
            constant = constant + np.minimum(coefficient * low, coefficient * top)
    return constant, named, choice


def _may_fit(bounded: BoundedClass) -> dict[Combination, Any]:
    """Where each memory on its own, and all levels together, can hold what must lie there, for every combination."""
    memories = [name for name in ("gpu_memory_decode", "gpu_memory_prefill", "cpu_memory", "lock_limit") if name in bounded.rows]
    groups = [[name] for name in memories]
    for gpu in ("gpu_memory_decode", "gpu_memory_prefill"):
        groups.append([gpu, "cpu_memory"])
        if "disk_memory" in bounded.rows:
            groups.append([gpu, "cpu_memory", "disk_memory"])
    leasts = [_minimise(bounded, total(bounded.rows[name] for name in group)) for group in groups]
    result: dict[Combination, Any] = {}
    for dense, head in product((True, False), repeat=2):
        fits: Any = np.ones(np.asarray(bounded.point.size).shape, dtype=bool)
        for least, parts, choice in leasts:
            value = least + choice + (parts[DENSE] if dense else 0.0) + (parts[HEAD] if head else 0.0)
            fits = fits & (value <= 1e3)
        result[(dense, head)] = fits
    return result


def _guesses(bounded: BoundedClass, sizes: Sizes) -> list[dict[str, Any]]:
    """First multipliers: each pair of a decode and a prefill lane, GPU memory priced by what experts save there."""
    steps = float(sizes.decode_steps)
    rows = bounded.rows
    guesses: list[dict[str, Any]] = []
    pairs = [
        ("decode_host_to_device", "prefill_gpu"),
        ("decode_gpu", "prefill_gpu"),
        ("decode_cpu", "prefill_gpu"),
        ("decode_disk", "prefill_gpu"),
        ("decode_one_slot_gpu", "prefill_gpu"),
        ("decode_chain", "prefill_gpu"),
        ("decode_ring_gpu_then_host_to_device", "prefill_gpu"),
        ("decode_ring_cpu_then_host_to_device", "prefill_gpu"),
        ("decode_host_to_device", "prefill_host_to_device"),
        ("decode_disk", "prefill_disk"),
    ]
    for decode, prefill in pairs:
        if decode not in rows or prefill not in rows:
            continue
        sums = rows[decode] * steps + rows[prefill]
        guess: dict[str, Any] = {decode: steps, prefill: 1.0}
        # What one byte on disk instead of in CPU memory costs prices CPU memory; what one byte of experts or KV cache
        # on the GPU then saves, per byte it takes there, prices GPU memory.
        memory, host = rows["gpu_memory_decode"], rows["cpu_memory"]
        on_disk = [sums.coefficient(name) for name in (EXPERTS_ON_DISK, KV_ON_DISK) if np.any(bounded.tops[name])]
        host_price: Any = 0.0
        if on_disk and np.any(host.coefficient(EXPERTS_ON_DISK)):
            host_price = np.maximum(0.0, np.minimum.reduce(np.broadcast_arrays(*[np.asarray(c) for c in on_disk])))
        price: Any = 0.0
        for name in (EXPERTS_ON_GPU, KV_ON_GPU):
            saved = -(sums.coefficient(name) + host_price * host.coefficient(name))
            takes = np.asarray(memory.coefficient(name), dtype=np.float64)
            price = np.maximum(price, np.where(takes > 1e-9, saved / np.maximum(takes, 1e-9), 0.0))
        guess["gpu_memory_decode"] = price
        guess["cpu_memory"] = host_price
        guesses.append(guess)
    return guesses

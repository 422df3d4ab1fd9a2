"""Lower bounds on the seconds of a batch, for many points at once.

A sheet is an array of nodes that share A_g, F_g and the weight slots: each is a batch and micro-batch size with a range
of prefill micro-batches. Its rows (`hrm.rows`) have arrays for coefficients, one entry per node. For any multipliers
>= 0 on the rows, the objective plus multipliers times rows, minimised over nothing but each unknown's own range, is a
lower bound on the optimum (weak duality). That minimum is a sum of closed forms, so one pass bounds every node;
multipliers that are the duals of one solved node are tight there and close to tight at its neighbours. A node whose
bound is above the incumbent is discarded; others are cut into nodes with smaller ranges, down to single choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from hrm.affine import Affine, total
from hrm.full_cost import DENSE, EMBEDDING, EXPERTS_ON_DISK, EXPERTS_ON_GPU, HEAD, KV_ON_DISK, KV_ON_GPU, RING
from hrm.pins import Pins
from hrm.points import Point, prefill_range
from hrm.rates import Rates
from hrm.rows import PIN, PREFILL, STEPS, objective_of, rows_of, seconds_of, tops_of
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes

__all__ = ["Sheet", "bound_sheet", "combinations_of", "discard", "guess_multipliers", "tighten"]

Array = npt.NDArray[np.float64]
PLACED = (DENSE, HEAD, EMBEDDING)
SECONDS = (PREFILL, *(unknown for unknown, _ in STEPS))
Combination = tuple[bool, ...]
"""Whether each of `PLACED` is on the GPU."""


@dataclass(slots=True, eq=False)
class Sheet:
    """Bounds of nodes of one class; tightened in place as multipliers become known.

    Attributes
    ----------
    point : Point
        With arrays over the nodes.
    low, high : ndarray
        Range of the prefill micro-batch [requests].
    rows : dict of str to Affine
        By name, arrays for coefficients.
    lows, tops : dict of str to float or ndarray
        Ranges of the unknowns.
    objective : Affine
        Seconds of a batch.
    bounds : dict of combination to ndarray
        Lower bound on the seconds of a batch [s], by placement of non-expert weights, lm_head and embedding.
    """

    point: Point
    low: Array
    high: Array
    rows: dict[str, Affine]
    lows: dict[str, Any]
    tops: dict[str, Any]
    objective: Affine
    bounds: dict[Combination, Array] = field(default_factory=dict)

    @property
    def lowest(self) -> Array:
        """Bound of each node over all combinations [s]."""
        lowest: Array = np.minimum.reduce(list(self.bounds.values()))
        return lowest

    def best_combination(self, index: int) -> Combination:
        """Combination with the lowest bound at one node."""
        return min(self.bounds, key=lambda combination: float(self.bounds[combination][index]))

    def is_single(self, index: int) -> bool:
        """Whether the range of a node is one choice: every size in it makes as many micro-batches."""
        size = float(np.asarray(self.point.size)[index])
        return bool(np.ceil(size / self.low[index]) == np.ceil(size / self.high[index]))


def combinations_of(pins: Pins, *, tied: bool) -> list[Combination]:
    """Placements of non-expert weights, lm_head and embedding that the pins leave; tied tables are one matrix."""
    pinned = (pins.dense_weights_on_gpu, pins.lm_head_on_gpu, pins.embedding_on_gpu)
    every = product(*((True, False) if value is None else (value,) for value in pinned))
    return [combination for combination in every if not tied or combination[1] == combination[2]]


def bound_sheet(
    scenario: Scenario,
    sizes: Sizes,
    rates: Rates,
    point: Point,
    low: Array,
    high: Array,
    pins: Pins,
    *,
    max_seconds: float,
) -> Sheet:
    """Rows of nodes of one class, with bounds of zero, or infinity where memory cannot hold what must lie there.

    Parameters
    ----------
    point : Point
        With arrays over the nodes.
    low, high : ndarray
        Range of the prefill micro-batch of each node [requests].
    """
    rows = {
        row.name: row.left
        for row in rows_of(
            scenario,
            sizes,
            rates,
            point,
            prefill_range(scenario, point.size, low, high),
            max_seconds=max_seconds,
            pin_allowed=pins.pin_weights is not False,
            pin_required=pins.pin_weights is True,
        )
    }
    tops: dict[str, Any] = dict(tops_of(scenario, sizes, point))
    lows: dict[str, Any] = dict.fromkeys(tops, 0.0)
    if point.ring:
        lows[RING] = 2.0 * sizes.expert_bytes
    for name, share in ((EXPERTS_ON_GPU, pins.weights_on_gpu), (EXPERTS_ON_DISK, pins.weights_on_disk)):
        if share is not None:
            lows[name] = tops[name] = min(share * sizes.streamed_bytes, tops[name])
    # KV cache moves as whole requests of every micro-batch; only on the GPU may it be all, part-filled rows included.
    size, count = np.asarray(point.size), np.asarray(point.micro_batches)
    whole, unit = np.floor(size / count), kv_capacity_bytes(scenario, sizes, point.size) * count / size
    tops[KV_ON_DISK] = np.minimum(tops[KV_ON_DISK], whole * unit)
    for name, share in ((KV_ON_GPU, pins.kv_on_gpu), (KV_ON_DISK, pins.kv_on_disk)):
        if share is not None and not (name == KV_ON_GPU and share >= 1.0):
            tops[name] = np.minimum(tops[name], np.floor(share * whole + 1e-9) * unit)
        if share is not None:
            lows[name] = tops[name]
    if pins.pin_weights is not None:
        lows[PIN] = tops[PIN] = float(pins.pin_weights)
    sheet = Sheet(
        point=point,
        low=low,
        high=high,
        rows=rows,
        lows=lows,
        tops=tops,
        objective=objective_of(sizes),
    )
    shape = np.asarray(point.size).shape
    for combination, fits in _may_fit(sheet, combinations_of(pins, tied=sizes.tied)).items():
        sheet.bounds[combination] = np.where(fits, 0.0, np.inf) + np.zeros(shape)
    return sheet


def tighten(sheet: Sheet, multipliers: Mapping[str, float | Array]) -> None:
    """Raise the bounds of a sheet by one set of multipliers on its rows.

    Parameters
    ----------
    multipliers : mapping of str to float or ndarray
        Seconds of objective per unit of each row; negative ones count as zero. Those of the decode lanes are scaled to
        add up to the decode steps, those of the prefill lanes to 1, so that the seconds drop out.
    """
    hours = max(0.0, float(multipliers.get("max_hours", 0.0)))
    for combination, value in _dual_values(sheet, multipliers, objective=1.0 + hours).items():
        np.maximum(sheet.bounds[combination], value, out=sheet.bounds[combination])


def discard(sheet: Sheet, multipliers: Mapping[str, float | Array]) -> None:
    """Discard the nodes where these multipliers prove that no values meet all rows (Farkas' lemma).

    Parameters
    ----------
    multipliers : mapping of str to float or ndarray
        On the rows, from a program that minimises how far rows are from being met.
    """
    hours = max(0.0, float(multipliers.get("max_hours", 0.0)))
    for combination, value in _dual_values(sheet, multipliers, objective=hours).items():
        bound = sheet.bounds[combination]
        bound[value > 1e-6] = np.inf


def _dual_values(sheet: Sheet, multipliers: Mapping[str, float | Array], objective: float) -> dict[Combination, Any]:
    """Least value over the ranges of `objective` times the seconds plus multipliers times rows.

    The row `max_hours` bounds the same seconds, so its multiplier is in `objective` and its constant among the rows.
    """
    return _minimise(sheet, _weigh(sheet, multipliers, objective), sheet.bounds)


def _weigh(sheet: Sheet, multipliers: Mapping[str, float | Array], objective: float) -> Affine:
    wanted = {unknown: objective * sheet.objective.coefficient(unknown) for unknown in SECONDS}
    sums: dict[str, Any] = dict.fromkeys(SECONDS, 0.0)
    kept: dict[str, Any] = {}
    for name, row in sheet.rows.items():
        weight = np.maximum(multipliers.get(name, 0.0), 0.0)
        if not np.any(weight):
            continue
        kept[name] = weight
        if name != "max_hours":
            for unknown in SECONDS:
                if row.coefficient(unknown):
                    sums[unknown] = sums[unknown] + weight
    terms = []
    for name, weight in kept.items():
        row = sheet.rows[name]
        unknown = next((each for each in SECONDS if row.coefficient(each)), "")
        if name == "max_hours":
            row = Affine(row.constant)  # its seconds are in the objective already
        elif unknown:
            weight = weight * (wanted[unknown] / sums[unknown])
            coefficients = {key: value for key, value in row.coefficients.items() if key != unknown}
            row = Affine(row.constant, coefficients)  # the seconds drop out of the sum
        terms.append(row * weight)
    return total(terms)


def _minimise(sheet: Sheet, lagrangian: Affine, combinations: Iterable[Combination]) -> dict[Combination, Any]:
    """Least value over the ranges, for every combination: each unknown at the better end of its range."""
    constant: Any = np.asarray(lagrangian.constant, dtype=np.float64)
    for name, coefficient in lagrangian.coefficients.items():
        if name not in PLACED:
            low, top = sheet.lows.get(name, 0.0), sheet.tops.get(name, 1.0)
            constant = constant + np.minimum(coefficient * low, coefficient * top)
    placed = [lagrangian.coefficient(name) for name in PLACED]
    return {
        combination: constant + sum(cost for on, cost in zip(combination, placed, strict=True) if on)
        for combination in combinations
    }


def _may_fit(sheet: Sheet, every: list[Combination]) -> dict[Combination, Any]:
    """Where each memory on its own, and all levels together, can hold what must lie there, for every combination."""
    memories = ("gpu_memory_decode", "gpu_memory_prefill", "cpu_memory", "lock_limit")
    groups = [[name] for name in memories if name in sheet.rows]
    for gpu in ("gpu_memory_decode", "gpu_memory_prefill"):
        groups.append([gpu, "cpu_memory"])
        if "disk_memory" in sheet.rows:
            groups.append([gpu, "cpu_memory", "disk_memory"])
    leasts = [_minimise(sheet, total(sheet.rows[name] for name in group), every) for group in groups]
    fits = np.ones(np.asarray(sheet.point.size).shape, dtype=bool)
    return {each: fits & np.logical_and.reduce([np.asarray(least[each] <= 1e3) for least in leasts]) for each in every}


def guess_multipliers(sheet: Sheet, sizes: Sizes) -> list[dict[str, Any]]:
    """First multipliers, before anything is solved.

    Each guess puts the whole objective on one lane of decode and one of prefill, and prices GPU memory so that a byte
    of experts there is worth what it saves these lanes; the best of the guesses counts.
    """
    rows = sheet.rows
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
        guess: dict[str, Any] = {prefill: 1.0}
        lane = decode.removeprefix("decode")
        for _, prefix, steps in seconds_of(sizes):
            guess[prefix + lane] = steps
        sums = total(rows[name] * weight for name, weight in guess.items())
        # What one byte on disk instead of in CPU memory costs prices CPU memory; what one byte of experts or KV cache
        # on the GPU then saves, per byte it takes there, prices GPU memory.
        memory, host = rows["gpu_memory_decode"], rows["cpu_memory"]
        on_disk = [sums.coefficient(name) for name in (EXPERTS_ON_DISK, KV_ON_DISK) if np.any(sheet.tops[name])]
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

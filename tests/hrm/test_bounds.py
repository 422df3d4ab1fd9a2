"""Bounds: what they rule out can never be had, whatever the multipliers (weak duality, Farkas)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_oracle import Integers, Oracle, random_pins, random_scenario

from hrm.bounds import PLACED, Combination, Sheet, bound_sheet, combinations_of, discard, guess_multipliers, tighten
from hrm.full_program import LIMITS, build_program, least_excess
from hrm.pins import Pins
from hrm.points import Point, cut_ranges, prefill_range
from hrm.rows import objective_of

FREE = Pins()


def sheet_of(oracle: Oracle, points: Integers, pins: Pins = FREE, *, reach: int = 0) -> Sheet:
    """The nodes these points belong to: their prefill micro-batch alone, or a range `reach` to both sides."""
    point = Point(
        size=points.size,
        micro_batch=points.micro_batch,
        micro_batches=points.micro_batches,
        attention_on_gpu=points.attention_on_gpu,
        ffn_on_gpu=points.ffn_on_gpu,
        slots=points.slots,
    )
    low, high = np.maximum(points.prefill - reach, 1.0), np.minimum(points.prefill + reach, points.size)
    return bound_sheet(
        oracle.scenario, oracle.sizes, oracle.rates, point, low, high, pins, max_seconds=oracle.max_seconds
    )


def bounds_at(sheet: Sheet, points: Integers) -> np.ndarray:
    """The bound that holds for each point: of its own placement of non-expert weights, lm_head and embedding."""
    return np.select(
        [
            (points.dense == dense) & (points.head == head) & (points.embedding == embedding)
            for dense, head, embedding in sheet.bounds
        ],
        list(sheet.bounds.values()),
        np.nan,
    )


def sample(oracle: Oracle, pins: Pins, seed: int, count: int) -> list[tuple[Integers, np.ndarray]]:
    """Some points of every class with their least seconds of one batch, infinite where nothing fits."""
    pick = np.random.default_rng(seed)
    found = []
    for points in oracle.every(pins):
        some = points.take(pick.choice(len(points), min(count, len(points)), replace=False))
        batches = np.ceil(oracle.scenario.workload.num_requests / some.size)
        found.append((some, oracle.evaluate(some).seconds / batches))
    return found


def prices(sheet: Sheet, seed: int) -> dict[str, float]:
    """Arbitrary multipliers >= 0 on some of the rows: seconds per byte on memories, plain numbers on lanes."""
    pick = np.random.default_rng(seed)
    found = {}
    for name in sheet.rows:
        scale = 1e-9 if name in LIMITS or name in ("kv_cache", "expert_weights", "ring_within_layer") else 1.0
        scale *= 0.1 if name == "max_hours" else 10.0 ** pick.uniform(-2, 2)
        found[name] = float(scale * pick.random() * (pick.random() < 0.5))
    return found


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), reach=st.integers(0, 3))
def test_no_multipliers_lift_a_bound_above_what_a_point_reaches(seed: int, reach: int) -> None:
    oracle = Oracle(random_scenario(seed))
    for points, seconds in sample(oracle, random_pins(oracle, seed, 5_000), seed, 200):
        sheet = sheet_of(oracle, points, reach=reach)
        for multipliers in [*guess_multipliers(sheet, oracle.sizes), *(prices(sheet, seed + k) for k in range(3))]:
            tighten(sheet, multipliers)
        assert np.all(bounds_at(sheet, points) <= seconds * (1.0 + 1e-9) + 1e-9)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), reach=st.integers(0, 3))
def test_no_multipliers_discard_a_point_that_fits(seed: int, reach: int) -> None:
    oracle = Oracle(random_scenario(seed), max_hours=0.01)
    for points, seconds in sample(oracle, random_pins(oracle, seed, 5_000), seed, 200):
        sheet = sheet_of(oracle, points, reach=reach)
        for k in range(4):
            discard(sheet, prices(sheet, seed + k))
        assert np.all(np.isfinite(bounds_at(sheet, points)[np.isfinite(seconds)]))


def node_with_a_plan() -> tuple[Oracle, Sheet, int, Combination]:
    """A scenario, the nodes of a class in it, one of them that fits, and the placement of its tables."""
    oracle = Oracle(random_scenario(8))
    for points, seconds in sample(oracle, random_pins(oracle, 8, 5_000), 1, 200):
        for index in np.flatnonzero(np.isfinite(seconds)):
            combination = tuple(bool(each[index]) for each in (points.dense, points.head, points.embedding))
            return oracle, sheet_of(oracle, points), int(index), combination
    raise AssertionError("nothing fits")


def test_duals_of_a_node_give_its_own_optimum() -> None:
    oracle, sheet, index, combination = node_with_a_plan()
    point = sheet.point.at(index)
    prefill = prefill_range(oracle.scenario, point.size, float(sheet.low[index]), float(sheet.high[index]))
    arguments = (oracle.scenario, oracle.sizes, oracle.rates, point, FREE, prefill)
    program = build_program(*arguments, max_seconds=oracle.max_seconds)
    program.fix({name: float(on) for name, on in zip(PLACED, combination, strict=True)})
    program.relax(program.integers)
    solution = program.minimise(objective_of(oracle.sizes))
    tighten(sheet, {name: max(0.0, -dual) for name, dual in solution.duals.items()})
    assert sheet.bounds[combination][index] == pytest.approx(solution.objective, rel=1e-6)


def test_reasons_of_an_infeasible_node_discard_it() -> None:
    oracle, sheet, index, combination = node_with_a_plan()
    hopeless = Oracle(oracle.scenario, max_hours=1e-9)
    sheet = bound_sheet(
        hopeless.scenario,
        hopeless.sizes,
        hopeless.rates,
        sheet.point,
        sheet.low,
        sheet.high,
        FREE,
        max_seconds=hopeless.max_seconds,
    )
    point = sheet.point.at(index)
    prefill = prefill_range(oracle.scenario, point.size, float(sheet.low[index]), float(sheet.high[index]))
    arguments = (oracle.scenario, oracle.sizes, oracle.rates, point, FREE, prefill)
    program = build_program(*arguments, max_seconds=hopeless.max_seconds, elastic=LIMITS)
    program.fix({name: float(on) for name, on in zip(PLACED, combination, strict=True)})
    program.relax(program.integers)
    solution = program.minimise(least_excess(program))
    assert solution.objective > 1e-6
    discard(sheet, {name: max(0.0, -dual) for name, dual in solution.duals.items()})
    assert np.isinf(sheet.bounds[combination][index])


def test_pinned_tables_leave_only_their_combination() -> None:
    pins = Pins(dense_weights_on_gpu=True, lm_head_on_gpu=False)
    assert combinations_of(pins, tied=False) == [(True, False, True), (True, False, False)]
    assert combinations_of(pins, tied=True) == [(True, False, False)]  # one matrix, in one place
    assert len(combinations_of(FREE, tied=False)) == 8


@given(size=st.integers(1, 5_000), pieces=st.integers(2, 9))
def test_cutting_ranges_to_the_end_leaves_each_number_of_passes_once(size: int, pieces: int) -> None:
    ranges, singles = [(1.0, float(size))], []
    while ranges:
        low, high = ranges.pop()
        if np.ceil(size / low) == np.ceil(size / high):
            singles.append(low)
            continue
        lows, highs, _ = cut_ranges(np.array([float(size)]), np.array([low]), np.array([high]), pieces)
        ranges += list(zip(lows, highs, strict=True))
    passes = sorted(-(-size // int(low)) for low in singles)
    assert passes == sorted({-(-size // each) for each in range(1, size + 1)})
    assert all(-(-size // (int(low) - 1)) > -(-size // int(low)) for low in singles if low > 1)

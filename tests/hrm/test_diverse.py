"""The best policies that differ: order, what counts as different, shares of kinds, brute force on a small case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from test_search import full_size
from tiny import tiny_profile, tiny_scenario
from tiny_policies import policy_of

from hrm.branch_and_bound import BranchAndBound
from hrm.diverse import Candidate, are_different, find_policies
from hrm.errors import InfeasibleError, InputError
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.prediction import memory_use
from hrm.profile import Efficiency
from hrm.scenario import Scenario, measure_sizes
from hrm.search import find_policy

SMALL = tiny_scenario(profile=tiny_profile(usable=6000.0, disk=True), requests=6)
PINS = Pins(attention_on_gpu=False, ffn_on_gpu=True, weight_slots=2)


def large_policy(**changes: Any) -> Policy:
    """20 micro-batches of 100."""
    base = {"batch_size": 2000, "micro_batch_size": 100, "num_micro_batches": 20}
    return policy_of(**(base | changes))


# What a person would call different


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_on_gpu": True},
        {"ffn_on_gpu": False},
        {"weight_slots": 1},
        {"weight_slots": "experts", "ring_experts": 2},
        {"pin_weights": False},
        {"kv_on_disk": 0.01},
        {"micro_batch_size": 110, "batch_size": 2200},
        {"micro_batch_size": 90, "batch_size": 1800},
        {"micro_batch_size": 91, "num_micro_batches": 22, "batch_size": 2000},
    ],
)
def test_place_slots_locking_disk_and_a_tenth_of_the_micro_batches_make_a_difference(changes: dict[str, Any]) -> None:
    assert are_different(large_policy(), large_policy(**changes))
    assert are_different(large_policy(**changes), large_policy())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch_size": 109, "batch_size": 2180},
        {"num_micro_batches": 21, "micro_batch_size": 96},
        {"weights_on_gpu": 0.1},
        {"prefill_micro_batch_size": 7},
        {"dense_weights_on_gpu": False},
    ],
)
def test_a_few_requests_or_bytes_more_make_none(changes: dict[str, Any]) -> None:
    assert not are_different(large_policy(), large_policy(**changes))


def test_slots_make_no_difference_where_nothing_is_streamed() -> None:
    one, two = (large_policy(weights_on_gpu=1.0, weight_slots=slots) for slots in (1, 2))
    assert not are_different(one, two)


# The plans


@pytest.fixture(scope="module", params=[("t4", "mixtral-8x7b"), ("t4", "dbrx"), ("t4", "kimi-k2")])
def found(request: pytest.FixtureRequest) -> tuple[Scenario, tuple[Candidate, ...]]:
    scenario = full_size(*request.param)
    return scenario, find_policies(scenario, count=8)


def test_the_first_is_the_plan_of_the_search_and_the_others_follow_by_prediction(
    found: tuple[Scenario, tuple[Candidate, ...]],
) -> None:
    scenario, plans = found
    assert plans[0].policy == find_policy(scenario).policy
    seconds = [each.seconds for each in plans[1:]]
    assert len(plans) > 2 and seconds == sorted(seconds)


def test_no_two_are_nearly_the_same_and_all_fit(found: tuple[Scenario, tuple[Candidate, ...]]) -> None:
    scenario, plans = found
    assert all(are_different(one.policy, other.policy) for one, other in combinations(plans, 2))
    sizes = measure_sizes(scenario)
    for each in plans:
        if not each.policy.everything_on_cpu:
            assert all(use.fits for use in memory_use(scenario, sizes, each.policy).values())
        assert each.prediction.batch_s <= 24 * 3600.0
        assert each.seconds <= 2.0 * plans[0].seconds


@pytest.mark.parametrize("efficiency", [Efficiency(), None], ids=["peaks", "calibrated"])
def test_rings_of_experts_are_among_them_but_leave_room_for_others(efficiency: Efficiency | None) -> None:
    """At most half of eight are rings, and at most a third of one kind, whatever the rates."""
    scenario = full_size("t4", "mixtral-8x7b")
    if efficiency is not None:
        scenario = replace(scenario, profile=replace(scenario.profile, efficiency=efficiency))
    plans = find_policies(scenario, count=8)
    kinds = Counter(
        (each.weight_slots, each.pin_weights, each.attention_on_gpu, each.ffn_on_gpu, each.kv_on_disk > 0)
        for each in (plan.policy for plan in plans)
    )
    rings = sum(count for (slots, *_), count in kinds.items() if slots == "experts")
    assert plans[0].policy.weight_slots == 2
    assert plans[1].policy.weight_slots == "experts" and plans[1].seconds < plans[0].seconds
    assert 2 <= rings <= 4
    assert len(kinds) >= 3 and max(kinds.values()) <= 3


def every_pinned_plan() -> list[tuple[float, Policy]]:
    """Seconds and policy of the best plan at every batch and micro-batch, locked or staged, with disk or without."""
    plans = []
    sizes = sorted({-(-6 // parts) for parts in range(1, 7)})
    for size, lock, disk in product(sizes, (True, False), (None, 0.0)):
        for micro_batch in sorted({-(-size // count) for count in range(1, size + 1)}):
            pins = replace(PINS, batch_size=size, micro_batch_size=micro_batch, pin_weights=lock, kv_on_disk=disk)
            try:
                result = find_policy(SMALL, pins, explain=False)
            except InfeasibleError:
                continue
            plans.append((result.prediction.num_batches * result.prediction.batch_s, result.policy))
    return plans


def test_every_next_one_is_the_best_that_differs_from_those_before_by_brute_force() -> None:
    plans = find_policies(SMALL, PINS, count=6)  # no share of a kind binds for the first three
    every = every_pinned_plan()
    assert len(plans) >= 4
    kept = [plans[0].policy]
    for each in plans[1:3]:
        least = min(seconds for seconds, policy in every if all(are_different(policy, other) for other in kept))
        assert each.seconds == pytest.approx(least, rel=3e-3)
        kept.append(each.policy)


def test_pinned_variables_stay_and_fewer_plans_come_where_there_are_no_more() -> None:
    pins = Pins(
        batch_size=4, micro_batch_size=2, attention_on_gpu=True, ffn_on_gpu=True, weight_slots=1, kv_on_disk=0.0
    )
    plans = find_policies(SMALL, pins, count=5)
    assert [(each.policy.pin_weights, each.policy.weight_slots) for each in plans] in (
        [(False, 1), (True, 1)],
        [(True, 1), (False, 1)],
    )
    assert all((each.policy.batch_size, each.policy.micro_batch_size) == (4, 2) for each in plans)


@pytest.mark.parametrize("count", [0, -1, 51])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InputError, match=r"--refine: .* is out of range \(from 1 to 50 plans\)"):
        find_policies(SMALL, count=count)


def test_points_that_are_excluded_are_not_found() -> None:
    free = BranchAndBound.start(SMALL, PINS, 24.0)
    free.run(None)
    assert free.best.policy is not None
    size = free.best.policy.batch_size
    other = BranchAndBound.start(SMALL, PINS, 24.0)
    other.exclude(lambda point: point.size == size)
    other.run(None)
    assert other.best.policy is not None
    assert other.best.policy.batch_size != size and other.best.seconds > free.best.seconds

"""Routing skew: how many experts are reached, against every outcome; what changes of a task, and what does not."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from tiny import tiny_model, tiny_scenario
from tiny_policies import policy_of

from hrm import cost
from hrm.cost import Work
from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, Operator, Phase, Task, TaskId
from hrm.layout import Layout
from simulator.durations import Durations, jittered
from simulator.skew import reach_probabilities, skewed, wrap

SCENARIO = tiny_scenario()
RING = {"weight_slots": "experts", "ring_experts": 2}


def layout_of(**changes: Any) -> Layout:
    """Four requests in two micro-batches: two tokens each in decode, twelve in prefill."""
    return Layout(SCENARIO, policy_of(**changes))


def experts_task(op: Op, kind: LaneKind, work: Work, layer: int = 0, phase: Phase = "decode", **at: Any) -> Task:
    name = TaskId(op, phase, 0, layer, **at)
    return Task(name, Lane(kind), operators=(Operator("router", Work(1.0, 2.0)), Operator("routed experts", work)))


def uniform(tokens: float) -> Work:
    """Work of the experts of a layer under uniform routing."""
    return cost.routed_experts(SCENARIO.model, SCENARIO.formats, tokens)


def seen(task: Task, layout: Layout, spread: float, seed: int = 0) -> Work:
    """Work of the experts that the durations get to see."""
    found: list[Work] = []

    def durations(changed: Task) -> float:
        assert changed.operators[0] == task.operators[0]
        found.append(changed.operators[1].work)
        return 7.0

    assert skewed(durations, layout, spread, seed)(task) == 7.0
    return found[0]


def draws(weights: list[float], top_k: int) -> dict[frozenset[int], float]:
    """Probability of every set of experts a token may take, drawn one after the other."""
    sets: dict[frozenset[int], float] = {}
    for order in permutations(range(len(weights)), top_k):
        left, chance = sum(weights), 1.0
        for expert in order:
            chance *= weights[expert] / left
            left -= weights[expert]
        sets[frozenset(order)] = sets.get(frozenset(order), 0.0) + chance
    return sets


# Probabilities


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize(("experts", "top_k"), [(3, 1), (4, 2), (6, 3), (8, 2)])
def test_probabilities_are_those_of_every_order_of_drawing(experts: int, top_k: int, spread: float) -> None:
    weights = [rank**-spread for rank in range(1, experts + 1)]
    exact = np.zeros(experts)
    for taken, chance in draws(weights, top_k).items():
        for expert in taken:
            exact[expert] += chance
    assert reach_probabilities(np.array(weights), top_k) == pytest.approx(exact, abs=1e-12)


def test_two_of_three_by_hand() -> None:
    """Weights 3, 2, 1: the last is left out with 3/6 * 2/3 + 2/6 * 3/4 = 7/12, so it is reached with 5/12."""
    found = reach_probabilities(np.array([3.0, 2.0, 1.0]), 2)
    assert found == pytest.approx([51 / 60, 44 / 60, 25 / 60])
    assert found.sum() == pytest.approx(2.0)


def test_hundreds_of_experts_add_up_too() -> None:
    assert reach_probabilities(np.arange(1.0, 385.0) ** -1.0, 8).sum() == pytest.approx(8.0, abs=1e-9)


# Tasks of a whole layer


def test_experts_reached_are_the_mean_over_every_outcome_of_two_tokens() -> None:
    """Two tokens, two of four experts each, weights 1, 1/2, 1/3, 1/4: 36 pairs of sets."""
    sets = draws([1.0, 1 / 2, 1 / 3, 1 / 4], 2)
    reached = sum(
        first[1] * second[1] * len(first[0] | second[0]) for first, second in product(sets.items(), sets.items())
    )
    plain = uniform(2.0)
    activations = plain.bytes_touched - cost.experts_touched(SCENARIO.model, 2.0) * 192.0
    skew = seen(experts_task(Op.POST_ATTENTION, LaneKind.GPU, plain, micro_batch=0), layout_of(), 1.0)
    assert reached < 3.0 == cost.experts_touched(SCENARIO.model, 2.0)
    assert skew.bytes_touched == pytest.approx(reached * 192.0 + activations)
    assert skew.flops == pytest.approx(plain.flops)


def test_experts_on_the_cpu_and_a_part_of_them_change_by_the_same_share() -> None:
    plain = uniform(2.0)
    whole = seen(experts_task(Op.EXPERTS, LaneKind.CPU, plain, micro_batch=1), layout_of(), 1.0)
    half = seen(experts_task(Op.EXPERTS, LaneKind.CPU, 0.5 * plain, micro_batch=1), layout_of(), 1.0)
    assert half.bytes_touched == pytest.approx(0.5 * whole.bytes_touched)
    assert whole.bytes_touched < plain.bytes_touched


def test_expanded_values_follow_the_experts_that_are_reached() -> None:
    plain = Work(100.0, float(uniform(2.0).bytes_touched), 60.0)
    skew = seen(experts_task(Op.POST_ATTENTION, LaneKind.GPU, plain), layout_of(), 1.0)
    activations = uniform(2.0).bytes_touched - 3.0 * 192.0
    assert skew.dequantised / 60.0 == pytest.approx((skew.bytes_touched - activations) / (3.0 * 192.0))


def test_many_tokens_reach_every_expert_however_skewed() -> None:
    """Twelve tokens a prefill micro-batch here; a thousand requests in one leave nothing out."""
    layout = Layout(tiny_scenario(requests=2000), policy_of(micro_batch_size=1000, batch_size=2000))
    plain = uniform(1000.0)
    skew = seen(experts_task(Op.POST_ATTENTION, LaneKind.GPU, plain), layout, 1.0)
    assert skew.bytes_touched == pytest.approx(plain.bytes_touched, rel=1e-9)


def test_more_skew_reads_less() -> None:
    task = experts_task(Op.POST_ATTENTION, LaneKind.GPU, uniform(2.0))
    read = [float(seen(task, layout_of(), spread).bytes_touched) for spread in (0.25, 0.5, 1.0, 2.0, 4.0)]
    assert read == sorted(read, reverse=True) and read[0] < float(uniform(2.0).bytes_touched)


# A ring: one task per expert


@pytest.mark.parametrize(("phase", "tokens"), [("decode", 4.0), ("prefill", 12.0)])
def test_experts_of_a_ring_take_unequal_parts_of_the_same_whole(phase: Phase, tokens: float) -> None:
    """Decode serves the whole batch at once, prefill a micro-batch of two prompts; pages go on from pass to pass."""
    layout, part = layout_of(**RING), 0.25 * uniform(tokens)
    works = [
        seen(experts_task(Op.EXPERTS, LaneKind.GPU, part, phase=phase, page=4 + expert), layout, 1.0)
        for expert in range(4)
    ]
    reached = reach_probabilities(np.array([1.0, 1 / 2, 1 / 3, 1 / 4]), 2)
    flops = [float(work.flops) for work in works]
    assert sum(flops) == pytest.approx(float(uniform(tokens).flops))
    assert sorted(flops, reverse=True) == pytest.approx(reached / 2.0 * float(uniform(tokens).flops))
    touched = float(np.sum(1.0 - (1.0 - reached) ** tokens))
    activations = float(uniform(tokens).bytes_touched) - float(cost.experts_touched(SCENARIO.model, tokens)) * 192.0
    assert sum(float(work.bytes_touched) for work in works) == pytest.approx(touched * 192.0 + activations)


def test_ranks_are_dealt_out_by_seed_and_layer() -> None:
    layout = layout_of(**RING)

    def flops(layer: int, seed: int) -> tuple[float, ...]:
        tasks = [
            experts_task(Op.EXPERTS, LaneKind.GPU, 0.25 * uniform(4.0), layer=layer, page=expert) for expert in range(4)
        ]
        return tuple(float(seen(task, layout, 1.0, seed).flops) for task in tasks)

    assert flops(1, 3) == flops(1, 3)
    assert len({flops(layer, seed) for layer in range(4) for seed in range(4)}) > 8


# What stays


def unchanged(durations: Durations, layout: Layout, spread: float) -> bool:
    return skewed(durations, layout, spread, 0) is durations


def test_no_skew_one_expert_and_all_of_them_leave_durations_as_they_are() -> None:
    def durations(task: Task) -> float:
        return 1.0

    assert unchanged(durations, layout_of(), 0.0)
    assert not unchanged(durations, layout_of(), 0.1)
    dense = tiny_model(n_experts=0, top_k=0, expert_ffn=0, dense_ffn=4, moe_layers=(False, False))
    assert unchanged(durations, Layout(tiny_scenario(model=dense), policy_of()), 1.0)
    assert unchanged(durations, Layout(tiny_scenario(model=tiny_model(top_k=4)), policy_of()), 1.0)


def test_tasks_without_experts_are_passed_on_as_they_are() -> None:
    task = Task(TaskId(Op.LOAD_WEIGHTS, "decode", 0, 0, page=0), Lane(LaneKind.H2D), bytes_moved=3.0)
    assert skewed(lambda same: 5.0 if same is task else 0.0, layout_of(), 1.0, 0)(task) == 5.0


# Both together


def test_wrap_is_skew_then_jitter_and_nothing_without_either() -> None:
    def durations(task: Task) -> float:
        return sum(float(operator.work.bytes_touched) for operator in task.operators)

    layout, task = layout_of(), experts_task(Op.POST_ATTENTION, LaneKind.GPU, uniform(2.0), micro_batch=1)
    assert wrap(layout, 0.0, 0.0, 5)(durations) is durations
    routed = skewed(durations, layout, 1.0, 5)
    assert wrap(layout, 0.0, 1.0, 5)(durations)(task) == routed(task) < durations(task)
    assert wrap(layout, 0.05, 1.0, 5)(durations)(task) == jittered(routed, 0.05, 5)(task) != routed(task)


@pytest.mark.parametrize(
    ("jitter", "skew", "where"), [(0.0, -0.1, "--routing-skew"), (0.0, 4.1, "--routing-skew"), (2.0, 0.0, "--jitter")]
)
def test_spreads_out_of_range_are_refused_before_anything_runs(jitter: float, skew: float, where: str) -> None:
    with pytest.raises(InputError, match=where):
        wrap(layout_of(), jitter, skew, 0)


def test_a_spread_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="--routing-skew"):
        wrap(layout_of(), 0.0, float("nan"), 0)

"""Routing that prefers some experts: durations of the experts' tasks where tokens reach them unequally.

The cost model and the task graph count a micro-batch of B tokens under uniform routing: it reaches
E*(1 - (1 - k/E)^B) experts. Here the popularity of the experts of a layer follows Zipf's law, expert of rank r with
weight r^-spread, the ranks dealt out once per layer from a seed. A token draws k different experts one after the other
with these weights, so tokens reach expert e with a probability q_e that follows (`reach_probabilities`; the q_e add up
to k). Tokens are independent: the micro-batch reaches sum(1 - (1 - q_e)^B) experts in the mean, and each reached expert
serves B*q_e visits. Seconds are those of these means, not means of seconds.

Bytes of weights read by the computation, and values expanded, follow the experts reached; FLOPs stay. With a ring each
expert has a task of its own, whose FLOPs follow its tokens. Copies stay as they are: a plan copies every expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import numpy.typing as npt

from hrm import cost
from hrm.cost import Work
from hrm.errors import InputError
from hrm.graph import LaneKind, Op, Operator, Phase, Task
from hrm.layout import Layout
from simulator.durations import Durations, jittered

__all__ = ["reach_probabilities", "skewed", "wrap"]

Array = npt.NDArray[np.float64]
Operators = tuple[Operator, ...]

MOST_SPREAD = 4.0
"""Beyond it all tokens take the same experts."""

LOG_STEP = 0.1
"""Step in log t of the integral over time."""

EXPERTS = "routed experts"


def wrap(layout: Layout, jitter: float, skew: float, seed: int) -> Callable[[Durations], Durations]:
    """What jitter and routing skew make of durations, for `simulator.replay.replay_plan(wrap=...)`.

    Parameters
    ----------
    layout : Layout
        Of the plan.
    jitter : float
        Spread of every task's seconds (`simulator.durations.jittered`) [share].
    skew : float
        Exponent of Zipf's law of the experts' popularity; 0 = uniform routing.
    seed : int
        Same seed, same durations.

    Raises
    ------
    InputError
        A spread is out of range.
    """
    _check_spread(skew)
    jittered(lambda task: 0.0, jitter, seed)  # refuses a spread that is none before anything is replayed

    def wrapped(durations: Durations) -> Durations:
        routed = skewed(durations, layout, skew, seed)
        return jittered(routed, jitter, seed) if jitter else routed

    return wrapped


def skewed(durations: Durations, layout: Layout, spread: float, seed: int) -> Durations:
    """Durations where some experts are more popular than others.

    Parameters
    ----------
    durations : callable
        Task -> seconds under uniform routing [s].
    layout : Layout
        Of the plan whose tasks they are.
    spread : float
        Exponent of Zipf's law, from 0 to 4; 0 = uniform, the durations as they are.
    seed : int
        Deals out the ranks: the same for the same seed and layer.

    Raises
    ------
    InputError
        The spread is out of range.
    """
    _check_spread(spread)
    model = layout.scenario.model
    experts, top_k = model.streamed_experts, model.streamed_top_k
    if spread == 0.0 or top_k >= experts:
        return durations
    by_rank = reach_probabilities(np.arange(1.0, experts + 1.0) ** -spread, top_k)

    @cache
    def of_layer(layer: int) -> Array:
        ranks = list(range(experts))
        Random(f"routing/{seed}/{layer}").shuffle(ranks)
        return by_rank[ranks]

    @cache
    def share_of(phase: Phase, layer: int, expert: int | None) -> Work:
        """Skewed over uniform, for each number of the work of a task: of a whole layer, or of one expert of a ring."""
        reached = of_layer(layer)
        if expert is None:
            return _share(layout, layout.tokens(phase), reached, 1.0)
        # The experts of a ring serve the whole batch at once; prefill passes one micro-batch at a time.
        tokens = float(layout.policy.batch_size) if phase == "decode" else layout.tokens(phase)
        return _share(layout, tokens, reached[expert : expert + 1], 1.0 / experts)

    # Durations know work by the operators themselves, so the same ones come out where the same went in; those that went
    # in are kept, so that their id stays theirs.
    known: dict[tuple[int, Phase, int, int | None], tuple[Operators, Operators]] = {}

    def seconds(task: Task) -> float:
        if not any(operator.name == EXPERTS for operator in task.operators):
            return durations(task)
        phase, layer, expert = task.id.phase, task.id.layer, _expert_of(task, layout)
        key = (id(task.operators), phase, layer, expert)
        found = known.get(key)
        if found is None:
            share = share_of(phase, layer, expert)
            changed = tuple(
                Operator(name, _scaled(work, share)) if name == EXPERTS else Operator(name, work)
                for name, work in task.operators
            )
            found = known[key] = (task.operators, changed)
        return durations(replace(task, operators=found[1]))

    return seconds


def reach_probabilities(weights: Array, top_k: int) -> Array:
    """Probability that a token reaches each expert, of `top_k` drawn one after the other without replacement.

    Drawing with these weights is a race: expert e arrives after an exponential time of rate w_e, the first k are taken.
    So ``q_e = integral of w_e exp(-w_e t) P(fewer than k others by t) dt``, here over log t by the trapezium rule
    (exact to rounding, of a smooth function that vanishes at both ends).

    Parameters
    ----------
    weights : ndarray
        Popularity of each expert, above 0.
    top_k : int
        Experts a token takes; fewer than there are.

    Returns
    -------
    ndarray
        They add up to `top_k`.
    """
    rates = np.asarray(weights, dtype=np.float64) / np.max(weights)
    # By the end k + 1 experts have arrived, whatever happens; before the start none has.
    end = np.log(60.0 / np.sort(rates)[::-1][top_k])
    start = np.log(1e-14)
    steps = int(np.ceil((end - start) / LOG_STEP))
    at = np.exp(np.linspace(start, end, steps + 1))
    here = -np.expm1(-np.outer(rates, at))  # arrived by then: [expert, time]
    before = [_none(top_k, at.size)]  # P(j of the experts before this one have arrived), j < k: [j, time]
    for each in here[:-1]:
        before.append(_with_one_more(before[-1], each))
    found = np.empty_like(rates)
    behind = _none(top_k, at.size)
    for expert in range(rates.size - 1, -1, -1):
        at_most = np.cumsum(behind, axis=0)[::-1]  # so many, or fewer, of those after it: [k - 1 - j, time]
        fewer = np.sum(before[expert] * at_most, axis=0)
        found[expert] = np.sum(rates[expert] * at * (1.0 - here[expert]) * fewer) * (end - start) / steps
        behind = _with_one_more(behind, here[expert])
    return found


def _none(top_k: int, times: int) -> Array:
    """Nobody has arrived, for certain."""
    counts = np.zeros((top_k, times))
    counts[0] = 1.0
    return counts


def _with_one_more(counts: Array, arrived: Array) -> Array:
    """Probabilities of 0 .. k - 1 arrivals with one more expert, who has arrived with that probability."""
    more = counts * (1.0 - arrived)
    more[1:] += counts[:-1] * arrived
    return more


def _expert_of(task: Task, layout: Layout) -> int | None:
    """The one expert that a task of a ring computes; None where it computes those of a whole layer."""
    on_gpu = task.id.op is Op.EXPERTS and task.lane.kind is LaneKind.GPU
    if not on_gpu or task.id.page is None or layout.policy.weight_slots != "experts":
        return None
    return task.id.page % layout.scenario.model.streamed_experts  # pages of one pass after those of another


def _share(layout: Layout, tokens: float, reached: Array, part: float) -> Work:
    """Work of some experts of a layer over that of as many under uniform routing (`part` of the layer's).

    Parameters
    ----------
    tokens : float
        Tokens that are routed.
    reached : ndarray
        Probability that a token reaches each of these experts.
    """
    model, formats = layout.scenario.model, layout.scenario.formats
    uniform = part * cost.routed_experts(model, formats, tokens)
    expert_bytes = float(model.expert_bytes(formats.weights))
    touched_before = part * float(cost.experts_touched(model, tokens))
    touched = float(np.sum(1.0 - (1.0 - reached) ** tokens))
    visits = float(np.sum(reached)) / (part * model.streamed_top_k)  # over those under uniform routing
    activations = float(uniform.bytes_touched) - touched_before * expert_bytes
    return Work(
        visits,
        (touched * expert_bytes + visits * activations) / float(uniform.bytes_touched),
        touched / touched_before,
    )


def _scaled(work: Work, share: Work) -> Work:
    return Work(
        work.flops * share.flops, work.bytes_touched * share.bytes_touched, work.dequantised * share.dequantised
    )


def _check_spread(spread: float) -> None:
    if not 0.0 <= spread <= MOST_SPREAD:
        raise InputError(
            f"{spread} is no exponent of Zipf's law",
            where="--routing-skew",
            way_out=f"from 0 (uniform) to {MOST_SPREAD:g}, e.g. 1",
        )

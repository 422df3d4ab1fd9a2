"""The policy search: bound every batch in closed form, solve the programs that may still win, prove the gap.

The objective is generated tokens over prefill + decode seconds of the whole workload. Batches are equal (b of them,
N = ceil(R/b)), and b and mu are enumerated, so the ratio becomes seconds of all batches, b * T(N), and each program is
linear: an exact reformulation. Points (N, mu, A_g, F_g, slots), each with a range of prefill micro-batches, are taken
in the order of their bounds and cut into smaller ranges down to single choices; the search ends when no bound is below
the incumbent, so what is returned is optimal to the gap it carries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from hrm.branch_and_bound import GAP, BranchAndBound, Incumbent, SolvedPoint
from hrm.errors import InfeasibleError
from hrm.full_program import TIE_BREAK
from hrm.pins import Pins
from hrm.policy import Policy, WeightSlots
from hrm.prediction import Prediction, predict
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes
from hrm.trivial import Trivial, trivial_plans

__all__ = ["SearchResult", "SolvedPoint", "SolverReport", "find_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """How the answer was found.

    Attributes
    ----------
    name, status : str
    gap : float
        No feasible policy of the search space is better than the one returned by more than this share.
    seconds : float
        Wall-clock time of the search [s].
    points_bounded, programs_solved : int
        Points discarded or ordered by closed-form bounds; programs solved.
    """

    name: str
    status: str
    gap: float
    seconds: float
    points_bounded: int
    programs_solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best policy with its prediction.

    Attributes
    ----------
    policy : Policy
    prediction : Prediction
    solver : SolverReport
    trivial : tuple of Trivial
        The plans anyone would try first, with what they give or why they do not fit.
    solved : SolvedPoint or None
        The winning program; None where a trivial plan won.
    """

    policy: Policy
    prediction: Prediction
    solver: SolverReport
    trivial: tuple[Trivial, ...]
    solved: SolvedPoint | None


def find_policy(
    scenario: Scenario,
    pins: Pins | None = None,
    *,
    max_hours: float = 24.0,
    gap: float = GAP,
    rings: Literal["where needed", "always"] = "where needed",
    explain: bool = True,
    on_progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Find the policy with the highest end-to-end throughput over the workload.

    Parameters
    ----------
    scenario : Scenario
    pins : Pins, optional
        Variables that are given.
    max_hours : float
        Bound on prefill + decode of one batch [h].
    gap : float
        Relative gap at which the search stops.
    rings : {"where needed", "always"}
        Whether a ring of experts is looked at only where no plan has one or two slots of a layer, or in any case. Its
        lanes overlap less than the model says (attention and experts of a layer take turns, and disk and link with
        them), so a ring that wins by little on paper is not worth it.
    explain : bool
        Where nothing fits, find out by how much and what would help; it takes longer than finding that nothing does.
    on_progress : callable, optional
        Called with a line of text now and then.

    Returns
    -------
    SearchResult

    Raises
    ------
    InfeasibleError
        No policy fits the limits.
    InputError
        The pins leave nothing to choose from.
    """
    started = time.perf_counter()
    pins = pins or Pins()
    best = Incumbent()
    trivial: tuple[Trivial, ...] | None = None
    lowest_open = np.inf
    points = programs = 0
    layered: tuple[WeightSlots, ...] = (1, 2)
    passes: list[tuple[WeightSlots, ...]] = [(*layered, "experts")] if rings == "always" else [layered, ("experts",)]
    for slots, settled in product(passes, _pinning_choices(scenario, pins)):
        if slots == ("experts",) and (best.solved is not None or pins.weight_slots is not None):
            continue
        search = BranchAndBound.start(scenario, settled, max_hours, gap, best, slots)
        if trivial is None:
            trivial = trivial_plans(scenario, search.sizes, search.rates, search.grid, pins, search.max_seconds)
            for plan in trivial:
                if plan.policy is not None and plan.prediction is not None:
                    search.offer(plan.policy, plan.prediction, None)
        lowest_open = min(lowest_open, search.run(on_progress))
        points, programs = points + search.points_bounded, programs + search.programs_solved
    if best.policy is None or best.prediction is None:
        if not explain:
            raise InfeasibleError(f"no plan fits {scenario.model.name} on {scenario.profile.name}")
        from hrm.infeasibility import explain_infeasibility

        raise explain_infeasibility(scenario, search.sizes, search.rates, pins, max_hours)
    if best.solved is not None:
        best.policy = with_exact_budget(scenario, best.policy)
        best.prediction = predict(scenario, search.sizes, search.rates, best.policy)
        if pins.pin_weights is None and best.policy.pin_weights:
            _unpin(best, scenario, search.sizes, search.rates)
    open_gap = max(0.0, 1.0 - lowest_open / best.seconds) if np.isfinite(lowest_open) else 0.0
    return SearchResult(
        policy=best.policy,
        prediction=best.prediction,
        trivial=trivial or (),
        solved=best.solved,
        solver=SolverReport(
            name="HiGHS (PuLP), Lagrangian bounds",
            status="optimal",
            gap=open_gap + 2 * TIE_BREAK,
            seconds=time.perf_counter() - started,
            points_bounded=points,
            programs_solved=programs,
        ),
    )


def _pinning_choices(scenario: Scenario, pins: Pins) -> list[Pins]:
    """Pins with page-locking settled: without a lock limit locked weights are never slower; with one, try both."""
    if pins.pin_weights is not None:
        return [pins]
    both = (True,) if scenario.profile.cpu.lockable_bytes is None else (True, False)
    return [replace(pins, pin_weights=locked) for locked in both]


def _unpin(best: Incumbent, scenario: Scenario, sizes: Sizes, rates: Rates) -> None:
    """Leave the weights pageable where that costs no time: pinning only lengthens the start then."""
    if best.policy is None or best.prediction is None:
        return
    staged = replace(best.policy, pin_weights=False)
    prediction = predict(scenario, sizes, rates, staged)
    if prediction.batch_s <= best.prediction.batch_s * (1.0 + TIE_BREAK):
        best.policy, best.prediction = staged, prediction


def with_exact_budget(scenario: Scenario, policy: Policy) -> Policy:
    """The policy with the smallest token budget under which Algorithm 2 defers no request (at most the bound)."""
    budget = scenario.workload.micro_batch_token_budget(
        policy.batch_size, policy.num_micro_batches, policy.micro_batch_size
    )
    return replace(policy, micro_batch_token_budget=min(budget, policy.micro_batch_token_budget or budget))

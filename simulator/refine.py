"""The plan that the simulator puts first, of the best ones by prediction; and how far the two disagree on the order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

from hrm.diverse import CANDIDATE_GAP, Candidate, Judged, Refinement, find_policies
from hrm.errors import InputError
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.scenario import Scenario
from hrm.search import SearchResult
from simulator.replay import Replay, replay_plan

__all__ = ["count_changes", "refine_search"]

SAME = 1e-4
"""Rates that differ by a smaller share are equal: the search ends at this gap, and the fast replay is no finer."""


def refine_search(
    scenario: Scenario,
    pins: Pins,
    result: SearchResult,
    count: int,
    *,
    max_hours: float = 24.0,
    replay: Callable[[Scenario, Policy], Replay] = replay_plan,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[SearchResult, Refinement]:
    """Replay the best plans by prediction that differ, and take the one that the simulator puts first.

    Parameters
    ----------
    scenario : Scenario
    pins : Pins
        Variables that are given.
    result : SearchResult
        The best plan by prediction.
    count : int
        Plans to replay.
    max_hours : float
        Bound on prefill + decode of one batch, as predicted [h].
    replay : callable
        Scenario and policy -> Replay.
    on_progress : callable, optional
        Called with a line of text now and then.

    Returns
    -------
    SearchResult
        With the policy that is fastest in simulation; where that is not the first, its gap is to the best prediction
        of all candidates, rings of experts included.
    Refinement

    Raises
    ------
    InputError
        The count is out of range, or the simulator has no lanes for this machine.
    """
    candidates = find_policies(scenario, pins, count, best=result, max_hours=max_hours, on_progress=on_progress)
    tokens = scenario.workload.num_requests * scenario.workload.generation_length
    judged: list[Judged] = []
    for number, each in enumerate(candidates, 1):
        if on_progress is not None:
            on_progress(f"replaying plan {number} of {len(candidates)}")
        seconds = _simulated_seconds(scenario, each, replay)
        judged.append(
            Judged(
                policy=each.policy,
                predicted_tokens_per_s=tokens / each.seconds,
                simulated_tokens_per_s=None if seconds is None else tokens / seconds,
            )
        )
    chosen = _first(judged)
    pairs, inversions, largest = count_changes(
        [
            (each.predicted_tokens_per_s, each.simulated_tokens_per_s)
            for each in judged
            if each.simulated_tokens_per_s is not None
        ]
    )
    refinement = Refinement(
        candidates=tuple(judged), pairs=pairs, inversions=inversions, largest_change=largest, chosen=chosen
    )
    return (result if chosen == 0 else _with_candidate(result, candidates, chosen)), refinement


def count_changes(rates: Sequence[tuple[float, float]]) -> tuple[int, int, float]:
    """Pairs whose order simulation turns around.

    Parameters
    ----------
    rates : sequence of (float, float)
        Predicted and simulated throughput of each plan [token/s].

    Returns
    -------
    pairs, inversions : int
        All pairs, and those that simulation puts in the other order; rates within 1e-4 are in no order.
    largest : float
        By how much the plan that was predicted slower is faster in simulation, at most [share].
    """
    pairs = inversions = 0
    largest = 0.0
    for one, other in combinations(rates, 2):
        pairs += 1
        better, worse = (one, other) if one[0] > other[0] else (other, one)
        if better[0] <= worse[0] * (1.0 + SAME) or worse[1] <= better[1] * (1.0 + SAME):
            continue
        inversions += 1
        largest = max(largest, worse[1] / better[1] - 1.0)
    return pairs, inversions, largest


def _simulated_seconds(
    scenario: Scenario, candidate: Candidate, replay: Callable[[Scenario, Policy], Replay]
) -> float | None:
    """Simulated seconds of all batches [s]; None for a plan that is all on the CPU, which no schedule lays out."""
    try:
        run = replay(scenario, candidate.policy)
    except InputError:
        if candidate.policy.everything_on_cpu:
            return None
        raise
    return candidate.prediction.num_batches * (run.prefill_s + run.decode_s)


def _first(judged: Sequence[Judged]) -> int:
    """Index of the best plan by simulation, the earlier one of equals; one without lanes stands by its prediction."""
    rates = [each.simulated_tokens_per_s or each.predicted_tokens_per_s for each in judged]
    top = max(rates)
    return next(index for index, rate in enumerate(rates) if rate * (1.0 + SAME) >= top)


def _with_candidate(result: SearchResult, candidates: Sequence[Candidate], chosen: int) -> SearchResult:
    """The result of the search with another plan in place of its best."""
    plan = candidates[chosen]
    bound = min(each.seconds for each in candidates) * (1.0 - max(result.solver.gap, CANDIDATE_GAP))
    return replace(
        result,
        policy=plan.policy,
        prediction=plan.prediction,
        solved=plan.solved,
        solver=replace(result.solver, gap=1.0 - bound / plan.seconds),
    )

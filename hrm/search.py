"""The policy search: bound every batch in closed form, solve the programs that may still win, prove the gap.

The objective is generated tokens over prefill + decode seconds of the whole workload. Batches are equal (b of them,
N = ceil(R/b)), and b and mu are enumerated, so the ratio becomes seconds of all batches, b * T(N), and each program is
linear: an exact reformulation. Nodes (N, mu, A_g, F_g, ring) are taken in the order of their bounds; the search ends
when no bound is below the incumbent, so what is returned is optimal to the gap it carries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hrm.bounds import Grid, bound_nodes, candidate_batches
from hrm.errors import InfeasibleError, InputError
from hrm.full_program import Node, build_program, objective, policy_of
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.prediction import Prediction, predict
from hrm.program import Program, Solution
from hrm.rates import Rates, derive_rates
from hrm.scenario import Scenario, Sizes, measure_sizes
from hrm.trivial import Trivial, trivial_plans

__all__ = ["SearchResult", "SolverReport", "find_policy"]

GAP = 1e-4
"""Relative gap at which the search stops."""


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
    points_bounded, nodes_solved : int
        Points discarded or ordered by a closed-form bound; programs solved.
    """

    name: str
    status: str
    gap: float
    seconds: float
    points_bounded: int
    nodes_solved: int


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
    node : Node or None
        Node of the winning program; None where a trivial plan won.
    """

    policy: Policy
    prediction: Prediction
    solver: SolverReport
    trivial: tuple[Trivial, ...]
    node: Node | None


@dataclass(slots=True)
class _Incumbent:
    """Best plan so far; seconds of the whole workload."""

    seconds: float = np.inf
    policy: Policy | None = None
    prediction: Prediction | None = None
    node: Node | None = None


def find_policy(
    scenario: Scenario,
    pins: Pins | None = None,
    *,
    max_hours: float = 24.0,
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
    sizes = measure_sizes(scenario)
    rates = derive_rates(scenario.profile, scenario.formats)
    grid = candidate_batches(scenario.workload.num_requests, pins)
    if grid.size.size == 0:
        raise InputError(
            f"no batch of at most {scenario.workload.num_requests} requests agrees with {pins.given}",
            where="pinned variables",
            way_out="more --requests, or fewer pinned variables",
        )
    max_seconds = max_hours * 3600.0
    nodes = _ordered_nodes(scenario, sizes, rates, grid, pins, max_seconds)
    trivial = trivial_plans(scenario, sizes, rates, grid, pins, max_seconds)
    best = _Incumbent()
    for plan in trivial:
        if plan.policy is not None and plan.prediction is not None:
            _offer(best, scenario, plan.policy, plan.prediction, None)
    solved = 0
    lowest_open = np.inf
    for bound, index, (attention, ffn, ring) in nodes:
        if bound >= best.seconds * (1.0 - GAP):
            lowest_open = bound
            break
        node = Node(
            batch_size=int(grid.size[index]),
            micro_batch_size=int(grid.micro_batch[index]),
            num_micro_batches=int(grid.micro_batches[index]),
            attention_on_gpu=attention,
            ffn_on_gpu=ffn,
            ring=ring,
        )
        solution, _ = solve_node(scenario, sizes, rates, node, pins, max_seconds, bound / grid.batches[index])
        solved += 1
        if on_progress is not None and solved % 10 == 0:
            on_progress(f"solved {solved} programs, best {_rate(scenario, best):.2f} token/s")
        if solution.status == "optimal":
            policy = with_exact_budget(scenario, policy_of(scenario, sizes, node, solution))
            _offer(best, scenario, policy, predict(scenario, sizes, rates, policy), node)
    if best.policy is None or best.prediction is None:
        from hrm.infeasibility import explain_infeasibility

        raise explain_infeasibility(scenario, sizes, rates, pins, max_hours)
    gap = 0.0 if lowest_open >= best.seconds else 1.0 - lowest_open / best.seconds
    return SearchResult(
        policy=best.policy,
        prediction=best.prediction,
        trivial=trivial,
        node=best.node,
        solver=SolverReport(
            name="HiGHS through PuLP, closed-form bounds",
            status="optimal",
            gap=float(max(gap, 0.0) + 2e-5),
            seconds=time.perf_counter() - started,
            points_bounded=len(nodes),
            nodes_solved=solved,
        ),
    )


def solve_node(
    scenario: Scenario, sizes: Sizes, rates: Rates, node: Node, pins: Pins, max_seconds: float, reference_s: float
) -> tuple[Solution, Program]:
    """Solve the program of one node."""
    program = build_program(scenario, sizes, rates, node, pins, max_seconds)
    return program.minimise(objective(sizes, scenario, node, reference_s)), program


def with_exact_budget(scenario: Scenario, policy: Policy) -> Policy:
    """The policy with the smallest token budget under which Algorithm 2 defers no request (at most the bound)."""
    budget = scenario.workload.micro_batch_token_budget(
        policy.batch_size, policy.num_micro_batches, policy.micro_batch_size
    )
    return replace(policy, micro_batch_token_budget=min(budget, policy.micro_batch_token_budget or budget))


def _rate(scenario: Scenario, best: _Incumbent) -> float:
    tokens = scenario.workload.num_requests * scenario.workload.generation_length
    return 0.0 if not np.isfinite(best.seconds) else float(tokens / best.seconds)


def _offer(best: _Incumbent, scenario: Scenario, policy: Policy, prediction: Prediction, node: Node | None) -> None:
    seconds = prediction.num_batches * prediction.batch_s
    if seconds < best.seconds:
        best.seconds, best.policy, best.prediction, best.node = seconds, policy, prediction, node


def _ordered_nodes(
    scenario: Scenario, sizes: Sizes, rates: Rates, grid: Grid, pins: Pins, max_seconds: float
) -> list[tuple[float, int, tuple[bool, bool, bool]]]:
    """(bound on the seconds of all batches, index in the grid, (A_g, F_g, ring)), lowest bound first."""

    def choices(pinned: bool | None) -> tuple[bool, ...]:
        return (True, False) if pinned is None else (pinned,)

    rings = (False, True) if pins.weight_slots is None else (pins.weight_slots == "experts",)
    found: list[tuple[float, int, tuple[bool, bool, bool]]] = []
    for attention, ffn, ring in product(choices(pins.attention_on_gpu), choices(pins.ffn_on_gpu), rings):
        if ring and scenario.model.streamed_experts < 3:
            continue  # a ring of two experts is then a whole layer
        bound = bound_nodes(
            scenario,
            sizes,
            rates,
            grid,
            pins,
            attention_on_gpu=attention,
            ffn_on_gpu=ffn,
            ring=ring,
            staged=pins.pin_weights is False,
        )
        seconds = np.where(bound <= max_seconds, bound * grid.batches, np.inf)
        for index in np.flatnonzero(np.isfinite(seconds)):
            found.append((float(seconds[index]), int(index), (attention, ffn, ring)))
    found.sort(key=lambda entry: entry[0])
    return found

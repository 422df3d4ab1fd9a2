"""The policy search: bound every batch in closed form, solve the programs that may still win, prove the gap.

The objective is generated tokens over prefill + decode seconds of the whole workload. Batches are equal (b of them,
N = ceil(R/b)), and b and mu are enumerated, so the ratio becomes seconds of all batches, b * T(N), and each program is
linear: an exact reformulation. Points (N, mu, A_g, F_g, slots) are taken in the order of their bounds; the search ends
when no bound is below the incumbent, so what is returned is optimal to the gap it carries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hrm.bounds import BoundedClass, bound_class, discard, tighten
from hrm.errors import InputError
from hrm.full_cost import DENSE, HEAD
from hrm.full_program import LIMITS, TIE_BREAK, build_program, least_excess, objective_with_tie_breaks, policy_of
from hrm.pins import Pins
from hrm.points import Grid, Point, PrefillChoice, candidate_batches, prefill_choice, prefill_choices, prefill_ladder
from hrm.policy import Policy, WeightSlots
from hrm.prediction import Prediction, predict
from hrm.program import Program
from hrm.rates import Rates, derive_rates
from hrm.rows import objective_of
from hrm.scenario import Scenario, Sizes, measure_sizes
from hrm.trivial import Trivial, trivial_plans

__all__ = ["SearchResult", "SolvedPoint", "SolverReport", "find_policy"]

GAP = 1e-4
"""Relative gap at which the search stops."""

LADDER_REACH = 1.3
"""How far around the chosen prefill micro-batch the last step looks."""


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
class SolvedPoint:
    """A point of the outer search with the solution of its program.

    Attributes
    ----------
    point : Point
    choices : list of PrefillChoice
    values : dict of str to float
        By name of the unknown.
    """

    point: Point
    choices: list[PrefillChoice]
    values: dict[str, float]


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


@dataclass(slots=True)
class _Incumbent:
    """Best plan so far; seconds of the whole workload."""

    seconds: float = np.inf
    policy: Policy | None = None
    prediction: Prediction | None = None
    solved: SolvedPoint | None = None

    def rate(self, scenario: Scenario) -> float:
        """Generated tokens over those seconds [token/s]."""
        tokens = scenario.workload.num_requests * scenario.workload.generation_length
        return float(tokens / self.seconds) if np.isfinite(self.seconds) else 0.0


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
    search = _Search.start(scenario, pins, max_hours)
    trivial = trivial_plans(scenario, search.sizes, search.rates, search.grid, pins, search.max_seconds)
    for plan in trivial:
        if plan.policy is not None and plan.prediction is not None:
            search.offer(plan.policy, plan.prediction, None)
    lowest_open = search.run(on_progress)
    best = search.best
    if best.policy is None or best.prediction is None:
        from hrm.infeasibility import explain_infeasibility

        raise explain_infeasibility(scenario, search.sizes, search.rates, pins, max_hours)
    if best.solved is not None:
        search.polish()
    gap = max(0.0, 1.0 - lowest_open / best.seconds) if np.isfinite(lowest_open) else 0.0
    return SearchResult(
        policy=best.policy,
        prediction=best.prediction,
        trivial=trivial,
        solved=best.solved,
        solver=SolverReport(
            name="HiGHS (PuLP), Lagrangian bounds",
            status="optimal",
            gap=gap + 2 * TIE_BREAK,
            seconds=time.perf_counter() - started,
            points_bounded=search.points_bounded,
            programs_solved=search.programs_solved,
        ),
    )


@dataclass(slots=True)
class _Search:
    """State of one search. Mutable on purpose: bounds tighten and the incumbent improves."""

    scenario: Scenario
    pins: Pins
    sizes: Sizes
    rates: Rates
    grid: Grid
    max_seconds: float
    ladder: tuple[int, ...]
    classes: list[BoundedClass]
    best: _Incumbent
    programs_solved: int = 0

    @staticmethod
    def start(scenario: Scenario, pins: Pins, max_hours: float) -> _Search:
        """Sizes, rates and the bounded classes of points."""
        sizes = measure_sizes(scenario)
        rates = derive_rates(scenario.profile, scenario.formats)
        grid = candidate_batches(scenario.workload.num_requests, pins)
        if grid.size.size == 0:
            raise InputError(
                f"no batch of at most {scenario.workload.num_requests} requests agrees with {pins.given}",
                where="pinned variables",
                way_out="more --requests, or fewer pinned variables",
            )
        ladder = prefill_ladder(scenario, sizes, rates)
        max_seconds = max_hours * 3600.0
        classes = [
            bound_class(scenario, sizes, rates, grid, point, pins, ladder, max_seconds=max_seconds)
            for point in _classes(scenario, sizes, grid, pins)
        ]
        return _Search(
            scenario=scenario,
            pins=pins,
            sizes=sizes,
            rates=rates,
            grid=grid,
            max_seconds=max_seconds,
            ladder=ladder,
            classes=classes,
            best=_Incumbent(),
        )

    @property
    def points_bounded(self) -> int:
        """Points of all classes, every combination counted."""
        return sum(len(each.bounds) * self.grid.size.size for each in self.classes)

    def run(self, on_progress: Callable[[str], None] | None) -> float:
        """Solve points in the order of their bounds; return the lowest bound left open [s of all batches]."""
        tightened: dict[tuple[int, tuple[bool, bool]], float] = {}
        while True:
            found = self._lowest()
            if found is None:
                return np.inf
            bound, which, index = found
            if bound >= self.best.seconds * (1.0 - GAP):
                return bound
            bounded = self.classes[which]
            combination = bounded.best_combination(index)
            point = bounded.point.at(self.grid, index)
            choices = prefill_choices(self.scenario, self.sizes, self.rates, point, self.pins, self.ladder)
            last = tightened.get((which, combination), 0.0)
            if bound > last * (1.0 + GAP / 4):
                # New ground for these multipliers: the duals here tighten the bounds of the whole class.
                tightened[(which, combination)] = bound
                self._tighten(bounded, index, point, choices, combination)
                continue
            self._solve(bounded, index, point, choices)
            tightened[(which, combination)] = 0.0
            if on_progress is not None and self.programs_solved % 20 == 0:
                on_progress(f"{self.programs_solved} programs solved, best {self.best.rate(self.scenario):.2f} token/s")

    def _lowest(self) -> tuple[float, int, int] | None:
        """Lowest open bound on the seconds of all batches: (bound, class, index in the grid)."""
        found: tuple[float, int, int] | None = None
        for which, bounded in enumerate(self.classes):
            bounds = bounded.lowest
            seconds = np.where(bounds <= self.max_seconds, bounds * self.grid.batches, np.inf)
            index = int(np.argmin(seconds))
            if np.isfinite(seconds[index]) and (found is None or seconds[index] < found[0]):
                found = (float(seconds[index]), which, index)
        return found

    def _program(self, point: Point, choices: list[PrefillChoice], *, elastic: Collection[str] = ()) -> Program:
        self.programs_solved += 1
        return build_program(
            self.scenario,
            self.sizes,
            self.rates,
            point,
            self.pins,
            choices,
            max_seconds=self.max_seconds,
            elastic=elastic,
        )

    def _tighten(
        self,
        bounded: BoundedClass,
        index: int,
        point: Point,
        choices: list[PrefillChoice],
        combination: tuple[bool, bool],
    ) -> None:
        """Solve the relaxation at a point and use its duals as multipliers for the whole class."""
        program = self._program(point, choices)
        program.fix({DENSE: float(combination[0]), HEAD: float(combination[1])})
        program.relax(program.integers)
        solution = program.minimise(objective_of(self.sizes))
        if solution.status == "infeasible":
            self._discard(bounded, point, choices, combination)
            bounded.bounds[combination][index] = np.inf
            return
        tighten(bounded, {name: max(0.0, -dual) for name, dual in solution.duals.items()})
        bound = bounded.bounds[combination]
        bound[index] = max(bound[index], solution.objective * (1.0 - 1e-9))

    def _discard(
        self, bounded: BoundedClass, point: Point, choices: list[PrefillChoice], combination: tuple[bool, bool]
    ) -> None:
        """Find out why a point is infeasible and discard every batch of the class with the same reason."""
        program = self._program(point, choices, elastic=LIMITS)
        program.fix({DENSE: float(combination[0]), HEAD: float(combination[1])})
        program.relax(program.integers)
        solution = program.minimise(least_excess(program))
        if solution.status == "optimal" and solution.objective > 1e-6:
            discard(bounded, {name: max(0.0, -dual) for name, dual in solution.duals.items()})

    def _solve(self, bounded: BoundedClass, index: int, point: Point, choices: list[PrefillChoice]) -> None:
        """Solve the program at a point: its bound becomes its optimum, and it may become the incumbent."""
        reference = max(bounded.lowest[index], 1e-9)
        program = self._program(point, choices)
        solution = program.minimise(objective_with_tie_breaks(self.scenario, self.sizes, point, float(reference)))
        for bound in bounded.bounds.values():
            bound[index] = np.inf if solution.status == "infeasible" else max(bound[index], solution.objective)
        if solution.status == "infeasible":
            return
        policy = policy_of(self.scenario, self.sizes, point, choices, solution)
        policy = with_exact_budget(self.scenario, policy)
        solved = SolvedPoint(point=point, choices=choices, values=solution.values)
        self.offer(policy, predict(self.scenario, self.sizes, self.rates, policy), solved)
        for bound in bounded.bounds.values():  # solved: nothing is left to find here
            bound[index] = np.inf

    def offer(self, policy: Policy, prediction: Prediction, solved: SolvedPoint | None) -> None:
        """Make a plan the incumbent if it is better."""
        seconds = prediction.num_batches * prediction.batch_s
        if seconds < self.best.seconds:
            self.best.seconds, self.best.policy, self.best.prediction = seconds, policy, prediction
            self.best.solved = solved

    def polish(self) -> None:
        """Try the prefill micro-batch sizes between the rungs of the ladder around the best one."""
        policy, solved = self.best.policy, self.best.solved
        if policy is None or solved is None or self.pins.prefill_micro_batch_size is not None:
            return
        chosen, n, point = policy.prefill_micro_batch_size, policy.batch_size, solved.point
        low, high = int(chosen / LADDER_REACH) + 1, min(n, int(chosen * LADDER_REACH))
        parts = sorted({-(-n // size) for size in range(low, high + 1)})
        sizes = sorted({-(-n // count) for count in parts[:: max(1, len(parts) // 16)]} | {chosen})
        if len(sizes) < 2:
            return
        if point.ring:
            for size in sizes:
                self._solve_alone(point, [prefill_choice(self.scenario, point.size, float(size))])
        else:
            self._solve_alone(point, [prefill_choice(self.scenario, point.size, float(size)) for size in sizes])

    def _solve_alone(self, point: Point, choices: list[PrefillChoice]) -> None:
        program = self._program(point, choices)
        reference = self.best.seconds / max(1, -(-self.scenario.workload.num_requests // int(point.size)))
        solution = program.minimise(objective_with_tie_breaks(self.scenario, self.sizes, point, float(reference)))
        if solution.status == "optimal":
            policy = with_exact_budget(self.scenario, policy_of(self.scenario, self.sizes, point, choices, solution))
            solved = SolvedPoint(point=point, choices=choices, values=solution.values)
            self.offer(policy, predict(self.scenario, self.sizes, self.rates, policy), solved)


def _classes(scenario: Scenario, sizes: Sizes, grid: Grid, pins: Pins) -> list[Point]:
    """Classes of points (A_g, F_g, slots) that the pins leave."""

    def choices(pinned: bool | None) -> tuple[bool, ...]:
        return (True, False) if pinned is None else (pinned,)

    all_slots: tuple[WeightSlots, ...] = (1, 2, "experts")
    slots = all_slots if pins.weight_slots is None else (pins.weight_slots,)
    if scenario.model.streamed_experts < 3:
        slots = tuple(each for each in slots if each != "experts")  # a ring of two experts is a whole layer
    return [
        Point(
            size=grid.size,
            micro_batch=grid.micro_batch,
            micro_batches=grid.micro_batches,
            attention_on_gpu=attention,
            ffn_on_gpu=ffn,
            slots=each,
        )
        for attention, ffn, each in product(choices(pins.attention_on_gpu), choices(pins.ffn_on_gpu), slots)
    ]


def with_exact_budget(scenario: Scenario, policy: Policy) -> Policy:
    """The policy with the smallest token budget under which Algorithm 2 defers no request (at most the bound)."""
    budget = scenario.workload.micro_batch_token_budget(
        policy.batch_size, policy.num_micro_batches, policy.micro_batch_size
    )
    return replace(policy, micro_batch_token_budget=min(budget, policy.micro_batch_token_budget or budget))

"""Branch and bound over the points of the outer search: the state of one search and its steps.

Nodes are points (N, mu, A_g, F_g, slots) with a range of prefill micro-batches. The one with the lowest bound is taken:
its duals tighten the bounds of its family, its program is solved, or its range is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hrm.bounds import PLACED, Combination, Sheet, bound_sheet, discard, guess_multipliers, tighten
from hrm.errors import InputError
from hrm.full_program import LIMITS, TIE_BREAK, build_program, least_excess, objective_with_tie_breaks, policy_of
from hrm.pins import Pins
from hrm.points import (
    Grid,
    Point,
    PrefillChoice,
    candidate_batches,
    cut_ranges,
    point_classes,
    prefill_choice,
    prefill_range,
)
from hrm.policy import Policy, WeightSlots
from hrm.prediction import Prediction, predict
from hrm.program import Program
from hrm.rates import Rates, derive_rates
from hrm.rows import objective_of
from hrm.scenario import Scenario, Sizes, measure_sizes

__all__ = ["GAP", "BranchAndBound", "Incumbent", "SolvedPoint"]

GAP = 1e-4
"""Relative gap at which the search stops."""

NARROW = 1.4
"""A range of prefill micro-batches whose ends differ by less has its program solved before it is cut further."""

PIECES = 8
"""Ranges a range is cut into."""

SPLIT_AT_ONCE = 4000
"""Most nodes of a sheet cut in one go."""

FIRST_SPREAD = 1.02
"""Before there is any plan, nodes with bounds up to so many times the lowest are cut with it."""

MOST_PATIENCE = 15
"""Most programs solved in a row where new multipliers rule out nothing."""

DIVE = 40
"""Prefill micro-batches tried for the first plan of a family."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPoint:
    """A point of the outer search with the solution of its program.

    Attributes
    ----------
    point : Point
    prefill : PrefillChoice
    values : dict of str to float
        By name of the unknown.
    """

    point: Point
    prefill: PrefillChoice
    values: dict[str, float]


@dataclass(slots=True)
class Incumbent:
    """Best plan so far; seconds of the whole workload."""

    seconds: float = np.inf
    policy: Policy | None = None
    prediction: Prediction | None = None
    solved: SolvedPoint | None = None

    def rate(self, scenario: Scenario) -> float:
        """Generated tokens over those seconds [token/s]."""
        tokens = scenario.workload.num_requests * scenario.workload.generation_length
        return float(tokens / self.seconds) if np.isfinite(self.seconds) else 0.0


@dataclass(slots=True, eq=False)
class _Family:
    """Points of one class (A_g, F_g, slots) under search: their sheets, and the multipliers found so far."""

    sheets: list[Sheet] = field(default_factory=list)
    multipliers: list[dict[str, float]] = field(default_factory=list)
    dived: bool = False


@dataclass(slots=True, eq=False)
class _Front:
    """Lowest open node of a sheet: bound on the seconds of all batches [s], and its index."""

    family: _Family
    sheet: Sheet
    batches: Array
    stuck: bool = False  # a program solved for a range did not close it, so ranges are cut first
    ground: dict[Combination, float] = field(default_factory=dict)  # bound at which multipliers were last sought
    patience: int = 0  # programs to solve before multipliers are sought on old ground
    solved: int = 0  # since they were
    seconds: float = 0.0
    index: int = 0


@dataclass(slots=True)
class BranchAndBound:
    """State of one search. Mutable on purpose: bounds tighten and the incumbent improves."""

    scenario: Scenario
    pins: Pins
    sizes: Sizes
    rates: Rates
    grid: Grid
    max_seconds: float
    gap: float = GAP
    fronts: list[_Front] = field(default_factory=list)
    best: Incumbent = field(default_factory=Incumbent)
    points_bounded: int = 0
    programs_solved: int = 0

    @staticmethod
    def start(
        scenario: Scenario,
        pins: Pins,
        max_hours: float,
        gap: float = GAP,
        best: Incumbent | None = None,
        slots: tuple[WeightSlots, ...] = (1, 2, "experts"),
    ) -> BranchAndBound:
        """Sizes and rates, and one sheet for every class: all batches, all prefill micro-batches as one range."""
        grid = candidate_batches(scenario.workload.num_requests, pins)
        if grid.size.size == 0:
            raise InputError(
                f"no batch of at most {scenario.workload.num_requests} requests agrees with {pins.given}",
                where="pinned variables",
                way_out="more --requests, or fewer pinned variables",
            )
        search = BranchAndBound(
            scenario=scenario,
            pins=pins,
            sizes=measure_sizes(scenario),
            rates=derive_rates(scenario.profile, scenario.formats),
            grid=grid,
            max_seconds=max_hours * 3600.0,
            gap=gap,
            best=best or Incumbent(),
        )
        given = pins.prefill_micro_batch_size
        low = np.ones_like(grid.size) if given is None else np.minimum(grid.size, given)
        high = grid.size if given is None else low
        for point in point_classes(scenario, grid, pins, slots):
            family = _Family()
            front = search._add_sheet(family, point, low, high)
            for multipliers in guess_multipliers(front.sheet, search.sizes):
                tighten(front.sheet, multipliers)
            search._refresh(front)
        return search

    def exclude(self, unwanted: Callable[[Point], npt.NDArray[np.bool_]]) -> None:
        """Take points out of the search before it runs; `unwanted` gets a class of points, with arrays of counts."""
        for front in list(self.fronts):
            gone = unwanted(front.sheet.point)
            for bound in front.sheet.bounds.values():
                bound[gone] = np.inf
            self._refresh(front)

    def run(self, on_progress: Callable[[str], None] | None) -> float:
        """Take nodes in the order of their bounds; return the lowest bound left open [s of all batches]."""
        while self.fronts:
            front = min(self.fronts, key=lambda each: each.seconds)
            if front.seconds >= self.best.seconds * (1.0 - self.gap):
                return front.seconds
            sheet, index = front.sheet, front.index
            combination = sheet.best_combination(index)
            single = sheet.is_single(index)
            if front.seconds > front.ground.get(combination, 0.0) * (1.0 + self.gap / 4):
                # New ground for these multipliers: the duals here tighten the bounds of the whole family.
                front.ground[combination] = front.seconds
                self._tighten(front, index, combination)
            elif not front.family.dived:
                front.family.dived = True
                self._dive(front)
            elif single or (not front.stuck and sheet.high[index] <= sheet.low[index] * NARROW):
                self._solve(front, single=single)
            else:
                self._split(front)
            if on_progress is not None and self.programs_solved % 20 == 0:
                on_progress(f"{self.programs_solved} programs solved, best {self.best.rate(self.scenario):.2f} token/s")
        return np.inf

    def _add_sheet(self, family: _Family, point: Point, low: Array, high: Array) -> _Front:
        sheet = bound_sheet(
            self.scenario, self.sizes, self.rates, point, low, high, self.pins, max_seconds=self.max_seconds
        )
        family.sheets.append(sheet)
        batches = np.ceil(self.scenario.workload.num_requests / np.asarray(point.size))
        front = _Front(family=family, sheet=sheet, batches=batches)
        self.fronts.append(front)
        self.points_bounded += len(sheet.bounds) * low.size
        for multipliers in family.multipliers:
            tighten(sheet, multipliers)
        return front

    def _refresh(self, front: _Front) -> None:
        """Find the lowest open node of a sheet anew; drop the sheet where none is left."""
        bounds = front.sheet.lowest
        seconds = np.where(bounds <= self.max_seconds, bounds * front.batches, np.inf)
        front.seconds = float(seconds.min())
        # Of nodes about as low take the largest micro-batch: whole requests are the smallest share of it.
        limit = self.best.seconds * (1.0 - self.gap)
        about = np.flatnonzero((seconds <= front.seconds * (1.0 + self.gap / 4)) & (seconds < limit))
        front.index = int(about[np.argmax(np.asarray(front.sheet.point.micro_batch)[about])]) if about.size else 0
        if not np.isfinite(front.seconds):
            self.fronts.remove(front)
            front.family.sheets.remove(front.sheet)

    def _program(self, point: Point, prefill: PrefillChoice, *, elastic: Collection[str] = ()) -> Program:
        self.programs_solved += 1
        return build_program(
            self.scenario,
            self.sizes,
            self.rates,
            point,
            self.pins,
            prefill,
            max_seconds=self.max_seconds,
            elastic=elastic,
        )

    def _node(self, sheet: Sheet, index: int) -> tuple[Point, PrefillChoice]:
        point = sheet.point.at(index)
        return point, prefill_range(self.scenario, point.size, float(sheet.low[index]), float(sheet.high[index]))

    def _tighten(self, front: _Front, index: int, combination: Combination) -> None:
        """Solve the relaxation at a node and use its duals as multipliers for the whole family."""
        point, prefill = self._node(front.sheet, index)
        program = self._program(point, prefill)
        program.fix({name: float(on) for name, on in zip(PLACED, combination, strict=True)})
        program.relax(program.integers)
        solution = program.minimise(objective_of(self.sizes))
        bound = front.sheet.bounds[combination]
        touched = [each for each in self.fronts if each.family is front.family]
        open_before = self._count_open(touched)
        if solution.status == "infeasible":
            bound[index] = np.inf
            reasons = self._reasons(point, prefill, combination)
            for each in touched:
                discard(each.sheet, reasons)
        else:
            multipliers = {name: max(0.0, -dual) for name, dual in solution.duals.items()}
            front.family.multipliers.append(multipliers)
            for each in touched:
                tighten(each.sheet, multipliers)
            bound[index] = max(bound[index], solution.objective * (1.0 - 1e-9))
        for each in touched:
            self._refresh(each)
        useless = self._count_open(touched) >= open_before - 1
        front.patience = min(2 * front.patience + 1, MOST_PATIENCE) if useless else 0
        front.solved = 0

    def _count_open(self, fronts: list[_Front]) -> int:
        """Nodes whose bound does not rule them out."""
        limit = self.best.seconds * (1.0 - self.gap)
        return sum(int(np.count_nonzero(each.sheet.lowest * each.batches < limit)) for each in fronts)

    def _reasons(self, point: Point, prefill: PrefillChoice, combination: Combination) -> dict[str, float]:
        """Find out why a node is infeasible: multipliers that prove it there, and at every node of the same kind."""
        program = self._program(point, prefill, elastic=LIMITS)
        program.fix({name: float(on) for name, on in zip(PLACED, combination, strict=True)})
        program.relax(program.integers)
        solution = program.minimise(least_excess(program))
        if solution.status == "infeasible" or solution.objective <= 1e-6:
            return {}
        return {name: max(0.0, -dual) for name, dual in solution.duals.items()}

    def _dive(self, front: _Front) -> None:
        """Find a good plan at the lowest node of a family: of many prefill micro-batches take the best by its bound."""
        sheet, index = front.sheet, front.index
        sizes = np.unique(np.round(np.geomspace(sheet.low[index], sheet.high[index], DIVE)))
        point = sheet.point.at(np.full(sizes.size, index))
        probe = self._add_sheet(front.family, point, sizes, sizes)
        self._refresh(probe)
        if probe not in self.fronts:
            return
        self._tighten(probe, probe.index, probe.sheet.best_combination(probe.index))
        if probe in self.fronts:
            self._solve(probe, single=True)
        if probe in self.fronts:  # what it holds is part of the range it was taken from
            self.fronts.remove(probe)
            front.family.sheets.remove(probe.sheet)

    def _solve(self, front: _Front, *, single: bool) -> None:
        """Solve the program of the lowest node: its bound becomes its optimum, and it may give the incumbent.

        Where the node is a range, its smallest prefill micro-batch may give a plan, and the bound is for all of them.
        """
        sheet, index = front.sheet, front.index
        point, prefill = self._node(sheet, index)
        program = self._program(point, prefill)
        reference = max(float(sheet.lowest[index]), 1e-9)
        solution = program.minimise(objective_with_tie_breaks(self.scenario, self.sizes, point, reference))
        infeasible = solution.status == "infeasible"
        batches = float(front.batches[index])
        if not infeasible and solution.objective * batches * (1.0 - TIE_BREAK) < self.best.seconds:
            prefill = prefill_choice(self.scenario, point.size, float(sheet.low[index]))
            policy = policy_of(self.scenario, self.sizes, point, prefill, solution)
            solved = SolvedPoint(point=point, prefill=prefill, values=solution.values)
            self.offer(policy, predict(self.scenario, self.sizes, self.rates, policy), solved)
        for bound in sheet.bounds.values():  # a single choice is solved: nothing is left to find there
            done = infeasible or single
            bound[index] = np.inf if done else max(bound[index], solution.objective * (1.0 - TIE_BREAK))
        front.solved += 1
        if front.solved > front.patience:
            front.ground.clear()
        front.stuck |= bool(sheet.lowest[index] * batches < self.best.seconds * (1.0 - self.gap))
        self._refresh(front)

    def _split(self, front: _Front) -> None:
        """Cut the ranges of the lowest node, and of all nodes of its sheet that may still win, into smaller ones."""
        sheet = front.sheet
        seconds = sheet.lowest * front.batches
        limit = self.best.seconds * (1.0 - self.gap) if np.isfinite(self.best.seconds) else front.seconds * FIRST_SPREAD
        chosen = np.flatnonzero((seconds <= limit) & (sheet.high > sheet.low))
        if chosen.size > SPLIT_AT_ONCE:
            chosen = chosen[np.argpartition(seconds[chosen], SPLIT_AT_ONCE)[:SPLIT_AT_ONCE]]
        size = np.asarray(sheet.point.size)[chosen]
        low, high, pieces = cut_ranges(size, sheet.low[chosen], sheet.high[chosen], PIECES)
        parents = chosen[pieces]
        child = self._add_sheet(front.family, sheet.point.at(parents), low, high)
        for combination, bound in child.sheet.bounds.items():
            np.maximum(bound, sheet.bounds[combination][parents], out=bound)
            sheet.bounds[combination][chosen] = np.inf
        self._refresh(child)
        self._refresh(front)

    def offer(self, policy: Policy, prediction: Prediction, solved: SolvedPoint | None) -> None:
        """Make a plan the incumbent if it is better.

        A plan taken from a range of prefill micro-batches may need more than the range did (its hidden states wait in
        CPU memory where the largest one needs a single pass, and it takes longer), so its limits are looked at again.
        """
        seconds = prediction.num_batches * prediction.batch_s
        fits = all(use.fits for use in prediction.memory.values())
        if fits and seconds < self.best.seconds and prediction.batch_s <= self.max_seconds * (1.0 + 1e-9):
            self.best.seconds, self.best.policy, self.best.prediction = seconds, policy, prediction
            self.best.solved = solved

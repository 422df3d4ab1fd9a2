"""A small mixed-integer program with named constraints, built in PuLP and solved by HiGHS.

linopy's habit: every constraint has a name that appears again in errors and in the table of marginal values.
Bytes enter the solver in units of 10^9, so that its tolerances mean the same for every row.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pulp

from hrm.affine import Affine

__all__ = ["Program", "Solution"]

FEASIBILITY_TOLERANCE = 1e-9
RELATIVE_GAP = 1e-7

Status = Literal["optimal", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Outcome of a program.

    Attributes
    ----------
    status : {"optimal", "infeasible"}
    objective : float
        Minimum, in the objective's unit.
    values : dict of str to float
        By name of the unknown, in its own unit.
    duals : dict of str to float
        Change of the minimum per unit of the right-hand side of each constraint; of a program without integers.
    """

    status: Status
    objective: float
    values: dict[str, float]
    duals: dict[str, float]


@contextlib.contextmanager
def _closed_stdout() -> Iterator[None]:
    """HiGHS greets on the C-level standard output when it is made, whatever its options: keep ours clean."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # no standard output at all
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        with contextlib.suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).fflush(None)  # its buffer must empty while the sink is still there
        os.dup2(saved, 1)
        os.close(sink)
        os.close(saved)


class _QuietHiGHS(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS without the greeting."""

    def createAndConfigureSolver(self, lp: Any) -> None:  # noqa: N802 (PuLP's name)
        with _closed_stdout():
            super().createAndConfigureSolver(lp)


@dataclass(slots=True)
class Program:
    """A minimisation under construction. Mutable on purpose: it is built row by row and solved.

    Attributes
    ----------
    name : str
        For error messages.
    """

    name: str
    _problem: Any = field(init=False)
    _columns: dict[str, Any] = field(init=False, default_factory=dict)
    _scale: dict[str, float] = field(init=False, default_factory=dict)
    _row_scale: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._problem = pulp.LpProblem("policy", pulp.LpMinimize)

    def add_unknown(
        self, name: str, low: float = 0.0, high: float | None = None, *, integer: bool = False, scale: float = 1.0
    ) -> None:
        """Add an unknown between `low` and `high`, in its own unit; the solver sees it divided by `scale`."""
        kind = pulp.LpInteger if integer else pulp.LpContinuous
        top = None if high is None else high / scale
        self._columns[name] = pulp.LpVariable(name, low / scale, top, kind)
        self._scale[name] = scale

    def _expression(self, affine: Affine, scale: float) -> Any:
        terms = {
            self._columns[name]: float(value) * self._scale[name] / scale
            for name, value in affine.coefficients.items()
            if value != 0.0
        }
        return pulp.LpAffineExpression(terms, constant=float(affine.constant) / scale)

    def at_most(self, name: str, left: Affine, right: Affine | float, *, scale: float = 1.0) -> None:
        """Constrain ``left <= right``; both in one unit, divided by `scale` for the solver."""
        difference = left - right
        constraint = pulp.LpConstraint(self._expression(difference, scale), pulp.LpConstraintLE, name, 0)
        self._problem.addConstraint(constraint, name)
        self._row_scale[name] = scale

    def equal(self, name: str, left: Affine, right: float) -> None:
        """Constrain ``left == right``."""
        self._problem.addConstraint(
            pulp.LpConstraint(self._expression(left - right, 1.0), pulp.LpConstraintEQ, name, 0), name
        )
        self._row_scale[name] = 1.0

    def fix(self, values: Mapping[str, float]) -> None:
        """Give unknowns their values and drop their integrality, so that the next solve has duals."""
        for name, value in values.items():
            column = self._columns[name]
            column.lowBound = column.upBound = value / self._scale[name]
            column.cat = pulp.LpContinuous

    def relax(self, names: Iterable[str]) -> None:
        """Drop the integrality of unknowns; their ranges stay."""
        for name in names:
            self._columns[name].cat = pulp.LpContinuous

    @property
    def unknowns(self) -> tuple[str, ...]:
        """Names of all unknowns."""
        return tuple(self._columns)

    @property
    def integers(self) -> tuple[str, ...]:
        """Names of the integer unknowns."""
        return tuple(name for name, column in self._columns.items() if column.cat == pulp.LpInteger)

    @property
    def constraint_names(self) -> tuple[str, ...]:
        """Names of all constraints, in the order they were added."""
        return tuple(self._row_scale)

    def minimise(self, objective: Affine) -> Solution:
        """Solve to proven optimality (relative gap 1e-7).

        Returns
        -------
        Solution
            With status "infeasible" and no values where nothing satisfies every constraint.
        """
        self._problem.setObjective(self._expression(objective, 1.0))
        solver = _QuietHiGHS(
            msg=False,
            gapRel=RELATIVE_GAP,
            threads=1,
            primal_feasibility_tolerance=FEASIBILITY_TOLERANCE,
            mip_feasibility_tolerance=FEASIBILITY_TOLERANCE,
        )
        self._problem.solve(solver)
        if self._problem.status != pulp.LpStatusOptimal:
            return Solution(status="infeasible", objective=float("inf"), values={}, duals={})
        values = {}
        for name, column in self._columns.items():
            value = float(column.lowBound if column.varValue is None else column.varValue)  # None: in no constraint
            if column.cat == pulp.LpInteger:
                value = float(round(value))
            values[name] = value * self._scale[name]
        duals = {
            name: float(self._problem.constraints[name].pi or 0.0) / self._row_scale[name] for name in self._row_scale
        }
        return Solution(status="optimal", objective=float(objective.at(values)), values=values, duals=duals)

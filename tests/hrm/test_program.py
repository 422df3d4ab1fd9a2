"""The program: units, signs of duals, named constraints, fixed and relaxed integers, a clean standard output."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrm.affine import Affine
from hrm.program import Program


def diet(limit: float = 10.0) -> Program:
    """Minimise 2x + 3y with x + y >= limit, x <= 4 (bytes of the order of 10^9, seen in GB by the solver)."""
    program = Program("diet")
    for name in ("x", "y"):
        program.add_unknown(name, scale=1e9)
    program.at_most("enough", limit * 1e9 - Affine.of("x") - Affine.of("y"), 0.0, scale=1e9)
    program.at_most("x_limit", Affine.of("x"), 4e9, scale=1e9)
    return program


COST = Affine.of("x", 2e-9) + Affine.of("y", 3e-9)


def test_values_come_back_in_their_own_units() -> None:
    solution = diet().minimise(COST)
    assert solution.status == "optimal"
    assert solution.values == pytest.approx({"x": 4e9, "y": 6e9})
    assert solution.objective == pytest.approx(26.0)


def test_dual_is_change_of_the_minimum_per_unit_of_the_right_hand_side() -> None:
    duals = diet().minimise(COST).duals
    assert duals["x_limit"] == pytest.approx(-1e-9)  # one more byte of the cheap one saves 1 of 10^9
    assert duals["enough"] == pytest.approx(-3e-9)  # one byte less to reach saves 3 of 10^9
    more = diet(limit=10.5).minimise(COST).objective - diet().minimise(COST).objective
    assert more == pytest.approx(-duals["enough"] * 0.5e9)


def test_constraint_that_does_not_bind_has_no_dual() -> None:
    program = diet()
    program.at_most("slack", Affine.of("y"), 1e12, scale=1e9)
    assert program.minimise(COST).duals["slack"] == 0.0


def test_constraints_and_integers_keep_their_names() -> None:
    program = diet()
    program.add_unknown("whole", 0.0, 5.0, integer=True)
    program.equal("three", Affine.of("whole"), 3.0)
    assert program.constraint_names == ("enough", "x_limit", "three")
    assert program.integers == ("whole",)
    assert program.unknowns == ("x", "y", "whole")


def knapsack() -> Program:
    """Maximise 5a + 4b + 3c (minimise the negative) with 2a + 3b + c <= 4, each 0 or 1: a and c, 8."""
    program = Program("knapsack")
    for name in ("a", "b", "c"):
        program.add_unknown(name, 0.0, 1.0, integer=True)
    program.at_most("weight", Affine.of("a", 2.0) + Affine.of("b", 3.0) + Affine.of("c"), 4.0)
    return program


WORTH = -(Affine.of("a", 5.0) + Affine.of("b", 4.0) + Affine.of("c", 3.0))


def test_integers_are_whole_and_the_relaxation_is_not_worse() -> None:
    assert knapsack().minimise(WORTH).values == {"a": 1.0, "b": 0.0, "c": 1.0}
    relaxed = knapsack()
    relaxed.relax(relaxed.integers)
    solution = relaxed.minimise(WORTH)
    assert solution.objective == pytest.approx(-5.0 - 3.0 - 4.0 / 3.0)
    assert solution.values["b"] == pytest.approx(1.0 / 3.0)
    assert solution.duals["weight"] == pytest.approx(-4.0 / 3.0)


def test_fixed_integers_keep_their_values_and_give_duals() -> None:
    program = knapsack()
    program.add_unknown("rest", 0.0, 10.0)
    program.at_most("rest_within_weight", Affine.of("rest") + Affine.of("a", 2.0), 4.5)
    program.fix({"a": 1.0, "b": 0.0, "c": 1.0})
    assert program.integers == ()
    solution = program.minimise(WORTH - Affine.of("rest", 7.0))
    assert (solution.values["a"], solution.values["b"], solution.values["c"]) == (1.0, 0.0, 1.0)
    assert solution.values["rest"] == pytest.approx(2.5)
    assert solution.duals["rest_within_weight"] == pytest.approx(-7.0)


def test_contradiction_is_infeasible_and_has_no_values() -> None:
    program = diet()
    program.at_most("too_little", Affine.of("x") + Affine.of("y"), 9e9, scale=1e9)
    solution = program.minimise(COST)
    assert solution.status == "infeasible"
    assert solution.values == {}
    assert solution.duals == {}


def test_unknown_in_no_constraint_takes_its_lowest_value() -> None:
    program = diet()
    program.add_unknown("idle", 3.0, 5.0)
    assert program.minimise(COST).values["idle"] == 3.0


@settings(max_examples=20, deadline=None)
@given(cost=st.floats(0.1, 10.0), limit=st.floats(1.0, 100.0), scale=st.sampled_from([1.0, 1e3, 1e9]))
def test_scale_changes_nothing_but_the_solvers_view(cost: float, limit: float, scale: float) -> None:
    program = Program("scaled")
    program.add_unknown("x", scale=scale)
    program.at_most("at_least", limit * scale - Affine.of("x"), 0.0, scale=scale)
    solution = program.minimise(Affine.of("x", cost))
    assert solution.values["x"] == pytest.approx(limit * scale, rel=1e-6)
    assert solution.duals["at_least"] == pytest.approx(-cost, rel=1e-6)


def test_solving_prints_nothing() -> None:
    script = (
        "from hrm.affine import Affine\n"
        "from hrm.program import Program\n"
        "program = Program('quiet')\n"
        "program.add_unknown('x', integer=True)\n"
        "program.at_most('low', 3.5 - Affine.of('x'), 0.0)\n"
        "assert program.minimise(Affine.of('x')).values['x'] == 4.0\n"
        "print('{}')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"
    assert done.stderr == ""


def test_solving_works_where_there_is_no_standard_output() -> None:
    script = (
        "import os\n"
        "from hrm.affine import Affine\n"
        "from hrm.program import Program\n"
        "os.close(1)\n"
        "program = Program('closed')\n"
        "program.add_unknown('x')\n"
        "program.at_most('low', 2.0 - Affine.of('x'), 0.0)\n"
        "raise SystemExit(0 if program.minimise(Affine.of('x')).values['x'] == 2.0 else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

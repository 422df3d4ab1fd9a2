"""Affine expressions: linear in their unknowns, whichever way they are put together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrm.affine import Affine, total

NAMES = ("x", "y", "z")
whole = st.integers(-1000, 1000).map(float)  # sums and products of these are exact in float64
values = st.fixed_dictionaries(dict.fromkeys(NAMES, whole))
affines = st.builds(Affine, whole, st.dictionaries(st.sampled_from(NAMES), whole))


def test_value_is_constant_plus_coefficients_times_unknowns() -> None:
    cost = 3.0 + Affine.of("x", 2.0) - Affine.of("y")
    assert cost.at({"x": 10.0, "y": 4.0}) == 19.0
    assert cost.coefficient("y") == -1.0
    assert cost.coefficient("absent") == 0.0


def test_unknown_that_is_not_given_counts_as_zero() -> None:
    assert Affine(5.0, {"x": 2.0}).at({}) == 5.0


def test_number_minus_affine_and_division() -> None:
    assert ((10.0 - Affine.of("x", 4.0)) / 2.0).at({"x": 1.0}) == 3.0


def test_array_times_affine_stays_affine() -> None:
    cost = np.array([1.0, 2.0]) * Affine.of("x", 3.0) + np.array([10.0, 20.0])
    assert isinstance(cost, Affine)
    assert cost.at({"x": 2.0}).tolist() == [16.0, 32.0]


@given(affines, affines, values)
def test_sum_of_values_is_value_of_sum(a: Affine, b: Affine, at: dict[str, float]) -> None:
    assert (a + b).at(at) == a.at(at) + b.at(at)
    assert (a - b).at(at) == a.at(at) - b.at(at)
    assert total([a, b, 7.0]).at(at) == a.at(at) + b.at(at) + 7.0


@given(affines, whole, values)
def test_factor_scales_the_value(a: Affine, factor: float, at: dict[str, float]) -> None:
    assert (a * factor).at(at) == a.at(at) * factor
    assert (-a).at(at) == -a.at(at)


@given(affines, values, values)
def test_value_is_linear_along_a_line(a: Affine, start: dict[str, float], end: dict[str, float]) -> None:
    middle = {name: (start[name] + end[name]) / 2 for name in NAMES}
    assert a.at(middle) == (a.at(start) + a.at(end)) / 2


@given(affines, values, st.sets(st.sampled_from(NAMES)))
def test_substituting_some_unknowns_first_gives_the_same_value(a: Affine, at: dict[str, float], some: set[str]) -> None:
    settled = a.substitute({name: at[name] for name in some})
    assert some.isdisjoint(settled.coefficients)
    assert settled.at({name: value for name, value in at.items() if name not in some}) == a.at(at)


@given(affines, affines)
def test_adding_leaves_the_terms_as_they_were(a: Affine, b: Affine) -> None:
    before = (a.constant, dict(a.coefficients), b.constant, dict(b.coefficients))
    _ = a + b, a - b, a * 2.0
    assert before == (a.constant, dict(a.coefficients), b.constant, dict(b.coefficients))


def test_empty_sum_is_zero() -> None:
    assert total([]).at({}) == 0.0


def test_comparison_needs_numbers() -> None:
    with pytest.raises(TypeError):
        _ = Affine(1.0) < Affine(2.0)  # type: ignore[operator]

"""Noise of repeats, and the bars it allows: closed forms, and what needs no arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hrm.errors import InputError
from hrm.validation.noise import (
    bootstrap_medians,
    interval,
    least_difference,
    median_noise,
    pooled_noise,
    tightest_regret,
    tightest_spread,
)


def test_noise_is_that_of_normal_errors_with_the_median_difference_of_two_runs() -> None:
    # Half of all differences of two normal values are below 0.6745 * sqrt(2) standard deviations.
    assert pooled_noise([[math.exp(0.1), math.exp(-0.1)]]) == pytest.approx(0.2 / (0.67449 * math.sqrt(2.0)), rel=1e-4)


def test_pooled_noise_looks_at_pairs_within_groups_alone() -> None:
    # Differences 0.2; 0.1, 0.3 and 0.4: the median is 0.25. Groups of one and the level of a group do not matter.
    groups = [[math.exp(5.1), math.exp(4.9)], [1.0, math.exp(0.1), math.exp(0.4)], [7.0]]
    assert pooled_noise(groups) == pytest.approx(0.25 / (0.67449 * math.sqrt(2.0)), rel=1e-4)


def test_one_run_that_was_held_up_makes_no_noise() -> None:
    values = [1.0, 1.01, 1.02, 1.01, 1.0, 1.02, 1.01]
    assert pooled_noise([[*values, 60.0]]) < 2.0 * pooled_noise([values])


def test_noise_of_many_normal_values_is_their_standard_deviation() -> None:
    values = np.exp(np.random.default_rng(0).normal(0.0, 0.05, (400, 3)))
    assert pooled_noise([list(map(float, row)) for row in values]) == pytest.approx(0.05, rel=0.05)


def test_repeats_of_one_say_nothing_of_noise() -> None:
    with pytest.raises(InputError, match="2 or more"):
        pooled_noise([[1.0], [2.0]])


def test_noise_of_a_median_is_that_of_normal_errors_from_three_repeats_on() -> None:
    assert median_noise(0.1, 1) == 0.1
    assert median_noise(0.1, 2) == 0.1
    assert median_noise(0.1, 8) == pytest.approx(0.1 * math.sqrt(math.pi / 16.0))


def test_least_difference_is_two_standard_deviations_of_a_difference() -> None:
    assert least_difference(0.1, 1) == pytest.approx(0.2 * math.sqrt(2.0))


def test_tightest_spread_of_two_policies_is_the_quantile_of_their_difference() -> None:
    # |difference| of two normals of 0.1: below 1.96 * 0.1 * sqrt(2) in 95 of 100.
    expected = math.exp(1.96 * 0.1 * math.sqrt(2.0)) - 1.0
    assert tightest_spread(0.1, 1, 2, seed=0) == pytest.approx(expected, rel=0.03)


def test_tightest_regret_among_two_is_the_quantile_of_a_difference_that_is_not_negative() -> None:
    # The plan loses to its one rival by more than 1.645 standard deviations of the difference in 5 of 100.
    expected = 1.0 - math.exp(-1.645 * 0.1 * math.sqrt(2.0))
    assert tightest_regret(0.1, 1, 2, seed=0) == pytest.approx(expected, rel=0.04)


def test_without_noise_every_bar_can_be_tested() -> None:
    assert tightest_spread(0.0, 5, 10, seed=0) == 0.0
    assert tightest_regret(0.0, 5, 10, seed=0) == 0.0


def test_resampled_medians_of_two_values_come_in_their_proportions() -> None:
    medians = bootstrap_medians([[1.0, 3.0]], seed=1)[:, 0]
    shares = [float(np.mean(medians == value)) for value in (1.0, 2.0, 3.0)]
    assert sum(shares) == 1.0
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_resampling_repeats_with_its_seed_and_not_with_another() -> None:
    groups = [[1.0, 2.0, 4.0], [3.0, 5.0, 9.0]]
    one, same, other = (bootstrap_medians(groups, seed=seed, draws=50) for seed in (3, 3, 4))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_interval_leaves_out_as_many_on_either_side() -> None:
    assert interval(np.arange(101.0), 0.9) == pytest.approx((5.0, 95.0))

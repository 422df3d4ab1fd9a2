"""Intervals: quantiles of known ratios, leave-own-fold-out by hand, and what every prediction carries."""

from __future__ import annotations

import math

import pytest

from hrm.published.cross_validation import CrossValidation
from hrm.published.gates import coverage_of, interval_gate
from hrm.published.intervals import accuracy_document, covered_without_own_fold, error_quantiles, interval_of
from hrm.published.rows import Row


def test_quantiles_of_eleven_ratios_are_the_second_and_the_tenth() -> None:
    ratios = [2.0**power for power in range(-5, 6)]
    assert error_quantiles(ratios) == pytest.approx((2.0**-4, 2.0**4))


def test_interval_is_the_prediction_times_the_factors_of_its_kind() -> None:
    for kind, calibrated in (("calibrated", True), ("uncalibrated", False)):
        entry = accuracy_document()["intervals"][kind]
        assert interval_of(200.0, calibrated) == pytest.approx((200 * entry["low"], 200 * entry["high"]))


def test_a_calibrated_interval_holds_its_prediction_and_peaks_are_ceilings() -> None:
    low, high = interval_of(100.0, True)
    assert low < 100 < high
    wide_low, wide_high = interval_of(100.0, False)
    assert wide_high < 100  # nobody reaches the peaks
    assert wide_high / wide_low > high / low


def test_a_fold_has_no_part_in_its_own_interval() -> None:
    found = covered_without_own_fold([[1.0, 4.0], [2.0], [3.0]])
    assert [ratio for ratio, _, _ in found] == [1.0, 4.0, 2.0, 3.0]
    assert found[0][1:] == pytest.approx((2 * 1.5**0.1, 2 * 1.5**0.9))  # between 2 and 3
    assert found[0][1:] == found[1][1:]
    assert found[3][1:] == pytest.approx(error_quantiles([1.0, 4.0, 2.0]))


def row(key: str, tokens_per_s: float) -> Row:
    return Row(
        id=key,
        setting=key,
        system="FlexGen",
        workload="mtbench",
        prompt_len=1.0,
        padded=True,
        gen_len=2,
        throughput_tokens_per_s=tokens_per_s,
    )


def test_a_row_without_a_prediction_is_not_covered() -> None:
    rows = [row("a", 10.0), row("b", 10.0), row("c", 20.0), row("d", 1.0)]
    validation = CrossValidation(
        folds=(("a",), ("b",), ("c",), ("d",)), predicted={"full": {"a": 10.0, "b": 10.0, "c": 10.0}}
    )
    # a and b lie at 1, between 1 and 2, at its end; c at 2 lies outside of 1 to 1
    found = coverage_of(rows, validation, "full")
    assert (found["n"], found["covered"], found["coverage"]) == (4, 0, 0.0)
    assert found["mean_width"] == pytest.approx(math.exp((2 * 0.8 * math.log(2)) / 3))


def test_coverage_may_be_too_low_and_too_high() -> None:
    passes = [interval_gate("full", {"coverage": share}).passes for share in (0.69, 0.70, 0.90, 0.91)]
    assert passes == [False, True, True, False]

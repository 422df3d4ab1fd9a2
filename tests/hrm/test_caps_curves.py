"""Memory at the same throughput: envelopes, straight lines between caps, intervals of resampled repeats."""

from __future__ import annotations

import numpy as np
import pytest

from hrm.validation.caps_curves import SHARES, Curve, match_curves, memory_needed


def curve(name: str, points: dict[float, tuple[float, ...]]) -> Curve:
    return Curve(name, tuple(points), tuple(points.values()))


@pytest.mark.parametrize(
    ("rate", "memory"),
    [(5.0, 1.0), (10.0, 1.0), (15.0, 1.5), (20.0, 2.0), (25.0, 3.5), (30.0, 4.0), (30.1, None)],
)
def test_memory_of_a_throughput_is_read_off_the_envelope(rate: float, memory: float | None) -> None:
    rates = np.array([10.0, 20.0, 12.0, 30.0])  # the third is below the second: it is worth no memory
    assert memory_needed((1.0, 2.0, 3.0, 4.0), rates, rate) == memory


def test_ratio_is_that_of_what_both_need_from_the_lowest_to_the_highest_throughput_both_reach() -> None:
    first = curve("a", {1.0: (10.0,), 2.0: (30.0,)})
    second = curve("b", {2.0: (20.0,), 6.0: (28.0,)})
    found = match_curves(first, second, seed=0)
    assert found["matched"]
    rows = found["rows"]
    assert [row["share"] for row in rows] == list(SHARES)
    assert [row["tokens_per_s"] for row in rows] == [20.0, 22.0, 24.0, 26.0, 28.0]
    assert [row["first_bytes"] for row in rows] == pytest.approx([1.5, 1.6, 1.7, 1.8, 1.9])
    assert [row["second_bytes"] for row in rows] == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert rows[-1]["ratio"] == pytest.approx(6.0 / 1.9)
    assert (rows[-1]["low"], found["resamples_matched"]) == (None, None)  # nothing was repeated


def test_curves_that_share_no_throughput_are_not_matched_and_say_why() -> None:
    found = match_curves(curve("a", {1.0: (30.0,)}), curve("b", {1.0: (10.0,), 2.0: (20.0,)}), seed=0)
    assert (found["matched"], found["rows"]) == (False, [])
    assert found["reason"] == "b reaches 20 token/s at most, a has 30 with the least memory it ran in"


def test_a_schedule_without_a_run_is_not_matched() -> None:
    found = match_curves(curve("a", {1.0: (30.0,)}), curve("b", {}), seed=0)
    assert (found["matched"], found["reason"]) == (False, "no run of b held its cap")


def test_repeats_that_agree_give_an_interval_of_no_width() -> None:
    first = curve("a", {1.0: (10.0,) * 3, 2.0: (30.0,) * 3})
    second = curve("b", {2.0: (20.0,) * 3, 6.0: (28.0,) * 3})
    top = match_curves(first, second, seed=0)["rows"][-1]
    assert top["low"] == top["high"] == pytest.approx(top["ratio"])


def test_repeats_that_differ_give_an_interval_around_the_ratio_the_same_every_time() -> None:
    first = curve("a", {1.0: (9.0, 10.0, 11.0), 2.0: (29.0, 30.0, 31.0)})
    second = curve("b", {2.0: (19.0, 20.0, 21.0), 6.0: (27.0, 28.0, 29.0)})
    found = match_curves(first, second, seed=3)
    top = found["rows"][-1]
    assert top["low"] < top["ratio"] < top["high"]
    assert found["resamples_matched"] == 1.0
    assert match_curves(first, second, seed=3) == found


def test_resamples_without_a_common_throughput_are_counted() -> None:
    first, second = curve("a", {1.0: (19.0, 19.0, 25.0)}), curve("b", {1.0: (10.0,) * 3, 2.0: (20.0,) * 3})
    found = match_curves(first, second, seed=0)
    assert found["matched"]
    assert found["resamples_matched"] == pytest.approx(20.0 / 27.0, abs=0.03)  # the median is 25 in 7 of 27

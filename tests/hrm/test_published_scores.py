"""Errors, order, intervals, folds, differences and speed-ups, on tables small enough to redo in the head."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hrm.published.comparisons import FOLD_KEYS, difference_rows, difference_totals, fold_rows, speed_ups
from hrm.published.rows import Row, bundled_rows
from hrm.published.scores import (
    Scored,
    group_scores,
    interval_coverage,
    pair_order,
    point_of,
    quantile,
    score_row,
    summarise,
)


def scored(
    key: str,
    measured: float | None,
    predicted: float | None,
    *,
    setting: str = "S1",
    system: str = "A",
    point: str | None = None,
    interval: tuple[float, float] = (math.nan, math.nan),
) -> Scored:
    low, high = (None, None) if math.isnan(interval[0]) else interval
    return Scored(
        id=key,
        setting=setting,
        system=system,
        point=(point or key,),
        measured=measured,
        predicted=predicted,
        low=low,
        high=high,
    )


def row(key: str, **changes: object) -> Row:
    given = {
        "id": key,
        "setting": "S1",
        "system": "MoE-Lightning",
        "workload": "mtbench",
        "prompt_len": 10.0,
        "padded": True,
        "gen_len": 3,
        "micro_batch_size": 2,
        "num_micro_batches": 2,
        "batch_size": 4,
    }
    return Row(**(given | changes))  # type: ignore[arg-type]


# Errors


def test_quantiles_interpolate_and_carry_infinity() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.25, 0.5, 1.0)] == [1.0, 1.5, 2.0, 3.0]
    assert quantile([1.0, math.inf], 0.5) == math.inf
    assert quantile([math.inf, math.inf], 0.9) == math.inf
    assert quantile([1.0, 2.0, math.inf], 0.5) == 2.0
    assert math.isnan(quantile([], 0.5))


def test_summary_of_three_rows() -> None:
    summary = summarise([scored("a", 10, 11), scored("b", 10, 8), scored("c", 10, 14)])
    assert (summary.count, summary.missed, summary.worst_id) == (3, 0, "c")
    assert summary.median_error == pytest.approx(0.2)
    assert summary.p90_error == pytest.approx(0.2 + 0.8 * 0.2)
    assert summary.mean_error == pytest.approx((0.1 + 0.2 + 0.4) / 3)
    assert summary.worst_error == pytest.approx(0.4)
    assert summary.bias == pytest.approx(0.1)  # the middle ratio of 0.8, 1.1 and 1.4


def test_bias_of_twice_too_fast_and_twice_too_slow_is_none() -> None:
    assert summarise([scored("a", 10, 20), scored("b", 10, 5)]).bias == pytest.approx(0.0)


def test_a_missed_row_is_infinitely_wrong_and_an_unmeasured_one_does_not_count() -> None:
    summary = summarise([scored("a", 10, 11), scored("b", 10, None), scored("c", 10, 12), scored("d", None, 5)])
    assert (summary.count, summary.missed, summary.worst_id, summary.worst_error) == (3, 1, "b", math.inf)
    assert summary.median_error == pytest.approx(0.2)
    assert summary.p90_error == math.inf
    assert summary.mean_error == pytest.approx(0.15)


def test_summary_of_nothing_is_not_a_number() -> None:
    summary = summarise([])
    assert (summary.count, summary.worst_id) == (0, "")
    assert math.isnan(summary.median_error) and math.isnan(summary.bias)


def test_groups_keep_the_order_of_rows() -> None:
    rows = [scored("a", 1, 1, system="B"), scored("b", 1, 1, system="A"), scored("c", 1, 1, system="B")]
    assert {
        key: [each.id for each in group] for key, group in group_scores(rows, lambda each: each.system).items()
    } == {
        "B": ["a", "c"],
        "A": ["b"],
    }


# Pairs


def test_only_pairs_of_one_setting_more_than_15_per_cent_apart_count() -> None:
    rows = [
        scored("a", 100, 1),
        scored("b", 115, 2),  # 15 % above a: not more
        scored("c", 120, 0),  # 20 % above a, and ordered wrong
        scored("d", 500, 9, setting="S2"),
    ]
    order = pair_order(rows)
    assert (order.pairs, order.ordered, order.share) == (1, 0, 0.0)


def test_equal_and_missing_predictions_order_nothing() -> None:
    order = pair_order([scored("a", 1, 5), scored("b", 2, 5), scored("c", 4, None)])
    assert (order.pairs, order.ordered) == (3, 0)


def test_repeats_are_no_pair() -> None:
    order = pair_order([scored("a", 1, 5, point="p"), scored("b", 2, 5, point="p")])
    assert order.pairs == 0 and math.isnan(order.share)


def test_pairs_within_one_system() -> None:
    rows = [scored("a", 1, 1, system="A"), scored("b", 2, 2, system="A"), scored("c", 4, 0, system="B")]
    assert (pair_order(rows).pairs, pair_order(rows).ordered) == (3, 1)
    within = pair_order(rows, within_system=True)
    assert (within.pairs, within.ordered, within.share) == (1, 1, 1.0)


# Intervals


def test_coverage_and_geometric_width() -> None:
    rows = [
        scored("a", 10, 10, interval=(5, 10)),  # its edge counts as inside
        scored("b", 10, 10, interval=(1, 8)),
        scored("c", 10, None),
        scored("d", None, 3, interval=(1, 4)),
    ]
    found = interval_coverage(rows)
    assert (found.count, found.covered) == (3, 1)
    assert found.coverage == pytest.approx(1 / 3)
    assert found.mean_width == pytest.approx(4.0)  # 2 and 8
    assert interval_coverage([scored("a", 10, 10)]).count == 0


def test_a_row_is_scored_by_its_throughput() -> None:
    found = score_row(row("a", total_time_s=6.0), 4.0, (1.0, 5.0))
    assert (found.measured, found.ratio, found.low, found.high) == (4 * 3 / 6, 2.0, 1.0, 5.0)


# Folds


def test_repeats_have_one_point_whatever_n_finished() -> None:
    rows = {each.id: each for each in bundled_rows()}
    assert point_of(rows["P070"]) == point_of(rows["P073"])
    assert point_of(rows["P068"]) == point_of(rows["P075"])
    assert point_of(rows["P066"]) != point_of(rows["P070"])


def test_folds_leave_one_group_out_at_a_time() -> None:
    rows = [row("a"), row("b", setting="S2"), row("c", workload="other"), row("d")]
    assert [(fold.name, fold.train_ids, fold.test_ids) for fold in fold_rows(rows, "setting x workload")] == [
        ("S1, mtbench", ("b", "c"), ("a", "d")),
        ("S2, mtbench", ("a", "c", "d"), ("b",)),
        ("S1, other", ("a", "b", "d"), ("c",)),
    ]
    settings = fold_rows(rows, "leave one setting out")
    assert [(fold.name, fold.test_ids) for fold in settings] == [("S1", ("a", "c", "d")), ("S2", ("b",))]


@pytest.mark.parametrize("by", FOLD_KEYS)
def test_folds_of_the_bundled_rows_judge_every_row_once_and_split_no_repeats(by: str) -> None:
    rows = bundled_rows()
    points = {each.id: point_of(each) for each in rows}
    folds = fold_rows(rows, by)
    assert sorted(key for fold in folds for key in fold.test_ids) == sorted(points)
    for fold in folds:
        assert set(fold.train_ids) | set(fold.test_ids) == set(points)
        assert not {points[key] for key in fold.train_ids} & {points[key] for key in fold.test_ids}


# Differences


def test_two_totals_give_step_and_prefill() -> None:
    # prefill 10 s and 2 s per step: 3 generated tokens take 14 s, 8 take 24 s
    assert difference_totals(14.0, 24.0, 3, 8) == (2.0, 10.0)


def test_neighbouring_generation_lengths_are_differenced_and_repeats_count_by_their_geometric_mean() -> None:
    rows = [
        row("long", gen_len=8, total_time_s=24.0),
        row("once", total_time_s=7.0),
        row("again", total_time_s=28.0),
        row("longer", gen_len=10, throughput_tokens_per_s=4 * 10 / 30.0),
        row("other N", gen_len=9, batch_size=3, total_time_s=99.0),
        row("unknown", gen_len=7),
    ]
    first, second = difference_rows(rows, lambda _: 4)
    assert (first.short_ids, first.long_ids) == (("once", "again"), ("long",))
    assert (first.short_gen_len, first.long_gen_len) == (3, 8)
    assert (first.step_s, first.layer_s, first.prefill_s) == pytest.approx((2.0, 0.5, 10.0))
    assert (second.short_ids, second.long_ids) == (("long",), ("longer",))
    assert (second.step_s, second.prefill_s) == pytest.approx((3.0, 3.0))


def test_bundled_rows_give_three_differences() -> None:
    layers = {"S1": 32, "S6": 56}
    found = {
        (*each.short_ids, *each.long_ids): each for each in difference_rows(bundled_rows(), lambda r: layers[r.setting])
    }
    assert set(found) == {("P032", "P034"), ("P048", "P050"), ("P056", "P058")}
    assert found["P048", "P050"].step_s == pytest.approx(11.55, abs=0.005)
    assert found["P048", "P050"].layer_s == pytest.approx(0.361, abs=5e-4)
    assert found["P056", "P058"].step_s == pytest.approx(27.7, abs=0.05)
    assert found["P056", "P058"].layer_s == pytest.approx(0.495, abs=5e-4)


# Speed-ups


def test_speed_ups_say_padded_or_not_on_both_sides() -> None:
    rows = [
        row("ours", padded=False, throughput_tokens_per_s=30.0),
        row("flexgen", system="FlexGen", throughput_tokens_per_s=10.0),
        row("on the CPU", system="FlexGen(c)", throughput_tokens_per_s=5.0),
        row("deepspeed", system="DeepSpeed", throughput_tokens_per_s=6.0),
        row("another length", system="FlexGen", gen_len=4, throughput_tokens_per_s=1.0),
    ]
    predicted = {"ours": 40.0, "flexgen": 8.0}
    first, second = speed_ups(rows, lambda each: predicted.get(each.id))
    assert (first.baseline_id, first.measured, first.predicted) == ("flexgen", 3.0, 5.0)
    assert (first.padded, first.baseline_padded) == (False, True)
    assert (second.baseline_id, second.measured, second.predicted) == ("deepspeed", 5.0, None)


def test_a_changed_source_makes_no_other_point() -> None:
    assert point_of(row("a")) == point_of(replace(row("b"), source="log", batch_size=3))

"""Spread, order, regret and inversions on numbers that can be redone by hand."""

from __future__ import annotations

import pytest

from hrm.validation.bars import judge_bars, verdict_of
from hrm.validation.scores import Order, find_inversions, order_of_pairs, regret_of, spread_of


def once(*values: float) -> list[list[float]]:
    return [[value] for value in values]


def test_spread_is_largest_over_smallest_ratio_less_one() -> None:
    spread, bounds = spread_of([1.0, 1.0, 3.0], once(1.0, 2.0, 4.0), seed=0)  # ratios 1, 0.5, 0.75
    assert spread == 1.0
    assert bounds == (1.0, 1.0)


def test_a_common_factor_does_not_change_the_spread() -> None:
    measured = [[1.0, 1.1, 1.2], [2.0, 2.1, 2.5], [3.0, 3.0, 3.3]]
    factors = [spread_of([factor * guess for guess in (1.0, 2.0, 3.5)], measured, seed=0)[0] for factor in (1.0, 8.0)]
    assert factors[0] == pytest.approx(factors[1])


def test_spread_goes_by_medians_and_its_interval_by_repeats() -> None:
    spread, (low, high) = spread_of([1.0, 1.0], [[1.0, 1.0, 9.0], [1.0, 1.0, 1.0]], seed=0)
    assert spread == 0.0
    assert (low, high) == (0.0, 8.0)  # the outlier is the median where it is drawn twice: in 7 of 27


def test_pairs_within_noise_are_none_and_the_others_are_ordered_or_not() -> None:
    # Told apart from 2 * sqrt(2) * 0.1 = 0.283 on: ln 2 and ln 4 are, ln 1.2 is not.
    measured = once(1.0, 1.2, 2.0, 4.0)
    found = order_of_pairs([1.0, 0.5, 3.0, 2.0], measured, noise=0.1)
    # Pairs: 1-2, 1-4, 1.2-2, 1.2-4, 2-4; only the last is predicted the other way round.
    assert found == Order(5, 4)
    assert found.share == 0.8


def test_equal_predictions_order_nothing() -> None:
    assert order_of_pairs([2.0, 2.0], once(1.0, 3.0), noise=0.01) == Order(1, 0)


def test_without_a_pair_there_is_no_share() -> None:
    found = order_of_pairs([1.0, 2.0], once(1.0, 1.01), noise=0.1)
    assert found == Order(0, 0)
    assert found.share is None


def test_fifteen_pairs_are_enough_and_fourteen_are_not() -> None:
    assert Order(15, 15).tested
    assert not Order(14, 14).tested


def test_regret_is_what_the_plan_gives_away_against_the_fastest() -> None:
    found = regret_of([[100.0, 100.0], [125.0, 125.0], [90.0, 90.0]], chosen=[0], seed=0)
    assert found.best == 1
    assert (found.share, found.low, found.high) == pytest.approx((0.2, 0.2, 0.2))


def test_there_is_no_regret_where_the_plan_is_the_fastest() -> None:
    found = regret_of(once(100.0, 90.0, 80.0), chosen=[0], seed=0)
    assert (found.best, found.share) == (0, 0.0)


def test_a_plan_that_is_there_twice_counts_once_with_all_its_repeats() -> None:
    found = regret_of([[80.0], [120.0], [110.0]], chosen=[0, 1], seed=0)  # median 100
    assert found.best == 2
    assert found.share == pytest.approx(1.0 - 100.0 / 110.0)


def test_an_inversion_is_a_pair_measured_the_other_way_round_in_nearly_all_resamples() -> None:
    found = find_inversions([1.0, 2.0, 5.0], [[10.0, 10.0], [5.0, 5.0], [20.0, 20.0]], seed=0)
    assert [(each.first, each.second, each.predicted, each.measured, each.certainty) for each in found] == [
        (1, 0, 2.0, 0.5, 1.0)
    ]


def test_an_inversion_that_noise_may_have_made_is_none() -> None:
    assert find_inversions([1.0, 2.0], [[1.0, 1.4], [0.9, 1.3]], seed=0) == ()


# Bars


def scores(spread: float, pairs: int, ordered: int) -> dict[str, object]:
    metric = {
        "neighbourhood": {"spread": spread},
        "order": {"pairs": pairs, "ordered": ordered, "share": ordered / pairs if pairs else None},
    }
    return {"layer_latency_s": metric, "throughput_tokens_per_s": metric}


def row(taken: float, *, planned: float = 100e6, not_made: float = 0.0, reserve: float = 0.0) -> dict[str, object]:
    use = {"planned_bytes": planned, "not_made_bytes": not_made, "reserve_bytes": reserve, "taken_bytes": taken}
    return {"name": "plan", "memory": {"gpu": use, "cpu": use}}


def statuses(*, spread: float = 0.1, pairs: int = 20, ordered: int = 20, regret: float = 0.0, noise: float = 0.0,
             taken: float = 98e6) -> dict[str, str]:  # fmt: skip
    bars = judge_bars(
        scores(spread, pairs, ordered),
        {"share": regret},
        [row(taken)],
        noise={"layer_latency_s": noise, "throughput_tokens_per_s": noise},
        repeats=5,
        near=8,
        alike=3,
        seed=0,
    )
    return {bar["name"]: bar["status"] for bar in bars}


SPREAD, ORDER = "spread of the simulator, decode latency", "pairs in order by the simulator, throughput"


def test_bars_are_met_at_their_value_and_missed_beyond_it() -> None:
    assert set(statuses(spread=0.15, pairs=20, ordered=18, regret=0.03).values()) == {"met"}
    found = statuses(spread=0.151, pairs=20, ordered=17, regret=0.031)
    assert [found[name] for name in (SPREAD, ORDER, "regret of the plan")] == ["missed"] * 3


def test_fewer_than_fifteen_pairs_are_not_tested() -> None:
    assert statuses(pairs=14, ordered=0)[ORDER] == "not tested"


def test_a_spread_that_noise_alone_would_make_is_not_tested_and_one_above_it_is_missed() -> None:
    assert statuses(spread=0.2, noise=0.2)[SPREAD] == "not tested"
    assert statuses(spread=5.0, noise=0.2)[SPREAD] == "missed"
    assert statuses(spread=0.1, noise=0.2)[SPREAD] == "met"


def test_memory_is_within_five_percent_below_and_never_above() -> None:
    gpu = "memory of the plans, GPU"
    assert statuses(taken=95e6)[gpu] == "met"
    assert statuses(taken=94.9e6)[gpu] == "missed"
    assert statuses(taken=100e6 + 2**20)[gpu] == "met"  # alignment of buffers
    assert statuses(taken=100.1e6 + 2**20)[gpu] == "missed"


def test_a_plan_all_of_whose_memory_is_buffers_that_were_never_made_is_held_to_its_reserve() -> None:
    """Everything in GPU memory: of CPU memory the plan has staging buffers only, and nothing is staged."""

    def memory(taken: float) -> dict[str, object]:
        none = row(taken, planned=5e8, not_made=5e8, reserve=100e6)
        bars = judge_bars(
            scores(0.1, 20, 20),
            {"share": 0.0},
            [none],
            noise={"layer_latency_s": 0.0, "throughput_tokens_per_s": 0.0},
            repeats=5,
            near=8,
            alike=3,
            seed=0,
        )
        return next(bar for bar in bars if bar["name"] == "memory of the plans, CPU")

    assert memory(60e6)["status"] == "met"
    above = memory(120e6 + 2**20)
    assert (above["status"], above["value"]) == ("missed", pytest.approx(0.2))


def document(**changes: object) -> dict[str, object]:
    found: dict[str, object] = {
        "same_machine": True,
        "paced": [],
        "hardware": "mine",
        "scores": {"simulated": scores(0.1, 20, 20)},
        "regret": {"share": 0.01, "best": "mu up"},
        "bars": judge_bars(
            scores(0.2, 20, 20),
            {"share": 0.01},
            [row(98e6)],
            noise={"layer_latency_s": 0.0, "throughput_tokens_per_s": 0.0},
            repeats=5,
            near=8,
            alike=3,
            seed=0,
        ),
    }
    return found | changes


def test_the_verdict_names_the_bars_that_were_missed() -> None:
    found = verdict_of(document())
    assert found["missed"] == [SPREAD, "spread of the simulator, throughput"]
    assert found["sentence"].startswith("Missed (spread of the simulator, decode latency, ")


@pytest.mark.parametrize("changes", [{"same_machine": False}, {"same_machine": None}, {"paced": ["gpu0"]}])
def test_rates_of_another_machine_and_paced_lanes_miss_no_bar(changes: dict[str, object]) -> None:
    found = verdict_of(document(**changes))
    assert (found["tested"], found["missed"]) == (False, [])
    assert found["sentence"].startswith("Not tested")

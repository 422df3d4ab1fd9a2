"""The plan that simulation puts first: which one, how often the order changes, and the command."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from command import SMALL, refused, run
from test_search import full_size

from hrm.diverse import find_policies
from hrm.errors import InputError
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.scenario import Scenario
from hrm.search import find_policy
from simulator.refine import count_changes, refine_search
from simulator.replay import Replay


def replay_of(seconds: float) -> Replay:
    """A run that takes so long, a fifth of it prefill; nothing else of it matters here."""
    nothing: dict[str, Any] = dict.fromkeys((field.name for field in fields(Replay)), 0.0)
    return Replay(**(nothing | {"prefill_s": seconds / 5, "decode_s": seconds * 4 / 5}))


# Pairs


def test_pairs_that_change_places_are_counted_with_the_largest_change() -> None:
    """By prediction a > b > c; by simulation c (60) > a (50) > b (40): (a, c) and (b, c) change, c is 1.5 times b."""
    assert count_changes([(100.0, 50.0), (90.0, 40.0), (80.0, 60.0)]) == (3, 2, 0.5)


def test_the_same_order_has_no_change_and_one_plan_no_pair() -> None:
    assert count_changes([(100.0, 50.0), (90.0, 40.0)]) == (1, 0, 0.0)
    assert count_changes([(100.0, 50.0)]) == (0, 0, 0.0)


@pytest.mark.parametrize("rates", [[(100.0, 50.0), (99.999, 60.0)], [(100.0, 50.0), (90.0, 50.001)]])
def test_plans_within_a_ten_thousandth_are_in_no_order(rates: list[tuple[float, float]]) -> None:
    assert count_changes(rates) == (1, 0, 0.0)


# The choice


def test_the_best_by_simulation_is_returned_with_its_own_prediction_and_gap() -> None:
    scenario, pins = full_size("t4", "mixtral-8x7b"), Pins()
    first = find_policy(scenario, pins)
    plans = find_policies(scenario, pins, 4, best=first)
    slowed = dict(zip([each.policy for each in plans], (1.5, 3.0, 3.0, 1.0), strict=True))

    def replay(_: Scenario, policy: Policy) -> Replay:
        predicted = next(each.prediction.batch_s for each in plans if each.policy == policy)
        return replay_of(predicted * slowed[policy])

    result, refinement = refine_search(scenario, pins, first, 4, replay=replay)
    assert (refinement.chosen, result.policy) == (3, plans[3].policy)
    assert (result.prediction, result.solved) == (plans[3].prediction, plans[3].solved)
    fastest = min(each.seconds for each in plans)
    assert result.solver.gap == pytest.approx(1.0 - fastest / plans[3].seconds * (1.0 - 1e-3))
    for each, judged in zip(plans, refinement.candidates, strict=True):
        assert judged.predicted_tokens_per_s == pytest.approx(10_000 * 128 / each.seconds)
        assert judged.simulated_tokens_per_s == pytest.approx(judged.predicted_tokens_per_s / slowed[each.policy])


def test_of_equals_the_plan_of_the_cost_model_stays() -> None:
    scenario, pins = full_size("t4", "mixtral-8x7b"), Pins()
    first = find_policy(scenario, pins)
    batches = {each.policy: each.prediction.num_batches for each in find_policies(scenario, pins, 4, best=first)}
    result, refinement = refine_search(
        scenario, pins, first, 4, replay=lambda _, policy: replay_of(1000.0 / batches[policy])
    )
    assert result is first
    assert (refinement.chosen, refinement.pairs, refinement.inversions) == (0, 6, 0)


def test_a_plan_without_lanes_stands_by_its_prediction() -> None:
    """A link of 100 MB/s: the CPU-only plan is among the best, and no schedule of the GPU's lanes lays it out."""
    scenario, pins = full_size("t4", "granite-3.1-1b-a400m", generated=16), Pins()
    profile, link = scenario.profile, scenario.profile.link
    slow = replace(link.host_to_device, pinned_bytes_per_s=1e8, with_opposite_bytes_per_s=1e8)
    back = replace(link.device_to_host, pinned_bytes_per_s=1e8, with_opposite_bytes_per_s=1e8)
    small = replace(profile.gpu, usable_memory_bytes=2.0e9)
    crippled = replace(profile, gpu=small, link=replace(link, host_to_device=slow, device_to_host=back))
    scenario = replace(scenario, profile=crippled)

    def replay(_: Scenario, policy: Policy) -> Replay:
        if policy.everything_on_cpu:
            raise InputError("the plan computes everything on the CPU")
        return replay_of(1e9)

    result, refinement = refine_search(scenario, pins, find_policy(scenario, pins), 8, replay=replay)
    assert result.policy.everything_on_cpu and result.solved is None
    assert refinement.candidates[refinement.chosen].simulated_tokens_per_s is None
    others = len(refinement.candidates) - 1
    assert others >= 1 and refinement.pairs == others * (others - 1) // 2


# The command


@pytest.fixture(scope="module")
def refined(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    outcome = run(*SMALL, "--refine", "3", "--json", "-o", file)
    assert outcome.code == 0, outcome.err
    return outcome.document, file


def test_the_document_has_every_candidate_and_the_one_that_is_returned(refined: tuple[dict[str, Any], Path]) -> None:
    document, _ = refined
    refinement = document["refinement"]
    assert set(refinement) == {"candidates", "pairs", "inversions", "largest_change", "chosen"}
    rates = [each["simulated_throughput_tokens_per_s"] for each in refinement["candidates"] if each]
    simulated = [rate for rate in rates if rate is not None]
    assert refinement["pairs"] == len(simulated) * (len(simulated) - 1) // 2
    chosen = refinement["candidates"][refinement["chosen"]]
    policy = {key: value for key, value in document["policy"].items() if key != "dtypes"}
    assert chosen["policy"] == policy and chosen["schedule"] == document["schedule"]
    assert chosen["simulated_throughput_tokens_per_s"] >= max(simulated) * (1 - 1.1e-4)


def test_the_saved_plan_is_simulated_at_the_rate_it_was_chosen_for(refined: tuple[dict[str, Any], Path]) -> None:
    document, file = refined
    outcome = run("simulate", file, "--json")
    assert outcome.code == 0, outcome.err
    chosen = document["refinement"]["candidates"][document["refinement"]["chosen"]]
    seconds = outcome.document["prefill_s"] + outcome.document["decode_s"]
    rate = 8 * 4 / (document["predicted"]["num_batches"] * seconds)
    assert rate == pytest.approx(chosen["simulated_throughput_tokens_per_s"])


def test_without_the_option_nothing_is_replayed_and_the_key_is_null() -> None:
    outcome = run(*SMALL, "--json")
    assert outcome.document["refinement"] is None


def test_the_screen_shows_every_plan_best_first(refined: tuple[dict[str, Any], Path]) -> None:
    document, _ = refined
    outcome = run(*SMALL, "--refine", "3")
    lines = outcome.out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("prediction  plan"))
    candidates = document["refinement"]["candidates"]
    chosen = candidates[document["refinement"]["chosen"]]
    rows = lines[head + 1 : head + 1 + len(candidates)]
    assert all(f"{each['predicted_throughput_tokens_per_s']:,.2f}" in "\n".join(rows) for each in candidates)
    assert rows[0].endswith(f"{chosen['simulated_throughput_tokens_per_s']:,.2f}")
    assert f"the best of {len(candidates)} plans that differ is returned" in outcome.out


def test_counts_out_of_range_and_the_terms_of_the_paper_are_refused() -> None:
    assert refused(*SMALL, "--refine", 0) == "--refine: 0 is out of range (from 1 to 50 plans)"
    assert refused(*SMALL, "--refine", 51) == "--refine: 51 is out of range (from 1 to 50 plans)"
    assert "--cost-model full" in refused(*SMALL, "--refine", 3, "--cost-model", "paper")


def test_a_refined_plan_says_how_it_was_chosen_in_one_document(refined: tuple[dict[str, Any], Path]) -> None:
    saved = json.loads(refined[1].read_text(encoding="utf-8"))
    assert saved["refinement"] == refined[0]["refinement"]

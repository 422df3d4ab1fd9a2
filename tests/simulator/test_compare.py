"""Schedules beside each other: overrides, candidates, words and the whole command, on small machines."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import plan_of, refused, run
from tiny import tiny_profile, tiny_scenario
from tiny_policies import policy_of

from hrm.errors import InputError
from hrm.pins import Pins
from hrm.planning import make_plan
from hrm.policy import Policy
from hrm.prediction import memory_use
from hrm.scenario import measure_sizes
from hrm.schedules import SCHEDULES, check_schedule
from simulator.compare import Comparison, Entry, compare_schedules, read_schedules, take_fastest
from simulator.compare_tables import comparison_document, comparison_figure, policy_in_words, winner_in_words
from simulator.own_plans import Candidates, overrides_for, same_policy, whole_experts
from simulator.replay import replay_plan

SMALL = ("compare", "--hw", "t4", "--model", "granite-3.1-1b-a400m", "--requests", "8", "--gen-len", "4")
MANY = ("compare", "--hw", "colab-t4", "--model", "olmoe", "--requests", "64", "--gen-len", "8")
SCENARIO = tiny_scenario()
BASE = policy_of(weights_on_gpu=0.6, kv_on_disk=0.25, weights_on_disk=0.1)  # A_g = 0, F_g = 1, 2 x 2 requests


def overrides(name: str, base: Policy = BASE) -> dict[str, Any]:
    return overrides_for(SCHEDULES[name], base, SCENARIO)


# The same policy


def test_schedules_with_attention_where_the_policy_has_it_run_it_as_it_is() -> None:
    for name in ("cgopipe", "s2", "s3", "serial"):
        assert overrides(name) == {}
        assert same_policy(SCHEDULES[name], BASE, SCENARIO) == BASE


def test_what_a_schedule_needs_otherwise_is_replaced_and_nothing_else() -> None:
    assert overrides("s4") == {"attention_on_gpu": True}
    assert overrides("cgopipe", policy_of(attention_on_gpu=True)) == {"attention_on_gpu": False}
    assert overrides("streaming") == {
        "attention_on_gpu": True,
        "micro_batch_size": 4,
        "num_micro_batches": 1,
        "kv_on_gpu": 1.0,
        "kv_on_disk": 0.0,
    }
    ring = policy_of(weight_slots="experts", ring_experts=3)
    assert overrides("s2", ring) == {"weight_slots": 2, "ring_experts": 0}
    assert overrides("cgopipe", ring) == {}


def test_one_micro_batch_holds_the_tokens_of_all() -> None:
    """Four requests of 6 prompt and 4 generated tokens in one micro-batch: 40."""
    assert same_policy(SCHEDULES["streaming"], BASE, SCENARIO).micro_batch_token_budget == 40


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("attention_on_gpu", [False, True])
def test_every_schedule_accepts_the_policy_that_is_made_for_it(name: str, attention_on_gpu: bool) -> None:
    base = policy_of(weights_on_gpu=0.6, attention_on_gpu=attention_on_gpu, kv_on_gpu=0.5)
    policy = same_policy(SCHEDULES[name], base, SCENARIO)
    check_schedule(name, policy)
    assert policy.batch_size == base.batch_size


def test_experts_that_stay_are_whole_ones() -> None:
    """Of four experts 0.6 are two, 0.75 three, and 0.2 none, which is no such plan."""
    assert [whole_experts(SCENARIO, share) for share in (0.6, 0.75, 0.2)] == [0.5, 0.75, 0.0]
    if "static_experts" in SCHEDULES:
        assert overrides("static_experts")["weights_on_gpu"] == 0.5
        with pytest.raises(InputError, match="less than one of 4 experts"):
            same_policy(SCHEDULES["static_experts"], policy_of(weights_on_gpu=0.2), SCENARIO)


# The fastest candidate


def candidate(number: int, predicted: float) -> Any:
    return policy_of(prefill_micro_batch_size=number), SimpleNamespace(throughput_tokens_per_s=predicted)


def test_candidates_that_cannot_win_are_not_tried() -> None:
    tried: list[int] = []

    def rate(policy: Policy) -> float:
        tried.append(policy.prefill_micro_batch_size)
        return {1: 80.0, 2: 85.0, 3: 70.0, 4: 99.0}[policy.prefill_micro_batch_size]

    candidates = [candidate(1, 100.0), candidate(2, 90.0), candidate(3, 85.0), candidate(4, 50.0)]
    assert take_fastest(candidates, rate).prefill_micro_batch_size == 2
    assert tried == [1, 2]
    assert take_fastest(candidates, rate, bounded=False).prefill_micro_batch_size == 4


def test_candidates_that_cannot_run_are_passed_over_and_the_first_says_why() -> None:
    def rate(policy: Policy) -> float:
        if policy.prefill_micro_batch_size != 3:
            raise InputError(f"no {policy.prefill_micro_batch_size}")
        return 1.0

    assert take_fastest([candidate(1, 9.0), candidate(3, 8.0)], rate).prefill_micro_batch_size == 3
    with pytest.raises(InputError, match="no 2"):
        take_fastest([candidate(2, 9.0), candidate(1, 8.0)], rate)


# A whole comparison


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """The tiny machine with 12,000 byte of GPU memory: all in one micro-batch does not fit."""
    scenario = tiny_scenario(profile=tiny_profile(usable=12_000.0), requests=64, prompts=(6,), generated=6)
    return compare_schedules(make_plan(scenario, hardware={"name": "tiny"}, model={"name": "tiny"}), panels=True)


def test_every_schedule_has_a_row_or_a_reason_in_both_tables(comparison: Comparison) -> None:
    for entries in (comparison.same, comparison.own):
        assert [entry.schedule for entry in entries] == list(SCHEDULES)
        assert all((entry.replay is None) == bool(entry.reason) for entry in entries)


def test_what_does_not_fit_is_simulated_all_the_same_and_says_by_how_much(comparison: Comparison) -> None:
    scenario = comparison.scenario
    for entry in comparison.same:
        if entry.policy is None or entry.policy.everything_on_cpu:
            continue
        over = memory_use(scenario, measure_sizes(scenario), entry.policy)["gpu"].peak_bytes - 12_000.0
        assert entry.over_bytes.get("gpu", 0.0) == pytest.approx(max(0.0, over))
        assert entry.fits == (not entry.over_bytes)
        assert entry.rate > 0
    assert any(entry.over_bytes for entry in comparison.same)


def test_plans_of_their_own_fit(comparison: Comparison) -> None:
    assert all(entry.fits for entry in comparison.own if entry.replay is not None)
    assert sum(entry.replay is not None for entry in comparison.own) >= 4


def test_nothing_overlapped_is_the_slowest_way_to_run_a_policy(comparison: Comparison) -> None:
    rates = {entry.schedule: entry.rate for entry in comparison.same if not entry.overrides}
    assert len(rates) >= 2
    assert min(rates, key=lambda name: rates[name]) == "serial"


def test_rates_are_those_of_a_replay(comparison: Comparison) -> None:
    for entry in comparison.own:
        if entry.policy is not None:
            again = replay_plan(comparison.scenario, entry.policy, entry.schedule)
            assert entry.rate == again.throughput_tokens_per_s


def test_the_document_is_the_same_every_time_and_has_what_scripts_are_promised(comparison: Comparison) -> None:
    document = comparison_document(comparison)
    again = compare_schedules(comparison.plan, panels=False)
    assert comparison_document(again) == document
    assert document["padded"] is False
    for row in (*document["same_policy"], *document["own_plan"]):
        assert (row["simulated"] is None) == (row["reason"] is not None)
        if row["simulated"] is not None:
            assert set(row["memory"]["gpu"]) == {"peak_bytes", "limit_bytes"}
            assert 0.0 <= row["simulated"]["bubble_share"] < 1.0


def test_keys_of_a_row_are_those_of_the_page(comparison: Comparison) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = text.split("| key of a row of `hrm compare` | what it is |\n")[1].split("\n\n")[0].splitlines()[1:]
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert set(comparison_document(comparison)["own_plan"][0]) == documented


def test_the_figure_has_a_panel_for_every_schedule_that_ran_the_policy(comparison: Comparison) -> None:
    axes = comparison_figure(comparison).axes
    ran = [entry.schedule for entry in comparison.same if entry.panel is not None]
    assert [each.get_title(loc="left").split(":")[0] for each in axes] == ran
    assert len({each.get_xlim() for each in axes}) == 1


def test_a_plan_of_its_own_is_not_slower_than_the_same_policy_where_that_fits() -> None:
    document = run(*MANY, "--json").document
    same = {row["schedule"]: row for row in document["same_policy"] if row["fits"]}
    own = {row["schedule"]: row for row in document["own_plan"] if row["fits"]}
    assert {"s4", "serial"} <= set(same) <= set(own)
    for name, row in same.items():
        rates = [each["simulated"]["throughput_tokens_per_s"] for each in (row, own[name])]
        assert rates[0] <= rates[1], name


def test_serial_plans_are_those_with_the_least_sum_of_lanes_and_simulation_agrees() -> None:
    plan = plan_of("t4", "granite-3.1-1b-a400m", requests=64)
    found = Candidates(scenario=plan.scenario, pins=Pins(), max_hours=24.0)
    tried = dict(found.of(SCHEDULES["serial"]))
    rates = {policy: replay_plan(plan.scenario, policy, "serial").throughput_tokens_per_s for policy in tried}
    everything = {**dict(found.of(SCHEDULES["cgopipe"])), **dict(found.of(SCHEDULES["s4"]))}
    left_out = [policy for policy in everything if policy not in tried]
    assert left_out
    for policy in left_out:
        assert replay_plan(plan.scenario, policy, "serial").throughput_tokens_per_s < max(rates.values())


# Words


def entry(schedule: str, rate: float, *, fits: bool = True) -> Entry:
    use = SimpleNamespace(fits=fits, peak_bytes=2.0, limit_bytes=1.0)
    made: dict[str, Any] = {
        "schedule": schedule,
        "replay": SimpleNamespace(throughput_tokens_per_s=rate),
        "prediction": SimpleNamespace(memory={"gpu": use}),
    }
    return Entry(**made)


def test_where_another_schedule_is_faster_than_the_papers_that_is_said() -> None:
    assert winner_in_words([entry("cgopipe", 80.0), entry("s4", 100.0)]) == [
        "fastest: s4, 100.0 token/s, 1.250x cgopipe",
        "cgopipe is not the best here: s4 is 1.250x as fast",
    ]
    assert winner_in_words([entry("cgopipe", 100.0), entry("s4", 80.0)]) == [
        "fastest: cgopipe, 100.0 token/s, 1.250x s4"
    ]
    assert winner_in_words([Entry(schedule="cgopipe", reason="x"), entry("s4", 80.0)]) == [
        "fastest: s4, 80.0 token/s",
        "cgopipe is not the best here: it has no plan",
    ]


def test_rates_within_the_accuracy_of_the_replay_are_equal() -> None:
    assert winner_in_words([entry("cgopipe", 100.0), entry("s4", 100.01)]) == [
        "fastest: s4, 100.0 token/s, as fast as cgopipe"
    ]


def test_what_does_not_fit_is_not_the_fastest() -> None:
    assert winner_in_words([entry("cgopipe", 80.0), entry("streaming", 100.0, fits=False)]) == [
        "fastest: cgopipe, 80.0 token/s",
        "streaming would be faster, 100.0 token/s, but does not fit",
    ]
    assert winner_in_words([entry("cgopipe", 80.0, fits=False)]) == ["none of them fits the machine"]


def test_a_policy_in_words_names_what_is_not_usual() -> None:
    assert policy_in_words(BASE) == (
        "N = 4, n_ub = 2, mu = 2, A_g = 0, F_g = 1, r_w = 0.6, weights on disk = 0.1, KV on disk = 0.25"
    )
    assert policy_in_words(policy_of(weight_slots=1)) == (
        "N = 4, n_ub = 2, mu = 2, A_g = 0, F_g = 1, r_w = 0, weight slots = 1"
    )


def test_schedules_are_read_in_their_own_order() -> None:
    assert read_schedules("s4, cgopipe") == ("cgopipe", "s4")
    assert read_schedules(None) == tuple(SCHEDULES)


# The command


def test_the_command_prints_both_tables_and_says_whether_prompts_are_padded() -> None:
    done = run(*SMALL, "--schedules", "cgopipe,s4", "--padded")
    assert done.code == 0, done.err
    assert " ".join(done.out.split()).count("padded prompts") == 3 and "unpadded" not in done.out
    assert "Same policy" in done.out and "best plan of its own" in done.out and "fastest: " in done.out
    assert all(len(line) <= 118 for line in done.out.splitlines())


def test_one_generated_token_has_rates_and_no_step() -> None:
    document = run(*SMALL[:-1], "1", "--schedules", "s4,streaming", "--json").document
    for row in document["own_plan"]:
        assert row["simulated"]["throughput_tokens_per_s"] > 0
        assert row["simulated"]["step_latency_s"] == 0.0
    assert refused(*SMALL[:-1], "1", "--plot", "x.png").startswith("--plot: x.png: one token is generated")


def test_wrong_input_is_refused_in_one_line() -> None:
    assert refused(*SMALL, "--schedules", "s4,s5").startswith("--schedules: there is no schedule 's5' (some of cgopipe")
    assert refused(*SMALL, "--schedules", "s4,s4").startswith("--schedules: s4 is there twice")
    assert refused(*SMALL, "--schedules", "").startswith("--schedules: there is no schedule ''")
    assert refused(*SMALL, "--plot", "x.jpg") == (
        "--plot: 'x.jpg' is not a figure this writes (a name that ends in .png or .svg)"
    )
    assert refused(*SMALL, "--plot", "nowhere/x.png") == "--plot: nowhere/x.png: its folder does not exist"

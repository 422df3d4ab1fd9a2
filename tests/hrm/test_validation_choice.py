"""Policies that a validation measures: neighbours by brute force, the same with the same seed, only what can be run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from command import plan_of
from tiny import tiny_profile, tiny_scenario

from hrm.host_facts import HostFacts
from hrm.policy import Policy
from hrm.scenario import Scenario
from hrm.validation.candidates import Pricer, as_run, regime_of, settled
from hrm.validation.choice import AGAIN, CHOSEN, choose_candidates, in_neighbourhood
from hrm.validation.neighbours import one_step, steps_of
from hrm.validation.pool import draw_policies
from hrm.workload import uniform_workload

ROOMY = HostFacts(torch="cpu", gpus=(), cpu_bytes=1e15, lockable_bytes=1e15, disk_bytes=1e15)


def never(_: Policy) -> str:
    return ""


# One step


def policy(**changes: object) -> Policy:
    found = {
        "batch_size": 12,
        "micro_batch_size": 4,
        "num_micro_batches": 3,
        "prefill_micro_batch_size": 12,
        "attention_on_gpu": True,
        "ffn_on_gpu": True,
        "weights_on_gpu": 0.5,
    }
    return Policy(**(found | changes))  # type: ignore[arg-type]


def test_steps_of_mu_are_all_numbers_of_micro_batches_that_a_batch_makes_the_nearest_first() -> None:
    up = [(each.micro_batch_size, each.num_micro_batches) for each in steps_of(policy(), "mu", 1, rows=8)]
    down = [(each.micro_batch_size, each.num_micro_batches) for each in steps_of(policy(), "mu", -1, rows=8)]
    assert up == [(6, 2), (12, 1)]
    assert down == [(3, 4), (2, 6), (1, 12)]


def test_steps_of_n_keep_the_micro_batch_where_it_fits() -> None:
    down = [(each.batch_size, each.micro_batch_size, each.num_micro_batches)
            for each in steps_of(policy(), "N", -1, rows=8)]  # fmt: skip
    assert down[:5] == [(11, 4, 3), (10, 4, 3), (9, 4, 3), (8, 4, 2), (7, 4, 2)]
    assert down[-1] == (1, 1, 1)


def test_steps_of_r_w_are_whole_rows_and_leave_room_for_the_share_on_disk() -> None:
    at = policy(weights_on_disk=0.25)
    assert [each.weights_on_gpu for each in steps_of(at, "r_w", 1, rows=8)] == [0.625, 0.75]
    assert [each.weights_on_gpu for each in steps_of(at, "r_w", -1, rows=8)] == [0.375, 0.25, 0.125, 0.0]


def test_experts_on_the_cpu_have_no_step_of_r_w() -> None:
    found, why = one_step(policy(ffn_on_gpu=False, weights_on_gpu=0.0), "r_w", 1, rows=8, noise=0.1,
                          latency=lambda _: 1.0, why_not=never)  # fmt: skip
    assert (found, why) == (None, "there is no larger r_w")


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("variable", ["mu", "N", "r_w"])
def test_a_step_is_the_nearest_value_predicted_beyond_twice_the_noise(
    variable: str, direction: int, noise: float
) -> None:
    scenario = tiny_scenario(profile=tiny_profile(usable=1e9), prompts=(6,), generated=4, requests=24)
    pricer = Pricer.start(scenario, {}, ROOMY)
    base = policy()

    def latency(other: Policy) -> float:
        return pricer.latency(settled(scenario, other))

    found, why = one_step(base, variable, direction, rows=4, noise=noise, latency=latency, why_not=never)
    expected = None
    reach = {"mu": range(1, 13), "N": range(1, 25), "r_w": range(5)}[variable]
    start = {"mu": 4, "N": 12, "r_w": 2}[variable]
    for value in sorted((each for each in reach if (each - start) * direction > 0), key=lambda each: abs(each - start)):
        if variable == "r_w":
            other = replace(base, weights_on_gpu=value / 4)
        else:
            n, mu = (12, value) if variable == "mu" else (value, min(4, value))
            if variable == "mu" and value != -(-12 // -(-12 // value)):
                continue  # the same number of micro-batches with a smaller size
            other = replace(base, batch_size=n, micro_batch_size=mu, num_micro_batches=-(-n // mu),
                            prefill_micro_batch_size=min(n, base.prefill_micro_batch_size))  # fmt: skip
        if abs(latency(other) / latency(base) - 1.0) >= 2.0 * noise:
            expected = other
            break
    assert found == expected
    assert bool(why) == (expected is None)


def test_a_step_that_cannot_be_run_is_passed_over() -> None:
    found, _ = one_step(policy(), "mu", -1, rows=8, noise=0.0, latency=lambda _: 1.0,
                        why_not=lambda each: "no room" if each.micro_batch_size == 3 else "")  # fmt: skip
    assert found is not None
    assert found.micro_batch_size == 2
    found, why = one_step(policy(), "mu", 1, rows=8, noise=0.0, latency=lambda _: 1.0, why_not=lambda _: "no room")
    assert found is None
    assert why.endswith("no room")


# As run


def test_the_requests_of_a_batch_are_spread_over_the_prompts_of_the_workload() -> None:
    scenario = tiny_scenario(prompts=(1, 2, 3, 4, 5, 6, 7, 8), requests=100)
    assert as_run(scenario, 4).workload.prompt_lengths == (2, 4, 6, 8)
    assert as_run(scenario, 8).workload.prompt_lengths == (1, 2, 3, 4, 5, 6, 7, 8)
    twice = as_run(scenario, 16).workload
    assert sorted(twice.prompt_lengths) == sorted(2 * (1, 2, 3, 4, 5, 6, 7, 8))
    assert (twice.num_requests, twice.padded) == (16, False)


def test_padded_prompts_are_as_long_as_the_longest() -> None:
    scenario = tiny_scenario(prompts=(2, 8), requests=4, padded=True)
    assert as_run(scenario, 3).workload.prompt_lengths == (8, 8, 8)


# All of them


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    """OLMoE on the host of an L4, 64 requests."""
    plan = plan_of("l4", "olmoe-1b-7b", workload=uniform_workload(128, 32, num_requests=64))
    gpu = replace(plan.scenario.profile.gpu, usable_memory_bytes=8e9)
    return replace(plan.scenario, profile=replace(plan.scenario.profile, gpu=gpu))


@pytest.fixture(scope="module")
def pricer(scenario: Scenario) -> Pricer:
    return Pricer.start(scenario, {}, ROOMY)


@pytest.fixture(scope="module")
def base(scenario: Scenario) -> Policy:
    return Policy(
        batch_size=64,
        micro_batch_size=16,
        num_micro_batches=4,
        prefill_micro_batch_size=16,
        attention_on_gpu=False,
        ffn_on_gpu=True,
        weights_on_gpu=0.25,
    )


def test_everything_that_is_chosen_can_be_run_and_has_a_name_of_its_own(pricer: Pricer, base: Policy) -> None:
    found = choose_candidates(pricer, base, "cgopipe", noise=0.01, seed=0)
    assert len({each.name for each in found.candidates}) == len(found.candidates)
    for each in found.candidates:
        assert pricer.why_not(each.policy, each.schedule) == ""
        assert settled(pricer.scenario, each.policy) == each.policy
        assert each.regime == regime_of(pricer.predict(each.policy))


def test_the_plan_is_there_twice_and_first_and_nothing_else_is(pricer: Pricer, base: Policy) -> None:
    found = choose_candidates(pricer, base, "cgopipe", noise=0.01, seed=0)
    assert [each.name for each in found.candidates[:2]] == [CHOSEN, AGAIN]
    assert found.candidates[0].policy == found.candidates[1].policy == settled(pricer.scenario, base)
    places = [(each.policy, each.schedule) for each in found.candidates[1:]]
    assert len(set(places)) == len(places)


def test_every_kind_is_there_or_the_reason_why_it_is_not(pricer: Pricer, base: Policy) -> None:
    found = choose_candidates(pricer, base, "cgopipe", noise=0.01, seed=0)
    kinds = {kind for each in found.candidates for kind in each.kinds} | set(found.lacking)
    wanted = {f"{name} {way}" for name in ("mu", "N", "r_w") for way in ("up", "down")}
    wanted |= {"flip A_g", "flip pinning", "flip schedule to s2", "flip schedule to s3", "flip schedule to serial"}
    wanted |= {"trivial: all in GPU memory", "trivial: CPU only", "trivial: one micro-batch"}
    wanted |= {"bound by link", "bound by cpu", "bound by gpu", *(f"random {number}" for number in range(1, 11))}
    assert wanted <= kinds
    assert found.lacking["trivial: all in GPU memory"] == "weights are 1.7x the GPU memory"


def test_the_same_seed_chooses_the_same_and_another_one_does_not(pricer: Pricer, base: Policy) -> None:
    one, same, other = (choose_candidates(pricer, base, "cgopipe", noise=0.01, seed=seed) for seed in (5, 5, 6))
    assert one.candidates == same.candidates
    assert one.candidates != other.candidates


def test_random_plans_are_far_from_the_plan(pricer: Pricer, base: Policy) -> None:
    found = choose_candidates(pricer, base, "cgopipe", noise=0.01, seed=0)
    chosen = pricer.predict(found.candidates[0].policy).throughput_tokens_per_s
    rates = [
        pricer.predict(each.policy).throughput_tokens_per_s
        for each in found.candidates
        if each.name.startswith("random")
    ]
    assert len(rates) == 10
    assert all(chosen / 4.0 <= rate <= chosen / 1.15 for rate in rates)


def test_the_neighbourhood_is_steps_and_flips(pricer: Pricer, base: Policy) -> None:
    found = choose_candidates(pricer, base, "cgopipe", noise=0.01, seed=0)
    names = {each.name for each in found.candidates if in_neighbourhood(each)}
    assert {CHOSEN, AGAIN, "r_w down", "flip A_g", "flip schedule to s2"} <= names
    assert not any(name.startswith(("random", "trivial", "bound")) for name in names)


def test_policies_are_drawn_in_the_same_order_with_the_same_seed(pricer: Pricer, base: Policy) -> None:
    draws = [
        list(draw_policies(base, pricer.scenario.model, rows=1024, seed=seed, count=20, usable=lambda _: True))
        for seed in (1, 1, 2)
    ]
    assert len(draws[0]) == 20
    assert draws[0] == draws[1] != draws[2]
    shares = {each.weights_on_gpu * 1024 for each in draws[0]}
    assert all(share == round(share) for share in shares)

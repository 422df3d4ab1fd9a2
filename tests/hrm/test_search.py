"""The search against brute force (`search_oracle`): small scenarios in full, full-size ones by random points."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from search_oracle import ALL, Integers, Oracle, random_pins, random_scenario

from hrm.errors import InfeasibleError, InputError
from hrm.model_files import load_model
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.prediction import memory_use, predict
from hrm.profile_files import load_profile
from hrm.scenario import Scenario, choose_formats
from hrm.search import SearchResult, find_policy
from hrm.workload import load_workload, uniform_workload

POINTS = 20_000
FULL_SIZE = (
    ("t4", "dbrx"),
    ("t4", "mixtral-8x7b"),
    ("l4", "mixtral-8x7b"),
    ("rtx4090", "qwen3-30b-a3b"),
    ("t4", "deepseek-v2"),
    ("t4", "kimi-k2"),
    ("a100-80g", "mixtral-8x22b"),
    ("colab-t4", "olmoe-1b-7b"),
    ("t4x2", "dbrx"),
    ("t4", "gpt-oss-120b"),
)


def full_size(hardware: str, model: str, generated: int = 128) -> Scenario:
    profile, spec = load_profile(hardware), load_model(model)
    workload = load_workload("mtbench", generation_length=generated)
    return Scenario(profile=profile, model=spec, workload=workload, formats=choose_formats(profile, spec))


def seconds_of(result: SearchResult) -> float:
    return result.prediction.num_batches * result.prediction.batch_s


def rounding_loss(oracle: Oracle, result: SearchResult) -> float:
    """Seconds that whole rows of weights may cost: at most 3 rows of every layer lie on the wrong side of a copy.

    The program keeps two rows per layer free so that rounding never breaks a limit, and rounding itself moves one.
    """
    model, sizes, rates = oracle.scenario.model, oracle.sizes, oracle.rates
    row = model.hidden_size * sizes.expert_bytes / model.streamed_expert_parameters
    slowest = min(rates.h2d_bytes_per_s, rates.staging_bytes_per_s, rates.disk_read_bytes_per_s or np.inf)
    policy = result.policy
    ring = policy.weight_slots == "experts"
    passes = -(-policy.batch_size // policy.prefill_micro_batch_size) if ring else 1
    return 3.0 * row * sizes.streamed_layers * (sizes.decode_steps + passes) / slowest * result.prediction.num_batches


def brute_force(oracle: Oracle, pins: Pins) -> tuple[float, int]:
    """Least seconds of the whole workload over every integer point, and how many points there were."""
    least, count = np.inf, 0
    for points in oracle.every(pins):
        least = min(least, float(oracle.evaluate(points).seconds.min(initial=np.inf)))
        count += len(points)
    return least, count


def search_or_none(scenario: Scenario, pins: Pins, max_hours: float) -> SearchResult | None:
    try:
        return find_policy(scenario, pins, max_hours=max_hours, rings="always")
    except InfeasibleError:
        return None


def check_against(oracle: Oracle, pins: Pins, max_hours: float = 24.0) -> SearchResult | None:
    """The search finds what brute force finds: no worse than its own gap says, and nothing that cannot be."""
    least, count = brute_force(oracle, pins)
    assert count <= POINTS
    result = search_or_none(oracle.scenario, pins, max_hours)
    if result is None:
        assert np.isinf(least)
        return None
    found = seconds_of(result)
    assert found <= least / (1.0 - result.solver.gap) + rounding_loss(oracle, result)
    if not result.policy.everything_on_cpu:  # brute force has no plan without the GPU
        assert found >= least * (1.0 - 1e-6)
    assert all(use.fits for use in result.prediction.memory.values())
    assert result.prediction.batch_s <= max_hours * 3600.0 * (1.0 + 1e-6)
    return result


@pytest.mark.parametrize("seed", range(44))
def test_search_is_as_good_as_brute_force(seed: int) -> None:
    oracle = Oracle(random_scenario(seed))
    check_against(oracle, random_pins(oracle, seed, POINTS))


@pytest.mark.parametrize("seed", range(100, 108))
def test_search_is_as_good_as_brute_force_where_the_hours_bind(seed: int) -> None:
    scenario = random_scenario(seed)
    pins = random_pins(Oracle(scenario), seed, POINTS)
    free = search_or_none(scenario, pins, 24.0)
    hours = 1.0 if free is None else 0.6 * free.prediction.batch_s / 3600.0
    check_against(Oracle(scenario, max_hours=hours), pins, hours)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_search_is_as_good_as_brute_force_on_many_more_cases(seed: int) -> None:
    oracle = Oracle(random_scenario(seed))
    check_against(oracle, random_pins(oracle, seed, POINTS))


def random_points(scenario: Scenario, plan: Policy, count: int, pick: np.random.Generator) -> list[Integers]:
    """Integer points of every class, half of them anywhere, half of them within a tenth of the plan's numbers."""
    requests = scenario.workload.num_requests
    disk = scenario.profile.disk is not None
    found = []
    for attention in (True, False):
        for ffn in (True, False):
            for slots in (1, 2, "experts"):

                def near(value: int, most: np.ndarray) -> np.ndarray:
                    anywhere = np.exp(pick.uniform(0.0, np.log(most + 1.0)))
                    close = value * pick.uniform(0.9, 1.1, count)
                    return np.clip(np.floor(np.where(pick.random(count) < 0.5, anywhere, close)), 1.0, most)

                size = np.ceil(requests / near(-(-requests // plan.batch_size), np.full(count, float(requests))))
                micro = near(plan.micro_batch_size, size)
                whole = np.floor(size / np.ceil(size / micro))
                kv_gpu = np.floor(whole * pick.choice([0.0, 0.0, 0.3, 0.7, 1.0], count) * pick.random(count))
                kv_gpu = np.where(pick.random(count) < 0.1, ALL, kv_gpu)
                rest = np.where(kv_gpu == ALL, 0.0, whole - kv_gpu)
                share = pick.choice([0.0, 0.5, 1.0], count) if disk else np.zeros(count)
                head = pick.integers(0, 2, count).astype(float)
                experts = float(scenario.model.streamed_experts)
                found.append(
                    Integers(
                        attention_on_gpu=attention,
                        ffn_on_gpu=ffn,
                        slots=slots,
                        size=size,
                        micro_batch=micro,
                        prefill=near(plan.prefill_micro_batch_size, size),
                        dense=pick.integers(0, 2, count).astype(float),
                        head=head,
                        embedding=head if scenario.model.tie_embeddings else pick.integers(0, 2, count).astype(float),
                        pin=pick.integers(0, 2, count).astype(float),
                        kv_gpu=kv_gpu,
                        kv_disk=np.floor(rest * share),
                        ring=near(2, np.full(count, experts)).clip(2.0) if slots == "experts" else np.zeros(count),
                    )
                )
    return found


@pytest.mark.parametrize(("hardware", "model"), FULL_SIZE)
def test_no_random_feasible_policy_beats_the_plan(hardware: str, model: str) -> None:
    scenario = full_size(hardware, model)
    oracle = Oracle(scenario)
    result = find_policy(scenario, rings="always")
    limit = seconds_of(result) * (1.0 - result.solver.gap) - rounding_loss(oracle, result)
    pick = np.random.default_rng(7)
    feasible = 0
    while feasible < 1_000:
        for points in random_points(scenario, result.policy, 2_000, pick):
            seconds = oracle.evaluate(points).seconds
            assert seconds.min() >= limit
            feasible += int(np.isfinite(seconds).sum())


def test_oracle_prices_a_policy_as_the_prediction_does() -> None:
    pick = np.random.default_rng(3)
    checked = 0
    for seed in range(12):
        oracle = Oracle(random_scenario(seed))
        plan = search_or_none(oracle.scenario, Pins(), 24.0)
        if plan is None:
            continue
        for points in random_points(oracle.scenario, plan.policy, 40, pick):
            outcome = oracle.evaluate(points)
            for index in np.flatnonzero(np.isfinite(outcome.seconds))[:4]:
                policy = oracle.policy(points, int(index), outcome)
                prediction = predict(oracle.scenario, oracle.sizes, oracle.rates, policy)
                seconds = prediction.num_batches * prediction.batch_s
                assert seconds == pytest.approx(float(outcome.seconds[index]), rel=1e-9)
                assert all(use.fits for use in memory_use(oracle.scenario, oracle.sizes, policy).values())
                checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    "pins",
    [
        Pins(micro_batch_size=36),
        Pins(num_micro_batches=7),
        Pins(batch_size=500, prefill_micro_batch_size=20),
        Pins(weights_on_gpu=0.1, attention_on_gpu=False),
        Pins(weights_on_disk=0.25, pin_weights=False),
        Pins(kv_on_gpu=0.5, attention_on_gpu=True),
        Pins(weight_slots="experts", dense_weights_on_gpu=True, embedding_on_gpu=False, lm_head_on_gpu=False),
        Pins(ffn_on_gpu=False, weight_slots=1, pin_weights=True),
    ],
)
def test_a_pinned_variable_keeps_its_value(pins: Pins) -> None:
    policy = find_policy(full_size("t4", "mixtral-8x7b"), pins).policy
    for name, value in pins.given.items():
        found = getattr(policy, name)
        if name in ("weights_on_gpu", "weights_on_disk"):
            assert found == pytest.approx(value, abs=1e-4)  # whole rows of the packed experts
        elif name == "kv_on_gpu":
            assert value - 1.0 / policy.micro_batch_size < found <= value + 1e-9  # whole requests
        else:
            assert found == value


def test_five_requests_in_four_micro_batches_become_batches_of_four() -> None:
    profile, model = load_profile("l4"), load_model("olmoe-1b-7b")
    workload = uniform_workload(50, 4, num_requests=5)
    scenario = Scenario(profile=profile, model=model, workload=workload, formats=choose_formats(profile, model))
    policy = find_policy(scenario, Pins(num_micro_batches=4)).policy
    assert (policy.batch_size, policy.micro_batch_size, policy.num_micro_batches) == (4, 1, 4)


def test_pins_that_leave_no_batch_are_an_input_error() -> None:
    scenario = full_size("l4", "mixtral-8x7b")
    with pytest.raises(InputError, match="no batch of at most 10000 requests"):
        find_policy(scenario, Pins(micro_batch_size=6000, num_micro_batches=3))


@pytest.mark.parametrize(
    ("pins", "hardware", "said"),
    [
        (Pins(ffn_on_gpu=False, weights_on_gpu=0.2), "t4", "--weights-on-gpu: with the FFN on the CPU"),
        (Pins(weights_on_disk=0.2), "rtx4090", "--weights-on-disk: rtx4090 has no disk"),
        (Pins(kv_on_disk=1.0), "rtx4090", "--kv-on-disk: rtx4090 has no disk"),
    ],
)
def test_pins_that_name_a_place_that_is_not_there_are_an_input_error(pins: Pins, hardware: str, said: str) -> None:
    scenario = full_size(hardware, "mixtral-8x7b")
    bare = replace(scenario, profile=replace(scenario.profile, disk=None)) if hardware == "rtx4090" else scenario
    with pytest.raises(InputError, match=said):
        find_policy(bare, pins)


def test_ring_of_a_dense_model_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"--weight-slots: a ring of two experts is a whole layer of llama-3.1-8b"):
        find_policy(full_size("t4", "llama-3.1-8b"), Pins(weight_slots="experts"))


def test_plan_is_never_worse_than_the_trivial_ones() -> None:
    for hardware, model in (("colab-t4", "olmoe-1b-7b"), ("h100", "granite-3.1-1b-a400m"), ("t4", "kimi-k2")):
        result = find_policy(full_size(hardware, model))
        rates = [plan.prediction.throughput_tokens_per_s for plan in result.trivial if plan.prediction is not None]
        assert rates
        assert result.prediction.throughput_tokens_per_s >= max(rates)


def test_cpu_only_plan_wins_where_the_link_is_hopeless() -> None:
    scenario = full_size("t4", "granite-3.1-1b-a400m", generated=16)
    profile = scenario.profile
    slow = replace(profile.link.host_to_device, pinned_bytes_per_s=1e6, with_opposite_bytes_per_s=1e6)
    back = replace(profile.link.device_to_host, pinned_bytes_per_s=1e6, with_opposite_bytes_per_s=1e6)
    small = replace(profile.gpu, usable_memory_bytes=2.0e9)
    crippled = replace(profile, gpu=small, link=replace(profile.link, host_to_device=slow, device_to_host=back))
    result = find_policy(replace(scenario, profile=crippled))
    assert result.policy.everything_on_cpu
    assert result.solved is None


def test_all_on_gpu_plan_is_not_offered_where_the_host_cannot_hold_its_buffers() -> None:
    scenario = full_size("h100", "granite-3.1-1b-a400m")
    host = replace(scenario.profile.cpu, memory_bytes=scenario.profile.cpu.reserved_bytes + 1e8)
    small = replace(scenario, profile=replace(scenario.profile, cpu=host, disk=None))
    with pytest.raises(InfeasibleError):
        find_policy(small)


def test_report_of_the_solver_is_honest() -> None:
    solver = find_policy(full_size("l4", "mixtral-8x7b")).solver
    assert solver.status == "optimal"
    assert 0.0 <= solver.gap <= 1.3e-4
    assert solver.points_bounded > 200_000
    assert 0 < solver.programs_solved < 100


def test_a_ring_of_experts_is_taken_only_where_no_layer_fits() -> None:
    layered = find_policy(full_size("t4", "dbrx"))
    ringed = find_policy(full_size("t4", "dbrx"), rings="always")
    assert layered.policy.weight_slots in (1, 2)
    assert ringed.policy.weight_slots == "experts"
    assert 1.0 < ringed.prediction.throughput_tokens_per_s / layered.prediction.throughput_tokens_per_s < 1.05
    assert find_policy(full_size("t4", "kimi-k2")).policy.weight_slots == "experts"


def test_a_staged_plan_with_one_slot_waits_for_the_staging_copies() -> None:
    pins = Pins(micro_batch_size=164, num_micro_batches=14, weight_slots=1, pin_weights=False, attention_on_gpu=False)
    result = find_policy(full_size("t4", "mixtral-8x7b"), pins)
    staging, gpu = (result.prediction.decode.lanes[lane] for lane in ("staging", "gpu"))
    ahead = 32 * 512 * 2**20 / 8e9  # what the pinned ring takes of each layer beforehand, at 8 GB/s
    assert gpu > ahead
    assert result.prediction.decode.seconds == pytest.approx(staging + gpu - ahead, rel=1e-3)


def test_a_share_of_the_kv_cache_pinned_to_disk_is_never_all_on_the_gpu() -> None:
    oracle = Oracle(random_scenario(3729))  # half of one request per micro-batch rounds down to none of them
    pins = random_pins(oracle, 3729, 20_000)
    assert pins.kv_on_disk == 0.5
    result = search_or_none(oracle.scenario, pins, 24.0)
    assert result is not None and result.policy.kv_on_gpu < 1.0
    assert seconds_of(result) == pytest.approx(brute_force(oracle, pins)[0], rel=1e-6)

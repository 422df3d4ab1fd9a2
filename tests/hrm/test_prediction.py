"""Predictions: totals by mental arithmetic, the busiest lane decides, and a faster machine is never slower."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FP16, tiny_mla, tiny_model, tiny_profile, tiny_scenario

from hrm.account import pass_work
from hrm.full_cost import Batch, decode_lanes
from hrm.policy import Policy
from hrm.prediction import Prediction, memory_use, pass_seconds, predict, startup_seconds, unknowns_of
from hrm.profile import HardwareProfile
from hrm.rates import Phase, Rates, derive_rates
from hrm.scenario import Scenario, kv_capacity_bytes, measure_sizes
from hrm.units import MIB


def policy_of(**changes: Any) -> Policy:
    base: dict[str, Any] = {
        "batch_size": 4,
        "micro_batch_size": 2,
        "num_micro_batches": 2,
        "prefill_micro_batch_size": 2,
        "attention_on_gpu": True,
        "ffn_on_gpu": True,
        "micro_batch_token_budget": 20,
    }
    return Policy(**(base | changes))


def predict_on(scenario: Scenario, policy: Policy) -> Prediction:
    return predict(scenario, measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats), policy)


def test_totals_of_a_batch_and_of_all_requests() -> None:
    found = predict_on(tiny_scenario(), policy_of())
    assert found.decode.seconds == pytest.approx(43.2)  # the GPU; see test_full_cost
    assert found.decode.bottleneck == found.prefill.bottleneck == "gpu"
    assert found.layer_latency_s == pytest.approx(21.6)
    assert found.decode_s == pytest.approx(3 * 43.2)
    assert found.prefill_s == pytest.approx(134.72)
    assert found.throughput_tokens_per_s == pytest.approx(4 * 4 / (134.72 + 129.6))
    assert found.decode_throughput_tokens_per_s == pytest.approx(4 * 4 / 129.6)
    assert found.num_batches == 2
    assert found.completion_s == pytest.approx(found.startup_s + 2 * (134.72 + 129.6))
    assert found.bottleneck == "prefill: gpu"


def test_startup_reads_the_weights_and_locks_what_is_copied() -> None:
    scenario = tiny_scenario()
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, FP16)
    buffers = 512 * MIB
    pinned = startup_seconds(scenario, sizes, rates, policy_of())
    assert pinned == pytest.approx(3024 / 40 + (buffers + 1536 + 1280) / 20)  # experts and the KV cache S4 copies
    loose = startup_seconds(scenario, sizes, rates, policy_of(pin_weights=False, kv_on_gpu=1.0))
    assert loose == pytest.approx(3024 / 40 + buffers / 20)


def test_one_generated_token_needs_no_decode() -> None:
    found = predict_on(tiny_scenario(generated=1), policy_of(micro_batch_token_budget=14))
    assert found.decode_s == found.decode_throughput_tokens_per_s == 0.0
    assert found.throughput_tokens_per_s == pytest.approx(4 / found.prefill_s)


def test_a_pass_takes_as_long_as_its_busiest_lane() -> None:
    scenario = tiny_scenario()
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, FP16)
    policy = policy_of(attention_on_gpu=False, pin_weights=False)
    values = unknowns_of(policy, sizes, float(kv_capacity_bytes(scenario, sizes, 4.0)))
    lanes = decode_lanes(
        scenario, sizes, rates, Batch(size=4.0, micro_batches=2.0, attention_on_gpu=False, ffn_on_gpu=True)
    )
    seconds, bottleneck, busy = pass_seconds(lanes, values, policy, sizes, rates)
    assert busy["staging"] == pytest.approx(38.4)
    assert (seconds, bottleneck) == (busy["staging"], "staging")
    seconds, bottleneck, busy = pass_seconds(lanes, values, replace(policy, pin_weights=True), sizes, rates)
    assert busy["staging"] == 0.0
    assert (seconds, bottleneck) == (pytest.approx(36.8), "gpu")
    one_slot = replace(policy, pin_weights=True, weight_slots=1)
    assert pass_seconds(lanes, values, one_slot, sizes, rates)[:2] == (pytest.approx(15.36 + 36.8), "one_slot_gpu")


def test_a_copy_direction_is_slowed_down_only_while_it_copies_itself() -> None:
    profile = tiny_profile(h2d_with_opposite=75.0, d2h_with_opposite=25.0)
    lanes = predict_on(tiny_scenario(profile=profile), policy_of()).decode.lanes
    assert lanes["device_to_host"] == pytest.approx(2 * 128 / 50)  # at half its rate, not for all 25.6 s of the other
    assert lanes["host_to_device"] == pytest.approx(25.6 + 0.25 * 2.56)


def test_bytes_of_cpu_memory_are_those_of_its_seconds() -> None:
    for pinned in (True, False):
        step = predict_on(tiny_scenario(), policy_of(pin_weights=pinned)).decode
        assert step.bytes_moved["cpu_memory"] / 250 == pytest.approx(step.lanes["cpu_memory"])


def test_chain_binds_where_micro_batches_are_too_few_to_hide_it() -> None:
    found = predict_on(
        tiny_scenario(),
        policy_of(micro_batch_size=4, num_micro_batches=1, attention_on_gpu=False, micro_batch_token_budget=40),
    )
    assert found.decode.bottleneck == "chain"
    lanes = found.decode.lanes
    assert found.decode.seconds == pytest.approx(lanes["gpu"] + lanes["cpu"] + 128 / 100 + 256 / 50)


def test_everything_on_the_gpu_copies_no_weights() -> None:
    found = predict_on(tiny_scenario(), policy_of(weights_on_gpu=1.0, kv_on_gpu=1.0))
    assert found.decode.bytes_moved["host_to_device"] == pytest.approx(0.0, abs=1e-9)
    assert found.decode.bytes_moved["device_to_host"] == pytest.approx(0.0, abs=1e-9)


def test_memory_terms_add_up_to_the_peak() -> None:
    scenario = tiny_scenario(profile=tiny_profile(disk=True))
    uses = memory_use(scenario, measure_sizes(scenario), policy_of(weights_on_disk=0.25, kv_on_disk=0.5))
    for use in uses.values():
        assert use.peak_bytes == pytest.approx(sum(use.terms.values()))
        assert all(value > 0 for value in use.terms.values())
    assert uses["disk"].terms == {"expert weights": 384.0, "KV cache": 640.0}
    assert uses["cpu"].terms["expert weights"] == 1536 - 384
    assert uses["gpu"].phase == "prefill"  # 12 prompt tokens at once


def test_slots_hold_the_part_of_a_layer_that_is_not_resident() -> None:
    scenario = tiny_scenario()
    sizes = measure_sizes(scenario)
    for slots, bytes_held in ((1, 0.75 * 768), (2, 1.5 * 768)):
        use = memory_use(scenario, sizes, policy_of(weights_on_gpu=0.25, weight_slots=slots))["gpu"]
        assert use.terms["expert weight slots"] == pytest.approx(bytes_held)
    ring = memory_use(scenario, sizes, policy_of(weight_slots="experts", ring_experts=2))["gpu"]
    assert ring.terms["expert weight slots"] == 2 * 192
    streamed = memory_use(scenario, sizes, policy_of(dense_weights_on_gpu=False, weight_slots=1))["gpu"]
    assert streamed.terms["non-expert weight slots"] == 480
    assert "non-expert weights" not in streamed.terms


def test_fits_says_whether_the_peak_is_within_the_limit() -> None:
    small = tiny_scenario(profile=tiny_profile(usable=5000.0))
    use = memory_use(small, measure_sizes(small), policy_of())["gpu"]
    assert use.limit_bytes == 5000.0
    assert not use.fits
    assert memory_use(tiny_scenario(), measure_sizes(tiny_scenario()), policy_of())["gpu"].fits


# Account


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("model", [tiny_model(), tiny_mla(), tiny_model(shared_ffn=2, layer_windows=(4, None))])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_on_gpu": False, "kv_on_gpu": 0.5},
        {"attention_on_gpu": False, "ffn_on_gpu": False},
        {"weight_slots": "experts", "ring_experts": 2},
    ],
)
def test_work_of_a_pass_makes_the_seconds_of_its_processors(phase: Phase, model: Any, changes: dict[str, Any]) -> None:
    scenario = tiny_scenario(model=model)
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, FP16)
    policy = policy_of(embedding_on_gpu=False, **changes)
    work = pass_work(scenario, sizes, policy, phase)
    found = predict(scenario, sizes, rates, policy)
    lanes = (found.decode if phase == "decode" else found.prefill).lanes
    gpu = sum(float(rates.gpu_seconds(each, phase)) for each in work["gpu"].values())
    lookup = (4 if phase == "decode" else 24) * 32 / 250
    assert lanes["gpu"] == pytest.approx(gpu)
    assert lanes["cpu"] == pytest.approx(sum(float(rates.cpu_seconds(each)) for each in work["cpu"].values()) + lookup)


# A faster machine

policies = st.builds(
    lambda mu, n_ub, a, f, rw, rc, slots, d, e, h, pin: policy_of(
        batch_size=mu * n_ub,
        micro_batch_size=mu,
        num_micro_batches=n_ub,
        prefill_micro_batch_size=mu,
        attention_on_gpu=a,
        ffn_on_gpu=f,
        weights_on_gpu=rw / 4 if f else 0.0,
        kv_on_gpu=rc / 4,
        weights_on_disk=(4 - rw) / 8 if f else 0.25,
        weight_slots=slots,
        ring_experts=2 if slots == "experts" else 0,
        dense_weights_on_gpu=d,
        embedding_on_gpu=e,
        lm_head_on_gpu=h,
        pin_weights=pin,
        micro_batch_token_budget=10 * mu,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from([1, 2, "experts"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


def faster(profile: HardwareProfile, part: str, factor: float) -> HardwareProfile:
    """The profile with one part `factor` times as fast."""
    link, disk = profile.link, profile.disk
    assert disk is not None
    if part in ("host_to_device", "device_to_host"):
        direction = getattr(link, part)
        quick = replace(
            direction,
            pinned_bytes_per_s=direction.pinned_bytes_per_s * factor,
            with_opposite_bytes_per_s=direction.with_opposite_bytes_per_s * factor,
        )
        return replace(profile, link=replace(link, **{part: quick}))
    if part == "gpu_memory":
        gpu = replace(profile.gpu, bandwidth_bytes_per_s=profile.gpu.bandwidth_bytes_per_s * factor)
        return replace(profile, gpu=gpu)
    if part == "cpu_memory":
        cpu = replace(profile.cpu, bandwidth_bytes_per_s=profile.cpu.bandwidth_bytes_per_s * factor)
        return replace(profile, cpu=cpu)
    if part == "cpu_flops":
        return replace(profile, cpu=replace(profile.cpu, peak_flops_per_s={"fp32": 100.0 * factor}))
    if part == "disk":
        return replace(profile, disk=replace(disk, read_bytes_per_s=disk.read_bytes_per_s * factor))
    return replace(profile, staging_bytes_per_s=profile.staging_bytes_per_s * factor)


PARTS = ["host_to_device", "device_to_host", "gpu_memory", "cpu_memory", "cpu_flops", "disk", "staging"]


@settings(max_examples=200)
@given(policies, st.sampled_from(PARTS), st.floats(1.0, 10.0))
def test_a_faster_part_never_makes_a_plan_slower(policy: Policy, part: str, factor: float) -> None:
    profile = tiny_profile(disk=True, h2d_with_opposite=80.0, d2h_with_opposite=30.0)
    slow = predict_on(tiny_scenario(profile=profile, requests=9), policy)
    fast = predict_on(tiny_scenario(profile=faster(profile, part, factor), requests=9), policy)
    assert fast.batch_s <= slow.batch_s * (1 + 1e-12)


@given(policies)
def test_seconds_and_bytes_of_a_prediction_are_never_negative(policy: Policy) -> None:
    found = predict_on(tiny_scenario(profile=tiny_profile(disk=True), requests=9), policy)
    assert found.prefill_s > 0 and found.decode_s > 0 and found.startup_s > 0
    for phase in (found.decode, found.prefill):
        assert min(phase.lanes.values()) >= -1e-9
        assert min(phase.bytes_moved.values()) >= -1e-9
    for use in found.memory.values():
        assert use.peak_bytes >= 0.0


def test_rates_are_those_of_the_profile() -> None:
    rates: Rates = derive_rates(tiny_profile(disk=True), FP16)
    assert (rates.h2d_bytes_per_s, rates.d2h_bytes_per_s) == (100.0, 50.0)
    assert (rates.disk_read_bytes_per_s, rates.disk_write_bytes_per_s) == (10.0, 5.0)
    assert rates.cpu_flops_per_s == 100.0  # fp16 on a CPU accumulates in fp32

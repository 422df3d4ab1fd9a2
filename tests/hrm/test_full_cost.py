"""Seconds per lane on the tiny machine, by mental arithmetic (see `tiny`): 4 requests in 2 micro-batches of 2.

Per micro-batch (2 tokens) and layer on the GPU, the larger of FLOPs/400 and bytes/200: norms 0.64, QKV 1.76, output
0.96, router 0.48 = 3.84 s; experts 832/200 = 4.16 s; lm_head 2.08 s. KV cache: 4 x 10 tokens x 32 byte = 1280 byte, of
which a step reads 4 x 8 x 32 = 1024. Attention per KV byte: GPU 1.25/200 s, CPU 2/100 s.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import FP16, tiny_mla, tiny_model, tiny_profile, tiny_scenario

from hrm import full_cost as fc
from hrm.cost import Formats, Work
from hrm.full_cost import Batch, Lanes, decode_lanes, prefill_lanes
from hrm.policy import Policy
from hrm.prediction import pass_seconds, unknowns_of
from hrm.profile import Efficiency
from hrm.rates import derive_rates
from hrm.scenario import Scenario, kv_capacity_bytes, measure_sizes

RESIDENT = {fc.DENSE: 1.0, fc.HEAD: 1.0, fc.EMBEDDING: 1.0}


def batch_of(attention: bool = True, ffn: bool = True, size: float = 4.0, micro_batches: float = 2.0) -> Batch:
    return Batch(size=size, micro_batches=micro_batches, attention_on_gpu=attention, ffn_on_gpu=ffn)


def decode(scenario: Scenario | None = None, **choices: Any) -> Lanes:
    scenario = scenario or tiny_scenario()
    return decode_lanes(
        scenario, measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats), batch_of(**choices)
    )


def prefill(scenario: Scenario | None = None, parts: float = 2.0, ring: bool = False) -> Lanes:
    scenario = scenario or tiny_scenario()
    rates = derive_rates(scenario.profile, scenario.formats)
    return prefill_lanes(scenario, measure_sizes(scenario), rates, batch_of(), parts, ring=ring)


def seconds(lanes: Lanes, **values: float) -> dict[str, float]:
    return {name: float(lane.at(RESIDENT | values)) for name, lane in lanes.always.items()}


# Decode


def test_decode_with_everything_computed_on_the_gpu() -> None:
    found = seconds(decode())
    # 1024 byte of KV x 1.25/200 + 2 micro-batches x (2 layers x (3.84 + 4.16) + 2.08) + embedding 4 x 32/200
    assert found["gpu"] == pytest.approx(6.4 + 2 * (16.0 + 2.08) + 0.64)
    assert found["cpu"] == 0.0
    assert found["host_to_device"] == pytest.approx((1536 + 1024) / 100)  # experts, KV cache
    assert found["device_to_host"] == pytest.approx(4 * 32 / 50)  # one new token each
    assert found["cpu_memory"] == pytest.approx((1536 + 1024 + 128) / 250)


def test_decode_with_attention_on_the_cpu() -> None:
    lanes = decode(attention=False)
    found = seconds(lanes)
    assert found["gpu"] == pytest.approx(36.8)
    assert found["cpu"] == pytest.approx(1024 * 2 / 100)
    assert found["host_to_device"] == pytest.approx((1536 + 4 * 2 * 8 * 2) / 100)  # experts, D2: 8 values a layer
    assert found["device_to_host"] == pytest.approx(4 * 2 * 16 * 2 / 50)  # D1: 16 values a layer
    assert found["cpu_memory"] == pytest.approx((1536 + 128 + 256 + 1024) / 250)
    assert lanes.chain is not None
    assert lanes.chain.at(RESIDENT) == pytest.approx((36.8 + 20.48 + 1.28 + 5.12) / 2)


def test_decode_with_experts_on_the_cpu_too() -> None:
    lanes = decode(attention=False, ffn=False)
    found = seconds(lanes)
    assert found["gpu"] == pytest.approx(36.8 - 2 * 2 * 4.16)
    assert found["cpu"] == pytest.approx(20.48 + 2 * 2 * 768 / 100)  # bound by FLOPs
    assert found["host_to_device"] == pytest.approx((128 + 2 * 64) / 100)  # no weights; the experts' results
    assert found["device_to_host"] == pytest.approx((256 + 2 * 64) / 50)
    assert found["cpu_memory"] == pytest.approx((256 + 384 + 1024 + 2 * 2 * 832) / 250)


def test_decode_with_attention_on_the_gpu_and_experts_on_the_cpu() -> None:
    lanes = decode(ffn=False)
    found = seconds(lanes)
    assert found["gpu"] == pytest.approx(43.2 - 16.64)
    assert found["cpu"] == pytest.approx(30.72)
    assert found["host_to_device"] == pytest.approx((1024 + 128) / 100)
    assert lanes.chain is not None  # a micro-batch waits for the CPU
    assert decode().chain is None


def test_weights_kv_and_tables_on_the_gpu_save_their_copies() -> None:
    lanes = decode()
    assert seconds(lanes, **{fc.EXPERTS_ON_GPU: 1536.0})["host_to_device"] == pytest.approx(10.24)
    half_kv = seconds(lanes, **{fc.KV_ON_GPU: 640.0})
    assert half_kv["host_to_device"] == pytest.approx((1536 + 512) / 100)
    assert half_kv["device_to_host"] == pytest.approx(1.28)
    streamed = {name: float(lane.at({})) for name, lane in lanes.always.items()}  # tables, dense weights in CPU memory
    assert streamed["host_to_device"] == pytest.approx((1536 + 1024 + 976 + 256 + 64) / 100)
    assert streamed["cpu"] == pytest.approx(4 * 32 / 250)  # the look-up
    assert streamed["gpu"] == pytest.approx(43.2 - 0.64)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("ffn", [True, False])
def test_all_weights_and_kv_on_the_gpu_leave_no_copies(attention: bool, ffn: bool) -> None:
    everything = {fc.EXPERTS_ON_GPU: 1536.0, fc.KV_ON_GPU: 1280.0}
    lanes = decode(attention=attention, ffn=ffn)
    assert lanes.weight_copies.at(RESIDENT | everything) == pytest.approx(0.0, abs=1e-9)
    hidden = 0.0 if ffn else 128.0
    assert lanes.bytes_moved["host_to_device"].at(RESIDENT | everything) == pytest.approx(hidden, abs=1e-9)
    assert lanes.bytes_moved["device_to_host"].at(RESIDENT | everything) == pytest.approx(hidden, abs=1e-9)


def test_kv_on_the_gpu_is_attended_there() -> None:
    lanes = decode(attention=False)
    quarter = seconds(lanes, **{fc.KV_ON_GPU: 320.0})
    assert quarter["gpu"] == pytest.approx(36.8 + 256 * 1.25 / 200)
    assert quarter["cpu"] == pytest.approx(0.75 * 20.48)


def test_disk_reads_experts_and_kv_and_writes_new_kv() -> None:
    scenario = tiny_scenario(profile=tiny_profile(disk=True))
    lanes = decode(scenario)
    assert seconds(lanes)["disk"] == 0.0
    assert seconds(lanes, **{fc.EXPERTS_ON_DISK: 100.0})["disk"] == pytest.approx(100 / 10)
    # All 1280 byte of KV on disk: 1024 read, 128 written.
    assert seconds(lanes, **{fc.KV_ON_DISK: 1280.0})["disk"] == pytest.approx(1024 / 10 + 128 / 5)


def test_weights_that_are_not_pinned_are_staged_first() -> None:
    lanes = decode(tiny_scenario(profile=tiny_profile(disk=True)))
    assert lanes.when_staged["staging"].at(RESIDENT) == pytest.approx(1536 / 40)
    # What comes from disk lands in the pinned ring, without a staging copy.
    assert lanes.when_staged["staging"].at(RESIDENT | {fc.EXPERTS_ON_DISK: 536.0}) == pytest.approx(1000 / 40)
    extra = lanes.when_staged["cpu_memory"].at(RESIDENT) - lanes.always["cpu_memory"].at(RESIDENT)
    assert extra == pytest.approx(2 * 1536 / 250)  # read and written once more
    assert decode(ffn=False).when_staged["staging"].at(RESIDENT) == pytest.approx(0.0, abs=1e-9)


def test_one_slot_adds_copy_and_computation() -> None:
    scenario = tiny_scenario()
    rates = derive_rates(scenario.profile, FP16)
    sums = decode(attention=False).serial_sums(slots=1, layers=2, rates=rates)
    values = {name: float(each.at(RESIDENT)) for name, each in sums.items()}
    assert values == pytest.approx(
        {"one_slot_gpu": 15.36 + 36.8, "one_slot_cpu": 15.36 + 20.48, "one_slot_chain": 15.36 + 31.84}
    )
    assert decode(attention=False).serial_sums(slots=2, layers=2, rates=rates) == {}


def test_one_slot_waits_for_disk_reads_beyond_the_pinned_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fc, "STAGING_BUFFER_BYTES", 30.0)
    scenario = tiny_scenario(profile=tiny_profile(disk=True))
    rates = derive_rates(scenario.profile, FP16)
    sums = decode(scenario).serial_sums(slots=1, layers=2, rates=rates)
    at = RESIDENT | {fc.EXPERTS_ON_DISK: 500.0}
    assert sums["one_slot_reads_gpu"].at(at) == pytest.approx((500 - 2 * 30) / 10 + 43.2)
    kv_on_disk = RESIDENT | {fc.KV_ON_DISK: 1280.0}
    assert sums["one_slot_disk"].at(kv_on_disk) == pytest.approx(15.36 + (1024 - 2 * 30) / 10)
    on_cpu = decode(scenario, ffn=False).serial_sums(slots=1, layers=2, rates=rates)
    assert "one_slot_reads_gpu" not in on_cpu  # experts stay in CPU memory: two layers of them fit its landing buffers


def test_ring_passes_attention_before_experts() -> None:
    scenario = tiny_scenario()
    rates = derive_rates(scenario.profile, FP16)
    lanes = decode(attention=False)
    sums = lanes.serial_sums(slots="experts", layers=2, rates=rates)
    at = RESIDENT | {fc.RING_SLOTS: 1.0, fc.RING: 384.0}
    # The whole batch at once: 4 tokens touch 4*(1 - 1/16) = 3.75 experts: 720 + 8 visits x 64 byte = 1232, FLOPs 1536.
    experts = 2 * max(1232 / 200, 1536 / 400)
    assert lanes.always["gpu"].at(at) == pytest.approx(36.8 - 16.64 + experts)
    # One of two micro-batches goes through attention alone, (20.16 GPU + 20.48 CPU + 6.4 copies) / 2; half is left.
    alone = 23.52
    assert sums["ring_cpu_then_gpu"].at(at) == pytest.approx(20.48 / 2 + alone + experts)
    assert sums["ring_gpu_then_gpu"].at(at) == pytest.approx(20.16 / 2 + alone + experts)
    # Two layers x 384 byte wait in the ring while attention runs.
    assert sums["ring_gpu_then_host_to_device"].at(at) == pytest.approx(20.16 / 2 + alone + (1536 - 2 * 384) / 100)


def test_ring_with_kv_copies_waits_for_those_its_slots_do_not_hold() -> None:
    scenario = tiny_scenario()
    rates = derive_rates(scenario.profile, FP16)
    sums = decode(micro_batches=4.0).serial_sums(slots="experts", layers=2, rates=rates)
    experts = 2 * 1232 / 200
    # Of 4 micro-batches two lie in the slots when attention starts.
    assert sums["ring_host_to_device_then_gpu"].at(RESIDENT) == pytest.approx(1024 * 0.5 / 100 + experts)


def test_copy_directions_slow_each_other_down() -> None:
    scenario = tiny_scenario(profile=tiny_profile(h2d_with_opposite=75.0, d2h_with_opposite=25.0))
    found = seconds(decode(scenario))
    assert found["host_to_device"] == pytest.approx(25.6 + 0.25 * 2.56)
    assert found["device_to_host"] == pytest.approx(2.56 + 0.5 * 25.6)


def test_launches_copies_and_overhead_take_their_time() -> None:
    base = seconds(decode())
    efficiency = Efficiency(overhead_per_micro_batch_s=1.0)
    slow = seconds(decode(tiny_scenario(profile=tiny_profile(launch_s=0.5, copy_s=0.25, efficiency=efficiency))))
    assert slow["gpu"] - base["gpu"] == pytest.approx(2 * 2 * (12 * 0.5 + 1.0))  # micro-batches x layers
    assert slow["host_to_device"] - base["host_to_device"] == pytest.approx(2 * 2 * 2 * 0.25)
    assert slow["device_to_host"] - base["device_to_host"] == pytest.approx(2 * 2 * 0.25)


def test_efficiencies_multiply_the_peaks() -> None:
    shares = Efficiency(link=0.5, cpu_flops=0.5, staging=0.5, gpu_bandwidth=0.5, gpu_flops_decode=0.5)
    base = decode(attention=False)
    slow = decode(tiny_scenario(profile=tiny_profile(efficiency=shares)), attention=False)
    for lane in ("gpu", "cpu", "host_to_device", "device_to_host"):
        assert seconds(slow)[lane] == pytest.approx(2 * seconds(base)[lane])
    assert slow.when_staged["staging"].at(RESIDENT) == pytest.approx(2 * 38.4)


# Tensor parallelism


def test_two_gpus_share_the_work_and_reduce_twice_per_layer_through_the_host() -> None:
    one, two = seconds(decode()), seconds(decode(tiny_scenario(profile=tiny_profile(gpus=2))))
    # Two all-reduces x 2 layers x 4 tokens x 8 values x 2 byte = 256; each GPU sends 2*(1/2) of it: 512 in all.
    reduce_s = 512 / 100  # the slower direction, 2 x 50
    assert two["gpu"] == pytest.approx(one["gpu"] / 2 + reduce_s)
    assert two["host_to_device"] == pytest.approx((1536 + 1024 + 512) / 200)
    assert two["device_to_host"] == pytest.approx((128 + 512) / 100)


def test_gpu_link_keeps_the_all_reduce_off_the_host() -> None:
    two = seconds(decode(tiny_scenario(profile=tiny_profile(gpus=2, gpu_link=64.0))))
    assert two["gpu"] == pytest.approx(43.2 / 2 + 256 / 64)
    assert two["host_to_device"] == pytest.approx((1536 + 1024) / 200)


def test_host_total_caps_the_links_together() -> None:
    two = seconds(decode(tiny_scenario(profile=tiny_profile(gpus=2, gpu_link=64.0, host_total=150.0))))
    assert two["host_to_device"] == pytest.approx((1536 + 1024) / 150)
    assert two["device_to_host"] == pytest.approx(128 / 100)


def test_hidden_states_go_to_every_gpu_and_come_from_one() -> None:
    two = decode(tiny_scenario(profile=tiny_profile(gpus=2, gpu_link=64.0)), ffn=False)
    assert two.bytes_moved["host_to_device"].at(RESIDENT) == pytest.approx(1024 + 2 * 128)
    assert two.bytes_moved["device_to_host"].at(RESIDENT) == pytest.approx(128 + 128)


def test_latent_cache_is_copied_to_every_gpu() -> None:
    profile = tiny_profile(gpus=2, gpu_link=64.0)
    grouped, latent = (
        decode(tiny_scenario(profile=profile, model=model)).bytes_moved["host_to_device"].at(RESIDENT) - 1536
        for model in (tiny_model(), tiny_mla())
    )
    assert grouped == pytest.approx(1024)
    assert latent == pytest.approx(2 * 1024)  # 8 latent values per token and layer, too


# Prefill


def test_prefill_of_two_micro_batches() -> None:
    """Per 12 tokens and layer: norms 3.84, QKV 7.68, output 3.84, router 1.92, experts 11.52, attention 2.88 s."""
    found = seconds(prefill())
    assert found["gpu"] == pytest.approx(2 * (2 * (3.84 + 7.68 + 3.84 + 1.92 + 11.52 + 2.88) + 2.08) + 24 * 32 / 200)
    waiting = 24 * 8 * 2  # hidden states of all 24 prompt tokens at the one boundary between 2 layers
    assert found["host_to_device"] == pytest.approx((1536 + waiting) / 100)
    assert found["device_to_host"] == pytest.approx((24 * 32 + waiting) / 50)
    assert found["cpu"] == found["disk"] == 0.0


def test_prefill_in_one_micro_batch_keeps_its_hidden_states_on_the_gpu() -> None:
    found = seconds(prefill(parts=1.0))
    assert found["host_to_device"] == pytest.approx(15.36)
    assert found["device_to_host"] == pytest.approx(24 * 32 / 50)


def test_prefill_with_a_ring_copies_weights_for_every_micro_batch() -> None:
    lanes = prefill(ring=True)
    assert seconds(lanes)["host_to_device"] == pytest.approx(2 * 15.36)
    assert lanes.bytes_moved["device_to_host"].at(RESIDENT) == pytest.approx(24 * 32)  # nothing waits


def test_the_ring_fills_again_in_every_micro_batch_of_prefill() -> None:
    lanes = prefill(parts=4.0, ring=True)
    rates = derive_rates(tiny_scenario().profile, FP16)
    at = RESIDENT | {fc.RING_SLOTS: 1.0, fc.RING: 384.0}
    found = lanes.serial_sums(slots="experts", layers=2, rates=rates)["ring_gpu_then_host_to_device"].at(at)
    # 4 passes over 2 layers; each time 384 byte were copied while attention ran.
    assert found == pytest.approx(lanes.attention_phase["gpu"].at(at) + 4 * (1536 - 2 * 384) / 100)


def test_prefill_streams_experts_wherever_decode_computes_them() -> None:
    scenario = tiny_scenario()
    rates = derive_rates(scenario.profile, FP16)
    on_cpu = prefill_lanes(scenario, measure_sizes(scenario), rates, batch_of(False, False), 2.0, ring=False)
    assert seconds(on_cpu) == seconds(prefill())


def test_prefill_writes_kv_to_disk_and_reads_experts() -> None:
    lanes = prefill(tiny_scenario(profile=tiny_profile(disk=True)))
    found = seconds(lanes, **{fc.EXPERTS_ON_DISK: 100.0, fc.KV_ON_DISK: 1280.0})
    assert found["disk"] == pytest.approx(100 / 10 + 24 * 32 / 5)


def test_prefill_of_mla_offloads_the_latent() -> None:
    lanes = prefill(tiny_scenario(model=tiny_mla()), parts=1.0)
    assert lanes.bytes_moved["device_to_host"].at(RESIDENT) == pytest.approx(24 * 2 * 8 * 2)


def test_prefill_on_two_gpus_loads_hidden_states_to_both() -> None:
    lanes = prefill(tiny_scenario(profile=tiny_profile(gpus=2, gpu_link=64.0)))
    assert lanes.bytes_moved["host_to_device"].at(RESIDENT) == pytest.approx(1536 + 2 * 384)
    assert lanes.bytes_moved["device_to_host"].at(RESIDENT) == pytest.approx(24 * 32 + 384)


# Rates


def test_fp8_peak_counts_only_where_weights_and_activations_both_have_it() -> None:
    peaks = {"fp16": 400.0, "bf16": 300.0, "fp8": 800.0, "fp32": 100.0}
    profile = tiny_profile(peaks=peaks)
    rates = derive_rates(profile, Formats(weights="fp8", kv="bf16", compute="fp8"))
    work = Work(2400.0, 1.0)
    assert rates.gpu_seconds(work, "decode") == 3.0
    assert rates.gpu_seconds(work, "decode", wide=True) == 8.0  # attention, router, lm_head: 16-bit operands
    plain = derive_rates(profile, Formats(weights="fp8", kv="bf16", compute="bf16"))
    assert plain.gpu_seconds(work, "decode") == 8.0


def test_expanding_quantised_weights_adds_time_on_the_vector_units() -> None:
    rates = derive_rates(tiny_profile(peaks={"fp16": 400.0, "fp32": 50.0}), FP16)
    assert rates.gpu_seconds(Work(400.0, 0.0, 100.0), "decode") == 1.0 + 100 * 2 / 50
    assert rates.cpu_seconds(Work(400.0, 0.0, 100.0)) == (400 + 200) / 100


# Any policy

shares = st.integers(0, 10).map(lambda tenth: tenth / 10)
policies = st.builds(
    lambda n, n_ub, a, f, rw, rd, rc, kd, slots, d, e, h, pin, prefill: Policy(
        batch_size=n * n_ub,
        micro_batch_size=n,
        num_micro_batches=n_ub,
        prefill_micro_batch_size=min(prefill, n * n_ub),
        attention_on_gpu=a,
        ffn_on_gpu=f,
        weights_on_gpu=rw if f else 0.0,
        weights_on_disk=rd * (1 - (rw if f else 0.0)),
        kv_on_gpu=rc,
        kv_on_disk=kd * (1 - rc),
        weight_slots=slots,
        ring_experts=2 if slots == "experts" else 0,
        dense_weights_on_gpu=d,
        embedding_on_gpu=e,
        lm_head_on_gpu=h,
        pin_weights=pin,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    shares,
    shares,
    shares,
    shares,
    st.sampled_from([1, 2, "experts"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 9),
)
scenarios = st.sampled_from(
    [
        tiny_scenario(profile=tiny_profile(disk=True), requests=9),
        tiny_scenario(profile=tiny_profile(disk=True, gpus=2), requests=9, model=tiny_mla()),
        tiny_scenario(profile=tiny_profile(disk=True, launch_s=0.1), requests=9, prompts=(1, 9, 3)),
        tiny_scenario(
            profile=tiny_profile(disk=True),
            requests=9,
            model=tiny_model(layer_windows=(4, None), shared_ffn=2, dense_ffn=8, moe_layers=(True, False)),
        ),
    ]
)


@given(scenarios, policies)
def test_no_lane_is_negative_and_a_pass_takes_at_least_every_lane(scenario: Scenario, policy: Policy) -> None:
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    values = unknowns_of(policy, sizes, float(kv_capacity_bytes(scenario, sizes, float(policy.batch_size))))
    batch = batch_of(policy.attention_on_gpu, policy.ffn_on_gpu, policy.batch_size, policy.num_micro_batches)
    parts = float(-(-policy.batch_size // policy.prefill_micro_batch_size))
    ring = policy.weight_slots == "experts"
    for lanes in (
        decode_lanes(scenario, sizes, rates, batch),
        prefill_lanes(scenario, sizes, rates, batch, parts, ring=ring),
    ):
        total, bottleneck, busy = pass_seconds(lanes, values, policy, sizes, rates)
        assert min(busy.values()) >= -1e-9
        assert min(float(each.at(values)) for each in lanes.bytes_moved.values()) >= -1e-9
        assert max(busy.values()) <= total
        assert bottleneck in busy or bottleneck == "chain" or bottleneck.startswith(("one_slot", "ring"))


@given(scenarios, st.booleans(), st.booleans())
def test_lanes_of_many_batches_at_once_equal_lanes_of_each(scenario: Scenario, attention: bool, ffn: bool) -> None:
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    size, parts = np.array([1.0, 4.0, 9.0]), np.array([1.0, 2.0, 3.0])
    at_once = decode_lanes(scenario, sizes, rates, replace(batch_of(attention, ffn), size=size, micro_batches=parts))
    for index in range(3):
        alone = decode_lanes(scenario, sizes, rates, batch_of(attention, ffn, float(size[index]), float(parts[index])))
        for name, lane in alone.always.items():
            together = np.broadcast_to(at_once.always[name].at(RESIDENT), (3,))
            assert together[index] == pytest.approx(float(lane.at(RESIDENT)), rel=1e-12, abs=1e-12)

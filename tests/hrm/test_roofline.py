"""The hierarchical roofline: the paper's case study, the equations on round numbers, and their properties."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrm.cost import Formats, Work
from hrm.errors import InputError
from hrm.model_files import load_model, model_names
from hrm.policy import Policy
from hrm.profile import Efficiency, HardwareProfile
from hrm.profile_files import load_profile, profile_names
from hrm.rates import derive_rates
from hrm.roofline import (
    Hop,
    Level,
    Stack,
    attainable_from,
    attainable_local,
    balance_point,
    compare_places,
    link_bandwidth,
    ridge_point,
    stack_of,
    turning_point_1,
    turning_point_2,
)
from hrm.roofline_operators import (
    attention_intensity,
    batch_at_intensity,
    break_even_batch,
    expert_bytes_moved,
    ffn_intensity,
    ffn_link_intensity,
    ffn_work,
    linear_places,
)
from hrm.roofline_report import explain_roofline, format_intensity, roofline_command, roofline_document
from hrm.roofline_view import build_view, locate_plan
from hrm.scenario import choose_formats

GPU, CPU, DISK = 0, 1, 2
FP16 = Formats(weights=None, kv="fp16", compute="fp16")


def stack(*, cpu_rate: float = 100.0, link: float = 10.0, disk: float = 2.0) -> Stack:
    return Stack(
        levels=(
            Level(name="GPU", peak_flops_per_s=8000.0, bytes_per_s=400.0, bytes=1.0),
            Level(name="CPU", peak_flops_per_s=500.0, bytes_per_s=cpu_rate, bytes=1.0),
            Level(name="disk", peak_flops_per_s=0.0, bytes_per_s=disk, bytes=1.0),
        ),
        hops=(Hop(up_bytes_per_s=link, down_bytes_per_s=8.0), Hop(up_bytes_per_s=3.0, down_bytes_per_s=1.0)),
    )


@pytest.fixture(scope="module")
def case_study():
    profile, model = load_profile("l4-figures"), load_model("mixtral-8x7b")
    return stack_of(profile, "fp16", cost_model="paper"), model


# The paper's case study (section 3.3, Figures 4 and 5)


def test_p1_of_the_case_study_is_81_25(case_study):
    assert turning_point_1(case_study[0], GPU, CPU) == 81.25


@pytest.mark.parametrize(("kv", "intensity"), [("fp16", 2.0), ("bf16", 2.0), ("int4", 8.0)])
def test_attention_of_figure_4_lies_left_of_p1_and_belongs_on_the_cpu(case_study, kv, intensity):
    machine, model = case_study
    found = attention_intensity(model, replace(FP16, kv=kv), 512, "paper")
    assert found == intensity
    on_cpu = attainable_local(machine, CPU, found)
    assert on_cpu == intensity * 100e9
    assert attainable_from(machine, GPU, CPU, found, found) == intensity * 16e9


def test_counting_the_values_too_doubles_attention_in_fp16(case_study):
    assert attention_intensity(case_study[1], FP16, 512, "full") == 4.0


def test_expert_ffn_of_figure_5_at_a_micro_batch_of_128(case_study):
    machine, model = case_study
    intensity = ffn_intensity(model, FP16, 128, "paper")
    assert intensity == pytest.approx(31.947, abs=5e-4)
    assert attainable_local(machine, GPU, intensity) / 1e9 == pytest.approx(9584, abs=0.5)
    assert turning_point_2(machine, GPU, CPU, intensity) == pytest.approx(599.0, abs=0.05)
    assert balance_point(machine, GPU, CPU, intensity) == turning_point_2(machine, GPU, CPU, intensity)


def test_the_batch_reaches_p2_at_2396_tokens_and_experts_leave_the_cpu_at_325(case_study):
    machine, model = case_study
    assert ffn_link_intensity(model, FP16, 2396, "paper") == 599.0  # N * k / E in fp16
    p2 = turning_point_2(machine, GPU, CPU, ffn_intensity(model, FP16, 128, "paper"))
    assert batch_at_intensity(model, FP16, p2, "paper") == 2396
    assert ffn_link_intensity(model, FP16, 325, "paper") == 81.25
    assert break_even_batch(machine, model, FP16, "paper") == 325


def test_the_figures_draw_from_the_same_numbers():
    profile, model = load_profile("l4-figures"), load_model("mixtral-8x7b")
    four = roofline_command(profile, model, operator="attention", cost_model="paper", context=512)
    assert four["turning_point_1_flops_per_byte"] == 81.25
    assert [point["intensity_link_flops_per_byte"] for point in four["points"]] == [2.0, 8.0]
    assert [point["better_on"] for point in four["points"]] == ["CPU", "CPU"]
    five = roofline_command(profile, model, operator="ffn", cost_model="paper", micro_batch=128)
    chosen = five["points"][five["chosen"]]
    assert chosen["intensity_gpu_flops_per_byte"] == pytest.approx(31.947, abs=5e-4)
    assert chosen["on_gpu_resident_flops_per_s"] == pytest.approx(9584e9, abs=5e8)
    assert five["turning_point_2_flops_per_byte"] == pytest.approx(599.0, abs=0.05)
    assert five["intensity"] == "theoretical"
    json.dumps([four, five], allow_nan=False)


# The equations, on round numbers


def test_link_is_the_slowest_hop_and_never_faster_than_a_memory_it_reads():
    assert link_bandwidth(stack(), CPU, GPU) == 10.0
    assert link_bandwidth(stack(), DISK, CPU) == 2.0  # the disk itself, not its 3.0 link
    assert link_bandwidth(stack(disk=50.0), DISK, GPU) == 3.0
    assert link_bandwidth(stack(cpu_rate=7.0), CPU, GPU) == 7.0
    assert link_bandwidth(stack(cpu_rate=1.5, disk=50.0), DISK, GPU) == 1.5  # on its way it is read from CPU memory
    assert link_bandwidth(stack(), GPU, DISK) == 1.0
    assert link_bandwidth(stack(), GPU, CPU) == 8.0
    assert link_bandwidth(stack(), CPU, CPU) == 100.0


def test_roofs_follow_equations_4_to_8():
    machine = stack()
    assert attainable_local(machine, GPU, 5.0) == 2000.0
    assert attainable_local(machine, GPU, 30.0) == 8000.0
    assert attainable_from(machine, GPU, CPU, 5.0, 40.0) == 400.0  # the link
    assert attainable_from(machine, GPU, CPU, 5.0, 400.0) == 2000.0  # GPU memory
    assert attainable_from(machine, GPU, CPU, 30.0, 4000.0) == 8000.0  # GPU peak
    assert attainable_from(machine, GPU, DISK, 5.0, 40.0) == 80.0  # two hops
    assert attainable_local(machine, DISK, 1e9) == 0.0
    assert ridge_point(machine, GPU) == 20.0


def test_p1_is_zero_without_a_crossing_or_without_a_processor():
    assert turning_point_1(stack(), GPU, CPU) == 50.0
    assert turning_point_1(stack(cpu_rate=10.0), GPU, CPU) == 0.0
    assert turning_point_1(stack(cpu_rate=4.0), GPU, CPU) == 0.0
    assert turning_point_1(stack(), GPU, DISK) == 0.0
    assert turning_point_1(stack(), CPU, DISK) == 0.0


def test_balance_point_passes_p2_beyond_the_ridge():
    machine = stack()
    assert turning_point_2(machine, GPU, CPU, 10.0) == balance_point(machine, GPU, CPU, 10.0) == 400.0
    assert turning_point_2(machine, GPU, CPU, 50.0) == 800.0
    assert balance_point(machine, GPU, CPU, 50.0) == 2000.0


rate = st.floats(1e-3, 1e6)


@st.composite
def stacks(draw):
    depth = draw(st.integers(2, 5))
    levels = [
        Level(
            name=f"level {k}",
            peak_flops_per_s=draw(rate),
            bytes_per_s=draw(rate),
            bytes=1.0,
            overlap=draw(st.sampled_from([1.0, 0.0, 0.25])),
        )
        for k in range(depth)
    ]
    hops = [Hop(up_bytes_per_s=draw(rate), down_bytes_per_s=draw(rate)) for _ in range(depth - 1)]
    i, j = draw(st.permutations(range(depth)))[:2]
    return Stack(levels=tuple(levels), hops=tuple(hops)), i, j


@given(stacks(), rate, rate)
def test_fetching_never_beats_resident_data_nor_the_source_memory(case, intensity_i, intensity_j):
    machine, i, j = case
    fetched = attainable_from(machine, i, j, intensity_i, intensity_j)
    assert fetched <= attainable_local(machine, i, intensity_i)
    assert fetched <= machine.levels[j].bytes_per_s * intensity_j


@given(stacks(), st.floats(0.01, 0.99))
def test_left_of_p1_staying_wins_at_any_intensity_of_the_other_level(case, share):
    machine, i, j = case
    p1 = turning_point_1(machine, i, j)
    if p1 > 0:
        intensity = p1 * share
        assert attainable_from(machine, i, j, 1e12, intensity) <= attainable_local(machine, j, intensity)


@given(stacks(), rate, st.floats(0.01, 0.99))
def test_p2_parts_the_link_from_the_level(case, intensity_i, share):
    machine, i, j = case
    p2 = turning_point_2(machine, i, j, intensity_i)
    link = link_bandwidth(machine, j, i)
    assert attainable_from(machine, i, j, intensity_i, p2 * share) == pytest.approx(link * p2 * share)
    above = attainable_from(machine, i, j, intensity_i, p2 / share)
    assert above == attainable_local(machine, i, intensity_i)
    assert balance_point(machine, i, j, intensity_i) >= p2


@given(stacks(), rate, rate, rate)
def test_compared_places_agree_with_seconds(case, flops, touched, moved):
    machine, i, j = case
    work = Work(flops, touched)
    places = compare_places(machine, i, j, at_i=work, at_j=work, bytes_moved=moved)

    def seconds(level: Level) -> float:
        compute, memory = flops / level.peak_flops_per_s, touched / level.bytes_per_s
        return max(compute, memory) + (1 - level.overlap) * min(compute, memory)

    stay = seconds(machine.levels[j])
    fetch = max(seconds(machine.levels[i]), moved / link_bandwidth(machine, j, i))
    assert flops / places.stay_flops_per_s == pytest.approx(stay)
    assert flops / places.fetch_flops_per_s == pytest.approx(fetch)
    if abs(stay - fetch) > 1e-9 * stay:
        assert places.better == (i if fetch < stay else j)


def bent(overlap: float) -> Stack:
    """Peak 8000, memory 400 (ridge at 20), below it a source of 500 at 100 behind a link of 10."""
    machine = stack()
    return replace(machine, levels=(replace(machine.levels[GPU], overlap=overlap), *machine.levels[1:]))


def test_where_nothing_overlaps_the_roof_is_half_as_high_at_the_ridge_and_bends_below_both_lines():
    """At I = 20 a FLOP takes 1/8000 s to compute and 1/8000 s to fetch; at 5, 1/8000 and 1/2000."""
    assert [attainable_local(bent(o), GPU, 20.0) for o in (1.0, 0.5, 0.0)] == pytest.approx([8000, 8000 / 1.5, 4000])
    assert [attainable_local(bent(o), GPU, 5.0) for o in (1.0, 0.5, 0.0)] == pytest.approx(
        [2000, 1 / (1 / 2000 + 0.5 / 8000), 1600]
    )
    assert turning_point_2(bent(0.0), GPU, CPU, 20.0) == 400.0
    assert balance_point(bent(0.0), GPU, CPU, 20.0) == 800.0  # of memory alone


@given(stacks())
def test_at_p1_staying_takes_as_long_as_the_link(case):
    machine, i, j = case
    p1 = turning_point_1(machine, i, j)
    if p1 > 0:
        assert attainable_local(machine, j, p1) == pytest.approx(link_bandwidth(machine, j, i) * p1, rel=1e-6)


def test_a_stack_refuses_an_overlap_that_is_no_share():
    for overlap in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="overlaps are"):
            bent(overlap)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_stack_refuses_rates_that_are_none(bad):
    with pytest.raises(InputError, match="bandwidths"):
        stack(link=bad)


def test_a_stack_needs_one_link_less_than_levels_and_knows_its_names():
    with pytest.raises(InputError, match="1 levels with 1 links"):
        Stack(levels=stack().levels[:1], hops=stack().hops[:1])
    assert stack().index("Cpu") == 1
    with pytest.raises(InputError, match="gpu, cpu, disk"):
        stack().index("tape")


# Profiles


@pytest.mark.parametrize("name", profile_names())
def test_stack_of_a_profile_has_the_rates_a_plan_uses(name):
    profile = load_profile(name)
    machine, rates, shares = stack_of(profile, "fp16"), derive_rates(profile, FP16), profile.efficiency
    gpus = profile.gpu.count
    assert machine.levels[GPU].peak_flops_per_s == gpus * profile.gpu.peak("fp16") * shares.gpu_flops_decode
    assert machine.levels[GPU].bytes_per_s == gpus * profile.gpu.bandwidth_bytes_per_s * shares.gpu_bandwidth
    assert machine.levels[GPU].overlap == shares.gpu_overlap
    assert link_bandwidth(machine, CPU, GPU) == min(rates.h2d_bytes_per_s, profile.cpu.bandwidth_bytes_per_s)
    assert len(machine.levels) == (2 if profile.disk is None else 3)


def at_peaks(name: str) -> HardwareProfile:
    """A bundled profile without its calibration."""
    return replace(load_profile(name), efficiency=Efficiency())


def test_gpus_act_as_one_and_the_authors_do_not_multiply_the_link():
    one, two = at_peaks("t4"), at_peaks("t4x2")
    full, paper = stack_of(two, "fp16"), stack_of(two, "fp16", cost_model="paper")
    assert full.levels[GPU].peak_flops_per_s == 2 * stack_of(one, "fp16").levels[GPU].peak_flops_per_s
    assert full.hops[0].up_bytes_per_s > paper.hops[0].up_bytes_per_s
    assert paper.hops[0].up_bytes_per_s == two.link.host_to_device.pinned_bytes_per_s


def test_calibrated_shares_lower_the_roofs_and_the_document_says_so():
    profile = at_peaks("t4")
    calibrated = replace(profile, efficiency=Efficiency(gpu_bandwidth=0.75, link=0.5, cpu_attention=0.25))
    before, after = stack_of(profile, "fp16"), stack_of(calibrated, "fp16", operator="attention")
    assert after.levels[GPU].bytes_per_s == 0.75 * before.levels[GPU].bytes_per_s
    assert after.levels[CPU].bytes_per_s == 0.25 * before.levels[CPU].bytes_per_s
    assert after.hops[0].up_bytes_per_s == 0.5 * before.hops[0].up_bytes_per_s
    assert stack_of(calibrated, "fp16", cost_model="paper") == stack_of(profile, "fp16", cost_model="paper")
    model = load_model("dbrx")
    assert roofline_command(calibrated, model)["roofs"] == "peaks times calibrated efficiencies"
    assert roofline_command(profile, model)["roofs"] == "peaks"
    added_up = "peaks times calibrated efficiencies, FLOPs and bytes on the GPU added up"
    assert roofline_command(load_profile("t4"), model)["roofs"] == added_up
    half = replace(profile, efficiency=Efficiency(gpu_overlap=0.5))
    assert roofline_command(half, model)["roofs"].endswith("FLOPs and bytes on the GPU overlapping by 50%")
    assert roofline_command(load_profile("t4"), model, cost_model="paper")["roofs"] == "peaks"


# Batches


@pytest.mark.parametrize("hardware", ["t4", "l4", "rtx4090", "h200", "kaggle-t4x2"])
@pytest.mark.parametrize("name", model_names())
def test_break_even_is_where_seconds_cross(hardware, name):
    profile, model = load_profile(hardware), load_model(name)
    formats = choose_formats(profile, model)
    machine = stack_of(profile, formats.compute)
    rates = derive_rates(profile, formats)
    found = break_even_batch(machine, model, formats)
    assert found is not None

    def fetching_wins(tokens: float) -> bool:
        work = ffn_work(model, formats, tokens, "full")
        copy = expert_bytes_moved(model, formats, tokens, "full") / link_bandwidth(machine, CPU, GPU)
        gpu = rates.gpu_seconds(replace(work, dequantised=0.0), "decode")
        return bool(max(copy, gpu) <= rates.cpu_seconds(work) * (1 + 1e-12))

    tried = np.unique(np.geomspace(1, 30_000, 60).astype(int))
    assert [fetching_wins(float(n)) for n in tried] == [bool(n >= found) for n in tried]


def test_break_even_is_one_token_from_a_disk_and_none_where_the_source_is_faster():
    model = load_model("mixtral-8x7b")
    machine = stack_of(load_profile("t4"), "fp16")
    assert break_even_batch(machine, model, FP16, i=GPU, j=DISK) == 1
    assert break_even_batch(machine, model, FP16, i=DISK, j=CPU) is None
    assert break_even_batch(machine, model, FP16, i=CPU, j=GPU) is None


@settings(max_examples=60)
@given(st.sampled_from(model_names()), st.floats(0.01, 2000.0), st.sampled_from([None, "int4", "fp8"]))
def test_batch_at_an_intensity_is_the_first_to_reach_it(name, intensity, weights):
    model = load_model(name)
    formats = replace(FP16, weights=weights)
    found = batch_at_intensity(model, formats, intensity, "full")
    assert found is not None
    assert ffn_link_intensity(model, formats, found, "full") >= intensity * (1 - 1e-9)
    if found > 1:
        assert ffn_link_intensity(model, formats, found - 1, "full") < intensity


def test_every_operator_that_streams_weights_is_placed():
    machine = stack_of(load_profile("t4"), "fp16")
    mixtral = linear_places(machine, load_model("mixtral-8x7b"), FP16, 128, 2048)
    assert list(mixtral) == ["QKV projection", "output projection", "router", "routed experts", "lm_head"]
    assert mixtral["QKV projection"].intensity_moved == pytest.approx(2048.0)  # 2 FLOPs and 2 bytes per weight
    assert "shared expert" in linear_places(machine, load_model("deepseek-v2-lite"), FP16, 128, 2048)
    assert "dense MLP" in linear_places(machine, load_model("deepseek-v2-lite"), FP16, 128, 2048)
    dense = linear_places(machine, load_model("llama-3.1-8b"), FP16, 128, 2048)
    assert list(dense) == ["QKV projection", "output projection", "routed experts", "lm_head"]


# Views, words, bad input


@pytest.mark.parametrize("operator", ["attention", "ffn"])
@pytest.mark.parametrize("name", model_names())
def test_every_bundled_model_has_a_document_without_nan(name, operator):
    document = roofline_command(load_profile("t4"), load_model(name), operator=operator, micro_batch=64)
    json.dumps(document, allow_nan=False)
    assert document["explanation"][0].startswith("P1 = ")


def test_without_a_batch_the_one_at_p2_is_taken():
    view = build_view(load_profile("t4"), load_model("dbrx"), operator="ffn", micro_batch=128)
    assert view.batch == view.turning_point_2_batch
    assert not view.batch_given
    assert view.places.intensity_moved >= view.places.turning_point_2
    given = build_view(load_profile("t4"), load_model("dbrx"), operator="ffn", micro_batch=128, batch=512)
    assert (given.batch, given.batch_given) == (512, True)


def test_words_name_the_numbers():
    view = build_view(load_profile("l4-figures"), load_model("mixtral-8x7b"), operator="ffn", cost_model="paper")
    text = "\n".join(explain_roofline(view))
    for part in ("P1 = 81.25 FLOP/byte", "31.947 FLOP/byte", "9,584 GFLOP/s", "P2 = 599.0 FLOP/byte", "325 tokens"):
        assert part in text
    slow = build_view(load_profile("kaggle-t4x2"), load_model("mixtral-8x7b"), operator="ffn")
    assert explain_roofline(slow)[0].startswith("P1 = 0: CPU memory is no faster")
    assert explain_roofline(slow)[-1].startswith("Experts belong on the GPU at any batch")
    assert "bound by its peak and memory together." in explain_roofline(slow)[1]


@pytest.mark.parametrize(
    ("intensity", "text"), [(81.25, "81.25 FLOP/byte"), (599.04, "599.0 FLOP/byte"), (17851.6, "17,852 FLOP/byte")]
)
def test_intensities_are_written_without_exponents(intensity, text):
    assert format_intensity(intensity) == text


def policy(**changes: object) -> Policy:
    values: dict[str, object] = {
        "batch_size": 1024,
        "micro_batch_size": 128,
        "num_micro_batches": 8,
        "prefill_micro_batch_size": 32,
        "attention_on_gpu": False,
        "ffn_on_gpu": True,
    }
    return Policy(**(values | changes))  # type: ignore[arg-type]


def test_plan_lies_where_it_runs_the_operator():
    profile, model = load_profile("l4-figures"), load_model("mixtral-8x7b")
    attention = build_view(profile, model, operator="attention", cost_model="paper")
    assert locate_plan(attention, policy()).flops_per_s == 200e9
    assert locate_plan(attention, policy(attention_on_gpu=True)).flops_per_s == 32e9
    half = locate_plan(attention, policy(attention_on_gpu=True, kv_on_gpu=0.5))
    assert (half.intensity, half.flops_per_s) == (4.0, 64e9)
    assert locate_plan(attention, policy(attention_on_gpu=True, kv_on_gpu=1.0)).flops_per_s == 600e9

    ffn = build_view(profile, model, operator="ffn", cost_model="paper")
    streamed = locate_plan(ffn, policy())
    assert (streamed.intensity, streamed.flops_per_s) == (256.0, 256 * 16e9)
    assert locate_plan(ffn, policy(weights_on_gpu=0.5)).intensity == 512.0
    memory_bound = locate_plan(ffn, policy(weights_on_gpu=0.9))
    assert memory_bound.flops_per_s == pytest.approx(9584e9, abs=5e8)
    ring = locate_plan(ffn, policy(weights_on_gpu=0.9, weight_slots="experts", ring_experts=2))
    assert ring.flops_per_s == pytest.approx(2560 * 16e9)  # the whole batch at once: GPU memory no longer binds
    resident = locate_plan(ffn, policy(weights_on_gpu=1.0))
    assert resident.intensity == pytest.approx(31.947, abs=5e-4)
    on_cpu = locate_plan(ffn, policy(ffn_on_gpu=False))
    assert on_cpu.flops_per_s == 1.3e12
    document = roofline_document(replace(ffn, plan=streamed))
    assert document["plan"]["attainable_flops_per_s"] == 256 * 16e9


def test_what_comes_from_disk_is_bound_by_the_disk():
    view = build_view(load_profile("t4"), load_model("mixtral-8x7b"), operator="ffn", cost_model="paper")
    point = locate_plan(view, policy(weights_on_disk=0.5))
    assert point.flops_per_s == pytest.approx(2 * 256 * 2.95e9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operator": "router"}, "--op: 'router' is not known"),
        ({"cost_model": "best"}, "--cost-model: 'best'"),
        ({"context": 0}, "--context: 0 tokens"),
        ({"context": 10**9}, "--context: 1000000000 tokens"),
        ({"micro_batch": -1}, "--micro-batch: -1 tokens"),
        ({"micro_batch": True}, "--micro-batch: True tokens"),
        ({"micro_batch": float("nan")}, "--micro-batch: nan tokens"),
        ({"micro_batch": 128, "batch": 127}, "a batch of 127 does not hold a micro-batch of 128"),
        ({"batch": 2.5}, "--batch: 2.5 tokens"),
        ({"kv_dtype": "int3"}, "--kv-dtype: unknown number format 'int3'"),
        ({"weights_dtype": ""}, "--weights-dtype"),
        ({"output": "figure.pdf"}, "'figure.pdf' is not a figure"),
        ({"output": "no/such/folder/figure.png"}, "cannot write no/such/folder/figure.png"),
    ],
)
def test_wrong_input_names_option_and_value(arguments, message):
    with pytest.raises(InputError) as caught:
        roofline_command(load_profile("t4"), load_model("mixtral-8x7b"), **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "operator", "why"),
    [
        ("deepseek-v2-lite", "attention", "latent attention"),
        ("gpt-oss-20b", "attention", "sliding-window layers"),
        ("llama-3.1-8b", "ffn", "no experts"),
    ],
)
def test_the_authors_formulas_refuse_models_they_do_not_describe(name, operator, why):
    with pytest.raises(InputError, match=why):
        roofline_command(load_profile("t4"), load_model(name), operator=operator, cost_model="paper")


def test_importing_the_roofline_loads_no_plotting_and_no_solver():
    code = (
        "import sys, hrm.roofline_report, hrm.plots, hrm.explorer;"
        "print([m for m in ('matplotlib', 'ipywidgets', 'pandas', 'scipy', 'pulp', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_printed_report_has_the_points_and_the_sentences():
    from io import StringIO

    from rich.console import Console

    from hrm.roofline_report import print_roofline

    document = roofline_command(
        load_profile("l4-figures"), load_model("mixtral-8x7b"), operator="ffn", cost_model="paper", micro_batch=128
    )
    out = StringIO()
    print_roofline(document, Console(file=out, width=200, highlight=False))
    text = out.getvalue()
    assert "theoretical intensity" in text
    for part in ("µ = 128", "31.947", "9,584 GFLOP/s", "[FLOP/byte]", *document["explanation"]):
        assert part in text

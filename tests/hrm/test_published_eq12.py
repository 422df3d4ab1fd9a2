"""Eq. 12 of measured rows: settings, policies, and the formula redone by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import tiny_scenario

from hrm.errors import InfeasibleError, InputError
from hrm.paper_cost import paper_terms
from hrm.profile import Efficiency
from hrm.published.eq12 import (
    VARIANTS,
    Eq12Rates,
    eq12_of_row,
    eq12_prediction,
    eq12_rates,
    fitted_rates,
    prompt_flops_per_layer,
    try_eq12,
)
from hrm.published.policies import RowPolicy, largest_streaming_batch, published_policy
from hrm.published.rows import Row, bundled_rows
from hrm.published.settings import SETTINGS, SYSTEMS, find_setting, find_system, scenario_of, workload_of
from hrm.rates import derive_rates
from hrm.units import GIB

ROWS = {row.id: row for row in bundled_rows()}
TERMS = paper_terms(tiny_scenario())  # W = 768 byte, h1 8, h2 4, k 2, d 4, q 2, kv 1, L 2, s 6, n 4
RATES = Eq12Rates(
    link_bytes_per_s=100.0,
    gpu_flops_per_s=400.0,
    gpu_bytes_per_s=200.0,
    prefill_flops_per_s=40.0,
    cpu_flops_per_s=100.0,
    cpu_bytes_per_s=250.0,
)


def row_of(**changes: object) -> Row:
    given = {
        "id": "X",
        "setting": "S1",
        "system": "MoE-Lightning",
        "workload": "mtbench",
        "prompt_len": 77.0,
        "padded": True,
        "gen_len": 32,
    }
    return Row(**(given | changes))  # type: ignore[arg-type]


def policy_of_four(*, attention_on_gpu: bool, r_w: float = 0.25, r_c: float = 0.0) -> RowPolicy:
    """N = 4 in two micro-batches of 2."""
    return RowPolicy(
        batch_size=4,
        micro_batch_size=2,
        num_micro_batches=2,
        attention_on_gpu=attention_on_gpu,
        weights_on_gpu=r_w,
        kv_on_gpu=r_c,
    )


# Settings and systems


def test_settings_are_those_of_the_paper() -> None:
    assert {name: (each.profile.gpu.count, each.model.name, each.host) for name, each in SETTINGS.items()} == {
        "S1": (1, "mixtral-8x7b", "n1-48"),
        "S2": (1, "mixtral-8x7b", "g2"),
        "S6": (2, "mixtral-8x22b", "n1-416"),
        "S7": (4, "mixtral-8x22b", "n1-416"),
        "S8": (2, "dbrx", "n1-416"),
        "S9": (4, "dbrx", "n1-416"),
    }
    assert all(each.gpus == each.profile.gpu.count == each.authors_profile.gpu.count for each in SETTINGS.values())
    assert SETTINGS["S6"].authors_profile.cpu.memory_bytes == 416e9
    assert SETTINGS["S6"].authors_profile.link == SETTINGS["S1"].authors_profile.link


def test_only_s3_and_cgopipe_compute_attention_on_the_cpu() -> None:
    assert {name: each.attention_on_gpu for name, each in SYSTEMS.items()} == {
        "MoE-Lightning": False,
        "MoE-Lightning(p)": False,
        "FlexGen": True,
        "FlexGen(c)": False,
        "DeepSpeed": True,
    }


def test_unknown_settings_and_systems_say_what_is_known() -> None:
    with pytest.raises(InputError, match=r"X: setting 'S3' is not known \(S1, S2, S6, S7, S8, S9\)"):
        find_setting(row_of(setting="S3"))
    with pytest.raises(InputError, match="X: system 'vLLM' is not known"):
        find_system(row_of(system="vLLM"))


def test_workload_is_uniform_where_padded_and_the_eighty_prompts_where_not() -> None:
    padded = workload_of(row_of(prompt_len=418.0, batch_size=504))
    assert (padded.prompt_lengths, padded.num_requests, padded.generation_length) == ((418,), 504, 32)
    unpadded = workload_of(row_of(padded=False))
    assert (len(unpadded.prompt_lengths), unpadded.mean_prompt_tokens) == (80, 76.1125)
    reasoning = workload_of(row_of(workload="synthetic_reasoning", padded=False, prompt_len=240.0))
    assert reasoning.mean_prompt_tokens == 242.0
    own = workload_of(row_of(workload="mine", padded=False, prompt_len=99.6))
    assert own.prompt_lengths == (100,) and "mine is not bundled" in own.note


# The formula


def test_prefill_counts_projections_experts_and_causal_attention() -> None:
    # s = 6: 6 * (4*8*8 + 4*8*4 + 6*8*4*2) + 2*8*36 = 6*768 + 576
    assert prompt_flops_per_layer(TERMS, 36.0) == 5184.0


def test_cpu_attention_by_hand() -> None:
    found = eq12_prediction(TERMS, RATES, policy_of_four(attention_on_gpu=False))
    link = 768 * 0.75 / 100  # 5.76
    gpu = 2 * (768 + 2 * 2 * 12) / 200  # experts read once per micro-batch: 8.16
    cpu = 2 * (2 * 10 * 2 * 10) / 100  # scores of two requests at context 10: 8.0
    assert (link, gpu, cpu) == (5.76, 8.16, 8.0)
    assert found.layer_s == pytest.approx(8.16)
    assert found.decode_s == pytest.approx(3 * 2 * 8.16)  # n - 1 steps, 2 layers
    assert found.prefill_s == pytest.approx(2 * 4 * 5184 / 40)
    assert found.decode_only_tokens_per_s == pytest.approx(16 / 48.96)
    assert found.tokens_per_s == pytest.approx(16 / (48.96 + 1036.8))
    assert found.bottleneck == "prefill: gpu"


def test_gpu_attention_copies_the_kv_of_the_mean_context_unless_it_stays_on_the_gpu() -> None:
    rates = replace(RATES, prefill_flops_per_s=1e9, gpu_bytes_per_s=1e9, gpu_flops_per_s=1e9)
    copied = eq12_prediction(TERMS, rates, policy_of_four(attention_on_gpu=True))
    kv = 4 * 16 * 8  # four requests, 16 byte per token and layer, context 6 + 4/2
    assert copied.layer_s == pytest.approx((768 * 0.75 + kv) / 100)
    assert copied.prefill_s == pytest.approx(2 * 5.76)  # then the weights bind
    assert copied.bottleneck == "decode: link"
    kept = eq12_prediction(TERMS, rates, policy_of_four(attention_on_gpu=True, r_c=1.0))
    assert kept.layer_s == pytest.approx(5.76)


def test_shorter_prompts_attend_by_their_own_square() -> None:
    policy = policy_of_four(attention_on_gpu=False)
    found = eq12_prediction(TERMS, RATES, policy, mean_squared_prompt_tokens=50.0)
    assert found.prefill_s == pytest.approx(2 * 4 * (6 * 768 + 2 * 8 * 50) / 40)


# Rates


def test_datasheet_rates_do_not_see_efficiencies_and_fitted_rates_do() -> None:
    scenario = tiny_scenario()
    shares = Efficiency(
        gpu_bandwidth=0.5,
        gpu_flops_prefill=0.25,
        gpu_flops_decode=0.75,
        link=0.9,
        staging=0.5,
        cpu_attention=0.2,
        cpu_flops=0.1,
        overhead_per_micro_batch_s=1.0,
    )
    calibrated = replace(scenario, profile=replace(scenario.profile, efficiency=shares))
    assert eq12_rates(paper_terms(calibrated)) == Eq12Rates(
        link_bytes_per_s=100.0,
        gpu_flops_per_s=400.0,
        gpu_bytes_per_s=200.0,
        prefill_flops_per_s=400.0,
        cpu_flops_per_s=100.0,
        cpu_bytes_per_s=250.0,
    )
    assert fitted_rates(derive_rates(calibrated.profile, calibrated.formats)) == Eq12Rates(
        link_bytes_per_s=20.0,  # staging: 40 byte/s at a half, slower than the link's 90
        gpu_flops_per_s=300.0,
        gpu_bytes_per_s=100.0,
        prefill_flops_per_s=100.0,
        cpu_flops_per_s=10.0,
        cpu_bytes_per_s=50.0,
    )


# Policies


def test_moe_lightning_fills_the_gpu_as_its_planner_does() -> None:
    # The example the authors' planner prints: mu 324, n_ub 14, s 77, n 32 -> r_w 0.0559, T 0.1549 s.
    row = row_of(setting="S2", micro_batch_size=324, num_micro_batches=14)
    policy = published_policy(row)
    assert (policy.batch_size, policy.num_micro_batches) == (4536, 14)
    assert policy.weights_on_gpu == pytest.approx(0.0559, abs=5e-5)
    found = eq12_of_row(row)["eq12_authors"]
    assert found.layer_s == pytest.approx(0.1549, abs=5e-5)
    assert found.decode_only_tokens_per_s == pytest.approx(944.66, rel=1e-3)


def test_flexgen_keeps_the_share_its_script_fixes() -> None:
    policy = published_policy(ROWS["P000"])
    assert (policy.batch_size, policy.weights_on_gpu, policy.attention_on_gpu, policy.note) == (1344, 0.12, True, "")
    assert published_policy(ROWS["P004"]).attention_on_gpu is False


def test_requests_that_do_not_fit_the_micro_batches_take_one_more_and_the_note_says_so() -> None:
    policy = published_policy(ROWS["P075"])
    assert (policy.batch_size, policy.micro_batch_size, policy.num_micro_batches) == (4592, 324, 15)
    assert "4592 requests make 15 micro-batches of 324, not 14" in policy.note


def test_a_micro_batch_that_was_not_published_is_left_to_the_planner() -> None:
    with pytest.raises(InputError, match="P076: its micro-batch was not published"):
        published_policy(ROWS["P076"])
    assert try_eq12(ROWS["P076"]) == ({}, "P076: its micro-batch was not published (let the planner choose for its N)")


def test_the_planner_can_be_plugged_in() -> None:
    def planned(row: Row) -> RowPolicy:
        return RowPolicy(
            batch_size=2652,
            micro_batch_size=68,
            num_micro_batches=39,
            attention_on_gpu=False,
            weights_on_gpu=0.0,
            kv_on_gpu=0.0,
            note=f"{row.id}: planned",
        )

    found, note = try_eq12(ROWS["P076"], policy_of=planned)
    assert set(found) == set(VARIANTS) and note == "P076: planned"


def test_deepspeed_runs_one_micro_batch_with_its_kv_cache_on_the_gpu() -> None:
    policy = published_policy(ROWS["P088"])
    assert (policy.batch_size, policy.micro_batch_size, policy.num_micro_batches) == (102, 102, 1)
    assert (policy.attention_on_gpu, policy.kv_on_gpu, policy.weights_on_gpu, policy.note) == (True, 1.0, 0.0, "")


def test_deepspeed_with_blank_n_takes_the_largest_that_fits_and_says_so() -> None:
    """Two layers of 2.90 GB, tables of 0.52, context 0.48 of 15.83 GB; a request 450 x 131,072 + 418 x 32,000 x 6 B."""
    policy = published_policy(ROWS["P020"])
    room = 14.74 * 2**30 - 0.45 * 2**30 - 2 * (2_818_572_288 + 83_968_000) - 2 * 32_000 * 4096 * 2
    assert policy.batch_size == int(room / (450 * 131_072 + 418 * 32_000 * 6)) == 64
    assert policy.note == "N = 64, the largest that fits the modelled GPU memory"


@pytest.mark.parametrize(("id_", "modelled"), [("P088", 100), ("P089", 8)])
def test_the_modelled_batch_of_deepspeed_is_what_was_published_where_it_was(id_: str, modelled: int) -> None:
    """Published: 102 and 8. Of the long prompts the attention scores of a layer take more than the logits.

    P088: 9.015 GB are left for requests of 306 x 131,072 + 256 x 32,000 x 6 byte, 100.99 of them.
    """
    assert largest_streaming_batch(scenario_of(ROWS[id_])) == modelled


def test_nothing_fits_a_gpu_too_small_for_one_request() -> None:
    row = ROWS["P020"]
    profile = find_setting(row).profile
    small = replace(profile, gpu=replace(profile.gpu, usable_memory_bytes=2 * GIB))
    with pytest.raises(InfeasibleError, match="one request exceeds the GPU memory"):
        largest_streaming_batch(scenario_of(row, profile=small))


# All rows


def test_authors_constants_are_as_wrong_as_a_calculation_by_hand_found() -> None:
    """14 MoE-Lightning rows with a policy: 2.8x too fast at the median (1.8x to 6.1x), 3.7x without prefill."""
    found = {
        key: eq12_of_row(row)["eq12_authors"]
        for key, row in ROWS.items()
        if row.system.startswith("MoE") and row.micro_batch_size
    }
    ratios = sorted(each.tokens_per_s / ROWS[key].measured_tokens_per_s for key, each in found.items())  # type: ignore[operator]
    decode = sorted(each.decode_only_tokens_per_s / ROWS[key].measured_tokens_per_s for key, each in found.items())  # type: ignore[operator]
    assert len(ratios) == 14
    assert (ratios[6] + ratios[7]) / 2 == pytest.approx(2.8, abs=0.05)
    assert (ratios[0], ratios[-1]) == (pytest.approx(1.8, abs=0.05), pytest.approx(6.1, abs=0.05))
    assert (decode[6] + decode[7]) / 2 == pytest.approx(3.7, abs=0.05)


def test_per_layer_latency_of_the_authors_constants_on_s1_and_s6() -> None:
    assert eq12_of_row(ROWS["P048"])["eq12_authors"].layer_s == pytest.approx(0.164, abs=5e-4)
    assert eq12_of_row(ROWS["P056"])["eq12_authors"].layer_s == pytest.approx(0.280, abs=5e-4)

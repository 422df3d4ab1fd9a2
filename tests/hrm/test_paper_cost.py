"""The authors' terms: by mental arithmetic on the tiny machine, and on the example their planner prints."""

import pytest
from tiny import tiny_mla, tiny_model, tiny_profile, tiny_scenario

from hrm.errors import InputError
from hrm.model_files import load_model
from hrm.paper_cost import KV_ON_GPU, WEIGHTS_ON_GPU, PaperTerms, paper_terms
from hrm.profile_files import load_profile
from hrm.scenario import Scenario, choose_formats
from hrm.units import GIB
from hrm.workload import uniform_workload

TERMS = paper_terms(tiny_scenario())


def l4_mixtral(prompt: int, generated: int) -> PaperTerms:
    profile, model = load_profile("l4-paper"), load_model("mixtral-8x7b")
    workload = uniform_workload(prompt, generated)
    return paper_terms(
        Scenario(profile=profile, model=model, workload=workload, formats=choose_formats(profile, model))
    )


def total_gib(terms: dict[str, object], **at: float) -> float:
    return sum(term.at(at) for term in terms.values()) / GIB  # type: ignore[attr-defined]


def test_weights_of_a_layer_and_all_others() -> None:
    assert TERMS.weights_layer == 6 * 8 * 4 * 4
    assert TERMS.weights_other == 2 * (4 * 8 * 8 + 4 * 8 * 1 * 4)


def test_link_moves_weights_and_with_gpu_attention_the_kv_of_the_mean_context() -> None:
    link = TERMS.link_seconds(4.0, attention_on_gpu=True, ffn_on_gpu=True)
    assert link.at({}) == pytest.approx((768 + 4 * 1 * 4 * (6 + 2) * 4) / 100)
    assert link.at({WEIGHTS_ON_GPU: 0.25, KV_ON_GPU: 2.0}) == pytest.approx((576 + 256) / 100)
    assert TERMS.link_seconds(4.0, attention_on_gpu=False, ffn_on_gpu=True).at({}) == pytest.approx(7.68)
    assert TERMS.link_seconds(4.0, attention_on_gpu=False, ffn_on_gpu=False).at({}) == 0.0


def test_ffn_reads_every_expert() -> None:
    assert TERMS.ffn_seconds(2.0, on_gpu=True) == pytest.approx((768 + 2 * 2 * (8 + 4)) / 200)
    assert TERMS.ffn_seconds(2.0, on_gpu=False) == pytest.approx(2 * 2 * 8 * 4 * 3 * 2 / 100)  # FLOPs bind on the CPU


def test_attention_counts_scores_only_at_the_final_context() -> None:
    assert TERMS.attention_seconds(2.0, on_gpu=False) == pytest.approx(2 * 10 * 2 * (2 * 4 + 2) / 100)
    assert TERMS.attention_seconds(2.0, on_gpu=True) == pytest.approx((2 * 2 * 2 * 4 * 2 + 2 * 2 * 10 * 4 * 2) / 200)


def test_gpu_and_cpu_seconds_go_where_the_policy_says() -> None:
    attention_only = TERMS.gpu_seconds_per_micro_batch(2.0, attention_on_gpu=True, ffn_on_gpu=False)
    assert attention_only == pytest.approx(TERMS.attention_seconds(2.0, on_gpu=True))
    assert TERMS.cpu_seconds_per_micro_batch(2.0, attention_on_gpu=True, ffn_on_gpu=True) == 0.0


def test_gpu_memory_by_term() -> None:
    prefill = {name: term.at({}) for name, term in TERMS.gpu_memory(2.0, 4.0, phase="prefill").items()}
    assert prefill == pytest.approx(
        {
            "non-expert weights": 768,
            "resident expert weights": 0,
            "two-layer weight buffer": 2 * 768,
            "fused MoE scratch": 2.4 * 2 * 2 * 6 * (8 + 3 * 4),
            "KV buffers of two micro-batches": 8 * 6 * 1 * 4 * 2,
            "KV cache": 0,
            "prefill activations": 4 * 8 * 2 * 6,
            "residual of all requests": 2 * 8 * 4 * 6,
        }
    )
    decode = TERMS.gpu_memory(2.0, 4.0, phase="decode")
    assert decode["decode hidden states"].at({}) == 4 * 8 * 4
    assert decode["KV cache"].at({KV_ON_GPU: 1.0}) == 4 * 10 * 1 * 4 * 2
    assert decode["two-layer weight buffer"].at({WEIGHTS_ON_GPU: 1.0}) == 0


def test_cpu_memory_by_term() -> None:
    half = {name: term.at({WEIGHTS_ON_GPU: 0.5}) for name, term in TERMS.cpu_memory(4.0).items()}
    assert half == {"expert weights": 768, "KV cache": 1280, "hidden states": 2 * 8 * 4 * 6, "pinned staging": 768}


def test_gpus_multiply_everything_but_the_link() -> None:
    two = paper_terms(tiny_scenario(profile=tiny_profile(gpus=2)))
    assert two.gpu_flops_per_s == 800 and two.gpu_bytes_per_s == 400
    assert two.link_bytes_per_s == 100
    assert two.gpu_limit_bytes == pytest.approx(0.86 * 2e6)
    prefill = two.gpu_memory(2.0, 4.0, phase="prefill")
    assert prefill["prefill activations"].at({}) == 2 * 4 * 8 * 2 * 6
    assert prefill["residual of all requests"].at({}) == 2 * 2 * 8 * 4 * 6
    assert two.cpu_memory(4.0)["hidden states"].at({}) == 2 * 2 * 8 * 4 * 6


def test_worked_example_of_the_planner() -> None:
    """Mixtral 8x7B on the L4 host, s=77, n=32: mu=324, n_ub=14 gives r_w 0.0559, 0.1549 s, 944.66 token/s."""
    terms, mu, requests = l4_mixtral(77, 32), 324.0, 324.0 * 14
    prefill = terms.gpu_memory(mu, requests, phase="prefill")
    fixed, slope = total_gib(prefill), total_gib(prefill, **{WEIGHTS_ON_GPU: 1.0}) - total_gib(prefill)
    share = (terms.gpu_limit_bytes / GIB - fixed) / slope
    assert share == pytest.approx(0.0559, abs=5e-5)
    at = {WEIGHTS_ON_GPU: share}
    latency = terms.link_seconds(requests, attention_on_gpu=False, ffn_on_gpu=True).at(at)
    sides = {"attention_on_gpu": False, "ffn_on_gpu": True}
    assert latency == pytest.approx(0.1549, abs=5e-5)
    assert 14 * terms.gpu_seconds_per_micro_batch(mu, **sides) < latency
    assert 14 * terms.cpu_seconds_per_micro_batch(mu, **sides) < latency
    assert requests * 32 / (31 * terms.layers * latency) == pytest.approx(944.66, abs=0.05)
    assert total_gib(prefill, **at) == pytest.approx(20.640, abs=5e-4)
    working = [prefill[name].at(at) / GIB for name in ("two-layer weight buffer", "fused MoE scratch")]
    assert sum(working) == pytest.approx(10.21, abs=5e-3)  # beside 10.43 that stay
    assert total_gib(terms.cpu_memory(requests), **at) == pytest.approx(147.28, abs=5e-3)


def test_published_policy_68_by_16_at_prompt_418_breaks_the_cpu_limit() -> None:
    terms, mu, requests = l4_mixtral(418, 32), 68.0, 68.0 * 16
    prefill = terms.gpu_memory(mu, requests, phase="prefill")
    fixed, slope = total_gib(prefill), total_gib(prefill, **{WEIGHTS_ON_GPU: 1.0}) - total_gib(prefill)
    share = (terms.gpu_limit_bytes / GIB - fixed) / slope  # the largest the GPU holds
    needs = total_gib(terms.cpu_memory(requests), **{WEIGHTS_ON_GPU: share})
    assert needs == pytest.approx(149.33, abs=5e-3)
    assert needs - terms.cpu_limit_bytes / GIB == pytest.approx(1.90, abs=5e-3)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (tiny_mla(), "latent attention"),
        (tiny_model(layer_windows=(4, None)), "sliding-window"),
        (tiny_model(shared_ffn=2), "dense layers or shared experts"),
        (tiny_model(n_experts=0, top_k=0, expert_ffn=0, dense_ffn=4, moe_layers=(False, False)), "no experts"),
    ],
)
def test_model_outside_the_formulas_is_refused(model, why) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=why):
        paper_terms(tiny_scenario(model=model))

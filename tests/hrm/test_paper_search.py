"""The search on the paper's terms: published worked example, published policies, and brute force over all integers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hrm.errors import InfeasibleError, InputError
from hrm.model_files import load_model
from hrm.paper_search import PaperResult, find_paper_policy
from hrm.pins import Pins
from hrm.profile_files import load_profile
from hrm.scenario import Scenario, choose_formats
from hrm.units import GIB
from hrm.workload import uniform_workload

# MoE-Lightning policies of settings S1 (T4) and S2 (L4), Mixtral 8x7B, with their ids in the table of published runs:
# (id, profile, prompt, generated, mu, n_ub), prompts padded to the longest where the run was "(p)", else their mean.
PUBLISHED = [
    ("P048", "t4-paper", 418, 32, 36, 14),
    ("P050", "t4-paper", 418, 128, 36, 14),
    ("P052", "l4-paper", 418, 32, 68, 16),
    ("P054", "l4-paper", 418, 128, 68, 13),
    ("P064", "t4-paper", 77, 32, 164, 19),
    ("P066", "t4-paper", 77, 128, 164, 14),
    ("P068", "l4-paper", 77, 32, 324, 14),
    ("P070", "l4-paper", 77, 128, 164, 16),
    ("P073", "l4-paper", 77, 128, 164, 16),
    ("P075", "l4-paper", 77, 32, 324, 14),
    ("P090", "t4-paper", 256, 50, 36, 26),
    ("P091", "t4-paper", 1984, 64, 4, 19),
]
INFEASIBLE = {"P052"}


def paper(hardware: str, prompt: int, generated: int, model: str = "mixtral-8x7b") -> Scenario:
    profile, spec = load_profile(hardware), load_model(model)
    workload = uniform_workload(prompt, generated)
    return Scenario(profile=profile, model=spec, workload=workload, formats=choose_formats(profile, spec))


def rate(result: PaperResult) -> float:
    return result.prediction.decode_throughput_tokens_per_s


def test_worked_example_of_the_authors_planner() -> None:
    result = find_paper_policy(paper("l4-paper", 77, 32), Pins(micro_batch_size=324, num_micro_batches=14))
    assert rate(result) == pytest.approx(944.66, abs=0.05)
    assert result.policy.weights_on_gpu == pytest.approx(0.0559, abs=5e-5)
    assert result.prediction.layer_latency_s == pytest.approx(0.1549, abs=5e-5)
    assert result.prediction.decode.bottleneck == "host_to_device"
    memory = result.prediction.memory
    assert memory["gpu"].peak_bytes / GIB == pytest.approx(20.640, abs=5e-4)
    assert memory["cpu"].peak_bytes / GIB == pytest.approx(147.28, abs=5e-3)
    assert result.policy.batch_size == 324 * 14


def test_better_policy_that_the_authors_grid_steps_over() -> None:
    result = find_paper_policy(paper("l4-paper", 77, 32), Pins(attention_on_gpu=False, ffn_on_gpu=True))
    assert (result.policy.micro_batch_size, result.policy.num_micro_batches) == (287, 16)
    assert rate(result) == pytest.approx(964.53, abs=0.05)


def test_published_policy_that_breaks_the_planners_own_limit() -> None:
    with pytest.raises(InfeasibleError, match=r"CPU memory limit .* exceeded by 1\.90 GiB") as caught:
        find_paper_policy(paper("l4-paper", 418, 32), Pins(micro_batch_size=68, num_micro_batches=16))
    assert caught.value.exit_code == 3
    assert caught.value.limit == "cpu_memory"
    assert caught.value.missing_bytes / GIB == pytest.approx(1.897, abs=1e-3)
    assert "149.33 of 147.43 GiB" in str(caught.value)


@pytest.mark.parametrize("row", PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_optimum_is_at_least_as_good_as_every_published_policy_that_fits(
    row: tuple[str, str, int, int, int, int],
) -> None:
    name, hardware, prompt, generated, mu, count = row
    scenario = paper(hardware, prompt, generated)
    best = find_paper_policy(scenario)
    published = Pins(micro_batch_size=mu, num_micro_batches=count)
    if name in INFEASIBLE:
        with pytest.raises(InfeasibleError):
            find_paper_policy(scenario, published)
        return
    assert rate(best) >= rate(find_paper_policy(scenario, published)) * (1.0 - best.gap)


def test_a_variable_outside_the_papers_model_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"--weight-slots: the paper's model has no such variable"):
        find_paper_policy(paper("l4-paper", 77, 32), Pins(weight_slots=1))


def test_one_generated_token_is_an_input_error() -> None:
    with pytest.raises(InputError, match="at least 2 generated tokens"):
        find_paper_policy(paper("l4-paper", 77, 1))


def test_experts_on_the_cpu_leave_no_weights_on_the_gpu() -> None:
    with pytest.raises(InputError, match="no expert weights stay on the GPU"):
        find_paper_policy(paper("l4-paper", 77, 32), Pins(ffn_on_gpu=False, weights_on_gpu=0.5))
    assert find_paper_policy(paper("l4-paper", 77, 32), Pins(ffn_on_gpu=False)).policy.weights_on_gpu == 0.0


def test_gpu_too_small_for_what_must_stay_on_it_says_by_how_much() -> None:
    scenario = paper("t4-paper", 77, 32, model="mixtral-8x22b")
    with pytest.raises(InfeasibleError, match="GPU memory limit") as caught:
        find_paper_policy(scenario)
    h1, h2, layers = 6144, 16384, 56
    least = 2 * 6 * h1 * h2 * 8 + layers * (4 * h1 * h1 + 4 * h1 * 8 * 128)  # two layers of experts, the other weights
    assert caught.value.missing_bytes == pytest.approx(least - 0.86 * 15 * GIB, rel=0.01)  # one request's buffers too
    assert caught.value.missing_bytes > least - 0.86 * 15 * GIB


def best_by_hand(scenario: Scenario, *, attention: bool, ffn: bool, most_mu: int, most_count: int) -> float:
    """Best N / T over every mu and n_ub: the formulas of the paper's planner written out once more.

    For given integers the link's seconds are linear in r_w and in the KV requests on the GPU, so their least value lies
    at a corner of what memory allows: every pair of limits is intersected.
    """
    model, profile, workload = scenario.model, scenario.profile, scenario.workload
    h1, h2, experts, k = model.hidden_size, model.expert_ffn, model.n_experts, model.top_k
    q, kv, d, layers = model.n_heads, model.n_kv_heads, model.head_dim, model.n_layers
    s, n = workload.prompt_lengths[0], workload.generation_length
    w, w_o = 6.0 * h1 * h2 * experts, layers * (4.0 * h1 * h1 + 4.0 * h1 * kv * d)
    p_g, b_g = profile.gpu.peak("fp16"), profile.gpu.bandwidth_bytes_per_s
    p_c, b_c = profile.cpu.peak("fp32"), profile.cpu.bandwidth_bytes_per_s
    link = profile.link.host_to_device.pinned_bytes_per_s
    gpu_limit, cpu_limit = 0.86 * profile.gpu.memory_bytes, 0.8 * profile.cpu.memory_bytes
    mu, count = np.meshgrid(np.arange(1.0, most_mu + 1), np.arange(1.0, most_count + 1), indexing="ij")
    size = mu * count

    def attention_s(peak: float, bandwidth: float) -> np.ndarray:
        flops, moved = mu * (s + n) * q * (2 * d + 2), 4 * mu * q * d + 4 * mu * (s + n) * kv * d
        return np.maximum(flops / peak, moved / bandwidth)

    def ffn_s(peak: float, bandwidth: float) -> np.ndarray:
        return np.maximum(6 * mu * h1 * h2 * k / peak, (w + 2 * mu * (h1 + h2)) / bandwidth)

    gpu_s = count * ((attention_s(p_g, b_g) if attention else 0.0) + (ffn_s(p_g, b_g) if ffn else 0.0))
    cpu_s = count * ((0.0 if attention else attention_s(p_c, b_c)) + (0.0 if ffn else ffn_s(p_c, b_c)))
    common = w_o + 2 * w + 2.4 * mu * k * s * (h1 + 3 * h2) + 8 * s * kv * d * mu
    each = 4.0 * (s + n) * kv * d * layers
    # Limits a*r_w + b*x <= c, with x the KV requests on the GPU.
    limits = [
        (w * layers - 2 * w, each, gpu_limit - common - 4 * h1 * mu * s - 2 * h1 * size * s),
        (w * layers - 2 * w, each, gpu_limit - common - 4 * h1 * size),
        (-w * layers - 2 * w, -each, cpu_limit - w * layers - 2 * w - each * size - 2 * h1 * size * s),
        (1.0, 0.0, 1.0 if ffn else 0.0),
        (-1.0, 0.0, 0.0),
        (0.0, 1.0, size if attention else 0.0),
        (0.0, -1.0, 0.0),
    ]
    least = np.full_like(size, np.inf)
    for first in range(len(limits)):
        for second in range(first):
            (a1, b1, c1), (a2, b2, c2) = limits[first], limits[second]
            determinant = a1 * b2 - a2 * b1
            if determinant == 0:
                continue
            r_w, x = (c1 * b2 - c2 * b1) / determinant, (a1 * c2 - a2 * c1) / determinant
            fits = np.ones_like(size, dtype=bool)
            for a, b, c in limits:
                fits &= a * r_w + b * x <= c + 1e-9 * (np.abs(a) + np.abs(b * size) + np.abs(c))
            moved = (w * (1 - r_w) if ffn else 0.0) + (4 * kv * d * (s + n / 2) * (size - x) if attention else 0.0)
            least = np.where(fits, np.minimum(least, moved / link), least)
    seconds = np.maximum(np.maximum(gpu_s, cpu_s), least)
    assert not np.any(np.isfinite(seconds[-1])), "mu ends before memory does"
    assert not np.any(np.isfinite(seconds[:, -1])), "n_ub ends before memory does"
    best = float(np.max(size / seconds))
    return best * n / ((n - 1) * layers)


@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("gpu_gib", "cpu_gib", "prompt", "generated", "link"),
    [(3.2, 20.0, 300, 8, 1.0), (4.0, 24.0, 77, 32, 0.2), (8.0, 20.0, 600, 16, 0.02), (2.9, 30.0, 1500, 64, 4.0)],
)
def test_search_is_as_good_as_brute_force_over_every_mu_and_count(
    sides: tuple[bool, bool], gpu_gib: float, cpu_gib: float, prompt: int, generated: int, link: float
) -> None:
    base = paper("l4-paper", prompt, generated, model="olmoe-1b-7b")
    profile, copies = base.profile, base.profile.link.host_to_device
    small = replace(
        profile,
        gpu=replace(profile.gpu, memory_bytes=gpu_gib * GIB, usable_memory_bytes=gpu_gib * GIB),
        cpu=replace(profile.cpu, memory_bytes=cpu_gib * GIB),
        link=replace(profile.link, host_to_device=replace(copies, pinned_bytes_per_s=link * copies.pinned_bytes_per_s)),
    )
    scenario = replace(base, profile=small)
    attention, ffn = sides
    by_hand = best_by_hand(scenario, attention=attention, ffn=ffn, most_mu=900, most_count=1200)
    result = find_paper_policy(scenario, Pins(attention_on_gpu=attention, ffn_on_gpu=ffn))
    assert rate(result) == pytest.approx(by_hand, rel=max(1e-5, result.gap))
    assert all(use.peak_bytes <= use.limit_bytes * (1 + 1e-9) for use in result.prediction.memory.values())


def test_free_search_takes_the_best_of_the_four_sides() -> None:
    scenario = paper("l4-paper", 77, 32)
    sides = [Pins(attention_on_gpu=a, ffn_on_gpu=f) for a in (True, False) for f in (True, False)]
    best = max(rate(find_paper_policy(scenario, pins)) for pins in sides)
    assert rate(find_paper_policy(scenario)) == pytest.approx(best, rel=1e-5)

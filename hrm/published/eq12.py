"""Eq. 12 of the paper for a row that was measured, with three sets of rates: the authors', datasheets', fitted.

One form, three times, so that the difference between the first and the third is what the constants do, and the rest
what the form does. The decode step is `hrm.paper_cost` unchanged: T = max(link, T_cpu, T_gpu) per layer, n - 1 steps.

The paper prices no prefill. The term used here is the least that Eq. 12 itself would say of it: per layer the longer of
the copy of its weights and its FLOPs at the GPU's peak,

    T_prefill = L * max(W*(1-r_w) / B_link, N * F / P_gpu)
    F = s*(4*h1*q*d + 4*h1*kv*d + 6*h1*h2*k) + 2*q*d*s^2     FLOPs of one prompt and layer

that is, projections (Q and O, K and V), experts, and causal attention with scores and values. No KV cache is written
back in it, nothing is read from GPU memory, and no micro-batch reads the weights again. Legend in `hrm.paper_cost`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hrm.errors import HrmError
from hrm.paper_cost import KV_ON_GPU, WEIGHTS_ON_GPU, PaperTerms, paper_terms
from hrm.profile import HardwareProfile
from hrm.published.policies import PolicyOf, RowPolicy, published_policy
from hrm.published.rows import Row
from hrm.published.settings import find_setting, scenario_of
from hrm.rates import Rates, derive_rates

__all__ = [
    "VARIANTS",
    "Eq12",
    "Eq12Rates",
    "Variant",
    "eq12_of_row",
    "eq12_prediction",
    "eq12_rates",
    "fitted_rates",
    "prompt_flops_per_layer",
    "try_eq12",
]

Variant = Literal["eq12_authors", "eq12_datasheet", "eq12_fitted"]
VARIANTS: tuple[Variant, ...] = ("eq12_authors", "eq12_datasheet", "eq12_fitted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eq12Rates:
    """The rates Eq. 12 knows.

    Attributes
    ----------
    link_bytes_per_s : float
        CPU memory to the GPU(s) [byte/s].
    gpu_flops_per_s, gpu_bytes_per_s : float
        Of all GPUs, in decode [FLOP/s, byte/s].
    prefill_flops_per_s : float
        Of all GPUs, in prefill [FLOP/s].
    cpu_flops_per_s, cpu_bytes_per_s : float
        [FLOP/s, byte/s]
    """

    link_bytes_per_s: float
    gpu_flops_per_s: float
    gpu_bytes_per_s: float
    prefill_flops_per_s: float
    cpu_flops_per_s: float
    cpu_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Eq12:
    """What Eq. 12 says of a run.

    Attributes
    ----------
    tokens_per_s, decode_only_tokens_per_s : float
        Generated tokens over prefill and decode; over decode alone, the planner's objective [token/s].
    prefill_s, decode_s, layer_s : float
        Of the batch; T of one layer and step [s].
    bottleneck : str
        The term that sets the larger part of the time: link, gpu or cpu, with the phase.
    note : str
        What of the policy was not published.
    """

    tokens_per_s: float
    decode_only_tokens_per_s: float
    prefill_s: float
    decode_s: float
    layer_s: float
    bottleneck: str
    note: str = ""


def eq12_rates(terms: PaperTerms) -> Eq12Rates:
    """Peaks as the authors' formulas take them from a profile: GPUs add up, the link does not."""
    return Eq12Rates(
        link_bytes_per_s=terms.link_bytes_per_s,
        gpu_flops_per_s=terms.gpu_flops_per_s,
        gpu_bytes_per_s=terms.gpu_bytes_per_s,
        prefill_flops_per_s=terms.gpu_flops_per_s,
        cpu_flops_per_s=terms.cpu_flops_per_s,
        cpu_bytes_per_s=terms.cpu_bytes_per_s,
    )


def fitted_rates(rates: Rates) -> Eq12Rates:
    """Calibrated rates of a profile in the places Eq. 12 has for them.

    Its one link is the whole way of the weights: the slower of the staging copy and the link, of all GPUs together.
    What has no place in Eq. 12 (overheads, latencies, contention) is left out: that is the form's share of the error.
    """
    return Eq12Rates(
        link_bytes_per_s=min(rates.h2d_bytes_per_s, rates.staging_bytes_per_s),
        gpu_flops_per_s=rates.gpu_flops_per_s["decode"],
        gpu_bytes_per_s=rates.gpu_bytes_per_s,
        prefill_flops_per_s=rates.gpu_flops_per_s["prefill"],
        cpu_flops_per_s=rates.cpu_flops_per_s,
        cpu_bytes_per_s=rates.cpu_attention_bytes_per_s,
    )


def eq12_prediction(
    terms: PaperTerms,
    rates: Eq12Rates,
    policy: RowPolicy,
    *,
    mean_squared_prompt_tokens: float | None = None,
    ffn_on_gpu: bool = True,
) -> Eq12:
    """Eq. 12, and the prefill term above, for one policy.

    Parameters
    ----------
    terms : PaperTerms
        Shapes; its rates are not used.
    rates : Eq12Rates
    policy : RowPolicy
    mean_squared_prompt_tokens : float, optional
        Mean of s^2 over the prompts, for attention in prefill; the square of the mean where it is not given [tokens^2].
    ffn_on_gpu : bool
        F_g of decode; every published run has its experts there.
    """
    terms = replace(
        terms,
        link_bytes_per_s=rates.link_bytes_per_s,
        gpu_flops_per_s=rates.gpu_flops_per_s,
        gpu_bytes_per_s=rates.gpu_bytes_per_s,
        cpu_flops_per_s=rates.cpu_flops_per_s,
        cpu_bytes_per_s=rates.cpu_bytes_per_s,
    )
    n, mu, n_ub = float(policy.batch_size), float(policy.micro_batch_size), float(policy.num_micro_batches)
    at = {WEIGHTS_ON_GPU: policy.weights_on_gpu, KV_ON_GPU: policy.kv_on_gpu * n}
    places = {"attention_on_gpu": policy.attention_on_gpu, "ffn_on_gpu": ffn_on_gpu}
    step = {
        "link": float(terms.link_seconds(n, **places).at(at)),
        "gpu": n_ub * float(terms.gpu_seconds_per_micro_batch(mu, **places)),
        "cpu": n_ub * float(terms.cpu_seconds_per_micro_batch(mu, **places)),
    }
    squared = terms.prompt**2 if mean_squared_prompt_tokens is None else mean_squared_prompt_tokens
    prefill = {
        "link": terms.weights_layer * (1.0 - policy.weights_on_gpu) / rates.link_bytes_per_s,
        "gpu": n * prompt_flops_per_layer(terms, squared) / rates.prefill_flops_per_s,
    }
    binds, prefill_binds = max(step, key=lambda lane: step[lane]), max(prefill, key=lambda lane: prefill[lane])
    layer_s = step[binds]
    decode_s = (terms.generated - 1.0) * terms.layers * layer_s
    prefill_s = terms.layers * prefill[prefill_binds]
    tokens = n * terms.generated
    return Eq12(
        tokens_per_s=tokens / (prefill_s + decode_s),
        decode_only_tokens_per_s=tokens / decode_s if decode_s > 0 else 0.0,
        prefill_s=prefill_s,
        decode_s=decode_s,
        layer_s=layer_s,
        bottleneck=f"prefill: {prefill_binds}" if prefill_s > decode_s else f"decode: {binds}",
        note=policy.note,
    )


def prompt_flops_per_layer(terms: PaperTerms, mean_squared_prompt_tokens: float) -> float:
    """FLOPs of one prompt in one layer: projections, experts, causal attention (F above) [FLOP]."""
    query, key = terms.query_heads * terms.head, terms.kv_heads * terms.head
    per_token = 4.0 * terms.h1 * (query + key) + 6.0 * terms.h1 * terms.h2 * terms.top_k
    return terms.prompt * per_token + 2.0 * query * mean_squared_prompt_tokens


def eq12_of_row(
    row: Row,
    *,
    policy_of: PolicyOf = published_policy,
    fitted: HardwareProfile | None = None,
) -> dict[Variant, Eq12]:
    """All three variants for a row.

    Parameters
    ----------
    row : Row
    policy_of : callable
        Gives the policy that ran; `hrm.published.policies.published_policy` by default.
    fitted : HardwareProfile, optional
        Profile whose efficiencies are the fitted rates; the setting's own by default.

    Raises
    ------
    InputError, InfeasibleError
        The row cannot be predicted; the message says why.
    """
    policy, setting = policy_of(row), find_setting(row)
    found: dict[Variant, Eq12] = {}
    for variant in VARIANTS:
        profile = setting.authors_profile if variant == "eq12_authors" else setting.profile
        if variant == "eq12_fitted" and fitted is not None:
            profile = fitted
        scenario = scenario_of(row, profile=profile, num_requests=policy.batch_size)
        terms = paper_terms(scenario)
        if variant == "eq12_fitted":
            rates = fitted_rates(derive_rates(profile, scenario.formats))
        else:
            rates = eq12_rates(terms)
        squared = scenario.workload.mean_squared_prompt_tokens
        found[variant] = eq12_prediction(terms, rates, policy, mean_squared_prompt_tokens=squared)
    return found


def try_eq12(
    row: Row, *, policy_of: PolicyOf = published_policy, fitted: HardwareProfile | None = None
) -> tuple[dict[Variant, Eq12], str]:
    """The variants of a row and the note on its policy; nothing, and the reason, where it cannot be predicted."""
    try:
        found = eq12_of_row(row, policy_of=policy_of, fitted=fitted)
    except HrmError as error:
        return {}, str(error)
    return found, found["eq12_authors"].note

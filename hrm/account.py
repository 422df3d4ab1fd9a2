"""FLOPs and bytes of one pass under a policy, by processor and operator: what the seconds are made of."""

from __future__ import annotations

from hrm import cost
from hrm.cost import Work
from hrm.policy import Policy
from hrm.rates import Phase
from hrm.scenario import Scenario, Sizes

__all__ = ["pass_work"]


def pass_work(scenario: Scenario, sizes: Sizes, policy: Policy, phase: Phase) -> dict[str, dict[str, Work]]:
    """Work of a decode step (at the mean context) or of the prefill of one batch, copies left out.

    Returns
    -------
    dict of str to dict of str to Work
        By processor ("gpu", "cpu"), then by operator; FLOPs [FLOP] and bytes touched in its memory [byte].
    """
    model, formats = scenario.model, scenario.formats
    n = float(policy.batch_size)
    on_cpu = policy.everything_on_cpu
    if phase == "prefill":
        parts = float(-(-policy.batch_size // policy.prefill_micro_batch_size))
        tokens, head_rows = n * sizes.prompt_tokens / parts, n / parts
    else:
        parts = float(policy.num_micro_batches)
        tokens = head_rows = n / parts
    main, experts = ("cpu" if on_cpu else "gpu"), ("cpu" if on_cpu else "gpu")
    if phase == "decode" and not policy.ffn_on_gpu:
        experts = "cpu"
    found: dict[str, dict[str, Work]] = {"gpu": {}, "cpu": {}}
    for name, layers, work in cost.layer_operators(model, formats, tokens):
        times = layers * parts
        if name == "routed experts" and phase == "decode" and policy.weight_slots == "experts" and policy.ffn_on_gpu:
            work, times = cost.routed_experts(model, formats, n), float(layers)  # every expert once for the whole batch
        found[experts if name == "routed experts" else main][name] = times * work
    if phase == "prefill":
        attention = Work()
        for kind in model.layer_kinds:
            pairs = n / parts * sizes.prompt_pairs_by_window[kind.window]
            attention = attention + (parts * kind.count) * cost.attention_prefill(model, formats, tokens, pairs)
        found[main]["attention"] = attention
    else:
        read = n * sizes.kv_read_bytes_per_request
        per_byte = cost.attention_decode_per_kv_byte(model, formats, sizes.kv_read_bytes_per_request)
        on_gpu = 0.0 if on_cpu else (1.0 if policy.attention_on_gpu else policy.kv_on_gpu)
        for place, share in (("gpu", on_gpu), ("cpu", 1.0 - on_gpu)):
            if share:
                found[place]["attention"] = (read * share) * per_byte
    found[main]["lm_head"] = parts * cost.lm_head(model, formats, head_rows)
    return found

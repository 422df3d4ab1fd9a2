"""The arenas of a plan: its own terms, on every level, and what whole requests and whole blocks add to them.

A plan counts shares; the runtime places whole requests. On the GPU they are rounded down, so nothing is added to the KV
cache there; its slots hold those requests instead, out of the share of the GPU that a plan keeps free.
"""

from __future__ import annotations

from hrm.attention_tasks import KV_BUFFERS
from hrm.holds import hold_sizes
from hrm.layout import Layout
from hrm.memory import KV_LANDINGS
from hrm.points import prefill_choice
from hrm.policy import Policy
from hrm.prediction import memory_by_phase
from hrm.scenario import Scenario
from hrm.trivial import cpu_only_memory
from runtime.arena import Arena, Arenas
from runtime.disk_file import BLOCK
from runtime.placement import most_on_disk, rounding_requests

__all__ = ["make_arenas"]

DISK_LAYER_BYTES = 2**16
"""Of the experts of a layer on disk, what is lost to whole rows and blocks at most [byte]."""


def make_arenas(scenario: Scenario, policy: Policy, layout: Layout) -> Arenas:
    """Arenas with the plan's terms, each as large as it gets, and the peak of each level."""
    if policy.everything_on_cpu:
        uses = {level: [use] for level, use in cpu_only_memory(scenario, layout.sizes, policy).items()}
    else:
        uses = memory_by_phase(scenario, layout.sizes, policy)
    levels = {}
    for level, phases in uses.items():
        terms: dict[str, float] = {}
        for use in phases:
            for term, size in use.terms.items():
                terms[term] = max(terms.get(term, 0.0), size)
        peak = max(use.peak_bytes for use in phases)
        levels[level] = Arena(level, terms, peak, _added(scenario, policy, layout, level, terms))
    return Arenas(levels, {})


def _added(scenario: Scenario, policy: Policy, layout: Layout, level: str, terms: dict[str, float]) -> dict[str, float]:
    """What whole requests and whole blocks can add to the terms of a level [byte]."""
    model, on_disk = scenario.model, most_on_disk(policy)
    token = model.kv_bytes_per_token_per_layer(scenario.formats.kv)
    longest = scenario.workload.max_request_tokens
    blocks = 2.0 * BLOCK  # keys and values of a request in a layer, to the end of a block
    found = {"KV cache": policy.num_micro_batches * rounding_requests(policy)[level] * longest * token * model.n_layers}
    if level == "gpu" and policy.attention_on_gpu:
        lost = rounding_requests(policy)["slot"] * longest
        found["KV slots"] = KV_BUFFERS * lost * token
    if level == "disk":
        found["KV cache"] += policy.num_micro_batches * on_disk * blocks * model.n_layers
        found["expert weights"] = float(layout.num_layers * DISK_LAYER_BYTES)
    if level == "cpu" and on_disk:
        # The fullest micro-batch, where the plan has the mean: all of one of prefill may be on disk.
        prefill = prefill_choice(scenario, float(policy.batch_size), float(policy.prefill_micro_batch_size))
        read = on_disk * longest
        if policy.micro_batch_token_budget:
            read = min(read, policy.micro_batch_token_budget)
        widest = max(read * token + on_disk * blocks, float(prefill.tokens) * token + float(prefill.requests) * blocks)
        mean = terms.get("KV landing buffers", 0.0) / KV_LANDINGS
        more = min(hold_sizes(scenario, layout.sizes, policy).kv_landings - KV_LANDINGS, 2 * policy.num_micro_batches)
        found["KV landing buffers"] = KV_LANDINGS * max(0.0, widest - mean)
        found["weight staging buffers"] = more * max(0.0, widest - mean)
    return {term: size for term, size in found.items() if size > 0}

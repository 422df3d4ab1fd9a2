"""What a plan says it takes of every level, as far as the kernel of the machine can see it."""

from __future__ import annotations

from collections.abc import Sequence

from hrm.policy import Policy
from hrm.prediction import MemoryUse, memory_by_phase
from hrm.scenario import Scenario, measure_sizes
from hrm.trivial import cpu_only_memory

__all__ = ["HOST_RESERVE_BYTES", "STAGING", "planned_bytes"]

HOST_RESERVE_BYTES = 128 * 2**20
"""What a process takes beside what a plan counts [byte].

Code that oneDNN makes for products of new shapes: 0.5 MiB each, of `runtime.host_allocator.KEPT_KERNELS` shapes in its
own cache and as many in that of each thread that computes, so up to 48 MiB with two. Freed tensors between others that
are in use: below 64 MiB, as malloc gives back at once what is larger than 32 MiB, and the rest before every batch. The
rest is for routing and indices of tokens, graph, trace and stacks. In runs on the CPU of OLMoE, Mixtral and Qwen3 with
512 to 16,384 tokens in a micro-batch it was 15 to 60 MiB in all.
"""

STAGING = "weight staging buffers"
"""The term of the plan that is a fixed size, of which a run makes what its largest piece needs, or nothing."""

NOT_TAKEN = ("CUDA context", "reserve")
"""Terms of a plan's GPU memory that no allocation of a run is: the driver's own, and what is kept free."""


def planned_bytes(scenario: Scenario, policy: Policy, *, emulated: bool) -> dict[str, float]:
    """Peak of every level that a plan states, of what the kernel can see of it [byte].

    The CUDA context and the reserve are no allocations of the run. Where the accelerator is emulated, activations of
    its lane are made by torch in CPU memory, so they count there.
    """
    sizes = measure_sizes(scenario)
    if policy.everything_on_cpu:
        return {level: use.peak_bytes for level, use in cpu_only_memory(scenario, sizes, policy).items()}
    phases = memory_by_phase(scenario, sizes, policy)
    moved = max(use.terms.get("activations", 0.0) for use in phases["gpu"]) if emulated else 0.0
    left_out = (*NOT_TAKEN, "activations") if emulated else NOT_TAKEN
    found = {level: max(use.peak_bytes for use in uses) for level, uses in phases.items()}
    found["gpu"] = max(_without(use, left_out) for use in phases["gpu"])
    found["cpu"] += moved
    return found


def _without(use: MemoryUse, terms: Sequence[str]) -> float:
    return use.peak_bytes - sum(use.terms.get(term, 0.0) for term in terms)

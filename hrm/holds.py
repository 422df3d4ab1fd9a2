"""What tasks take and give back, in the terms of the plan's own account (`hrm.memory`).

Some terms are there all along (resident weights, pinned buffers, the CUDA context): `standing`. The others are taken by
the task that fills them and given back by the last one that reads them, each in the size the plan reserves for it; how
many are alive at once is what the order of tasks decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hrm.affine import Number
from hrm.full_cost import STAGING_BUFFER_BYTES
from hrm.graph import Hold
from hrm.memory import KV_LANDINGS, ActivationPieces, activation_pieces, kv_slot_bytes
from hrm.points import prefill_choice
from hrm.policy import Policy
from hrm.prediction import memory_use
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes, kv_replicas, worst_prompt_tokens
from hrm.trivial import cpu_only_memory

__all__ = ["HoldSizes", "held", "hold_sizes", "ring_share", "standing"]

SLOTS, DENSE_SLOTS = "expert weight slots", "non-expert weight slots"
ACTIVATIONS, KV_CACHE, KV_SLOTS = "activations", "KV cache", "KV slots"
WAITING, OF_THE_BATCH = "hidden states of all prompts", "hidden states of the batch"

TAKEN_BY_TASKS = (SLOTS, DENSE_SLOTS, ACTIVATIONS, KV_CACHE, KV_SLOTS, WAITING, OF_THE_BATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldSizes:
    """Bytes that one task takes, all GPUs of a group together.

    Attributes
    ----------
    prefill, decode : ActivationPieces
        Of one micro-batch; its new KV cache without what stays on the GPU [byte].
    kv_cache : mapping of str to float
        KV cache of the whole batch by level, as full as it gets [byte].
    kv_slot : float
        One micro-batch's KV cache of one layer on the GPU [byte].
    kv_landings : int
        Buffers in CPU memory for what of it is read from disk, each as large as it gets: those the plan counts, and
        more in the pinned ring, as far as weights leave it.
    waiting : float
        Hidden states of all prompts in CPU memory [byte].
    of_the_batch : float
        Hidden states of all requests on the GPU in decode [byte].
    on_cpu : float
        Activations of one micro-batch where everything is on the CPU [byte].
    """

    prefill: ActivationPieces
    decode: ActivationPieces
    kv_cache: Mapping[str, float]
    kv_slot: float
    kv_landings: int
    waiting: float
    of_the_batch: float
    on_cpu: float

    def pieces(self, phase: str) -> ActivationPieces:
        """Of one micro-batch of a phase."""
        return self.prefill if phase == "prefill" else self.decode


def hold_sizes(scenario: Scenario, sizes: Sizes, policy: Policy) -> HoldSizes:
    """Sizes of what the tasks of a policy take."""
    n, ring = float(policy.batch_size), policy.weight_slots == "experts"
    prefill = prefill_choice(scenario, n, float(policy.prefill_micro_batch_size))
    capacity = float(kv_capacity_bytes(scenario, sizes, n))
    in_cpu = 1.0 if policy.everything_on_cpu else max(0.0, 1.0 - policy.kv_on_gpu - policy.kv_on_disk)
    slot = 0.0
    if policy.attention_on_gpu:
        mu, budget = float(policy.micro_batch_size), float(policy.micro_batch_token_budget)
        slot = (1.0 - policy.kv_on_gpu) * float(kv_slot_bytes(scenario, mu, budget))
    landing = policy.kv_on_disk * capacity / (scenario.model.n_layers * policy.num_micro_batches)
    on_cpu = 0.0
    if policy.everything_on_cpu:
        on_cpu = cpu_only_memory(scenario, sizes, policy)["cpu"].terms[ACTIVATIONS]
    value = scenario.formats.activation_bytes
    row = scenario.model.hidden_size * scenario.profile.gpu.count
    first = activation_pieces(
        scenario,
        sizes,
        phase="prefill",
        requests=float(prefill.requests),
        tokens=float(prefill.tokens),
        ring=ring,
    )
    return HoldSizes(
        prefill=first._replace(new_kv=(1.0 - policy.kv_on_gpu) * first.new_kv),
        decode=activation_pieces(
            scenario,
            sizes,
            phase="decode",
            requests=float(policy.micro_batch_size),
            tokens=float(policy.micro_batch_token_budget),
            ring=ring,
        ),
        kv_cache={
            "gpu": policy.kv_on_gpu * capacity * kv_replicas(scenario),
            "cpu": in_cpu * capacity,
            "disk": policy.kv_on_disk * capacity,
        },
        kv_slot=slot,
        kv_landings=KV_LANDINGS + (int(STAGING_BUFFER_BYTES * (1.0 - ring_share(policy)) / landing) if landing else 0),
        waiting=float(worst_prompt_tokens(scenario, n)) * scenario.model.hidden_size * value,
        on_cpu=on_cpu,
        of_the_batch=n * row * (value + (value + 4.0 if ring else 0.0)),
    )


def standing(scenario: Scenario, sizes: Sizes, policy: Policy) -> dict[str, float]:
    """Bytes by level that are there from the first task to the last [byte]."""
    uses = cpu_only_memory(scenario, sizes, policy) if policy.everything_on_cpu else memory_use(scenario, sizes, policy)
    return {
        level: sum(size for term, size in use.terms.items() if term not in TAKEN_BY_TASKS)
        for level, use in uses.items()
    }


def ring_share(policy: Policy) -> float:
    """Share of the pinned ring that weights pass: none, all, or half of it, KV cache from disk having the rest."""
    if policy.pin_weights and policy.weights_on_disk <= 0:
        return 0.0
    return 0.5 if policy.kv_on_disk > 0 else 1.0


def held(level: str, term: str, size: Number) -> tuple[Hold, ...]:
    """One hold, or none where there is nothing to hold."""
    return (Hold(level, term, float(size)),) if size > 0.0 else ()

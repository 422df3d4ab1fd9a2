"""The mixed-integer program of the full cost model at one point of the outer search, and the policy it finds.

The point gives N, mu, A_g, F_g, the weight slots and the prefill micro-batch; the program chooses bytes on each level,
whole requests of KV cache, placement of the tables and pinning. Its objective, seconds of a batch end to end, is
linear since N is given.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hrm.affine import Affine, total
from hrm.full_cost import (
    DENSE,
    EMBEDDING,
    EXPERTS_ON_DISK,
    EXPERTS_ON_GPU,
    HEAD,
    KV_ON_DISK,
    KV_ON_GPU,
    RING,
)
from hrm.pins import Pins
from hrm.points import Point, PrefillChoice
from hrm.policy import Policy
from hrm.program import Program, Solution
from hrm.rates import Rates
from hrm.rows import PIN, PREFILL, objective_of, rows_of, seconds_of, tops_of
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes

__all__ = [
    "LIMITS",
    "TIE_BREAK",
    "build_program",
    "excess_of",
    "least_excess",
    "objective_with_tie_breaks",
    "policy_of",
]

KV_REQUESTS_ON_GPU = "kv_requests_on_gpu"  # whole requests of every micro-batch
KV_REQUESTS_ON_DISK = "kv_requests_on_disk"
ALL_KV_ON_GPU = "all_kv_on_gpu"  # binary: also the last, part-filled row of requests
RING_EXPERTS = "ring_experts"  # whole experts

GB = 1e9
LIMITS = {
    "gpu_memory_decode": GB / 2,  # counts twice: the hardest to add to
    "gpu_memory_prefill": GB / 2,
    "cpu_memory": GB,
    "disk_memory": GB,
    "lock_limit": GB,
    "lock_limit_weights": GB,
    "max_hours": 3600.0,
}
"""Rows that an elastic program may exceed, and the unit in which it counts the excess."""

TIE_BREAK = 1e-5
"""Share of the objective by which ties are broken: CPU memory before disk, the GPU before both."""


def build_program(
    scenario: Scenario,
    sizes: Sizes,
    rates: Rates,
    point: Point,
    pins: Pins,
    prefill: PrefillChoice,
    *,
    max_seconds: float,
    elastic: Collection[str] = (),
) -> Program:
    """The program of one point, every constraint named.

    Parameters
    ----------
    prefill : PrefillChoice
        Prefill micro-batch.
    max_seconds : float
        Bound on prefill + decode of one batch [s].
    elastic : collection of str
        Limits (of `LIMITS`) that may be exceeded, each by an unknown of its own (`excess_of`): what is then least is
        how far the point is from being feasible.
    """
    program = Program(f"N={point.size:.0f}, mu={point.micro_batch:.0f}, slots={point.slots}")
    streamed = sizes.streamed_bytes
    tops = {name: float(top) for name, top in tops_of(scenario, sizes, point).items()}
    ranges = {name: (0.0, top) for name, top in tops.items()}
    for name, share in ((EXPERTS_ON_GPU, pins.weights_on_gpu), (EXPERTS_ON_DISK, pins.weights_on_disk)):
        if share is not None:
            ranges[name] = (min(share * streamed, tops[name]),) * 2
    for name, (low, high) in ranges.items():
        program.add_unknown(name, low, high, scale=GB)
    binaries = {
        DENSE: pins.dense_weights_on_gpu,
        HEAD: pins.lm_head_on_gpu,
        EMBEDDING: pins.embedding_on_gpu,
        PIN: pins.pin_weights,
    }
    for name, value in binaries.items():
        low, high = (0.0, 1.0) if value is None else (float(value),) * 2
        program.add_unknown(name, low, high, integer=True)
    for unknown, _, _ in seconds_of(sizes):
        program.add_unknown(unknown)
    program.add_unknown(PREFILL)
    if sizes.tied:  # one matrix: on the GPU for both uses, or for neither
        program.equal("tied_tables", Affine.of(EMBEDDING) - Affine.of(HEAD), 0.0)
    if point.ring:
        program.add_unknown(RING_EXPERTS, 2.0, max(2.0, tops[RING] // sizes.expert_bytes), integer=True)
        whole = Affine.of(RING_EXPERTS, sizes.expert_bytes / GB)
        program.equal("ring_whole_experts", Affine.of(RING, 1 / GB) - whole, 0)
    _whole_requests(program, scenario, sizes, point, pins, tops)
    rows = rows_of(
        scenario,
        sizes,
        rates,
        point,
        prefill,
        max_seconds=max_seconds,
        pin_allowed=True,
        pin_required=pins.pin_weights is True,
    )
    for row in rows:
        left = row.left
        if row.name in elastic:
            if excess_of(row.name) not in program.unknowns:
                program.add_unknown(excess_of(row.name), scale=LIMITS[row.name])
            left = left - Affine.of(excess_of(row.name))
        program.at_most(row.name, left, 0.0, scale=row.scale)
    return program


def excess_of(limit: str) -> str:
    """Name of the unknown by which an elastic program exceeds a limit; rows of one resource share it."""
    shared = {"gpu_memory_decode": "gpu_memory", "gpu_memory_prefill": "gpu_memory", "lock_limit_weights": "lock_limit"}
    return f"excess_{shared.get(limit, limit)}"


def least_excess(program: Program) -> Affine:
    """Objective of an elastic program: all excesses, in GB and in hours."""
    scales = {excess_of(name): scale for name, scale in LIMITS.items()}
    return total(Affine.of(name, 1.0 / scale) for name, scale in scales.items() if name in program.unknowns)


def _whole_requests(
    program: Program, scenario: Scenario, sizes: Sizes, point: Point, pins: Pins, tops: dict[str, float]
) -> None:
    """KV cache moves as whole requests: the same number of every micro-batch, or all of them."""
    capacity = float(kv_capacity_bytes(scenario, sizes, point.size))
    whole = int(float(point.size) // float(point.micro_batches))
    unit = capacity / float(point.size) * float(point.micro_batches)
    for name, requests, share in (
        (KV_ON_GPU, KV_REQUESTS_ON_GPU, pins.kv_on_gpu),
        (KV_ON_DISK, KV_REQUESTS_ON_DISK, pins.kv_on_disk),
    ):
        top = whole if tops[name] else 0
        low, high = (0, top) if share is None else (min(top, int(share * whole + 1e-9)),) * 2
        program.add_unknown(requests, low, high, integer=True)
        held = Affine.of(requests, unit / GB)
        if name == KV_ON_GPU:
            # A share pinned to disk may round down to no whole request; even so not all of it is on the GPU.
            free = 0.0 if pins.kv_on_disk else 1.0
            low_all, high_all = (0.0, free) if share is None else (float(share >= 1.0),) * 2
            program.add_unknown(ALL_KV_ON_GPU, low_all, high_all, integer=True)
            program.at_most("all_kv_requests", Affine.of(ALL_KV_ON_GPU, float(whole)), Affine.of(requests))
            held = held + Affine.of(ALL_KV_ON_GPU, max(0.0, capacity - unit * whole) / GB)
        program.equal(f"{name}_whole_requests", Affine.of(name, 1 / GB) - held, 0.0)


def objective_with_tie_breaks(scenario: Scenario, sizes: Sizes, point: Point, reference_s: float) -> Affine:
    """Seconds of one batch, plus tie-breaks worth 1e-5 of `reference_s` [s] at most."""
    part = TIE_BREAK * reference_s / 4
    capacity = float(kv_capacity_bytes(scenario, sizes, point.size))
    return (
        objective_of(sizes)
        + Affine.of(EXPERTS_ON_DISK, part / sizes.streamed_bytes)
        + Affine.of(KV_ON_DISK, part / capacity)
        - Affine.of(EXPERTS_ON_GPU, part / sizes.streamed_bytes)
    )


def policy_of(scenario: Scenario, sizes: Sizes, point: Point, prefill: PrefillChoice, solution: Solution) -> Policy:
    """The policy a solution means, with shares as realised: rows of weights rounded down, whole requests."""
    values = solution.values
    layer = sizes.layer_expert_bytes
    row = scenario.model.hidden_size * sizes.expert_bytes / scenario.model.streamed_expert_parameters
    per_layer = values[EXPERTS_ON_GPU] / sizes.streamed_layers
    # A share that is all, up to the solver's tolerance, is all.
    on_gpu = layer if per_layer > layer - row / 2 else np.floor(per_layer / row + 1e-6) * row
    on_disk = np.ceil(values[EXPERTS_ON_DISK] / sizes.streamed_layers / row - 1e-6) * row
    on_disk = min(max(0.0, on_disk), layer - on_gpu)
    n, n_ub = int(point.size), int(point.micro_batches)
    all_kv = values[ALL_KV_ON_GPU] > 0.5
    return Policy(
        batch_size=n,
        micro_batch_size=int(point.micro_batch),
        num_micro_batches=n_ub,
        prefill_micro_batch_size=int(prefill.requests),
        attention_on_gpu=point.attention_on_gpu,
        ffn_on_gpu=point.ffn_on_gpu,
        weights_on_gpu=float(on_gpu / layer),
        weights_on_disk=float(on_disk / layer),
        kv_on_gpu=1.0 if all_kv else values[KV_REQUESTS_ON_GPU] * n_ub / n,
        kv_on_disk=values[KV_REQUESTS_ON_DISK] * n_ub / n,
        weight_slots=point.slots,
        ring_experts=int(values[RING_EXPERTS]) if point.ring else 0,
        dense_weights_on_gpu=values[DENSE] > 0.5,
        embedding_on_gpu=values[EMBEDDING] > 0.5,
        lm_head_on_gpu=values[HEAD] > 0.5,
        pin_weights=values[PIN] > 0.5,
        micro_batch_token_budget=int(scenario.workload.micro_batch_token_bound(n, n_ub, int(point.micro_batch))),
    )

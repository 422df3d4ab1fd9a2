"""The mixed-integer program of the full cost model, for one batch, one micro-batch size, one A_g and F_g.

With N, mu, A_g and F_g given everything is linear: bytes on each level are continuous, KV cache moves as whole
requests, and slots, placement of tables, pinning and the prefill micro-batch are binary. The objective, seconds of
one batch end to end, is linear too, since N is given; the outer search (`hrm.search`) runs over N and mu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    RING_SLOTS,
    Batch,
    Lanes,
    decode_lanes,
    prefill_lanes,
)
from hrm.memory import DENSE_SLOTS, EXPERT_SLOTS, cpu_terms, disk_terms, gpu_terms, limit_bytes, pinned_terms
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.program import Program, Solution
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes, worst_prompt_tokens

__all__ = ["Node", "build_program", "policy_of", "prefill_candidates"]

STEP = "decode_step_s"
PREFILL = "prefill_s"
PIN = "pin_weights"  # binary
ONE_SLOT = "one_slot"  # binary, else two
KV_REQUESTS_ON_GPU = "kv_requests_on_gpu"  # whole requests of every micro-batch
KV_REQUESTS_ON_DISK = "kv_requests_on_disk"
ALL_KV_ON_GPU = "all_kv_on_gpu"  # binary: also the last, part-filled row of requests
RING_EXPERTS = "ring_experts"  # whole experts

GB = 1e9
TIE_BREAK = 1e-5
"""Share of the objective by which ties are broken: not pinned before pinned, CPU memory before disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What the outer search fixes.

    Attributes
    ----------
    batch_size, micro_batch_size, num_micro_batches : int
        N, mu, n_ub.
    attention_on_gpu, ffn_on_gpu : bool
        A_g, F_g.
    ring : bool
        Expert weights come through a ring of experts, else through one or two slots of a layer.
    """

    batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    attention_on_gpu: bool
    ffn_on_gpu: bool
    ring: bool

    @property
    def batch(self) -> Batch:
        """As the cost functions take it."""
        return Batch(
            size=float(self.batch_size),
            micro_batches=float(self.num_micro_batches),
            attention_on_gpu=self.attention_on_gpu,
            ffn_on_gpu=self.ffn_on_gpu,
        )


def prefill_tokens(scenario: Scenario, batch_size: int, requests: int) -> float:
    """Prompt tokens a prefill micro-batch of at most that many requests may hold, however they are drawn."""
    workload = scenario.workload
    parts = -(-batch_size // requests)
    worst = float(worst_prompt_tokens(scenario, float(batch_size)))
    return min(requests * float(workload.max_prompt_tokens), worst / parts + workload.max_prompt_tokens)


def prefill_candidates(scenario: Scenario, sizes: Sizes, rates: Rates, node: Node, pins: Pins) -> list[int]:
    """Prefill micro-batch sizes worth trying: each faster than every smaller one by at least 0.1 %.

    A larger one needs more memory and reads the weights from GPU memory less often; past the point where products are
    bound by FLOPs nothing is won. All sizes to 16, then in steps of about 8 %.
    """
    n = node.batch_size
    if pins.prefill_micro_batch_size is not None:
        return [min(pins.prefill_micro_batch_size, n)]
    most = limit_bytes(scenario.profile)["gpu"]
    sizes_tried = sorted({-(-n // max(1, round(n / m))) for m in _ladder(n)})
    chosen: list[int] = []
    best = np.inf
    for m in sizes_tried:
        terms = gpu_terms(
            scenario, sizes, node.batch, phase="prefill", requests=m, tokens=prefill_tokens(scenario, n, m)
        )
        if float(terms["activations"].constant) > most and chosen:
            break
        lanes = prefill_lanes(scenario, sizes, rates, node.batch, float(-(-n // m)), ring=node.ring)
        seconds = float(lanes.always["gpu"].constant)
        if node.ring:
            seconds = max(seconds, float(lanes.always["host_to_device"].at({})))
        if seconds < best * 0.999 or not chosen:
            chosen.append(m)
            best = seconds
    return chosen


def _ladder(most: int) -> list[int]:
    """1, 2, ... 16, then about 8 % apart, up to `most`."""
    steps, value = list(range(1, min(most, 16) + 1)), 16.0
    while value * 1.08 < most:
        value *= 1.08
        steps.append(round(value))
    return [*steps, most]


def _upper(affine: Affine, tops: dict[str, float]) -> float:
    """Largest value the expression can take, every unknown between 0 and its top."""
    return float(affine.constant) + sum(
        max(0.0, float(value) * tops.get(name, 0.0)) for name, value in affine.coefficients.items()
    )


def _choose(parts: dict[int, Affine]) -> Affine:
    """One expression out of several that differ in their constants, by the binaries of the prefill micro-batch."""
    some = next(iter(parts.values()))
    return Affine(0.0, some.coefficients) + total(
        Affine.of(f"prefill_{size}", float(part.constant)) for size, part in parts.items()
    )


def build_program(scenario: Scenario, sizes: Sizes, rates: Rates, node: Node, pins: Pins, max_seconds: float) -> Program:
    """The program of one node, every constraint named; its objective is set by `hrm.search`.

    Parameters
    ----------
    max_seconds : float
        Bound on prefill + decode of one batch [s].
    """
    profile, limits = scenario.profile, limit_bytes(scenario.profile)
    batch, n, n_ub = node.batch, node.batch_size, node.num_micro_batches
    layers = sizes.streamed_layers
    capacity = float(kv_capacity_bytes(scenario, sizes, float(n)))
    program = Program(f"N={n}, mu={node.micro_batch_size}")

    # Unknowns
    streamed, has_disk = sizes.streamed_bytes, profile.disk is not None
    tops = {
        EXPERTS_ON_GPU: streamed if node.ffn_on_gpu else 0.0,
        EXPERTS_ON_DISK: streamed if has_disk else 0.0,
        KV_ON_GPU: capacity,
        KV_ON_DISK: capacity if has_disk else 0.0,
        EXPERT_SLOTS: 2.0 * sizes.layer_expert_bytes,
        DENSE_SLOTS: 2.0 * sizes.largest_dense_layer_bytes,
        RING: sizes.layer_expert_bytes if node.ring else 0.0,
    }
    ranges = {name: (0.0, top) for name, top in tops.items()}
    for name, share, whole in (
        (EXPERTS_ON_GPU, pins.weights_on_gpu, streamed),
        (EXPERTS_ON_DISK, pins.weights_on_disk, streamed),
    ):
        if share is not None:
            ranges[name] = (min(share * whole, tops[name]), min(share * whole, tops[name]))
    for name, (low, high) in ranges.items():
        program.add_unknown(name, low, high, scale=GB)
    binaries = {
        DENSE: pins.dense_weights_on_gpu,
        HEAD: pins.lm_head_on_gpu,
        EMBEDDING: pins.embedding_on_gpu,
        PIN: pins.pin_weights,
        ONE_SLOT: None if pins.weight_slots is None or node.ring else pins.weight_slots == 1,
        RING_SLOTS: node.ring,
    }
    if node.ring:
        binaries[ONE_SLOT] = False
    for name, value in binaries.items():
        low, high = (0.0, 1.0) if value is None else (float(value), float(value))
        program.add_unknown(name, low, high, integer=True)
    candidates = prefill_candidates(scenario, sizes, rates, node, pins)
    for size in candidates:
        program.add_unknown(f"prefill_{size}", 0.0, 1.0, integer=True)
    program.equal("one_prefill_micro_batch", total(Affine.of(f"prefill_{size}") for size in candidates), 1.0)
    program.add_unknown(STEP)
    program.add_unknown(PREFILL)
    if sizes.tied:  # one matrix: on the GPU for both uses, or for neither
        program.equal("tied_tables", Affine.of(EMBEDDING) - Affine.of(HEAD), 0.0)

    # KV cache moves as whole requests of every micro-batch
    whole = n // n_ub
    unit = capacity / n * n_ub
    for name, requests, share in (
        (KV_ON_GPU, KV_REQUESTS_ON_GPU, pins.kv_on_gpu),
        (KV_ON_DISK, KV_REQUESTS_ON_DISK, pins.kv_on_disk),
    ):
        top = 0 if tops[name] == 0.0 else whole
        low, high = (0, top) if share is None else (min(top, int(share * whole + 1e-9)),) * 2
        program.add_unknown(requests, low, high, integer=True)
        held = Affine.of(requests, unit)
        if name == KV_ON_GPU:
            fixed = None if share is None else float(share == 1.0)
            program.add_unknown(ALL_KV_ON_GPU, fixed or 0.0, 1.0 if fixed is None else fixed, integer=True)
            program.at_most("all_kv_requests", Affine.of(ALL_KV_ON_GPU, float(whole)), Affine.of(requests))
            held = held + Affine.of(ALL_KV_ON_GPU, capacity - unit * whole)
        program.at_most(f"{name}_whole", Affine.of(name), held, scale=GB)
        program.at_most(f"{name}_whole_below", held, Affine.of(name), scale=GB)
    program.at_most("kv_cache", Affine.of(KV_ON_GPU) + Affine.of(KV_ON_DISK), capacity, scale=GB)
    program.at_most("expert_weights", Affine.of(EXPERTS_ON_GPU) + Affine.of(EXPERTS_ON_DISK), streamed, scale=GB)

    # Buffers for streamed weights
    layer_on_cpu = (streamed - Affine.of(EXPERTS_ON_GPU)) / layers
    layer = sizes.layer_expert_bytes
    if node.ring:
        program.add_unknown(RING_EXPERTS, 2.0, max(2.0, layer // sizes.expert_bytes), integer=True)
        ring = Affine.of(RING_EXPERTS, sizes.expert_bytes)
        program.at_most("ring_whole_experts", Affine.of(RING), ring, scale=GB)
        program.at_most("ring_within_layer", ring, layer_on_cpu, scale=GB)
        program.at_most("expert_slots", ring, Affine.of(EXPERT_SLOTS), scale=GB)
    else:
        program.at_most("expert_slots", layer_on_cpu, Affine.of(EXPERT_SLOTS), scale=GB)
        two = 2.0 * layer_on_cpu - Affine.of(ONE_SLOT, 2.0 * layer)
        program.at_most("two_expert_slots", two, Affine.of(EXPERT_SLOTS), scale=GB)
    dense = sizes.largest_dense_layer_bytes
    program.at_most("dense_slots", dense - Affine.of(DENSE, dense), Affine.of(DENSE_SLOTS), scale=GB)
    two_dense = 2.0 * dense - Affine.of(DENSE, 2.0 * dense) - Affine.of(ONE_SLOT, 2.0 * dense)
    program.at_most("two_dense_slots", two_dense, Affine.of(DENSE_SLOTS), scale=GB)

    # Memory
    tokens = float(scenario.workload.micro_batch_token_bound(n, n_ub, node.micro_batch_size))
    decode = gpu_terms(
        scenario, sizes, batch, phase="decode", requests=float(node.micro_batch_size), tokens=tokens
    )
    program.at_most("gpu_memory_decode", total(decode.values()), limits["gpu"], scale=GB)
    in_prefill = {
        size: total(
            gpu_terms(
                scenario, sizes, batch, phase="prefill", requests=float(size), tokens=prefill_tokens(scenario, n, size)
            ).values()
        )
        for size in candidates
    }
    program.at_most("gpu_memory_prefill", _choose(in_prefill), limits["gpu"], scale=GB)
    in_cpu = {
        size: total(
            cpu_terms(
                scenario,
                sizes,
                batch,
                requests=float(node.micro_batch_size),
                prefill_micro_batches=1.0 if node.ring else float(-(-n // size)),
            ).values()
        )
        for size in candidates
    }
    program.at_most("cpu_memory", _choose(in_cpu), limits["cpu"], scale=GB)
    if has_disk:
        program.at_most("disk_memory", total(disk_terms().values()), limits["disk"], scale=GB)
    _limit_pinned_memory(program, scenario, sizes, node, capacity)

    # Time
    decode_rows = decode_lanes(scenario, sizes, rates, batch)
    tops.update({DENSE: 1.0, HEAD: 1.0, EMBEDDING: 1.0, RING_SLOTS: 1.0})
    _bind(program, STEP, decode_rows, sizes, rates, node, tops, "decode")
    prefill_rows = {
        size: prefill_lanes(scenario, sizes, rates, batch, float(-(-n // size)), ring=node.ring) for size in candidates
    }
    if node.ring:  # copies again for every micro-batch: coefficients differ, so one set of rows each
        for size, rows in prefill_rows.items():
            _bind(program, PREFILL, rows, sizes, rates, node, tops, f"prefill_{size}", when=f"prefill_{size}")
    else:
        _bind(program, PREFILL, _choose_lanes(prefill_rows), sizes, rates, node, tops, "prefill")
    program.at_most("max_hours", Affine.of(PREFILL) + Affine.of(STEP, float(sizes.decode_steps)), max_seconds)
    return program


def _choose_lanes(rows: dict[int, Lanes]) -> Lanes:
    """Lanes whose constants depend on the binaries of the prefill micro-batch."""
    some = next(iter(rows.values()))
    return replace(
        some,
        always={lane: _choose({size: row.always[lane] for size, row in rows.items()}) for lane in some.always},
        when_staged={
            lane: _choose({size: row.when_staged[lane] for size, row in rows.items()}) for lane in some.when_staged
        },
    )


def _bind(
    program: Program,
    unknown: str,
    rows: Lanes,
    sizes: Sizes,
    rates: Rates,
    node: Node,
    tops: dict[str, float],
    prefix: str,
    when: str | None = None,
) -> None:
    """Make `unknown` at least every lane; and at least copy + computation where one buffer forbids overlap."""

    def add(name: str, left: Affine, off: Affine | None = None) -> None:
        slack = Affine() if off is None else off
        if when is not None:
            slack = slack + (1.0 - Affine.of(when))
        large = _upper(left, {**tops, **{key: 1.0 for key in left.coefficients if key.startswith("prefill_")}})
        program.at_most(f"{prefix}_{name}", left - slack * large, Affine.of(unknown))

    for lane, seconds in rows.always.items():
        add(lane, seconds)
    for lane, seconds in rows.when_staged.items():
        add(f"{lane}_unpinned", seconds, Affine.of(PIN))
    if node.ring:
        if rows.attention_phase:
            hidden = Affine.of(RING, sizes.streamed_layers / rates.h2d_bytes_per_s)
            for lane, seconds in rows.attention_phase.items():
                add(f"ring_waits_for_{lane}", rows.weight_copies - hidden + seconds)
    else:
        for lane in ("gpu", "cpu"):
            if rows.always[lane].coefficients or np.any(rows.always[lane].constant):
                add(f"one_slot_{lane}", rows.weight_copies + rows.always[lane], 1.0 - Affine.of(ONE_SLOT))


def _limit_pinned_memory(program: Program, scenario: Scenario, sizes: Sizes, node: Node, capacity: float) -> None:
    """Keep page-locked bytes within the host's lock limit, where it has one."""
    limit = scenario.profile.cpu.lockable_bytes
    if limit is None:
        return
    buffers = total(pinned_terms(scenario, node.batch, float(node.micro_batch_size)).values())
    if node.attention_on_gpu:  # copied each step, so page-locked
        buffers = buffers + capacity - Affine.of(KV_ON_GPU) - Affine.of(KV_ON_DISK)
    program.at_most("lock_limit", buffers, limit, scale=GB)
    tables = 0.0 if sizes.tied else sizes.lm_head_bytes
    weights = (
        sizes.streamed_bytes - Affine.of(EXPERTS_ON_GPU) - Affine.of(EXPERTS_ON_DISK)
        + (sizes.dense_bytes - Affine.of(DENSE, sizes.dense_bytes))
        + (tables - Affine.of(HEAD, tables))
    )
    most = sizes.weight_bytes
    unpinned = most - Affine.of(PIN, most)
    program.at_most("lock_limit_weights", buffers + weights - unpinned, limit, scale=GB)


def objective(sizes: Sizes, scenario: Scenario, node: Node, reference_s: float) -> Affine:
    """Seconds of one batch, plus tie-breaks worth 1e-5 of `reference_s` [s]."""
    epsilon = TIE_BREAK * reference_s
    capacity = float(kv_capacity_bytes(scenario, sizes, float(node.batch_size)))
    return (
        Affine.of(PREFILL)
        + Affine.of(STEP, float(sizes.decode_steps))
        + Affine.of(PIN, epsilon / 4)
        + Affine.of(EXPERTS_ON_DISK, epsilon / 4 / sizes.streamed_bytes)
        + Affine.of(KV_ON_DISK, epsilon / 4 / capacity)
        - Affine.of(EXPERTS_ON_GPU, epsilon / 4 / sizes.streamed_bytes)
    )


def policy_of(scenario: Scenario, sizes: Sizes, node: Node, solution: Solution) -> Policy:
    """The policy a solution means, with shares as realised: rows of weights rounded down, whole requests."""
    values = solution.values
    row = scenario.model.hidden_size * sizes.expert_bytes / scenario.model.streamed_expert_parameters
    per_layer = values[EXPERTS_ON_GPU] / sizes.streamed_layers
    # A share that is all, up to the solver's tolerance, is all.
    on_gpu = sizes.layer_expert_bytes if per_layer > sizes.layer_expert_bytes - row else np.floor(per_layer / row) * row
    on_disk = np.ceil(values[EXPERTS_ON_DISK] / sizes.streamed_layers / row - 1e-6) * row
    on_disk = min(max(0.0, on_disk), sizes.layer_expert_bytes - on_gpu)
    capacity = float(kv_capacity_bytes(scenario, sizes, float(node.batch_size)))
    unit = capacity / node.batch_size * node.num_micro_batches
    all_kv = values[ALL_KV_ON_GPU] > 0.5
    kv_on_gpu = 1.0 if all_kv else values[KV_REQUESTS_ON_GPU] * unit / capacity
    prefill = next(int(name[8:]) for name, value in values.items() if name.startswith("prefill_") and name[8:].isdigit() and value > 0.5)
    one_slot = values[ONE_SLOT] > 0.5
    return Policy(
        batch_size=node.batch_size,
        micro_batch_size=node.micro_batch_size,
        num_micro_batches=node.num_micro_batches,
        prefill_micro_batch_size=prefill,
        attention_on_gpu=node.attention_on_gpu,
        ffn_on_gpu=node.ffn_on_gpu,
        weights_on_gpu=float(on_gpu / sizes.layer_expert_bytes),
        weights_on_disk=float(on_disk / sizes.layer_expert_bytes),
        kv_on_gpu=min(1.0, kv_on_gpu),
        kv_on_disk=min(1.0, values[KV_REQUESTS_ON_DISK] * unit / capacity),
        weight_slots="experts" if node.ring else (1 if one_slot else 2),
        ring_experts=int(values[RING_EXPERTS]) if node.ring else 0,
        dense_weights_on_gpu=values[DENSE] > 0.5,
        embedding_on_gpu=values[EMBEDDING] > 0.5,
        lm_head_on_gpu=values[HEAD] > 0.5,
        pin_weights=values[PIN] > 0.5,
        micro_batch_token_budget=int(
            scenario.workload.micro_batch_token_bound(
                node.batch_size, node.num_micro_batches, node.micro_batch_size
            )
        ),
    )

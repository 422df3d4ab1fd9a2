"""Closed-form lower bounds on the seconds of a batch, for every batch and micro-batch size at once.

A node of the search is (N, mu, A_g, F_g, ring). Its bound comes from the same `Affine` lanes and memory terms as its
program, with what competes for memory decided separately for every lane: each lane is given all the GPU memory there
is. Where two lanes want the same memory (weights for the link, KV cache for the CPU), a weighted sum of both is bounded
too. A bound never exceeds the optimum of the node's program, so a node whose bound is above the incumbent is discarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

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
from hrm.memory import DENSE_SLOTS, EXPERT_SLOTS, cpu_terms, gpu_terms, limit_bytes
from hrm.pins import Pins
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes, worst_prompt_tokens

__all__ = ["Grid", "bound_nodes", "candidate_batches"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Candidate batches: arrays of equal length.

    Attributes
    ----------
    size, micro_batch, micro_batches, batches : ndarray of float
        N, mu, n_ub, and how many batches all requests make.
    """

    size: Array
    micro_batch: Array
    micro_batches: Array
    batches: Array


def candidate_batches(requests: int, pins: Pins) -> Grid:
    """Every (N, mu) worth considering for R requests.

    Batches are equal: b = ceil(R/N) and N = ceil(R/b), so N takes at most 2*sqrt(R) values. For each N and each
    number of micro-batches only the smallest mu that makes it is kept: a larger one needs more memory for nothing.
    """
    if pins.batch_size is not None:
        sizes = [min(pins.batch_size, requests)]
    elif pins.micro_batch_size is not None and pins.num_micro_batches is not None:
        sizes = [min(pins.micro_batch_size * pins.num_micro_batches, requests)]
    else:
        sizes = sorted({-(-requests // count) for count in _distinct_divisions(requests)})
    rows: list[tuple[int, int, int, int]] = []
    for size in sizes:
        if pins.micro_batch_size is not None:
            counts = [-(-size // pins.micro_batch_size)]
            if pins.num_micro_batches not in (None, counts[0]):
                continue
            micro = [min(pins.micro_batch_size, size)]
        elif pins.num_micro_batches is not None:
            counts = [pins.num_micro_batches] if pins.num_micro_batches <= size else []
            micro = [-(-size // count) for count in counts]
            counts = [c for c, m in zip(counts, micro, strict=True) if -(-size // m) == c]
            micro = micro[: len(counts)]
        else:
            micro = sorted({-(-size // count) for count in _distinct_divisions(size)})
            counts = [-(-size // m) for m in micro]
        rows += [(size, m, count, -(-requests // size)) for m, count in zip(micro, counts, strict=True)]
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    return Grid(size=table[:, 0], micro_batch=table[:, 1], micro_batches=table[:, 2], batches=table[:, 3])


def _distinct_divisions(total_count: int) -> list[int]:
    """Numbers of parts that give distinct ceil(total/parts), smallest first."""
    parts, result = 1, []
    while True:
        result.append(parts)
        size = -(-total_count // parts)
        if size == 1:
            return result
        parts = -(-total_count // (size - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What GPU and CPU memory leave for one structure: upper limits of the unknowns, arrays over the grid."""

    experts: Array  # most bytes of experts on the GPU
    least_experts: Array
    kv: Array  # most bytes of KV cache on the GPU
    expert_price: float  # GPU bytes that one byte of experts takes, slots that shrink taken off
    kv_price: Array
    free: Array  # GPU bytes for both
    overflow: Array  # bytes that must lie on disk
    feasible: npt.NDArray[np.bool_]


def _least(affine: Affine, room: _Room, ring_bytes: Array | float) -> Array:
    """Least value of a lane over what memory allows (a lower bound)."""
    constant = np.asarray(affine.constant, dtype=np.float64)
    x = np.asarray(affine.coefficient(EXPERTS_ON_GPU), dtype=np.float64)
    k = np.asarray(affine.coefficient(KV_ON_GPU), dtype=np.float64)
    gain_x, gain_k = np.maximum(-x, 0.0), np.maximum(-k, 0.0)
    apart = gain_x * room.experts + gain_k * room.kv
    if np.any(gain_x > 0) and np.any(gain_k > 0) and room.expert_price > 0:
        best = np.maximum(gain_x / room.expert_price, np.where(room.kv_price > 0, gain_k / np.maximum(room.kv_price, 1e-12), np.inf))
        gain = np.minimum(apart, best * room.free)
    else:
        gain = apart
    least = constant - gain + np.maximum(x, 0.0) * room.least_experts
    # Disk: what must lie there lies where it costs this lane least.
    on_disk = np.asarray(affine.coefficient(EXPERTS_ON_DISK), dtype=np.float64)
    kv_disk = np.asarray(affine.coefficient(KV_ON_DISK), dtype=np.float64)
    least = least + np.maximum(np.minimum(on_disk, kv_disk), 0.0) * room.overflow
    return least + np.asarray(affine.coefficient(RING), dtype=np.float64) * ring_bytes


def _pass_bound(
    rows: Lanes, room: _Room, sizes: Sizes, rates: Rates, *, ring: bool, one_slot: bool, staged: bool
) -> Array:
    """Lower bound on the seconds of one pass."""
    lanes = dict(rows.always)
    if staged:  # the weights cannot be pinned; those on disk need no staging
        lanes = {**lanes, "staging": _without_disk(rows.when_staged["staging"])}
    bound = np.maximum.reduce([_least(lane, room, 0.0) for lane in lanes.values()])
    link, cpu = rows.always["host_to_device"], rows.always["cpu"]
    x, k = -np.asarray(link.coefficient(EXPERTS_ON_GPU)), -np.asarray(cpu.coefficient(KV_ON_GPU))
    if np.any(x > 0) and np.any(k > 0) and room.expert_price > 0:
        # Weights that make both lanes want the GPU memory equally: the tightest mix of the two.
        density_x, density_k = x / room.expert_price, k / np.maximum(room.kv_price, 1e-12)
        share = density_k / (density_x + density_k)
        bound = np.maximum(bound, _least(link * share + cpu * (1.0 - share), room, 0.0))
    if one_slot:
        for lane in ("gpu", "cpu"):
            bound = np.maximum(bound, _least(rows.weight_copies + rows.always[lane], room, 0.0))
    if ring:
        most = np.minimum(sizes.layer_expert_bytes, np.maximum(room.free, 0.0))
        hidden = Affine.of(RING, sizes.streamed_layers / rates.h2d_bytes_per_s)
        for lane in rows.attention_phase.values():
            bound = np.maximum(bound, _least(rows.weight_copies - hidden + lane, room, most))
    return bound


def _without_disk(affine: Affine) -> Affine:
    coefficients = {name: value for name, value in affine.coefficients.items() if name != EXPERTS_ON_DISK}
    return Affine(affine.constant, coefficients)


def _structures(pins: Pins, tied: bool, ring: bool) -> Iterator[tuple[bool, bool, bool, bool]]:
    """(one_slot, dense, lm_head, embedding) on the GPU: every combination the pins leave."""

    def choices(pinned: bool | None) -> tuple[bool, ...]:
        return (True, False) if pinned is None else (pinned,)

    slots = (False,) if ring else choices(None if pins.weight_slots is None else pins.weight_slots == 1)
    for one_slot, dense, head in product(slots, choices(pins.dense_weights_on_gpu), choices(pins.lm_head_on_gpu)):
        # The embedding weighs little in time; whichever place is free of memory is a bound for both.
        for embedding in (head,) if tied else choices(pins.embedding_on_gpu):
            yield one_slot, dense, head, embedding


def bound_nodes(
    scenario: Scenario,
    sizes: Sizes,
    rates: Rates,
    grid: Grid,
    pins: Pins,
    *,
    attention_on_gpu: bool,
    ffn_on_gpu: bool,
    ring: bool,
    staged: bool,
) -> Array:
    """Lower bound on prefill + decode seconds of every batch of the grid; infinite where nothing fits.

    Parameters
    ----------
    grid : Grid
    attention_on_gpu, ffn_on_gpu, ring : bool
        The rest of the node.
    staged : bool
        The weights may not be pinned (by a pin or by the host's lock limit).

    Returns
    -------
    ndarray of float
        Shape (len(grid.size),) [s].
    """
    batch = Batch(
        size=grid.size,
        micro_batches=grid.micro_batches,
        attention_on_gpu=attention_on_gpu,
        ffn_on_gpu=ffn_on_gpu,
    )
    limits = limit_bytes(scenario.profile)
    capacity = np.asarray(kv_capacity_bytes(scenario, sizes, grid.size))
    workload = scenario.workload
    decode_rows = decode_lanes(scenario, sizes, rates, batch)
    parts, activations = _best_prefill(scenario, sizes, rates, batch, grid, pins, ring=ring, limit=limits["gpu"])
    prefill_rows = prefill_lanes(scenario, sizes, rates, batch, parts, ring=ring)
    tokens = np.asarray(
        workload.micro_batch_token_bound(
            grid.size.astype(np.int64), grid.micro_batches.astype(np.int64), grid.micro_batch.astype(np.int64)
        ),
        dtype=np.float64,
    )
    in_decode = total(
        gpu_terms(scenario, sizes, batch, phase="decode", requests=grid.micro_batch, tokens=tokens).values()
    )
    in_prefill = total(
        gpu_terms(scenario, sizes, batch, phase="prefill", requests=1.0 + 0.0 * grid.size, tokens=activations).values()
    )
    in_cpu = total(
        cpu_terms(scenario, sizes, batch, requests=grid.micro_batch, prefill_micro_batches=1.0).values()
    )
    best = np.full(grid.size.shape, np.inf)
    for one_slot, dense, head, embedding in _structures(pins, sizes.tied, ring):
        fixed = {DENSE: float(dense), HEAD: float(head), EMBEDDING: float(embedding), RING_SLOTS: float(ring)}
        room = _find_room(
            sizes, pins, in_decode.substitute(fixed), in_prefill.substitute(fixed), in_cpu.substitute(fixed), limits,
            capacity, ring=ring, one_slot=one_slot, dense=dense, ffn_on_gpu=ffn_on_gpu,
        )
        if not np.any(room.feasible):
            continue
        seconds = _pass_bound(
            _fix(prefill_rows, fixed), room, sizes, rates, ring=False, one_slot=one_slot, staged=staged
        ) + sizes.decode_steps * _pass_bound(
            _fix(decode_rows, fixed), room, sizes, rates, ring=ring, one_slot=one_slot, staged=staged
        )
        best = np.minimum(best, np.where(room.feasible, seconds, np.inf))
    return best


def _fix(rows: Lanes, fixed: dict[str, float]) -> Lanes:
    return Lanes(
        always={lane: seconds.substitute(fixed) for lane, seconds in rows.always.items()},
        when_staged={lane: seconds.substitute(fixed) for lane, seconds in rows.when_staged.items()},
        weight_copies=rows.weight_copies.substitute(fixed),
        attention_phase={lane: seconds.substitute(fixed) for lane, seconds in rows.attention_phase.items()},
        bytes_moved={},
    )


def _best_prefill(
    scenario: Scenario, sizes: Sizes, rates: Rates, batch: Batch, grid: Grid, pins: Pins, *, ring: bool, limit: float
) -> tuple[Array, Array]:
    """Fewest prefill micro-batches whose activations alone fit the GPU, and prompt tokens of the smallest one.

    More micro-batches never make the GPU faster, so the fewest bound its time; the smallest one bounds its memory.
    """
    workload = scenario.workload
    longest = float(workload.max_prompt_tokens)
    if pins.prefill_micro_batch_size is not None:
        size = np.minimum(float(pins.prefill_micro_batch_size), grid.size)
        parts = np.ceil(grid.size / size)
        worst = np.asarray(worst_prompt_tokens(scenario, grid.size))
        return parts, np.minimum(size * longest, worst / parts + longest)
    probe = gpu_terms(scenario, sizes, batch, phase="prefill", requests=1.0, tokens=1.0)["activations"]
    per_token = float(np.max(np.asarray(probe.constant)))
    per_token = min(per_token, float(np.asarray(
        gpu_terms(scenario, sizes, batch, phase="prefill", requests=1.0, tokens=1e6)["activations"].constant
    ).max()) / 1e6)
    most_requests = max(1.0, limit / per_token / sizes.prompt_tokens)
    return np.maximum(1.0, np.ceil(grid.size / most_requests)), np.minimum(longest, longest + 0.0 * grid.size)


def _find_room(
    sizes: Sizes,
    pins: Pins,
    decode: Affine,
    prefill: Affine,
    cpu: Affine,
    limits: dict[str, float],
    capacity: Array,
    *,
    ring: bool,
    one_slot: bool,
    dense: bool,
    ffn_on_gpu: bool,
) -> _Room:
    """How much of experts and KV cache the GPU can hold, and what must go to disk, for one structure."""
    streamed, layers, layer = sizes.streamed_bytes, sizes.streamed_layers, sizes.layer_expert_bytes
    slots = 0.0 if ring else (1.0 if one_slot else 2.0)
    least_slots = 2.0 * sizes.expert_bytes if ring else 0.0
    dense_slots = 0.0 if dense else (1.0 if one_slot else 2.0) * sizes.largest_dense_layer_bytes
    buffers = {EXPERT_SLOTS: slots * layer + least_slots, DENSE_SLOTS: dense_slots}
    price = 1.0 - slots / layers  # a byte more on the GPU is a byte less in every slot
    top = streamed if ffn_on_gpu else 0.0
    low = 0.0
    if pins.weights_on_gpu is not None:
        low = top = min(pins.weights_on_gpu * streamed, top)
    kv_low, kv_top = np.zeros_like(capacity), capacity
    if pins.kv_on_gpu is not None:
        kv_top = pins.kv_on_gpu * capacity
        kv_low = np.maximum(0.0, kv_top - capacity / np.maximum(1.0, capacity)) * 0.0
    free = np.full(capacity.shape, np.inf)
    kv_price = np.ones(capacity.shape)
    for phase, rows in (("decode", decode), ("prefill", prefill)):
        left = limits["gpu"] - np.asarray(rows.substitute(buffers).constant, dtype=np.float64)
        if phase == "decode":
            if not ffn_on_gpu:  # no expert slots while decoding, and none of the weights is here
                left = limits["gpu"] - np.asarray(rows.substitute({DENSE_SLOTS: dense_slots}).constant)
            kv_price = np.minimum(kv_price, np.broadcast_to(np.asarray(rows.coefficient(KV_ON_GPU)), capacity.shape))
        free = np.minimum(free, left)
    feasible = free - max(0.0, price) * low - np.maximum(kv_price, 0.0) * kv_low >= -1e-6 * limits["gpu"]
    if price <= 0:  # fewer layers than slots: holding all of them takes less than buffering them
        feasible = free - price * streamed >= -1e-6 * limits["gpu"] if pins.weights_on_gpu is None else feasible
        experts = np.full(capacity.shape, top)
    else:
        experts = np.clip(free / price, low, top)
    kv = np.where(kv_price > 0, np.minimum(kv_top, np.maximum(free, 0.0) / np.maximum(kv_price, 1e-12)), kv_top)
    held = experts + kv
    if price > 0:
        held = np.minimum(held, np.maximum(free, 0.0) / np.maximum(np.minimum(price, kv_price), 1e-12))
    overflow = np.maximum(0.0, np.asarray(cpu.constant, dtype=np.float64) - limits["cpu"] - held)
    feasible = feasible & (overflow <= limits["disk"])
    return _Room(
        experts=experts,
        least_experts=np.full(capacity.shape, low),
        kv=kv,
        expert_price=price,
        kv_price=kv_price,
        free=np.maximum(free, 0.0),
        overflow=overflow,
        feasible=feasible,
    )

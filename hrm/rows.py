"""The rows of the full model's program: every constraint by name, affine in the unknowns.

The same rows, with arrays for coefficients, give the bound over all batches at once (`hrm.bounds`); with numbers they
are the program of one point (`hrm.full_program`). With N, mu, A_g, F_g and the slots given everything is linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hrm.affine import Affine, Number, total
from hrm.full_cost import (
    DENSE,
    EXPERTS_ON_DISK,
    EXPERTS_ON_GPU,
    HEAD,
    KV_ON_DISK,
    KV_ON_GPU,
    RING,
    RING_SLOTS,
    Lanes,
    decode_lanes,
    prefill_lanes,
)
from hrm.memory import (
    DENSE_SLOTS,
    EXPERT_SLOTS,
    cpu_terms,
    disk_terms,
    gpu_terms,
    limit_bytes,
    pinned_terms,
    rounding_bytes,
)
from hrm.points import Point, PrefillChoice
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes

__all__ = ["PIN", "PREFILL", "STEPS", "Row", "objective_of", "rows_of", "tops_of"]

STEP = "decode_step_s"
STEPS = ((STEP, "decode"), ("early_decode_step_s", "early_decode"), ("late_decode_step_s", "late_decode"))
"""Seconds of a decode step at each context it is priced at (`hrm.scenario.DECODE_CONTEXTS`), and how its rows begin."""

PREFILL = "prefill_s"
PIN = "pin_weights"  # binary
GB = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """``left <= 0``.

    Attributes
    ----------
    name : str
    left : Affine
    scale : float
        What the solver divides it by.
    """

    name: str
    left: Affine
    scale: float = 1.0


def tops_of(scenario: Scenario, sizes: Sizes, point: Point) -> dict[str, Number]:
    """Largest value of every unknown that is not a binary or seconds [byte]."""
    capacity = kv_capacity_bytes(scenario, sizes, point.size)
    has_disk = scenario.profile.disk is not None
    return {
        EXPERTS_ON_GPU: sizes.streamed_bytes if point.ffn_on_gpu else 0.0,
        EXPERTS_ON_DISK: sizes.streamed_bytes if has_disk else 0.0,
        KV_ON_GPU: capacity,
        KV_ON_DISK: capacity if has_disk else 0.0 * np.asarray(capacity),
        RING: sizes.layer_expert_bytes if point.ring else 0.0,
    }


def _settle(expression: Affine, point: Point, sizes: Sizes) -> Affine:
    """Express the slots by what decides them: the share of the weights on the GPU, or the ring."""
    settled = expression.substitute({RING_SLOTS: float(point.ring)})
    slots = settled.coefficient(EXPERT_SLOTS)
    dense = settled.coefficient(DENSE_SLOTS)
    rest = {name: c for name, c in settled.coefficients.items() if name not in (EXPERT_SLOTS, DENSE_SLOTS)}
    settled = Affine(settled.constant, rest)
    if np.any(slots):
        if point.ring:
            settled = settled + Affine.of(RING, slots)
        else:
            count = float(point.slots)
            layer_off_gpu = (sizes.streamed_bytes - Affine.of(EXPERTS_ON_GPU)) / sizes.streamed_layers
            settled = settled + layer_off_gpu * (count * slots)
    if np.any(dense):
        count = 1.0 if point.slots == 1 else 2.0
        size = count * sizes.largest_dense_layer_bytes * dense
        settled = settled + (size - Affine.of(DENSE, size))
    return settled


def rows_of(
    scenario: Scenario,
    sizes: Sizes,
    rates: Rates,
    point: Point,
    prefill: PrefillChoice,
    *,
    max_seconds: float,
    pin_allowed: bool,
    pin_required: bool = False,
) -> list[Row]:
    """Every row of the program at a point.

    Parameters
    ----------
    prefill : PrefillChoice
        Prefill micro-batch.
    max_seconds : float
        Bound on prefill + decode of one batch [s].
    pin_allowed, pin_required : bool
        Whether weights may, or must, be page-locked.

    Returns
    -------
    list of Row
    """
    batch, n = point.batch, point.size
    capacity = kv_capacity_bytes(scenario, sizes, n)
    limits = limit_bytes(scenario.profile)
    rows = [
        Row("expert_weights", Affine.of(EXPERTS_ON_GPU) + Affine.of(EXPERTS_ON_DISK) - sizes.streamed_bytes, GB),
        Row("kv_cache", Affine.of(KV_ON_GPU) + Affine.of(KV_ON_DISK) - capacity, GB),
    ]
    if point.ring:
        layer_off_gpu = (sizes.streamed_bytes - Affine.of(EXPERTS_ON_GPU)) / sizes.streamed_layers
        rows.append(Row("ring_within_layer", Affine.of(RING) - layer_off_gpu, GB))

    tokens = np.asarray(
        scenario.workload.micro_batch_token_bound(
            np.asarray(n).astype(np.int64),
            np.asarray(point.micro_batches).astype(np.int64),
            np.asarray(point.micro_batch).astype(np.int64),
        ),
        dtype=np.float64,
    )
    ring, requests = point.ring, point.micro_batch
    gpu_decode = gpu_terms(scenario, sizes, batch, phase="decode", requests=requests, tokens=tokens, ring=ring)
    parts = 1.0 if ring else prefill.parts
    gpu_prefill = gpu_terms(
        scenario,
        sizes,
        batch,
        phase="prefill",
        requests=prefill.requests,
        tokens=prefill.tokens,
        ring=ring,
        prefill_micro_batches=parts,
    )
    rounding = rounding_bytes(scenario, sizes)  # of the share on the GPU, down: those rows then lie in CPU memory
    cpu = cpu_terms(
        scenario, sizes, batch, requests=requests, prefill_micro_batches=parts, prefill_tokens=prefill.tokens
    )
    rows += [
        Row("gpu_memory_decode", _settle(total(gpu_decode.values()), point, sizes) - limits["gpu"], GB),
        Row("gpu_memory_prefill", _settle(total(gpu_prefill.values()), point, sizes) - limits["gpu"], GB),
        Row("cpu_memory", total(cpu.values()) + (rounding if point.ffn_on_gpu else 0.0) - limits["cpu"], GB),
    ]
    if scenario.profile.disk is not None:
        rows.append(Row("disk_memory", total(disk_terms().values()) + rounding - limits["disk"], GB))  # there, up
    rows += _lock_rows(scenario, sizes, point, capacity, pin_allowed=pin_allowed)

    tops = tops_of(scenario, sizes, point)
    first = prefill_lanes(scenario, sizes, rates, batch, prefill.parts, ring=ring)
    for number in range(len(sizes.contexts)):
        unknown, prefix = STEPS[number]
        decode = decode_lanes(scenario, sizes.at_context(number), rates, batch)
        rows += _time_rows(decode, unknown, prefix, sizes, rates, point, tops, pin_required)
    rows += _time_rows(first, PREFILL, "prefill", sizes, rates, point, tops, pin_required)
    rows.append(Row("max_hours", objective_of(sizes) - max_seconds))
    return rows


def _largest(affine: Affine, tops: dict[str, Number]) -> Number:
    """Largest value an expression can take: unknowns to their top, binaries to 1."""
    value = np.asarray(affine.constant, dtype=np.float64)
    for name, coefficient in affine.coefficients.items():
        value = value + np.maximum(0.0, coefficient * np.asarray(tops.get(name, 1.0)))
    return value


def _time_rows(
    lanes: Lanes,
    unknown: str,
    prefix: str,
    sizes: Sizes,
    rates: Rates,
    point: Point,
    tops: dict[str, Number],
    pin_required: bool,
) -> list[Row]:
    """A pass takes at least every lane; and copy plus computation where one buffer forbids overlap."""
    seconds = Affine.of(unknown)
    found = {f"{prefix}_{lane}": use for lane, use in lanes.always.items()}
    if not pin_required:
        for lane, use in lanes.when_staged.items():
            found[f"{prefix}_{lane}_unpinned"] = use - Affine.of(PIN, _largest(use, tops))
        staged = lanes.staged_sums(slots=point.slots, layers=sizes.streamed_layers, rates=rates)
        for name, use in staged.items():
            found[f"{prefix}_{name}_unpinned"] = use - Affine.of(PIN, np.maximum(0.0, _largest(use, tops)))
    if lanes.chain is not None:
        found[f"{prefix}_chain"] = lanes.chain
    for name, use in lanes.serial_sums(slots=point.slots, layers=sizes.streamed_layers, rates=rates).items():
        found[f"{prefix}_{name}"] = use
    return [
        Row(name, use.substitute({RING_SLOTS: float(point.ring)}) - seconds)
        for name, use in found.items()
        if use.coefficients or np.any(use.constant)
    ]


def _lock_rows(scenario: Scenario, sizes: Sizes, point: Point, capacity: Number, *, pin_allowed: bool) -> list[Row]:
    """Keep page-locked bytes within the host's lock limit, where it has one."""
    limit = scenario.profile.cpu.lockable_bytes
    if limit is None:
        return []
    buffers = total(pinned_terms(scenario, point.batch, point.micro_batch).values())
    if point.attention_on_gpu:  # its KV cache is copied each step, so it is page-locked
        buffers = buffers + (capacity - Affine.of(KV_ON_GPU) - Affine.of(KV_ON_DISK))
    rows = [Row("lock_limit", buffers - limit, GB)]
    if pin_allowed:
        table = 0.0 if sizes.tied else sizes.lm_head_bytes
        weights = total(
            [
                sizes.streamed_bytes - Affine.of(EXPERTS_ON_GPU) - Affine.of(EXPERTS_ON_DISK),
                sizes.dense_bytes - Affine.of(DENSE, sizes.dense_bytes),
                table - Affine.of(HEAD, table),
            ]
        )
        most = sizes.weight_bytes
        weights = weights + (rounding_bytes(scenario, sizes) if point.ffn_on_gpu else 0.0)
        rows.append(Row("lock_limit_weights", buffers + weights - (most - Affine.of(PIN, most)) - limit, GB))
    return rows


def objective_of(sizes: Sizes) -> Affine:
    """Seconds of one batch: prefill and n - 1 decode steps, at contexts that stand for a part of them each."""
    return total([Affine.of(PREFILL), *(Affine.of(unknown, steps) for unknown, _, steps in seconds_of(sizes))])


def seconds_of(sizes: Sizes) -> list[tuple[str, str, float]]:
    """Unknown, how its rows begin, and number of steps, of every context decode is priced at."""
    return [
        (unknown, prefix, weight * sizes.decode_steps)
        for (unknown, prefix), (weight, _) in zip(STEPS, sizes.contexts, strict=False)
    ]

"""Brute force over the integer choices of a plan, with the exact optimum of what is continuous: the search's oracle.

Knows nothing of bounds, programs or solvers. What it shares with `hrm.search` is the account of seconds and bytes
(`hrm.full_cost`, `hrm.memory`), which `test_search.py` checks against `hrm.prediction` policy by policy; limits, order
of the choices and the optimum are stated here anew. For given integers two unknowns are left, bytes of experts on the
GPU (x) and on disk (y). No lane grows with x (asserted), so x is as large as memory allows; then seconds are convex and
piecewise linear in y, and bisection on the slope finds the least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from hrm import full_cost as fc
from hrm.affine import Affine, total
from hrm.full_cost import Batch, Lanes, decode_lanes, prefill_lanes
from hrm.memory import DENSE_SLOTS, EXPERT_SLOTS, cpu_terms, disk_terms, gpu_terms, limit_bytes, pinned_terms
from hrm.pins import Pins
from hrm.points import prefill_choice
from hrm.policy import Policy, WeightSlots
from hrm.rates import Rates, derive_rates
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes, measure_sizes

Array = npt.NDArray[np.float64]
ALL = -1.0  # `kv_gpu` of a policy with the whole KV cache on the GPU, the part-filled row of requests included


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """Integer choices of many policies that share A_g, F_g and the slots: arrays of equal length."""

    attention_on_gpu: bool
    ffn_on_gpu: bool
    slots: WeightSlots
    size: Array
    micro_batch: Array
    prefill: Array
    dense: Array
    head: Array
    embedding: Array
    pin: Array
    kv_gpu: Array  # whole requests of every micro-batch, or ALL
    kv_disk: Array
    ring: Array

    def __len__(self) -> int:
        return self.size.size

    @property
    def micro_batches(self) -> Array:
        return np.ceil(self.size / self.micro_batch)

    def take(self, index: Any) -> Integers:
        arrays = {name: getattr(self, name)[index] for name in ARRAYS}
        return Integers(
            attention_on_gpu=self.attention_on_gpu, ffn_on_gpu=self.ffn_on_gpu, slots=self.slots, **arrays
        )


ARRAYS = [field.name for field in fields(Integers) if field.name not in ("attention_on_gpu", "ffn_on_gpu", "slots")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of every policy: seconds of the whole workload (infinite where it does not fit), and the bytes that give them."""

    seconds: Array
    experts_on_gpu: Array
    experts_on_disk: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """c + gx*x + gy*y, every part an array."""

    c: Array
    gx: Array
    gy: Array

    def at(self, x: Array, y: Array) -> Array:
        return self.c + self.gx * x + self.gy * y


class Oracle:
    """The policies of one scenario."""

    def __init__(self, scenario: Scenario, *, max_hours: float = 24.0) -> None:
        self.scenario = scenario
        self.sizes: Sizes = measure_sizes(scenario)
        self.rates: Rates = derive_rates(scenario.profile, scenario.formats)
        self.max_seconds = max_hours * 3600.0

    def evaluate(self, points: Integers) -> Outcome:
        """Least seconds of every point over the continuous unknowns."""
        scenario, sizes = self.scenario, self.sizes
        n, n_ub = points.size, points.micro_batches
        batch = Batch(
            size=n,
            micro_batches=n_ub,
            attention_on_gpu=points.attention_on_gpu,
            ffn_on_gpu=points.ffn_on_gpu,
        )
        ring = points.slots == "experts"
        capacity = np.asarray(kv_capacity_bytes(scenario, sizes, n))
        per_request = capacity / n
        kv_gpu = np.where(points.kv_gpu == ALL, capacity, points.kv_gpu * n_ub * per_request)
        kv_disk = points.kv_disk * n_ub * per_request
        ring_bytes = points.ring * sizes.expert_bytes
        dense_slots = 1.0 if points.slots == 1 else 2.0
        known: dict[str, Any] = {
            fc.KV_ON_GPU: kv_gpu,
            fc.KV_ON_DISK: kv_disk,
            fc.DENSE: points.dense,
            fc.HEAD: points.head,
            fc.EMBEDDING: points.embedding,
            fc.RING_SLOTS: float(ring),
            fc.RING: ring_bytes,
            DENSE_SLOTS: (1.0 - points.dense) * dense_slots * sizes.largest_dense_layer_bytes,
        }
        layers, streamed = sizes.streamed_layers, sizes.streamed_bytes
        zero = np.zeros_like(n)

        def line(affine: Affine) -> _Line:
            c, gx, gy = zero + affine.constant, zero + 0.0, zero + 0.0
            for name, coefficient in affine.coefficients.items():
                if name == fc.EXPERTS_ON_GPU:
                    gx = gx + coefficient
                elif name == fc.EXPERTS_ON_DISK:
                    gy = gy + coefficient
                elif name == EXPERT_SLOTS and ring:
                    c = c + coefficient * ring_bytes
                elif name == EXPERT_SLOTS:  # one or two layers of what is not on the GPU
                    c = c + coefficient * (float(points.slots) * streamed / layers)
                    gx = gx - coefficient * (float(points.slots) / layers)
                else:
                    c = c + coefficient * known[name]
            return _Line(c=c, gx=gx, gy=gy)

        n_p = np.ceil(n / points.prefill)
        limits = limit_bytes(scenario.profile)
        held: list[tuple[_Line, float]] = []
        budget = scenario.workload.micro_batch_token_bound(
            n.astype(np.int64), n_ub.astype(np.int64), points.micro_batch.astype(np.int64)
        )
        fullest = prefill_choice(scenario, n, points.prefill)
        for phase, requests, tokens in (
            ("decode", points.micro_batch, np.asarray(budget, dtype=np.float64)),
            ("prefill", fullest.requests, fullest.tokens),
        ):
            terms = gpu_terms(scenario, sizes, batch, phase=phase, requests=requests, tokens=tokens, ring=ring)
            held.append((line(total(terms.values())), limits["gpu"]))
        host = cpu_terms(
            scenario, sizes, batch, requests=points.micro_batch, prefill_micro_batches=1.0 + zero if ring else n_p
        )
        held.append((line(total(host.values())), limits["cpu"]))
        if scenario.profile.disk is not None:
            held.append((line(total(disk_terms().values())), limits["disk"]))
        if scenario.profile.cpu.lockable_bytes is not None:
            held.append((line(self._locked(batch, points, capacity)), scenario.profile.cpu.lockable_bytes))

        x = np.full_like(n, streamed if points.ffn_on_gpu else 0.0)
        if ring:
            x = np.minimum(x, streamed - ring_bytes * layers)
        y_low, y_high = zero.copy(), zero + (streamed if scenario.profile.disk is not None else 0.0)
        for use, limit in held:
            grows = (use.gx > 0) & (use.gy == 0)
            x = np.minimum(x, np.where(grows, (limit - use.c) / np.where(grows, use.gx, 1.0), np.inf))
        fits = x >= -1e-6 * streamed - 1.0
        x = np.maximum(x, 0.0)
        y_high = np.minimum(y_high, streamed - x)
        for use, limit in held:
            at = (limit - use.c - use.gx * x) / np.where(use.gy == 0, 1.0, use.gy)
            y_high = np.minimum(y_high, np.where(use.gy > 0, at, np.inf))
            y_low = np.maximum(y_low, np.where(use.gy < 0, at, 0.0))
        fits &= y_low <= y_high + 1.0
        y = np.minimum(y_low, np.maximum(y_high, 0.0))
        for use, limit in held:
            fits &= use.at(x, y) <= limit * (1 + 1e-9) + 1.0

        steps = float(sizes.decode_steps)
        passes = [
            (steps, self._lines(decode_lanes(scenario, sizes, self.rates, batch), points, line)),
            (1.0, self._lines(prefill_lanes(scenario, sizes, self.rates, batch, n_p, ring=ring), points, line)),
        ]
        for _, lines in passes:
            assert all(np.all(lane.gx <= 0) for lane in lines), "a lane grows with the experts on the GPU"
        y = _least(passes, x, y, y_high)
        seconds, _ = _seconds(passes, x, y)
        fits &= seconds <= self.max_seconds * (1 + 1e-9)
        batches = np.ceil(scenario.workload.num_requests / n)
        return Outcome(seconds=np.where(fits, seconds * batches, np.inf), experts_on_gpu=x, experts_on_disk=y)

    def _locked(self, batch: Batch, points: Integers, capacity: Array) -> Affine:
        """Page-locked bytes: buffers, KV cache that GPU attention copies each step, and pinned weights."""
        sizes = self.sizes
        locked = total(pinned_terms(self.scenario, batch, points.micro_batch).values())
        if points.attention_on_gpu:
            locked = locked + capacity - Affine.of(fc.KV_ON_GPU) - Affine.of(fc.KV_ON_DISK)
        table = 0.0 if sizes.tied else sizes.lm_head_bytes
        weights = sizes.streamed_bytes - Affine.of(fc.EXPERTS_ON_GPU) - Affine.of(fc.EXPERTS_ON_DISK)
        weights = weights + (1.0 - points.dense) * sizes.dense_bytes + (1.0 - points.head) * table
        return locked + weights * points.pin

    def _lines(self, lanes: Lanes, points: Integers, line: Any) -> list[_Line]:
        found = [line(use) for use in lanes.always.values()]
        for use in lanes.when_staged.values():
            staged = line(use)
            free = 1.0 - points.pin
            found.append(_Line(c=staged.c * free, gx=staged.gx * free, gy=staged.gy * free))
        if lanes.chain is not None:
            found.append(line(lanes.chain))
        sums = lanes.serial_sums(slots=points.slots, layers=self.sizes.streamed_layers, rates=self.rates)
        return found + [line(use) for use in sums.values()]

    def policy(self, points: Integers, index: int, outcome: Outcome) -> Policy:
        """One point as a policy, its bytes cut to what can be realised: rows of weights, rounded against the plan."""
        sizes = self.sizes
        n, mu, n_ub = (int(a[index]) for a in (points.size, points.micro_batch, points.micro_batches))
        shares = (float(a[index]) / sizes.streamed_bytes for a in (outcome.experts_on_gpu, outcome.experts_on_disk))
        on_gpu, on_disk = shares
        every = points.kv_gpu[index] == ALL
        return Policy(
            batch_size=n,
            micro_batch_size=mu,
            num_micro_batches=n_ub,
            prefill_micro_batch_size=int(points.prefill[index]),
            attention_on_gpu=points.attention_on_gpu,
            ffn_on_gpu=points.ffn_on_gpu,
            weights_on_gpu=min(1.0, max(0.0, on_gpu)),
            weights_on_disk=min(1.0 - on_gpu, max(0.0, on_disk)),
            kv_on_gpu=1.0 if every else float(points.kv_gpu[index]) * n_ub / n,
            kv_on_disk=float(points.kv_disk[index]) * n_ub / n,
            weight_slots=points.slots,
            ring_experts=int(points.ring[index]),
            dense_weights_on_gpu=bool(points.dense[index]),
            embedding_on_gpu=bool(points.embedding[index]),
            lm_head_on_gpu=bool(points.head[index]),
            pin_weights=bool(points.pin[index]),
            micro_batch_token_budget=int(self.scenario.workload.micro_batch_token_bound(n, n_ub, mu)),
        )

    def count(self, pins: Pins) -> int:
        """Integer points that the pins leave."""
        rows = len(self._batches(pins))
        return sum(rows * len(self._switches(pins)) * len(self._rings(slots)) for _, _, slots in self._classes(pins))

    def every(self, pins: Pins) -> Iterator[Integers]:
        """Every integer point that the pins leave: all N, all mu, all prefill micro-batches, all whole requests."""
        table = np.array(self._batches(pins), dtype=np.float64).reshape(-1, 5)
        for attention, ffn, slots in self._classes(pins):
            rest = [[*switch, ring] for switch, ring in product(self._switches(pins), self._rings(slots))]
            left = np.repeat(table, len(rest), axis=0)
            right = np.tile(np.array(rest, dtype=np.float64), (len(table), 1))
            columns = dict(zip(("size", "micro_batch", "prefill", "kv_gpu", "kv_disk"), left.T, strict=True))
            columns |= dict(zip(("dense", "head", "embedding", "pin", "ring"), right.T, strict=True))
            yield Integers(attention_on_gpu=attention, ffn_on_gpu=ffn, slots=slots, **columns)

    def _batches(self, pins: Pins) -> list[tuple[float, ...]]:
        """(N, mu, prefill micro-batch, KV requests on the GPU, on disk)."""
        requests = self.scenario.workload.num_requests
        disk = self.scenario.profile.disk is not None
        rows: list[tuple[float, ...]] = []
        for n in range(1, requests + 1) if pins.batch_size is None else [min(pins.batch_size, requests)]:
            for mu in range(1, n + 1) if pins.micro_batch_size is None else [min(pins.micro_batch_size, n)]:
                count = -(-n // mu)
                if pins.num_micro_batches not in (None, count):
                    continue
                whole = n // count
                kv = [(float(g), float(d)) for g in range(whole + 1) for d in range(whole + 1 - g if disk else 1)]
                kv = [(g, d) for g, d in kv if _agrees(pins.kv_on_gpu, g, whole) and _agrees(pins.kv_on_disk, d, whole)]
                if pins.kv_on_gpu in (None, 1.0) and not pins.kv_on_disk:
                    kv = [*(pair for pair in kv if pins.kv_on_gpu is None), (ALL, 0.0)]
                given = pins.prefill_micro_batch_size
                prefills = range(1, n + 1) if given is None else [min(given, n)]
                rows += [(n, mu, p, g, d) for p in prefills for g, d in kv]
        return rows

    def _switches(self, pins: Pins) -> list[tuple[bool, ...]]:
        """(non-expert weights, lm_head, embedding on the GPU; weights pinned)."""
        names = ("dense_weights_on_gpu", "lm_head_on_gpu", "embedding_on_gpu", "pin_weights")
        every = product(*(_both(getattr(pins, name)) for name in names))
        return [switch for switch in every if not self.sizes.tied or switch[1] == switch[2]]  # tied: one matrix

    def _rings(self, slots: WeightSlots) -> list[int]:
        return list(range(2, self.scenario.model.streamed_experts + 1)) if slots == "experts" else [0]

    def _classes(self, pins: Pins) -> list[tuple[bool, bool, WeightSlots]]:
        slots: tuple[WeightSlots, ...] = (1, 2, "experts") if pins.weight_slots is None else (pins.weight_slots,)
        if self.scenario.model.streamed_experts < 3:
            slots = tuple(each for each in slots if each != "experts")
        return list(product(_both(pins.attention_on_gpu), _both(pins.ffn_on_gpu), slots))


def _both(pinned: bool | None) -> tuple[bool, ...]:
    return (True, False) if pinned is None else (pinned,)


def _agrees(share: float | None, requests: float, whole: int) -> bool:
    """Whether a number of whole requests is what a pinned share comes to."""
    return share is None or requests == int(share * whole + 1e-9)


def _seconds(passes: list[tuple[float, list[_Line]]], x: Array, y: Array) -> tuple[Array, Array]:
    """Seconds of a batch and their slope in y (to the right, at a kink the steeper one)."""
    seconds, slope = np.zeros_like(x), np.zeros_like(x)
    for times, lines in passes:
        top = np.full_like(x, -np.inf)
        rise = np.zeros_like(x)
        for lane in lines:
            value = lane.at(x, y)
            above = value > top * (1 + 1e-14)
            tied = ~above & (value >= top * (1 - 1e-14))
            rise = np.where(above, lane.gy, np.where(tied, np.maximum(rise, lane.gy), rise))
            top = np.where(above, value, top)
        seconds, slope = seconds + times * top, slope + times * rise
    return seconds, slope


def _least(passes: list[tuple[float, list[_Line]]], x: Array, low: Array, high: Array) -> Array:
    """The y between low and high with the least seconds; they are convex in y."""
    y = low.copy()
    _, slope = _seconds(passes, x, low)
    index = np.flatnonzero((slope < 0) & (high > low))
    if index.size == 0:
        return y
    part = [
        (times, [_Line(c=lane.c[index], gx=lane.gx[index], gy=lane.gy[index]) for lane in lines])
        for times, lines in passes
    ]
    left, right, at = low[index], high[index], x[index]
    for _ in range(60):
        middle = (left + right) / 2
        _, slope = _seconds(part, at, middle)
        left, right = np.where(slope < 0, middle, left), np.where(slope < 0, right, middle)
    y[index] = right
    return y

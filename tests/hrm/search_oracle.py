"""Brute force over the integer choices of a plan, with the exact optimum of what is continuous: the search's oracle.

Knows nothing of bounds, programs or solvers. What it shares with `hrm.search` is the account of seconds and bytes
(`hrm.full_cost`, `hrm.memory`), which `test_search.py` checks against `hrm.prediction` policy by policy; limits, order
of the choices and the optimum are stated here anew. For given integers two unknowns are left, bytes of experts on the
GPU (x) and on disk (y). No lane grows with x (asserted), so x is as large as memory allows; then seconds are convex and
piecewise linear in y, and bisection on the slope finds the least.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from hrm import full_cost as fc
from hrm.affine import Affine, total
from hrm.full_cost import Batch, Lanes, decode_lanes, prefill_lanes
from hrm.memory import DENSE_SLOTS, EXPERT_SLOTS, cpu_terms, disk_terms, gpu_terms, limit_bytes, pinned_terms
from hrm.model_files import load_model
from hrm.pins import Pins
from hrm.points import prefill_choice
from hrm.policy import Policy, WeightSlots
from hrm.profile import DiskLevel
from hrm.profile_files import load_profile
from hrm.rates import Rates, derive_rates
from hrm.scenario import Scenario, Sizes, choose_formats, kv_capacity_bytes, measure_sizes
from hrm.workload import Workload

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
        return Integers(attention_on_gpu=self.attention_on_gpu, ffn_on_gpu=self.ffn_on_gpu, slots=self.slots, **arrays)


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
            terms = gpu_terms(
                scenario,
                sizes,
                batch,
                phase=phase,
                requests=requests,
                tokens=tokens,
                ring=ring,
                prefill_micro_batches=1.0 + zero if ring else n_p,
            )
            held.append((line(total(terms.values())), limits["gpu"]))
        host = cpu_terms(
            scenario,
            sizes,
            batch,
            requests=points.micro_batch,
            prefill_micro_batches=1.0 + zero if ring else n_p,
            prefill_tokens=fullest.tokens,
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

        passes = [(1.0, self._lines(prefill_lanes(scenario, sizes, self.rates, batch, n_p, ring=ring), points, line))]
        for number, (weight, _) in enumerate(sizes.contexts):
            lanes = decode_lanes(scenario, sizes.at_context(number), self.rates, batch)
            passes.append((weight * sizes.decode_steps, self._lines(lanes, points, line)))
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
        staging = lanes.staged_sums(slots=points.slots, layers=self.sizes.streamed_layers, rates=self.rates)
        for use in (*lanes.when_staged.values(), *staging.values()):
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
        held = {whole: len(self._held(pins, whole)) for whole in range(1, self.scenario.workload.num_requests + 1)}
        rows = sum(held[n // -(-n // mu)] * len(self._prefills(pins, n)) for n, mu in self._sizes(pins))
        return sum(rows * len(self._switches(pins)) * len(self._rings(slots)) for _, _, slots in self._classes(pins))

    def every(self, pins: Pins) -> Iterator[Integers]:
        """Every integer point that the pins leave: N, mu, prefill micro-batches, whole requests, switches, rings."""
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
        return [
            (n, mu, prefill, gpu, disk)
            for n, mu in self._sizes(pins)
            for prefill in self._prefills(pins, n)
            for gpu, disk in self._held(pins, n // -(-n // mu))
        ]

    def _sizes(self, pins: Pins) -> list[tuple[int, int]]:
        """(N, mu): every mu of every N. Batches are equal: for each number of batches the smallest N that is enough.

        Where n_ub is given, the smallest that also makes so many micro-batches.
        """
        requests, count = self.scenario.workload.num_requests, pins.num_micro_batches

        def sizes_of_micro_batches(n: int) -> list[int]:
            every = range(1, n + 1) if pins.micro_batch_size is None else [min(pins.micro_batch_size, n)]
            return [mu for mu in every if count in (None, -(-n // mu))]

        sizes: set[int] = set()
        for batches in range(1, requests + 1):
            enough = range(-(-requests // batches), requests + 1)
            sizes.update(next(([n] for n in enough if sizes_of_micro_batches(n)), []))
        if pins.batch_size is not None:
            sizes = {min(pins.batch_size, requests)}
        return [(n, mu) for n in sorted(sizes) for mu in sizes_of_micro_batches(n)]

    def _prefills(self, pins: Pins, size: int) -> list[int]:
        given = pins.prefill_micro_batch_size
        return list(range(1, size + 1)) if given is None else [min(given, size)]

    def _held(self, pins: Pins, whole: int) -> list[tuple[float, float]]:
        """KV requests of every micro-batch (on the GPU, on disk), of as many whole ones; or all on the GPU."""
        disk = self.scenario.profile.disk is not None
        held = [(float(g), float(d)) for g in range(whole + 1) for d in range(whole + 1 - g if disk else 1)]
        held = [(g, d) for g, d in held if _agrees(pins.kv_on_gpu, g, whole) and _agrees(pins.kv_on_disk, d, whole)]
        if pins.kv_on_gpu in (None, 1.0) and not pins.kv_on_disk:
            held = [*(pair for pair in held if pins.kv_on_gpu is None), (ALL, 0.0)]
        return held

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


def random_scenario(seed: int) -> Scenario:
    """A scenario with few requests and a machine of odd sizes, made so that memories, links and times all may bind."""
    pick = random.Random(seed)
    model = load_model(pick.choice(MODELS))
    if pick.random() < 0.6:  # few layers make the KV cache and the slots large beside the weights
        kept = pick.randint(2, 6)
        model = replace(
            model, n_layers=kept, moe_layers=model.moe_layers[:kept], layer_windows=model.layer_windows[:kept]
        )
    profile = load_profile(pick.choice(("t4", "l4", "rtx4090", "t4x2", "colab-t4", "a100-80g")))
    generated = pick.choice((1, 4, 12, 40))
    longest = min(model.max_positions - generated, pick.choice((50, 300, 2000, 12000)))
    workload = Workload(
        name=f"case-{seed}",
        prompt_lengths=tuple(pick.randint(max(1, longest // 8), longest) for _ in range(pick.randint(1, 5))),
        generation_length=generated,
        num_requests=pick.choice((5, 12, 16, 24, 40, 60)),
        padded=pick.random() < 0.2,
    )
    formats = choose_formats(profile, model, weights=pick.choice((None, None, "int4")))
    scenario = Scenario(profile=profile, model=model, workload=workload, formats=formats)
    sizes = measure_sizes(scenario)
    everything = sizes.weight_bytes + workload.num_requests * sizes.kv_bytes_per_request

    def of_everything(low: float, high: float) -> float:
        return everything * pick.uniform(low, high)

    def about(rate: float) -> float:
        return rate * 2.0 ** pick.uniform(-2, 2)

    gpu, cpu = profile.gpu, profile.cpu
    disk = DiskLevel(
        name="disk", size_bytes=of_everything(0.1, 1.5), read_bytes_per_s=about(2e9), write_bytes_per_s=about(2e9)
    )
    return replace(
        scenario,
        profile=replace(
            profile,
            gpu=replace(gpu, usable_memory_bytes=(of_everything(0.03, 0.8) + 1.2e9) / gpu.count),
            cpu=replace(
                cpu,
                memory_bytes=cpu.reserved_bytes + of_everything(0.2, 1.4) + 1.5e9,
                bandwidth_bytes_per_s=about(cpu.bandwidth_bytes_per_s),
                lockable_bytes=None if pick.random() < 0.6 else of_everything(0.05, 1.0) + 0.8e9,
            ),
            disk=None if pick.random() < 0.4 else disk,
            staging_bytes_per_s=about(profile.staging_bytes_per_s),
        ),
    )


MODELS = (
    "mixtral-8x7b",
    "dbrx",
    "olmoe-1b-7b",
    "granite-3.1-1b-a400m",
    "deepseek-v2-lite",
    "gpt-oss-20b",
    "opt-30b",
    "llama-3.1-8b",
    "phi-3.5-moe",
)


def random_pins(oracle: Oracle, seed: int, most: int) -> Pins:
    """Variables pinned in random order until at most so many integer points are left."""
    pick = random.Random(seed)
    requests, few = oracle.scenario.workload.num_requests, oracle.scenario.model.streamed_experts < 3
    share = pick.choice((0.0, 0.4, 1.0))
    values: list[tuple[str, Any]] = [
        *((name, pick.choice((True, False))) for name in SWITCHES),
        ("weight_slots", pick.choice((1, 2) if few else (1, 2, "experts"))),
        ("kv_on_gpu", share),
        ("prefill_micro_batch_size", pick.randint(1, 8)),
        ("batch_size", -(-requests // pick.randint(1, 3))),
        pick.choice((("micro_batch_size", pick.randint(1, 8)), ("num_micro_batches", pick.randint(1, 4)))),
    ]
    if oracle.scenario.profile.disk is not None:
        values.append(("kv_on_disk", 0.0 if share else pick.choice((0.0, 0.5))))
    pick.shuffle(values)
    given: dict[str, Any] = {}
    while oracle.count(Pins(**given)) > most:
        name, value = values.pop()
        if oracle.count(Pins(**given, **{name: value})):
            given[name] = value
    return Pins(**given)


SWITCHES = (
    "attention_on_gpu",
    "ffn_on_gpu",
    "dense_weights_on_gpu",
    "lm_head_on_gpu",
    "embedding_on_gpu",
    "pin_weights",
)


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

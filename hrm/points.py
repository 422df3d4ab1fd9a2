"""Points of the outer search: batch, micro-batch, places of computation, weight slots, and the prefill ladder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hrm.affine import Number
from hrm.full_cost import Batch, prefill_lanes
from hrm.memory import activations_per_token, limit_bytes
from hrm.pins import Pins
from hrm.policy import WeightSlots
from hrm.rates import Rates
from hrm.scenario import Scenario, Sizes, kv_capacity_bytes, worst_prompt_tokens

__all__ = ["Grid", "Point", "PrefillChoice", "candidate_batches", "prefill_choices", "prefill_ladder", "ring_prefill_size"]

Array = npt.NDArray[np.float64]

LADDER_STEP = 1.3
LADDER_GAIN = 0.003
"""The next prefill micro-batch size must save this share of GPU time to be worth trying."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What the outer search fixes; counts are numbers, or arrays over a grid.

    Attributes
    ----------
    size, micro_batch, micro_batches : float or ndarray
        N, mu, n_ub.
    attention_on_gpu, ffn_on_gpu : bool
        A_g, F_g.
    slots : {1, 2, "experts"}
        GPU buffers for streamed expert weights.
    """

    size: Number
    micro_batch: Number
    micro_batches: Number
    attention_on_gpu: bool
    ffn_on_gpu: bool
    slots: WeightSlots

    @property
    def batch(self) -> Batch:
        """As the cost functions take it."""
        return Batch(
            size=self.size,
            micro_batches=self.micro_batches,
            attention_on_gpu=self.attention_on_gpu,
            ffn_on_gpu=self.ffn_on_gpu,
        )

    @property
    def ring(self) -> bool:
        """Whether expert weights come through a ring of experts."""
        return self.slots == "experts"

    def at(self, grid: Grid, index: int) -> Point:
        """The same class of point at one batch of the grid."""
        return replace(
            self,
            size=float(grid.size[index]),
            micro_batch=float(grid.micro_batch[index]),
            micro_batches=float(grid.micro_batches[index]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoice:
    """One prefill micro-batch size.

    Attributes
    ----------
    requests, parts, tokens : float or ndarray
        Requests in a micro-batch, micro-batches, prompt tokens in the fullest one.
    """

    requests: Number
    parts: Number
    tokens: Number


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
        if pins.num_micro_batches is not None:
            sizes = sorted({_fill_up(size, pins.num_micro_batches) for size in sizes})
            sizes = [size for size in sizes if size <= requests]
    rows: list[tuple[int, int, int, int]] = []
    for size in sizes:
        if pins.micro_batch_size is not None:
            micro = [min(pins.micro_batch_size, size)]
        elif pins.num_micro_batches is not None:
            micro = [-(-size // pins.num_micro_batches)]
        else:
            micro = sorted({-(-size // count) for count in _distinct_divisions(size)})
        for m in micro:
            count = -(-size // m)
            if pins.num_micro_batches in (None, count):
                rows.append((size, m, count, -(-requests // size)))
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    return Grid(size=table[:, 0], micro_batch=table[:, 1], micro_batches=table[:, 2], batches=table[:, 3])


def _fill_up(size: int, micro_batches: int) -> int:
    """Smallest batch of at least `size` requests that makes that many micro-batches: 5 requests do not make 4."""
    micro = -(-size // micro_batches)
    return max(size, micro * (micro_batches - 1) + 1)


def _distinct_divisions(whole: int) -> list[int]:
    """Numbers of parts that give distinct ceil(whole/parts), fewest first."""
    parts, result = 1, []
    while True:
        result.append(parts)
        size = -(-whole // parts)
        if size == 1:
            return result
        parts = -(-whole // (size - 1))


def prefill_tokens(scenario: Scenario, batch_size: Number, parts: Number, requests: Number) -> Number:
    """Prompt tokens of the fullest prefill micro-batch, however the requests are dealt out by Algorithm 2 [tokens]."""
    longest = float(scenario.workload.max_prompt_tokens)
    return np.minimum(requests * longest, worst_prompt_tokens(scenario, batch_size) / parts + longest)


def prefill_choice(scenario: Scenario, batch_size: Number, requests: Number) -> PrefillChoice:
    """The choice of at most that many requests per prefill micro-batch."""
    held = np.minimum(requests, batch_size)
    parts = np.ceil(batch_size / held)
    return PrefillChoice(requests=held, parts=parts, tokens=prefill_tokens(scenario, batch_size, parts, held))


def prefill_ladder(scenario: Scenario, sizes: Sizes, rates: Rates) -> tuple[int, ...]:
    """Prefill micro-batch sizes worth trying with whole layers in the slots, about 30 % apart.

    A larger one needs more memory and reads the weights from GPU memory less often; past the point where the products
    are bound by FLOPs nothing is won, and the ladder ends. `hrm.search` tries the whole numbers between at the end.
    """
    requests = scenario.workload.num_requests
    most = limit_bytes(scenario.profile)["gpu"]
    per_token = activations_per_token(scenario, ring=False)
    batch = Batch(size=float(requests), micro_batches=1.0, attention_on_gpu=True, ffn_on_gpu=True)
    chosen, best, value = [1], np.inf, 1.0
    while True:
        size = round(value)
        lanes = prefill_lanes(scenario, sizes, rates, batch, float(-(-requests // size)), ring=False)
        seconds = float(lanes.always["gpu"].constant)
        if seconds < best * (1.0 - LADDER_GAIN):
            chosen, best = [*chosen, size], seconds
        elif size >= 16:
            break
        value = max(value * LADDER_STEP, size + 1.0)
        if value > requests or prefill_tokens(scenario, float(requests), -(-requests // size), size) * per_token > most:
            break
    return tuple(sorted({*chosen, requests} if requests <= 2 * chosen[-1] else set(chosen)))


def ring_prefill_size(scenario: Scenario, sizes: Sizes, rates: Rates, batch_size: Number) -> Number:
    """Prefill micro-batch with a ring of experts: as small as keeps the GPU busy while the weights come again.

    Every prefill micro-batch copies all weights, so it should hold enough prompts to compute as long as that takes,
    and no more than GPU memory holds beside the buffers.
    """
    probe = Batch(size=batch_size, micro_batches=1.0, attention_on_gpu=True, ffn_on_gpu=True)
    gpu = prefill_lanes(scenario, sizes, rates, probe, 1.0 + 0.0 * np.asarray(batch_size), ring=True).always["gpu"]
    per_request = np.asarray(gpu.constant) / batch_size
    limits = limit_bytes(scenario.profile)
    capacity = kv_capacity_bytes(scenario, sizes, batch_size)
    overflow = np.maximum(0.0, sizes.weight_bytes + capacity - limits["cpu"] - limits["gpu"])
    copies = np.asarray(sizes.streamed_bytes / rates.h2d_bytes_per_s)
    if rates.disk_read_bytes_per_s:
        copies = np.maximum(copies, np.minimum(overflow, sizes.streamed_bytes) / rates.disk_read_bytes_per_s)
    wanted = copies / per_request
    room = limits["gpu"] * 0.5 / activations_per_token(scenario, ring=True) - scenario.workload.max_prompt_tokens
    held = np.maximum(room / sizes.prompt_tokens, 1.0)
    return np.maximum(1.0, np.floor(np.minimum(np.minimum(wanted + 1.0, held), batch_size)))


def prefill_choices(
    scenario: Scenario, sizes: Sizes, rates: Rates, point: Point, pins: Pins, ladder: tuple[int, ...]
) -> list[PrefillChoice]:
    """Choices of the prefill micro-batch at a point."""
    if pins.prefill_micro_batch_size is not None:
        return [prefill_choice(scenario, point.size, float(pins.prefill_micro_batch_size))]
    if point.ring:
        return [prefill_choice(scenario, point.size, ring_prefill_size(scenario, sizes, rates, point.size))]
    if isinstance(point.size, np.ndarray):
        return [prefill_choice(scenario, point.size, size) for size in (*map(float, ladder), point.size)]
    held = sorted({min(size, int(point.size)) for size in ladder} | {int(point.size)})
    return [prefill_choice(scenario, point.size, float(size)) for size in held]

"""Points of the outer search: batch, micro-batch, places of computation, weight slots, prefill micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from hrm.affine import Number
from hrm.errors import InputError
from hrm.full_cost import Batch
from hrm.pins import Pins, option_name
from hrm.policy import WeightSlots
from hrm.scenario import Scenario, worst_prompt_tokens

__all__ = [
    "Grid",
    "Point",
    "PrefillChoice",
    "candidate_batches",
    "cut_ranges",
    "point_classes",
    "prefill_choice",
    "prefill_range",
]

Array = npt.NDArray[np.float64]

RING_EXPERTS_LEAST = 3
"""With fewer experts in a layer a ring of two of them is the whole layer."""


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

    def at(self, index: int | npt.NDArray[np.int64]) -> Point:
        """One point, or several, of arrays of them."""
        size, micro_batch, micro_batches = (
            np.asarray(count)[index] for count in (self.size, self.micro_batch, self.micro_batches)
        )
        if size.ndim == 0:
            size, micro_batch, micro_batches = float(size), float(micro_batch), float(micro_batches)
        return replace(self, size=size, micro_batch=micro_batch, micro_batches=micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoice:
    """One prefill micro-batch size, or the least of a range of them (`prefill_range`).

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


def point_classes(
    scenario: Scenario, grid: Grid, pins: Pins, slots: tuple[WeightSlots, ...] = (1, 2, "experts")
) -> list[Point]:
    """Classes of points (A_g, F_g, slots) that the pins leave, each with all batches of the grid.

    Parameters
    ----------
    slots : tuple of {1, 2, "experts"}
        Weight slots to consider where none are pinned.

    Raises
    ------
    InputError
        Pinned variables name a place that is not there.
    """
    _check_places(scenario, pins)

    def choices(pinned: bool | None) -> tuple[bool, ...]:
        return (True, False) if pinned is None else (pinned,)

    if pins.weight_slots is not None:
        slots = (pins.weight_slots,)
    if scenario.model.streamed_experts < RING_EXPERTS_LEAST:
        slots = tuple(each for each in slots if each != "experts")
    return [
        Point(
            size=grid.size,
            micro_batch=grid.micro_batch,
            micro_batches=grid.micro_batches,
            attention_on_gpu=attention,
            ffn_on_gpu=ffn,
            slots=each,
        )
        for attention, ffn, each in product(choices(pins.attention_on_gpu), choices(pins.ffn_on_gpu), slots)
        if ffn or not pins.weights_on_gpu  # experts that are computed on the CPU lie there
    ]


def _check_places(scenario: Scenario, pins: Pins) -> None:
    if pins.ffn_on_gpu is False and pins.weights_on_gpu:
        raise InputError("with the FFN on the CPU no expert weights stay on the GPU", where="--weights-on-gpu")
    for key in ("weights_on_disk", "kv_on_disk"):
        if getattr(pins, key) and scenario.profile.disk is None:
            raise InputError(f"{scenario.profile.name} has no disk", where=option_name(key), way_out="0")
    tables = {pins.embedding_on_gpu, pins.lm_head_on_gpu}
    if scenario.model.tie_embeddings and tables == {True, False}:
        raise InputError(
            f"embedding and lm_head of {scenario.model.name} are one matrix, in one place",
            where=option_name("lm_head_on_gpu"),
            way_out=f"as {option_name('embedding_on_gpu')}, or without it",
        )
    experts = scenario.model.streamed_experts
    if pins.weight_slots == "experts" and experts < RING_EXPERTS_LEAST:
        raise InputError(
            f"a ring of two experts is a whole layer of {scenario.model.name}, which has {experts}",
            where=option_name("weight_slots"),
            way_out="1 or 2",
        )


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
    return prefill_range(scenario, batch_size, requests, requests)


def prefill_range(scenario: Scenario, batch_size: Number, low: Number, high: Number) -> PrefillChoice:
    """What every choice from `low` to `high` requests needs at least: memory of the smallest, passes of the largest.

    Memory grows with the micro-batch and seconds grow with the number of passes, so a bound with these numbers holds
    for all of the range; where both ends give the same number of passes the smaller one is the best choice itself.
    """
    held = np.minimum(low, batch_size)
    tokens = prefill_tokens(scenario, batch_size, np.ceil(batch_size / held), held)
    return PrefillChoice(requests=held, parts=np.ceil(batch_size / np.minimum(high, batch_size)), tokens=tokens)


def cut_ranges(size: Array, low: Array, high: Array, pieces: int) -> tuple[Array, Array, npt.NDArray[np.int64]]:
    """Cut ranges of prefill micro-batches into smaller ones of about equal ratio between their ends.

    Of all sizes that make as many micro-batches only the smallest is kept, so that none is tried twice.

    Parameters
    ----------
    size, low, high : ndarray
        N and the ends of the ranges [requests].
    pieces : int
        Most pieces of each.

    Returns
    -------
    low, high : ndarray
        The pieces.
    parents : ndarray of int
        Which range each is a piece of.
    """
    ratio = high / low
    cuts = [np.floor(low * ratio ** (part / pieces)) for part in range(1, pieces)]
    starts, ends = np.concatenate([low, *(cut + 1.0 for cut in cuts)]), np.concatenate([*cuts, high])
    parents = np.tile(np.arange(size.size), pieces)
    passes = np.ceil(size[parents] / starts)
    # The piece before ends at starts - 1: where that makes as many passes, this one begins with the next number.
    before = np.where(starts > low[parents], np.ceil(size[parents] / np.maximum(starts - 1.0, 1.0)), np.inf)
    starts = np.where(passes == before, np.ceil(size[parents] / np.maximum(passes - 1.0, 0.5)), starts)
    kept = starts <= ends
    return starts[kept], ends[kept], parents[kept]

"""What the kernels of one batch share: weights, KV cache, buffers, tokens, and what is between two tasks.

Everything that passes from task to task lies here under its position (phase, micro-batch); the dependencies of the task
graph say that it is there when it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hrm.graph import Phase, TaskId
from hrm.layout import Layout
from runtime.bindings import Bindings, StageKey
from runtime.cpu_experts import Routing
from runtime.device import Device
from runtime.kv_cache import KvCache
from runtime.layers import Heads, Rotary
from runtime.numerics import Numerics
from runtime.placement import Placement
from runtime.weights import WeightStore

__all__ = ["Activations", "Position", "RunState", "TierIndex", "greedy"]

Position = tuple[Phase, int]
"""Phase and micro-batch."""

Score = Callable[[Tensor, Sequence[int], int, int], Tensor]
"""Scores [B, V'] of which the largest is chosen, from logits [B, V'] of some rows, for the n-th generated token, of the
vocabulary from some token on: the logits themselves (greedy), or perturbed ones (sampling)."""


def greedy(logits: Tensor, rows: Sequence[int], column: int, first: int) -> Tensor:
    """The likeliest token."""
    return logits


@dataclass(slots=True)
class Activations:
    """Of one position, between the tasks of a layer.

    Attributes
    ----------
    qkv : tuple of Tensor
        [T, H, d], [T, G, d], [T, G, d].
    attended : Tensor
        [T, H*d].
    normed : Tensor
        Input of the experts [T, h].
    routing : Routing
    pending : list of Tensor
        What experts gave elsewhere, [T, h], not yet added to the hidden states.
    """

    qkv: tuple[Tensor, Tensor, Tensor] | None = None
    attended: Tensor | None = None
    normed: Tensor | None = None
    routing: Routing | None = None
    pending: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierIndex:
    """Requests of a micro-batch on one level: `first` token rows and `prompts` lengths [n], int64, host and device.

    `part` are their rows within the micro-batch; `in_slot` where they begin in a slot on the GPU, CPU memory's first;
    `in_landing` where those on disk begin in a landing buffer.
    """

    part: slice
    first: Tensor
    prompts: Tensor
    first_gpu: Tensor
    prompts_gpu: Tensor
    in_slot: Tensor
    in_slot_gpu: Tensor
    longest: int
    in_landing: Tensor

    def __len__(self) -> int:
        return self.first.numel()


@dataclass(slots=True)
class RunState:
    """One batch under one graph. Mutable on purpose: kernels pass things on through it."""

    layout: Layout
    numerics: Numerics
    heads: Heads
    device: Device
    store: WeightStore
    cache: KvCache
    placement: Placement
    bindings: Bindings
    rotary: Rotary
    prompts: Sequence[Tensor]
    generated: Tensor  # int64 [N, generation length], on the GPU level
    hidden: Tensor  # [N, h], on the GPU level
    score: Score
    experts_on_gpu: bool
    dtype: torch.dtype
    indices: dict[tuple[int, str], TierIndex] = field(default_factory=dict)
    prefill_hidden: dict[int, Tensor] = field(default_factory=dict)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    embedded: dict[Position, Tensor] = field(default_factory=dict)
    active: dict[Position, Activations] = field(default_factory=dict)
    positions: dict[Position, Tensor] = field(default_factory=dict)  # of the compute lane
    prompt_places: dict[Position, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    new_kv: dict[tuple[Phase, int, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    disk_writes: dict[tuple[Phase, int, int, int], list[tuple[int, int, Tensor, Tensor]]] = field(default_factory=dict)
    prompt_writes: dict[tuple[int, int], tuple[Tensor, list[tuple[int, int, int]]]] = field(default_factory=dict)
    landings: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    best: dict[Position, tuple[Tensor, Tensor]] = field(default_factory=dict)
    kept: dict[Position, list[Tensor]] = field(default_factory=dict)
    ring_inputs: dict[StageKey, tuple[Tensor, Routing, Tensor]] = field(default_factory=dict)
    pinned_qkv: list[Tensor] = field(default_factory=list)
    pinned_results: list[Tensor] = field(default_factory=list)
    pinned_expert_in: list[Tensor] = field(default_factory=list)
    pinned_expert_out: list[Tensor] = field(default_factory=list)
    host_routings: dict[Position, Routing] = field(default_factory=dict)
    keep_logits: Callable[[int, int, Tensor], None] | None = None
    on_experts: Callable[[TaskId, Routing], None] | None = None
    compute_stream: Any = None
    score_whole: bool = False  # the score looks at the whole vocabulary at once, where the lm_head comes in pieces too

    @property
    def window(self) -> Callable[[int], int | None]:
        """Attention window of a layer."""
        return self.layout.scenario.model.layer_windows.__getitem__

    def stage(self, name: TaskId) -> StageKey:
        """Stage of a task of a micro-batch."""
        group = 0
        if self.store.rings and name.phase == "prefill":
            group = name.micro_batch if name.micro_batch is not None else 0
        return StageKey(name.phase, name.step, name.layer, group)

    def slot(self, stage: StageKey) -> int | None:
        """Slot of a stage's streamed weights; None where nothing is streamed."""
        return self.bindings.slots.get(stage)

    def rows(self, position: Position) -> Sequence[int]:
        """Rows of a position."""
        return self.placement.rows(*position)

    def at(self, position: Position) -> Activations:
        """Activations of a position, made when first asked for."""
        return self.active.setdefault(position, Activations())

    def hidden_of(self, position: Position) -> Tensor:
        """Hidden states of a position [T, h]; in decode a view of those of the batch."""
        phase, j = position
        if phase == "prefill":
            return self.prefill_hidden[j]
        part = self.placement.decode[j]
        return self.hidden[part.first : part.last]

    def put_hidden(self, position: Position, x: Tensor) -> None:
        """Set the hidden states of a position."""
        if position[0] == "prefill":
            self.prefill_hidden[position[1]] = x
        else:
            self.hidden_of(position).copy_(x, non_blocking=True)

    def add_pending(self, position: Position) -> None:
        """Add what experts gave elsewhere."""
        found = self.at(position)
        for each in found.pending:
            self.hidden_of(position).add_(each)
        found.pending.clear()

    def lengths(self, position: Position) -> list[int]:
        """Prompt lengths of a position's requests."""
        return [self.placement.requests[row].prompt_tokens for row in self.rows(position)]

    def index(self, micro_batch: int, tier: str) -> TierIndex:
        """Where a decode micro-batch's requests lie on a level."""
        found = self.indices.get((micro_batch, tier))
        if found is None:
            found = self.indices[(micro_batch, tier)] = self._find(micro_batch, tier)
        return found

    def _find(self, micro_batch: int, tier: str) -> TierIndex:
        part, pool = self.placement.decode[micro_batch], self.cache.pools[tier]
        rows = part.tier_rows(tier)
        lengths = [self.placement.requests[row].prompt_tokens for row in rows]
        first = torch.tensor([pool.first[row] for row in rows], dtype=torch.int64)
        prompts = torch.tensor(lengths, dtype=torch.int64)
        tokens = [self.placement.requests[row].tokens for row in rows]
        before = self.cache.span("cpu", micro_batch) if tier == "disk" else 0
        in_slot = torch.tensor([before, *tokens], dtype=torch.int64).cumsum(0)[:-1]
        there = self.device.torch_device
        return TierIndex(
            slice(rows.start - part.first, rows.stop - part.first),
            first,
            prompts,
            first.to(there),
            prompts.to(there),
            in_slot,
            in_slot.to(there),
            max(lengths, default=0),
            torch.tensor(self.cache.landing_places(micro_batch) if tier == "disk" else [], dtype=torch.int64),
        )

    def head_rows(self, piece: int) -> tuple[int, int]:
        """Rows of the lm_head that are in one of its pieces."""
        rows, pieces = self.store.top["lm_head"].shape[0], self.layout.head_pieces()
        return piece * rows // pieces, (piece + 1) * rows // pieces

    def split_qkv(self, flat: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `count` requests in a flat buffer, [n, H, d] and [n, G, d] twice."""
        query, kv, width = self.heads
        most = flat.numel() // ((query + 2 * kv) * width)
        found, start = [], 0
        for heads in (query, kv, kv):
            found.append(flat[start : start + count * heads * width].view(count, heads, width))
            start += most * heads * width
        return found[0], found[1], found[2]

    def keep_for_disk(self, name: TaskId, k: Tensor, v: Tensor) -> None:
        """Keep the new tokens of a micro-batch's requests on disk, [n, G, d] each, until they are written."""
        assert name.micro_batch is not None
        part = self.placement.decode[name.micro_batch]
        self.disk_writes[(name.phase, name.step, name.layer, name.micro_batch)] = [
            (
                row,
                self.placement.requests[row].prompt_tokens + name.step,
                k[place : place + 1].clone(),
                v[place : place + 1].clone(),
            )
            for place, row in enumerate(part.tier_rows("disk"))
        ]

    def to_gpu(self, source: Tensor) -> Tensor:
        """A copy on the GPU level, for the compute lane."""
        if not self.device.cuda:
            return source.clone()
        found = torch.empty(source.shape, dtype=source.dtype, device="cuda")
        found.copy_(source, non_blocking=True)
        found.record_stream(self.compute_stream)
        return found

    def hand_over(self, source: Tensor) -> None:
        """Say that the calling lane uses what another made, so that its memory is not used again before."""
        if source.is_cuda:
            source.record_stream(torch.cuda.current_stream())

    def to_host(self, source: Tensor, into: Tensor | None = None) -> Tensor:
        """A copy in CPU memory; on CUDA it is there once the copy lane's event is."""
        if not self.device.cuda:
            if into is None:
                return source.clone()
            into.copy_(source)
            return into
        self.hand_over(source)
        if into is None:
            into = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        into.copy_(source, non_blocking=True)
        return into

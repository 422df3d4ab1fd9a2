"""The KV cache of one batch: a pool per level, token-major, without padding.

A pool is [L, 2, T, G, d]: keys and values of every layer, in rows of tokens; a request has `capacity` rows (its prompt
and what is generated for it) from `first` on, reserved when it is admitted. So what is filled of a request is one
contiguous piece, and one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runtime.arena import Arenas
from runtime.device import Device
from runtime.disk_file import BLOCK, DiskFile
from runtime.placement import Placement

__all__ = ["KvCache", "Pool", "make_kv_cache"]


@dataclass(slots=True)
class Pool:
    """KV cache of some requests on one level.

    Attributes
    ----------
    rows : range or sequence of int
        Requests, by row of the batch.
    first, capacity : dict of int to int
        Of every request its first token row, and how many it has.
    memory : Tensor or None
        [L, 2, T, G, d]; None on disk.
    offset : int
        Where it begins in the disk file [byte].
    reserved : int
        Of the disk [byte].
    """

    rows: tuple[int, ...]
    first: dict[int, int]
    capacity: dict[int, int]
    memory: Tensor | None
    tokens: int
    offset: int = 0
    raw: Tensor | None = None
    reserved: int = 0


@dataclass(slots=True)
class KvCache:
    """Pools, slots on the GPU and landing buffers for what is read from disk.

    Attributes
    ----------
    dtype : torch.dtype
    heads, width : int
        G and d.
    pools : dict of str to Pool
        By level.
    slots : list of Tensor
        GPU buffers [2, tokens, G, d] where attention is on the GPU and the cache is not.
    """

    placement: Placement
    dtype: torch.dtype
    layers: int
    heads: int
    width: int
    pools: dict[str, Pool]
    slots: list[Tensor]
    disk: DiskFile | None
    device: Device
    one_layer: bool = False
    free_landings: list[tuple[Tensor, Any]] = field(default_factory=list)
    landing_tokens: int = 0

    @property
    def token_bytes(self) -> int:
        """Keys, or values, of one token in one layer [byte]."""
        return self.heads * self.width * torch.empty(0, dtype=self.dtype).element_size()

    def base(self, tier: str, micro_batch: int) -> int:
        """First token row of a micro-batch on a level."""
        rows = self.placement.decode[micro_batch].tier_rows(tier)
        return self.pools[tier].first[rows[0]] if rows else 0

    def span(self, tier: str, micro_batch: int) -> int:
        """Token rows that a micro-batch has on a level."""
        return sum(self.pools[tier].capacity[row] for row in self.placement.decode[micro_batch].tier_rows(tier))

    def take_landing(self) -> Tensor:
        """A buffer [2, tokens, G, d] for one micro-batch's cache from disk."""
        if self.free_landings:
            landing, left = self.free_landings.pop(0)  # the one that was given back first
            if left is not None:
                left.synchronize()
            return landing
        flat = self.device.pinned_bytes(2 * self.landing_tokens * self.token_bytes)
        return flat.view(self.dtype).view(2, self.landing_tokens, self.heads, self.width)

    def give_landing(self, landing: Tensor, left: Any = None) -> None:
        """Give such a buffer back; on CUDA with the event after which nothing reads it any more."""
        self.free_landings.append((landing, left))

    def read_disk(self, layer: int, micro_batch: int, lengths: Sequence[int], landing: Tensor) -> None:
        """Read the filled rows of a micro-batch's requests on disk into a buffer, at the places they have there."""
        self._on_disk(layer, micro_batch, lengths, landing)

    def _on_disk(self, layer: int, micro_batch: int, lengths: Sequence[int], landing: Tensor) -> None:
        assert self.disk is not None
        pool, base = self.pools["disk"], self.base("disk", micro_batch)
        raw = landing.view(2, -1).view(torch.uint8)
        for row, length in zip(self.placement.decode[micro_batch].tier_rows("disk"), lengths, strict=True):
            for side in range(2):
                place = (pool.first[row] - base) * self.token_bytes
                into = raw[side, place : place + length * self.token_bytes]
                self.disk.read(self._where(layer, side, pool.first[row]), into)

    def write_disk(self, layer: int, row: int, position: int, keys: Tensor, values: Tensor) -> None:
        """Write tokens of one request, [t, G, d] each, from `position` on."""
        assert self.disk is not None
        pool = self.pools["disk"]
        for side, data in enumerate((keys, values)):
            place = self._where(layer, side, pool.first[row] + position)
            self.disk.write(place, data.to(self.dtype).contiguous().view(-1).view(torch.uint8))

    def _where(self, layer: int, side: int, token: int) -> int:
        pool, layer = self.pools["disk"], 0 if self.one_layer else layer
        return pool.offset + ((layer * 2 + side) * pool.tokens + token) * self.token_bytes

    def close(self, arenas: Arenas) -> None:
        """Give the memory back."""
        for tier, pool in self.pools.items():
            if pool.raw is not None:
                if tier == "cpu":
                    self.device.unlock_pages(pool.raw)
                arenas[tier].release("KV cache", pool.raw.numel())
            if tier == "disk":
                arenas[tier].release("KV cache", pool.reserved)
            pool.memory, pool.raw, pool.reserved = None, None, 0
        for slot in self.slots:
            arenas["gpu"].release("KV slots", slot.numel() * slot.element_size())
        self.slots = []


def make_kv_cache(
    placement: Placement,
    *,
    layers: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    slots: bool,
    device: Device,
    arenas: Arenas,
    disk: DiskFile | None,
    disk_offset: int | None,
    copied: bool,
    one_layer: bool = False,
) -> KvCache:
    """Reserve the KV cache of a batch, as full as it gets.

    Parameters
    ----------
    slots : bool
        Attention on the GPU needs what is not there in a slot.
    disk_offset : int or None
        Region of the disk file from an earlier batch, to be used again.
    copied : bool
        Copies go to or from the pool in CPU memory, so it is page-locked.
    one_layer : bool
        All layers share the cache of one, for a check of one layer.

    Raises
    ------
    InputError
        More than the plan foresees on a level.
    """
    cache = KvCache(placement, dtype, layers, heads, width, {}, [], disk, device, one_layer)
    kept = 1 if one_layer else layers
    try:
        _reserve(cache, arenas, kept=kept, slots=slots, disk_offset=disk_offset, copied=copied)
    except BaseException:  # what fits is not kept for what does not
        cache.close(arenas)
        raise
    return cache


def _reserve(cache: KvCache, arenas: Arenas, *, kept: int, slots: bool, disk_offset: int | None, copied: bool) -> None:
    placement, device, disk, dtype = cache.placement, cache.device, cache.disk, cache.dtype
    size = 2 * kept * cache.token_bytes
    for tier in ("gpu", "cpu", "disk"):
        rows = tuple(row for part in placement.decode for row in part.tier_rows(tier))
        first, tokens = {}, 0
        for row in rows:
            first[row] = tokens
            tokens += placement.requests[row].tokens
        pool = Pool(rows, first, {row: placement.requests[row].tokens for row in rows}, None, tokens)
        cache.pools[tier] = pool
        if tier == "disk":
            if tokens:
                assert disk is not None
                arenas[tier].reserve("KV cache", tokens * size)
                pool.reserved = tokens * size
                pool.offset = disk.size if disk_offset is None else disk_offset
                missing = pool.offset + tokens * size + BLOCK - disk.size
                if missing > 0:  # of a larger batch than those before; the region is the last of the file
                    disk.extend(missing)
        elif tokens:
            arenas[tier].reserve("KV cache", tokens * size)
            pool.raw = device.gpu_bytes(tokens * size) if tier == "gpu" else device.host_bytes(tokens * size)
            if tier == "cpu" and copied:
                device.lock_pages(pool.raw)
            pool.memory = (
                pool.raw.view(dtype)
                .view(kept, 2, tokens, cache.heads, cache.width)
                .expand(cache.layers, -1, -1, -1, -1)
            )
    micro_batches = range(len(placement.decode))
    cache.landing_tokens = max((cache.span("disk", j) for j in micro_batches), default=0)
    if slots:
        most = max((cache.span("cpu", j) + cache.span("disk", j) for j in micro_batches), default=0)
        for _ in range(2):
            flat = device.gpu_bytes(2 * most * cache.token_bytes)
            arenas["gpu"].reserve("KV slots", flat.numel())
            cache.slots.append(flat.view(dtype).view(2, most, cache.heads, cache.width))

"""The KV cache of one batch: a pool per level, token-major, without padding.

A pool is [L, 2, T, G, d]: keys and values of every layer, in rows of tokens; a request has `capacity` rows (its prompt
and what is generated for it) from `first` on, reserved when it is admitted. So what is filled of a request is one
contiguous piece, and one copy. On disk, and in the buffers that what is there lands in, rows of a request begin and end
at whole blocks, so that all of it goes past the page cache; only the token that a step adds is written through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hrm.memory import KV_LANDINGS
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
        Of every request its first token row, and how many it has; on disk whole blocks of them.
    memory : Tensor or None
        [L, 2, T, G, d]; None on disk.
    offset : int
        Where it begins in the disk file [byte].
    """

    rows: tuple[int, ...]
    first: dict[int, int]
    capacity: dict[int, int]
    memory: Tensor | None
    tokens: int
    offset: int = 0
    raw: Tensor | None = None


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
        GPU buffers [2, tokens, G, d] where attention is on the GPU and the cache is not, made when first used: until
        decode the activations of prefill have that memory.
    landing_tokens, slot_tokens : int
        Token rows of a landing buffer, and of a slot.
    landings : int
        Landing buffers made.
    reserved : list of (str, str, int)
        What is given back with the cache: level, term, bytes.
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
    arenas: Arenas
    one_layer: bool = False
    free_landings: list[tuple[Tensor, Any]] = field(default_factory=list)
    landing_tokens: int = 0
    slot_tokens: int = 0
    landings: int = 0
    reserved: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def token_bytes(self) -> int:
        """Keys, or values, of one token in one layer [byte]."""
        return self.heads * self.width * torch.empty(0, dtype=self.dtype).element_size()

    @property
    def block_rows(self) -> int:
        """Token rows after which one begins at a whole block again."""
        return BLOCK // math.gcd(BLOCK, self.token_bytes)

    def rows_on_disk(self, tokens: int) -> int:
        """Rows that so many tokens take, in whole blocks."""
        return -(-tokens // self.block_rows) * self.block_rows

    def reserve(self, level: str, term: str, size: int) -> None:
        """Count a buffer that lasts as long as the cache.

        Raises
        ------
        InputError
            The plan does not foresee it.
        """
        self.arenas[level].reserve(term, size)
        self.reserved.append((level, term, size))

    def slot(self, number: int) -> Tensor:
        """A buffer [2, tokens, G, d] on the GPU for what of a micro-batch's cache is elsewhere."""
        while len(self.slots) <= number:
            self.slots.append(self._buffer(self.device.gpu_bytes(self.buffer_bytes(self.slot_tokens))))
        return self.slots[number]

    def buffer_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens in one layer [byte]."""
        return 2 * tokens * self.token_bytes

    def _buffer(self, flat: Tensor) -> Tensor:
        return flat.view(self.dtype).view(2, -1, self.heads, self.width)

    def landing_places(self, micro_batch: int) -> list[int]:
        """First token row of each request on disk in a landing buffer: one behind the other, whatever lies between."""
        found, at = [], 0
        for row in self.placement.decode[micro_batch].tier_rows("disk"):
            found.append(at)
            at += self.pools["disk"].capacity[row]
        return found

    def span(self, tier: str, micro_batch: int) -> int:
        """Token rows that a micro-batch has on a level."""
        return sum(self.pools[tier].capacity[row] for row in self.placement.decode[micro_batch].tier_rows(tier))

    def take_landing(self) -> Tensor:
        """A buffer [2, tokens, G, d] in CPU memory between one micro-batch's cache and the disk.

        Two were reserved with the cache; more of them share what the plan has for the pinned ring.
        """
        if self.free_landings:
            landing, left = self.free_landings.pop(0)  # the one that was given back first
            if left is not None:
                left.synchronize()
            return landing
        size = self.buffer_bytes(self.landing_tokens)
        if self.landings >= KV_LANDINGS:
            self.reserve("cpu", "weight staging buffers", size)
        self.landings += 1
        return self._buffer(self.device.pinned_bytes(size))

    def give_landing(self, landing: Tensor, left: Any = None) -> None:
        """Give such a buffer back; on CUDA with the event after which nothing reads it any more."""
        self.free_landings.append((landing, left))

    def read_disk(self, layer: int, micro_batch: int, lengths: Sequence[int], landing: Tensor) -> None:
        """Read the filled rows of a micro-batch's requests on disk into a buffer, at the places they have there."""
        assert self.disk is not None
        pool, rows = self.pools["disk"], self.placement.decode[micro_batch].tier_rows("disk")
        for row, at, length in zip(rows, self.landing_places(micro_batch), lengths, strict=True):
            for side in range(2):
                self.disk.read(
                    self._where(layer, side, pool.first[row]),
                    self._blocks(landing, side, at, length),
                )

    def write_prompt(self, layer: int, row: int, landing: Tensor, first: int, length: int) -> None:
        """Write the prompt of one request, which lies in a buffer from a row on where a block begins."""
        assert self.disk is not None
        for side in range(2):
            place = self._where(layer, side, self.pools["disk"].first[row])
            self.disk.write(place, self._blocks(landing, side, first, length))

    def _blocks(self, landing: Tensor, side: int, first: int, length: int) -> Tensor:
        """Bytes of so many rows of a buffer, up to the end of their last block."""
        raw, place = landing.view(2, -1).view(torch.uint8), first * self.token_bytes
        return raw[side, place : place + -(-length * self.token_bytes // BLOCK) * BLOCK]

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
        for pool in self.pools.values():
            if pool.raw is not None:
                self.device.unlock_pages(pool.raw)
            pool.memory, pool.raw = None, None
        for level, term, size in self.reserved:
            arenas[level].release(term, size)
        self.reserved, self.slots, self.free_landings = [], [], []


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
    cache = KvCache(placement, dtype, layers, heads, width, {}, [], disk, device, arenas, one_layer)
    kept = 1 if one_layer else layers
    try:
        _reserve(cache, kept=kept, slots=slots, disk_offset=disk_offset, copied=copied)
    except BaseException:  # what fits is not kept for what does not
        cache.close(arenas)
        raise
    return cache


def _reserve(cache: KvCache, *, kept: int, slots: bool, disk_offset: int | None, copied: bool) -> None:
    placement, device, disk, dtype = cache.placement, cache.device, cache.disk, cache.dtype
    size = 2 * kept * cache.token_bytes
    for tier in ("gpu", "cpu", "disk"):
        rows = tuple(row for part in placement.decode for row in part.tier_rows(tier))
        first, capacity, tokens = {}, {}, 0
        for row in rows:
            first[row], capacity[row] = tokens, placement.requests[row].tokens
            if tier == "disk":
                capacity[row] = cache.rows_on_disk(capacity[row])
            tokens += capacity[row]
        pool = Pool(rows, first, capacity, None, tokens)
        cache.pools[tier] = pool
        cache.reserve(tier, "KV cache", tokens * size)
        if tier == "disk":
            if tokens:
                assert disk is not None
                pool.offset = disk.size if disk_offset is None else disk_offset
                missing = pool.offset + tokens * size - disk.size
                if missing > 0:  # of a larger batch than those before; the region is the last of the file
                    disk.extend(missing)
        elif tokens:
            pool.raw = device.gpu_bytes(tokens * size) if tier == "gpu" else device.host_bytes(tokens * size)
            if tier == "cpu" and copied:
                device.lock_pages(pool.raw)
            pool.memory = (
                pool.raw.view(dtype)
                .view(kept, 2, tokens, cache.heads, cache.width)
                .expand(cache.layers, -1, -1, -1, -1)
            )
    micro_batches = range(len(placement.decode))
    read = max((cache.span("disk", j) for j in micro_batches), default=0)
    on_disk = cache.pools["disk"].first
    written = max(
        sum(cache.rows_on_disk(placement.requests[row].prompt_tokens) for row in part if row in on_disk)
        for part in placement.prefill
    )
    cache.landing_tokens = max(read, written)
    for _ in range(KV_LANDINGS):
        cache.reserve("cpu", "KV landing buffers", cache.buffer_bytes(cache.landing_tokens))
    if slots:
        cache.slot_tokens = max(
            sum(placement.requests[row].tokens for tier in ("cpu", "disk") for row in part.tier_rows(tier))
            for part in placement.decode
        )
        for _ in range(2):
            cache.reserve("gpu", "KV slots", cache.buffer_bytes(cache.slot_tokens))

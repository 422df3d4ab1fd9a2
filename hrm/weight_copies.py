"""Streamed weights: pages, the pinned ring they pass, the slots they fill, experts read for the CPU.

A page is a piece of a stage's streamed weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hrm.full_cost import STAGING_BUFFER_BYTES
from hrm.graph import Hold, Op
from hrm.holds import DENSE_SLOTS, SLOTS, held, ring_share
from hrm.issuing import DISK, H2D, PIN, Issued, Issuer, Stage
from hrm.layout import PageBytes

__all__ = ["WeightCopies"]

STAGING_DEPTH = 4
"""Pieces in the pinned ring between CPU memory or disk and the link."""

PIECE_BYTES = STAGING_BUFFER_BYTES / STAGING_DEPTH
"""Largest piece that passes the ring."""

HEAD_BUFFERS = 2
"""Pieces of a streamed lm_head on the GPU."""


@dataclass(slots=True)
class WeightCopies(Issuer):
    """Issues the copies of streamed weights."""

    pages: dict[Stage, list[Issued]] = field(default_factory=dict)  # loads of a stage's weights
    pieces: dict[tuple[Stage, int], Issued] = field(default_factory=dict)  # last load of a page
    loaded: dict[Stage, PageBytes] = field(default_factory=dict)  # bytes in the slot of a stage
    holders: list[Stage] = field(default_factory=list)  # stages that took a slot, in order
    freed: dict[Stage, tuple[Issued, ...]] = field(default_factory=dict)  # last use of a stage's slot
    ring: list[Issued] = field(default_factory=list)  # loads that empty the pinned ring, in order
    heads: list[Issued] = field(default_factory=list)  # last use of each piece of the lm_head, in order
    head_loads: int = 0
    disk_experts: dict[Stage, Issued] = field(default_factory=dict)  # experts read for the CPU
    cpu_experts: list[tuple[Issued, ...]] = field(default_factory=list)  # last use of them, per stage in order

    def _stage_bytes(self, stage: Stage) -> PageBytes:
        return self.layout.streamed(stage.layer, stage.phase, experts=self._experts_on_gpu(stage))

    def _num_pages(self, stage: Stage) -> int:
        if stage.layer == self.layout.num_layers:
            return self.layout.head_pieces()
        return len(self.members(stage)) if self.schedule.paged else 1

    def _pages(self, stage: Stage, place: int, places: int) -> None:
        """Bring the pages of a stage that fall to one of `places` places in the order of issue.

        Of a streamed lm_head no more come ahead than its buffers hold.
        """
        pages = self._num_pages(stage)
        ahead = min(pages, HEAD_BUFFERS) if stage.layer == self.layout.num_layers else pages
        for page in range(ahead):
            if page * places // ahead == place:
                self._bring(stage, page)

    def _bring(self, stage: Stage, page: int) -> None:
        """Copy one page to the GPU; what is not pinned, or on disk, passes the pinned ring in pieces."""
        whole = self._stage_bytes(stage)
        self.pages.setdefault(stage, [])
        if whole.total <= 0:
            return
        pieces, count = self._pieces_of_page(stage), self._num_pages(stage)
        free = self._slot(stage)
        for piece in range(page * pieces, (page + 1) * pieces):
            size = whole.piece(piece, count * pieces)
            self._bring_piece(stage, stage.group * count * pieces + piece, size, free)
        self.pieces[(stage, page)] = self.pages[stage][-1]

    def _pieces_of_page(self, stage: Stage) -> int:
        """Pieces in which a page passes the pinned ring, if it passes it."""
        return self._pieces_through_ring(self._stage_bytes(stage).cut(self._num_pages(stage)))

    def _pieces_through_ring(self, size: PageBytes) -> int:
        """Pieces of the pinned ring that so many bytes take; those that are pinned in place do not pass it."""
        through = size.disk + (0.0 if self.layout.policy.pin_weights else size.cpu)
        share = ring_share(self.layout.policy)
        return max(1, math.ceil(through / (PIECE_BYTES * share) - 1e-9)) if through > 0 else 1

    def _bring_piece(
        self, stage: Stage, page: int, size: PageBytes, free: tuple[Issued, ...], part: int | None = None
    ) -> None:
        after = [*self._through_ring(stage, page, size, part), *free]
        whole = 1.0 / self.layout.narrowed(stage.phase)  # a slot is as large where part of the batch is laid out
        holds = held("gpu", SLOTS, whole * (size.experts + size.disk)) + held("gpu", DENSE_SLOTS, whole * size.dense)
        if stage.layer == self.layout.num_layers:
            holds = ()  # the lm_head has buffers of its own, there all along
        load = self.add(
            Op.LOAD_WEIGHTS,
            H2D,
            stage,
            tuple(after),
            page=page,
            part=part,
            bytes_moved=size.total,
            each=self.layout.gathers_weights,
            acquires=holds,
        )
        self.pages[stage].append(load)
        if size.disk > 0 or not self.layout.policy.pin_weights:
            self.ring.append(load)
        before = self.loaded.get(stage, PageBytes(0.0, 0.0, 0.0))
        self.loaded[stage] = PageBytes(
            before.experts + size.experts, before.disk + size.disk, before.dense + size.dense
        )

    def _through_ring(self, stage: Stage, page: int, size: PageBytes, part: int | None = None) -> list[Issued]:
        """Bring a piece into the pinned ring, from disk and from CPU memory where weights are not pinned."""
        reuse = (self.ring[-STAGING_DEPTH],) if len(self.ring) >= STAGING_DEPTH else ()
        found = []
        if size.disk > 0:
            found.append(self.add(Op.READ_DISK, DISK, stage, reuse, page=page, part=part, bytes_moved=size.disk))
        if size.cpu > 0 and not self.layout.policy.pin_weights:
            found.append(self.add(Op.STAGE_WEIGHTS, PIN, stage, reuse, page=page, part=part, bytes_moved=size.cpu))
        return found

    def _slot(self, stage: Stage) -> tuple[Issued, ...]:
        """What a page waits for until its slot, or the lm_head's buffer, is free."""
        if stage.layer == self.layout.num_layers:
            number = self.head_loads - min(HEAD_BUFFERS, self.layout.head_pieces())  # a small one has one buffer
            self.head_loads += 1
            return (self.heads[number],) if number >= 0 else ()
        if not self.holders or self.holders[-1] != stage:
            self.holders.append(stage)
        slots = 1 if self.layout.policy.weight_slots == 1 else 2
        return self.freed[self.holders[-1 - slots]] if len(self.holders) > slots else ()

    def _dense_loads(self, stage: Stage) -> int:
        """Loads of a stage until all its streamed non-expert weights are there, which come first."""
        if self.layout.policy.dense_weights_on_gpu:
            return 0
        return self._stage_bytes(stage).dense_pieces(self._num_pages(stage) * self._pieces_of_page(stage))

    def _dense_weights(self, stage: Stage) -> list[Issued]:
        """What to wait for until a stage's non-expert weights are there."""
        needed = self._dense_loads(stage)
        return self.pages[stage][needed - 1 : needed] if needed else []

    def _weights(self, stage: Stage) -> list[Issued]:
        """What to wait for until a stage's weights are there: its last page, since a lane takes copies in order."""
        return self.pages.get(stage, [])[-1:]

    def _free(self, stage: Stage, last: tuple[Issued, ...]) -> tuple[Hold, ...]:
        """The slot of a stage is free after `last`; what that gives back."""
        self.freed[stage] = last
        size = self.loaded.get(stage)
        if size is None:
            return ()
        whole = 1.0 / self.layout.narrowed(stage.phase)
        return held("gpu", SLOTS, whole * (size.experts + size.disk)) + held("gpu", DENSE_SLOTS, whole * size.dense)

    def _read_experts(self, stage: Stage) -> None:
        """Read the experts of the disk that the CPU computes with, a layer ahead, into one of two buffers."""
        if stage.phase == "prefill" or stage.layer >= self.layout.num_layers or self._experts_on_gpu(stage):
            return
        size = self.layout.read_for_cpu(stage.layer)
        if size > 0 and stage not in self.disk_experts:
            number = len(self.disk_experts) - 2
            after = self.cpu_experts[number] if number >= 0 else ()
            self.disk_experts[stage] = self.add(Op.READ_DISK, DISK, stage, after, page=stage.group, bytes_moved=size)

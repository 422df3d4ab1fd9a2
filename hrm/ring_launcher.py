"""The launcher where expert weights come through a ring: expert by expert, each for the whole batch at once.

In a stage every micro-batch passes attention and the router first; then each expert is loaded and applied to all
tokens that reach it. A load waits for the expert that used its place in the ring. Non-expert weights that are streamed
have two slots of their own. In prefill every micro-batch goes through all layers by itself: a group of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hrm.graph import Op, Phase
from hrm.holds import ACTIVATIONS, SLOTS, held
from hrm.issuing import GPU, H2D, Issued, Stage
from hrm.launcher import Launcher
from hrm.layout import POST_KERNELS, PageBytes
from hrm.memory import KV_LANDINGS

__all__ = ["RingLauncher"]


@dataclass(slots=True)
class RingLauncher(Launcher):
    """A launcher that remembers what its ring holds."""

    used: list[Issued] = field(default_factory=list)  # experts computed so far, in order
    places_taken: int = 0
    coming: list[tuple[Stage, int, PageBytes]] = field(default_factory=list)  # loads not issued yet, in order
    arrived: dict[tuple[Stage, int], Issued] = field(default_factory=dict)
    read_ahead: dict[Stage, dict[int, list[Issued]]] = field(default_factory=dict)

    def members(self, stage: Stage) -> range:
        """Micro-batches that pass a stage: one in prefill, all in decode."""
        if stage.phase == "prefill":
            return range(stage.group, stage.group + 1)
        return range(self.layout.micro_batches("decode"))

    def num_groups(self, phase: Phase) -> int:
        """Parts of the batch that pass the layers apart from each other."""
        return self.layout.micro_batches(phase) if phase == "prefill" else 1

    def issue(self, stages: list[Stage]) -> Iterator[bool]:
        """Issue stages of one phase; yields at the end of every pass over the layers."""
        layers = self.layout.num_layers
        self.coming = [
            (stage, self._page_number(stage, expert), size)
            for stage in stages
            for expert, size in enumerate(self._expert_pages(stage))
        ]
        for number, stage in enumerate(stages):
            previous = stages[number - 1] if number else None
            following = stages[number + 1] if number + 1 < len(stages) else None
            if number == 0:
                self._load_dense(stage, None)
                self._read_experts(stage)
                if stage.phase == "decode":
                    for j in self.members(stage):
                        self._embed(stage, j)
            if stage.layer == layers:
                for _ in self._head(stage, None):
                    pass
                if following is not None:
                    self._load_dense(following, previous)
                    self._read_experts(following)
            else:
                self._attend(stage)
                if following is not None:  # after the hidden states of this stage, before the rest of its experts
                    self._load_dense(following, previous)
                    self._read_experts(following)
                self._serve(stage, following)
                if self._ends_pass(stage):
                    for j in self.members(stage):
                        self._finish(stage, j)
            if self._ends_pass(stage):
                yield True

    def _places(self) -> int:
        """Experts the ring holds: where a part of each stays on the GPU, what comes of it is smaller."""
        share = 1.0 - self.layout.policy.weights_on_gpu
        return int(self.layout.policy.ring_experts / share + 1e-9) if share > 0 else 0

    def _page_number(self, stage: Stage, expert: int) -> int:
        return stage.group * self.layout.scenario.model.streamed_experts + expert

    def _expert_pages(self, stage: Stage) -> list[PageBytes]:
        """What one pass loads of each expert of a stage."""
        layout = self.layout
        if stage.layer >= layout.num_layers or not layout.streams_experts(stage.layer):
            return []
        if not self._experts_on_gpu(stage):
            return []
        count = layout.scenario.model.streamed_experts
        whole = layout.streamed(stage.layer, stage.phase, experts=True)
        if stage.phase == "prefill":  # every micro-batch loads all of it
            part = 1.0 / layout.narrowed("prefill")
            whole = PageBytes(whole.experts * part, whole.disk * part, 0.0)
        return [PageBytes(whole.experts / count, whole.disk / count, 0.0)] * count

    def _read_ahead(self, stage: Stage, share: float) -> None:
        """KV cache of the next stage from disk, as far as the pinned ring holds it, between the reads of experts."""
        if self.layout.policy.kv_on_disk <= 0:
            return
        room = min(len(self.members(stage)), self.sizes.kv_landings - KV_LANDINGS)
        while len(self.read_ahead.setdefault(stage, {})) < room * share:
            j = len(self.read_ahead[stage])
            self.read_ahead[stage][j] = [self._read_cache(stage, j)]

    def _read_kv(self, stage: Stage, j: int) -> list[Issued]:
        """A micro-batch's KV cache from disk, unless it was read ahead."""
        ahead = self.read_ahead.get(stage, {}).get(j)
        return ahead if ahead is not None else Launcher._read_kv(self, stage, j)

    def _dense_loads(self, stage: Stage) -> int:
        """All of them come in loads of their own, before anything of the layer is issued."""
        return len(self.pages.get(stage, ()))

    def _comes(self, stage: Stage) -> bool:
        """Whether the next load of the ring is for this stage."""
        return bool(self.coming) and self.coming[0][0] == stage

    def _next_load(self) -> None:
        """Issue the next load of the ring; it waits for the expert whose place it takes."""
        stage, page, size = self.coming.pop(0)
        if size.total <= 0:
            return
        place = self.places_taken - self._places()
        self.places_taken += 1
        free = [self.used[place]] if 0 <= place < len(self.used) else []
        pieces = self._pieces_through_ring(size)
        for number in range(pieces):
            piece, part = size.piece(number, pieces), number + 1 if pieces > 1 else None
            loaded = self.add(
                Op.LOAD_WEIGHTS,
                H2D,
                stage,
                (*self._through_ring(stage, page, piece, part), *free),
                page=page,
                part=part,
                bytes_moved=piece.total,
                acquires=held("gpu", SLOTS, piece.total * self._whole(stage)),
            )
            if piece.disk > 0 or not self.layout.policy.pin_weights:
                self.ring.append(loaded)
        self.arrived[(stage, page)] = loaded

    def _whole(self, stage: Stage) -> float:
        """A place of the ring is as large where only part of the batch is laid out."""
        return 1.0 if stage.phase == "prefill" else 1.0 / self.layout.narrowed(stage.phase)

    def _load_dense(self, stage: Stage, previous: Stage | None) -> None:
        """Copy what is streamed of a stage besides its experts; into one of two slots, free once `previous` is done."""
        if stage.layer == self.layout.num_layers:
            self._pages(stage, 0, 1)
            return
        size = self.layout.streamed(stage.layer, stage.phase, experts=False)
        if stage.phase == "prefill":
            size = PageBytes(0.0, 0.0, size.dense / self.layout.narrowed("prefill"))
        self.pages.setdefault(stage, [])
        if size.total > 0:
            pieces, free = self._pieces_through_ring(size), self._slot(stage)
            for number in range(pieces):
                self._bring_piece(stage, stage.group * pieces + number, size.piece(number, pieces), free, part=0)

    def _attend(self, stage: Stage) -> None:
        """Attention and router of every micro-batch of a stage, CPU attention looking ahead."""
        members = self.members(stage)
        ahead = max(1, min(self.schedule.lookahead, len(members)))
        positions = len(members) + ahead
        loads = 0
        for position in range(positions):
            # The ring fills between the other copies, so that hidden states never wait behind all of it.
            while self._comes(stage) and loads < self._places() * (position + 1) / positions:
                self._next_load()
                loads += 1
            if position < len(members):
                self._before(stage, members[position])
            if position >= ahead:
                j = members[position - ahead]
                self._copies(stage, None, position - ahead, j)
                self._after(stage, j)

    def _after(self, stage: Stage, j: int) -> None:
        """Output projection, router and shared expert of one micro-batch; its experts come later."""
        operators = self.layout.operators(stage.phase, stage.layer)
        if operators["experts"] and not self._experts_on_gpu(stage):
            Launcher._after(self, stage, j)
            return
        alive = self.sizes.pieces(stage.phase)
        releases = held("gpu", ACTIVATIONS, alive.compute)
        takes = releases if stage.phase == "decode" else ()
        if (stage, j) in self.results:
            releases += held("gpu", ACTIVATIONS, alive.result)
        post = self._project(
            stage,
            j,
            (*self.before_post[(stage, j)], *self._weights(stage)),
            operators["post"],
            acquires=takes,
            releases=() if stage.phase == "prefill" and operators["experts"] else releases,
            slot_free=j == self.members(stage)[-1],
        )
        self.shared.done[(stage, j)] = (post,)

    def _serve(self, stage: Stage, following: Stage | None) -> None:
        """Each expert for all tokens of the stage, its place then free for the next load."""
        members, pages = self.members(stage), self._expert_pages(stage)
        arrived = sum((stage, self._page_number(stage, expert)) in self.arrived for expert in range(len(pages)))
        while self._comes(stage) and arrived < min(self._places(), len(pages)):
            self._next_load()  # of a ring larger than the layer, or where nothing was loaded in between
            arrived += 1
        if pages:
            work = self.layout.expert_share(stage.phase, len(members), len(pages))
            ends = [issued for j in members for issued in self.shared.done[(stage, j)]]
            computed: list[Issued] = []
            for expert, size in enumerate(pages):
                number = self._page_number(stage, expert)
                after = [*(computed[-1:] or ends)]
                if (stage, number) in self.arrived:
                    after.append(self.arrived[(stage, number)])
                final = expert == len(pages) - 1
                gives = held("gpu", SLOTS, size.total * self._whole(stage))
                if final and stage.phase == "prefill":
                    gives += held("gpu", ACTIVATIONS, self.sizes.prefill.compute)
                computed.append(
                    self.add(
                        Op.EXPERTS,
                        GPU,
                        stage,
                        tuple(after),
                        page=number,
                        operators=work,
                        launches=1 if expert else POST_KERNELS,
                        releases=gives,
                    )
                )
                if size.total > 0:
                    self.used.append(computed[-1])
                    if self._comes(stage):
                        self._next_load()
                if following is not None and following.phase == "decode" and following.layer < self.layout.num_layers:
                    self._read_ahead(following, (expert + 1) / len(pages))
            for j in members:
                self.shared.done[(stage, j)] = (computed[-1],)
        if stage.phase == "prefill" and stage.layer < self.layout.num_layers:
            for j in members:
                self._offload_prompts(stage, j, self.shared.done[(stage, j)][0])

    def _goes_out(self, stage: Stage) -> bool:
        """Hidden states stay on the GPU, as the micro-batch goes on to the next layer at once."""
        return False

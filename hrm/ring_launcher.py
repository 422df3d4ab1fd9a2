"""The launcher where expert weights come through a ring: expert by expert, each for the whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from hrm.full_cost import STAGING_BUFFER_BYTES
from hrm.graph import Op, Phase, TaskId
from hrm.launcher import D2H, DISK, GPU, H2D, PIN, STAGING_DEPTH, Launcher, Stage
from hrm.layout import POST_KERNELS, PageBytes

__all__ = ["RingLauncher"]

GROUP_PAGES = 1_000_000
"""Offset that tells the pages of one prefill micro-batch from those of the next."""


@dataclass(slots=True)
class RingLauncher(Launcher):
    """The same launcher where expert weights come through a ring: expert by expert, for the whole batch at once.

    In a stage every micro-batch passes attention and the router first; then each expert is loaded and applied to all
    tokens that reach it. A load waits for the expert that used its place in the ring. Non-expert weights that are
    streamed have two slots of their own.
    """

    used: list[TaskId] = field(default_factory=list)  # experts computed so far, in order
    coming: list[tuple[Stage, int, PageBytes]] = field(default_factory=list)  # loads not issued yet, in order
    arrived: dict[tuple[Stage, int], TaskId] = field(default_factory=dict)
    dense: dict[Stage, TaskId] = field(default_factory=dict)
    read_ahead: dict[Stage, dict[int, TaskId]] = field(default_factory=dict)

    def run(self, stages: list[Stage], phase: Phase) -> None:
        """Issue the stages of one phase; in prefill every micro-batch goes through all of them by itself."""
        micro_batches = self.layout.micro_batches(phase)
        groups = [[j] for j in range(micro_batches)] if phase == "prefill" else [list(range(micro_batches))]
        passes = [(stage, group) for group in groups for stage in stages]
        start = len(self.order)
        self.order += stages
        self.number.update({stage: start + position for position, stage in enumerate(stages)})
        self.coming = []
        for stage, group in passes:
            for expert, size in enumerate(self._expert_pages(stage)):
                self.coming.append((stage, group[0] * GROUP_PAGES + expert if phase == "prefill" else expert, size))
        for number, (stage, group) in enumerate(passes):
            if number == 0:
                self._load_dense(stage, group, None)
            self._attend(stage, group)
            following = passes[number + 1] if number + 1 < len(passes) else None
            if following is not None:  # after the hidden states of this stage, before the rest of its experts
                self._load_dense(*following, passes[number - 1] if number else None)
            self._serve(stage, group, following[0] if following is not None else None)
            if self._ends_step(stage):
                for j in group:
                    self._finish(stage, j)

    def _places(self) -> int:
        """Experts the ring holds: where a part of each stays on the GPU, what comes of it is smaller."""
        share = 1.0 - self.layout.policy.weights_on_gpu
        return int(self.layout.policy.ring_experts / share + 1e-9) if share > 0 else 0

    def _read_ahead(self, stage: Stage, count: int, share: float) -> None:
        """KV cache of the next stage from disk, as far as the pinned ring holds it, between the reads of experts."""
        policy = self.layout.policy
        if policy.kv_on_disk <= 0:
            return
        size = self.layout.kv_read_bytes(stage.layer, stage.step) * policy.kv_on_disk
        room = min(count, int(STAGING_BUFFER_BYTES / size)) if size > 0 else 0
        while len(self.read_ahead.setdefault(stage, {})) < room * share:
            j = len(self.read_ahead[stage])
            self.read_ahead[stage][j] = Launcher._read_kv(self, stage, j)

    def _read_kv(self, stage: Stage, j: int) -> TaskId:
        """A micro-batch's KV cache from disk, unless it was read ahead."""
        ahead = self.read_ahead.get(stage, {}).get(j)
        return ahead if ahead is not None else Launcher._read_kv(self, stage, j)

    def arrived_of(self, stage: Stage, group: list[int]) -> list[int]:
        """Pages of this stage and group whose load is issued."""
        start = group[0] * GROUP_PAGES if stage.phase == "prefill" else 0
        count = self.layout.scenario.model.streamed_experts
        return [page for page in range(start, start + count) if (stage, page) in self.arrived]

    def _expert_pages(self, stage: Stage) -> list[PageBytes]:
        """What one pass loads of each expert of a stage."""
        layout, policy = self.layout, self.layout.policy
        if (
            stage.layer >= layout.num_layers
            or not layout.streams_experts(stage.layer)
            or not self._experts_on_gpu(stage)
        ):
            return []
        each, count = layout.sizes.expert_bytes, layout.scenario.model.streamed_experts
        cpu = max(0.0, 1.0 - policy.weights_on_gpu - policy.weights_on_disk) * each
        return [PageBytes(cpu, policy.weights_on_disk * each)] * count

    def _comes(self, stage: Stage, group: list[int]) -> bool:
        """Whether the next load of the ring is for this stage and group."""
        if not self.coming or self.coming[0][0] != stage:
            return False
        return stage.phase == "decode" or self.coming[0][1] // GROUP_PAGES == group[0]

    def _next_load(self) -> None:
        """Issue the next load of the ring; it waits for the expert whose place it takes."""
        if not self.coming:
            return
        stage, page, size = self.coming.pop(0)
        if size.total <= 0:
            return
        after: list[TaskId] = []
        reuse = (self.loads[-STAGING_DEPTH],) if len(self.loads) >= STAGING_DEPTH else ()
        if size.disk > 0:
            after.append(self.add(Op.READ_DISK, DISK, stage, reuse, page=page, bytes_moved=size.disk))
        if size.cpu > 0 and not self.layout.policy.pin_weights:
            after.append(self.add(Op.STAGE_WEIGHTS, PIN, stage, reuse, page=page, bytes_moved=size.cpu))
        place = len(self.loads) - self._places()
        if 0 <= place < len(self.used):
            after.append(self.used[place])
        loaded = self.add(Op.LOAD_WEIGHTS, H2D, stage, tuple(after), page=page, bytes_moved=size.total)
        self.loads.append(loaded)
        self.arrived[(stage, page)] = loaded

    def _load_dense(self, stage: Stage, group: list[int], previous: tuple[Stage, list[int]] | None) -> None:
        """Copy the streamed non-expert weights of a stage into one of two slots, free once `previous` is done."""
        size = self.layout.streamed(stage.layer, experts=False)
        if size.total <= 0:
            return
        after: list[TaskId] = []
        if not self.layout.policy.pin_weights:
            after.append(self.add(Op.STAGE_WEIGHTS, PIN, stage, part=group[0], bytes_moved=size.cpu))
        if previous is not None:
            after += [self.done[(previous[0], previous[1][-1])]]
        self.dense[stage] = self.add(Op.LOAD_WEIGHTS, H2D, stage, tuple(after), part=group[0], bytes_moved=size.total)
        self.pages[stage] = [self.dense[stage]]

    def _attend(self, stage: Stage, group: list[int]) -> None:
        """Attention and router of every micro-batch of a group, CPU attention looking ahead."""
        if stage.layer >= self.layout.num_layers:
            return
        ahead = max(1, min(self.schedule.lookahead, len(group)))
        positions = len(group) + ahead
        first = len(self.loads)
        for position in range(positions):
            # The ring fills between the other copies, so that hidden states never wait behind all of it.
            while self._comes(stage, group) and len(self.loads) - first < self._places() * (position + 1) / positions:
                self._next_load()
            if position < len(group):
                self._embed(Stage(stage.phase, stage.step, 0), group[position])
                self._before(stage, group[position])
            if position >= ahead:
                j = group[position - ahead]
                self._copies(stage, None, j, stage.phase)
                self._route(stage, j)

    def _route(self, stage: Stage, j: int) -> None:
        """Output projection, router and shared expert of one micro-batch."""
        layout = self.layout
        operators = layout.operators(stage.phase, stage.layer)
        after = (*self.before_post[(stage, j)], *self._weights(stage))
        work = operators["post"]
        if not operators["experts"] or self._experts_on_gpu(stage):
            post = self.add(Op.POST_ATTENTION, GPU, stage, after, micro_batch=j, operators=work, launches=POST_KERNELS)
            self.done[(stage, j)] = post
        else:
            self._after(stage, j)

    def _serve(self, stage: Stage, group: list[int], following: Stage | None) -> None:
        """Each expert for all tokens of the group, its place then free for the next load."""
        pages = self._expert_pages(stage)
        for _ in range(self._places()):  # of a ring larger than the layer, or where nothing was loaded in between
            if self._comes(stage, group) and len(self.arrived_of(stage, group)) < min(self._places(), len(pages)):
                self._next_load()
        if not pages:
            if stage.phase == "prefill" and stage.layer < self.layout.num_layers:
                for j in group:
                    self._offload_prefill_kv(stage, j)
            return
        tokens = self.layout.tokens(stage.phase) * len(group)
        work = self.layout.expert_share(tokens, len(pages))
        routed = tuple(self.done[(stage, j)] for j in group)
        last = routed[-1]
        for expert in range(len(pages)):
            page = group[0] * GROUP_PAGES + expert if stage.phase == "prefill" else expert
            after = [*(routed if expert == 0 else (last,))]
            if (stage, page) in self.arrived:
                after.append(self.arrived[(stage, page)])
            last = self.add(
                Op.EXPERTS, GPU, stage, tuple(after), page=page, operators=work, launches=1 if expert else POST_KERNELS
            )
            if pages[expert].total > 0:
                self.used.append(last)
                if self._comes(stage, group):
                    self._next_load()
            if following is not None and following.phase == "decode" and following.layer < self.layout.num_layers:
                self._read_ahead(following, len(group), (expert + 1) / len(pages))
        for j in group:
            self.done[(stage, j)] = last
            if stage.phase == "prefill":
                self._offload_prefill_kv(stage, j)

    def _offload_prefill_kv(self, stage: Stage, j: int) -> None:
        """KV cache of the prompts to where it lies; hidden states stay, as the micro-batch goes on at once."""
        layout, policy = self.layout, self.layout.policy
        off_gpu = 1.0 - policy.kv_on_gpu
        if off_gpu <= 0:
            return
        attention = self.before_post[(stage, j)][0]
        size = layout.kv_prompt_bytes()
        stored = self.add(Op.STORE_KV, D2H, stage, (attention,), micro_batch=j, bytes_moved=size * off_gpu)
        self._keep_stored(stage, stored)
        if policy.kv_on_disk > 0:
            self.add(Op.WRITE_DISK, DISK, stage, (stored,), micro_batch=j, bytes_moved=size * policy.kv_on_disk)

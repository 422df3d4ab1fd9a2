"""The launcher: issues the tasks of a schedule one after the other, as Algorithm 1 of the paper does.

Terms: a *stage* is a layer of one pass, or its streamed lm_head; a *position* is one micro-batch in one stage. A page
is a piece of a stage's streamed weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hrm.graph import Hold, Lane, LaneKind, Op, Operator, Phase, Task, TaskId
from hrm.layout import ATTENTION_KERNELS, POST_KERNELS, PRE_KERNELS, Layout, PageBytes

__all__ = ["Launcher", "Schedule", "Stage"]

GPU, CPU = Lane(LaneKind.GPU, 0), Lane(LaneKind.CPU)
H2D, D2H = Lane(LaneKind.H2D, 0), Lane(LaneKind.D2H, 0)
PIN, DISK = Lane(LaneKind.PIN), Lane(LaneKind.DISK)

LOOKAHEAD = 2
"""Micro-batches whose attention is issued ahead of the one that finishes (Algorithm 1)."""

STAGING_DEPTH = 2
"""Pages in the pinned ring between CPU memory or disk and the link."""

KV_BUFFERS = 2
"""Micro-batches' KV caches on the GPU where attention is there and the cache is not: in use, and the next."""


class Stage(NamedTuple):
    """One layer of one pass; layer L is the streamed lm_head."""

    phase: Phase
    step: int
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How a schedule lays out a pass.

    Attributes
    ----------
    name, summary : str
    lookahead : int
        Micro-batches whose attention is issued before the current one finishes.
    paged : bool
        The next stage's weights come in as many pages as there are micro-batches, between the other copies; else as
        one block.
    block_first : bool
        That block is issued before the stage's other copies, else after its first hidden-state load.
    attention_on_gpu : bool or None
        What it needs A_g to be; None = either.
    """

    name: str
    summary: str
    lookahead: int
    paged: bool
    block_first: bool
    attention_on_gpu: bool | None
    on_cpu: bool = False
    serial: bool = False
    one_micro_batch: bool = False


@dataclass(slots=True)
class Launcher:
    """Tasks in the order they are issued. Mutable on purpose: a launcher that remembers what it issued."""

    layout: Layout
    schedule: Schedule
    tasks: list[Task] = field(default_factory=list)
    pages: dict[Stage, list[TaskId]] = field(default_factory=dict)  # loads of a stage's weights
    done: dict[tuple[Stage, int], TaskId] = field(default_factory=dict)  # what ends a micro-batch in a stage
    embedded: dict[tuple[Phase, int, int], TaskId] = field(default_factory=dict)
    before_post: dict[tuple[Stage, int], list[TaskId]] = field(default_factory=dict)
    hidden: dict[tuple[Stage, int], TaskId] = field(default_factory=dict)
    loads: list[TaskId] = field(default_factory=list)  # loads that empty the pinned ring, in order
    kv_attention: dict[tuple[Stage, int], TaskId] = field(default_factory=dict)
    kv_stored: dict[tuple[int, int], TaskId] = field(default_factory=dict)  # last store of a layer and micro-batch
    kv_loads: list[tuple[Stage, int]] = field(default_factory=list)  # KV caches copied to the GPU, in order
    last_sample: dict[int, TaskId] = field(default_factory=dict)
    order: list[Stage] = field(default_factory=list)
    number: dict[Stage, int] = field(default_factory=dict)  # of each stage in `order`
    loaded: dict[Stage, float] = field(default_factory=dict)  # bytes in the slots of a stage

    def add(
        self,
        op: Op,
        lane: Lane,
        stage: Stage,
        after: tuple[TaskId, ...] = (),
        *,
        micro_batch: int | None = None,
        page: int | None = None,
        part: int | None = None,
        operators: tuple[Operator, ...] = (),
        bytes_moved: float = 0.0,
        launches: int = 0,
        acquires: tuple[Hold, ...] = (),
        releases: tuple[Hold, ...] = (),
    ) -> TaskId:
        """Issue one task."""
        name = TaskId(op, stage.phase, stage.step, stage.layer, micro_batch, page, lane.device, part)
        self.tasks.append(
            Task(name, lane, tuple(dict.fromkeys(after)), operators, bytes_moved, launches, acquires, releases)
        )
        return name

    # Passes

    def run(self, stages: list[Stage], phase: Phase) -> None:
        """Issue the stages of one phase."""
        micro_batches = self.layout.micro_batches(phase)
        start = len(self.order)
        self.order += stages
        self.number.update({stage: start + position for position, stage in enumerate(stages)})
        for page in range(self._num_pages(phase)):  # prologue: the first stage's weights, before anything overlaps
            self._prepare(stages[0], page)
            self._load(stages[0], page)
        for j in range(micro_batches):
            self._embed(stages[0], j)
        ahead = min(self.schedule.lookahead, micro_batches) if phase == "decode" else 0
        layers = self.layout.num_layers
        computed = [(stage, j) for stage in stages if stage.layer < layers for j in range(micro_batches)]
        issued = 0
        passed = 0
        for number, stage in enumerate(stages):
            following = stages[number + 1] if number + 1 < len(stages) else None
            for j in range(micro_batches):
                if stage.layer < layers:
                    passed += 1
                while issued < min(passed if ahead == 0 else passed + ahead - 1, len(computed)):
                    if issued < passed and not self._ready(*computed[issued]):
                        break
                    if not self._ready(*computed[issued]):
                        break
                    self._before(*computed[issued])
                    issued += 1
                if ahead == 0 and self.schedule.block_first and j == 0 and self.layout.policy.weight_slots != 1:
                    self._block(following, phase)
                self._copies(stage, following, j, phase)
                if stage.layer < layers:
                    self._after(stage, j)
                if self._ends_step(stage):
                    self._finish(stage, j)
                if following is not None and self.layout.policy.weight_slots == 1 and j == micro_batches - 1:
                    for page in range(self._num_pages(phase)):
                        self._prepare(following, page)
                        self._load(following, page)
                while ahead and issued < min(passed + ahead, len(computed)) and self._ready(*computed[issued]):
                    self._before(*computed[issued])
                    issued += 1

    def _ends_step(self, stage: Stage) -> bool:
        last = self.layout.num_layers - (1 if self.layout.policy.lm_head_on_gpu else 0)
        return stage.layer == last

    def _ready(self, stage: Stage, j: int) -> bool:
        """Whether what a micro-batch's layer starts from has been issued."""
        if stage.layer == 0:
            return (stage.phase, stage.step, j) in self.embedded
        return (Stage(stage.phase, stage.step, stage.layer - 1), j) in self.done

    # Weights

    def _num_pages(self, phase: Phase) -> int:
        return self.layout.micro_batches(phase) if self.schedule.paged else 1

    def _page(self, stage: Stage) -> PageBytes:
        whole = self.layout.streamed(stage.layer, experts=self._experts_on_gpu(stage))
        count = self._num_pages(stage.phase)
        return PageBytes(whole.cpu / count, whole.disk / count)

    def _experts_on_gpu(self, stage: Stage) -> bool:
        return stage.phase == "prefill" or self.layout.policy.ffn_on_gpu

    def _prepare(self, stage: Stage, page: int) -> None:
        """Bring one page into the pinned ring: from CPU memory where weights are not pinned, and from disk."""
        size = self._page(stage)
        reuse = (self.loads[-STAGING_DEPTH],) if len(self.loads) >= STAGING_DEPTH else ()
        if size.disk > 0:
            self.add(Op.READ_DISK, DISK, stage, reuse, page=page, bytes_moved=size.disk)
        if size.cpu > 0 and not self.layout.policy.pin_weights:
            self.add(Op.STAGE_WEIGHTS, PIN, stage, reuse, page=page, bytes_moved=size.cpu)

    def _load(self, stage: Stage, page: int) -> None:
        """Copy one page to its slot on the GPU, once the slot is free."""
        size = self._page(stage)
        loads = self.pages.setdefault(stage, [])
        if size.total <= 0:
            return
        after: list[TaskId] = []
        name = TaskId(Op.READ_DISK, stage.phase, stage.step, stage.layer, None, page, None, None)
        if size.disk > 0:
            after.append(name)
        if size.cpu > 0 and not self.layout.policy.pin_weights:
            after.append(name._replace(op=Op.STAGE_WEIGHTS))
        slots = 1 if self.layout.policy.weight_slots == 1 else 2
        held = self._stage_before(stage, slots)
        if held is not None:
            last = self.layout.micro_batches(held.phase) - 1
            after.append(self.done[(held, last)])
        hold = (Hold("gpu", "weight slots", size.total),)
        loads.append(
            self.add(Op.LOAD_WEIGHTS, H2D, stage, tuple(after), page=page, bytes_moved=size.total, acquires=hold)
        )
        self.loads.append(loads[-1])
        self.loaded[stage] = self.loaded.get(stage, 0.0) + size.total

    def _stage_before(self, stage: Stage, distance: int) -> Stage | None:
        """The stage that used the slot: `distance` streamed stages earlier."""
        position = self.number[stage]
        while position > 0 and distance > 0:
            position -= 1
            if self.pages.get(self.order[position]):
                distance -= 1
        return self.order[position] if distance == 0 and position >= 0 else None

    def _block(self, following: Stage | None, phase: Phase) -> None:
        if following is not None:
            self._prepare(following, 0)
            self._load(following, 0)

    def _weights(self, stage: Stage) -> list[TaskId]:
        """What to wait for until a stage's weights are there: its last page, since a lane takes copies in order."""
        return self.pages.get(stage, [])[-1:]

    # One position

    def _embed(self, stage: Stage, j: int) -> None:
        key = (stage.phase, stage.step, j)
        if key in self.embedded:
            return
        sampled = self.last_sample.get(j)
        after = () if sampled is None or stage.phase == "prefill" else (sampled,)
        layout, first = self.layout, Stage(stage.phase, stage.step, 0)
        operators = layout.embedding(stage.phase)
        if layout.policy.embedding_on_gpu:
            self.embedded[key] = self.add(Op.EMBED, GPU, first, after, micro_batch=j, operators=operators)
            return
        looked_up = self.add(Op.EMBED, CPU, first, after, micro_batch=j, operators=operators)
        size = layout.tokens(stage.phase) * layout.row_bytes
        self.embedded[key] = self.add(Op.LOAD_HIDDEN, H2D, first, (looked_up,), micro_batch=j, part=0, bytes_moved=size)

    def _before(self, stage: Stage, j: int) -> None:
        """Everything of a micro-batch's layer up to attention on the CPU, or to the projections."""
        layout, policy, tokens = self.layout, self.layout.policy, self.layout.tokens(stage.phase)
        start = self.embedded[(stage.phase, stage.step, j)] if stage.layer == 0 else None
        after = [start if start is not None else self.done[(Stage(stage.phase, stage.step, stage.layer - 1), j)]]
        if not policy.dense_weights_on_gpu:
            after += self._weights(stage)
        if stage.phase == "prefill" and (stage, j) in self.hidden:
            after.append(self.hidden[(stage, j)])
        operators = layout.operators(stage.phase, stage.layer)
        pre = self.add(
            Op.PRE_ATTENTION, GPU, stage, tuple(after), micro_batch=j, operators=operators["pre"], launches=PRE_KERNELS
        )
        if stage.phase == "prefill":
            attention = self.add(
                Op.ATTENTION,
                GPU,
                stage,
                (pre,),
                micro_batch=j,
                operators=layout.attention_prefill(stage.layer),
                launches=ATTENTION_KERNELS,
            )
            self.before_post[(stage, j)] = [attention]
            return
        if policy.attention_on_gpu:
            self.before_post[(stage, j)] = [self._attention_on_gpu(stage, j, pre)]
            return
        waits = []
        if policy.kv_on_gpu > 0:
            waits.append(self._gpu_share(stage, j, pre))
        share = 1.0 - policy.kv_on_gpu
        if share > 0:
            copy = self.add(
                Op.OFFLOAD_QKV, D2H, stage, (pre,), micro_batch=j, bytes_moved=tokens * share * layout.qkv_bytes
            )
            ready = [copy]
            if policy.kv_on_disk > 0:
                ready.append(self._read_kv(stage, j))
            attention = self.add(
                Op.ATTENTION,
                CPU,
                stage,
                tuple(ready),
                micro_batch=j,
                operators=layout.attention_decode(stage.layer, stage.step, share),
            )
            self.hidden[(stage, j)] = attention
        self.before_post[(stage, j)] = waits

    def _gpu_share(self, stage: Stage, j: int, pre: TaskId) -> TaskId:
        operators = self.layout.attention_decode(stage.layer, stage.step, self.layout.policy.kv_on_gpu)
        return self.add(
            Op.ATTENTION, GPU, stage, (pre,), micro_batch=j, part=1, operators=operators, launches=ATTENTION_KERNELS
        )

    def _attention_on_gpu(self, stage: Stage, j: int, pre: TaskId) -> TaskId:
        layout, policy = self.layout, self.layout.policy
        after = [pre]
        if policy.kv_on_gpu < 1.0:
            after.append(self._load_kv(stage, j))
            following = j + 1
            if following < layout.micro_batches("decode"):
                self._load_kv(stage, following)  # the next micro-batch's cache comes while this one computes
        attention = self.add(
            Op.ATTENTION,
            GPU,
            stage,
            tuple(after),
            micro_batch=j,
            operators=layout.attention_decode(stage.layer, stage.step, 1.0),
            launches=ATTENTION_KERNELS,
        )
        self.kv_attention[(stage, j)] = attention
        if policy.kv_on_gpu < 1.0:
            size = layout.requests("decode") * layout.kv_new_bytes * (1.0 - policy.kv_on_gpu)
            stored = self.add(Op.STORE_KV, D2H, stage, (pre,), micro_batch=j, bytes_moved=size)
            self.kv_stored[(stage.layer, j)] = stored
            if policy.kv_on_disk > 0:
                self._write_kv(stage, j, stored)
        return attention

    def _load_kv(self, stage: Stage, j: int) -> TaskId:
        """Copy a micro-batch's cache into one of two slots (D4); each waits for the attention that used it."""
        name = TaskId(Op.LOAD_KV, stage.phase, stage.step, stage.layer, j, None, 0, None)
        key = (stage, j)
        if self.hidden.get(key) == name:
            return name
        layout, policy = self.layout, self.layout.policy
        after = []
        self.kv_loads.append(key)
        if len(self.kv_loads) > KV_BUFFERS:
            after.append(self.kv_attention[self.kv_loads[-1 - KV_BUFFERS]])
        if (stage.layer, j) in self.kv_stored:
            after.append(self.kv_stored[(stage.layer, j)])  # what the step before added, or prefill
        if policy.kv_on_disk > 0:
            after.append(self._read_kv(stage, j))
        size = layout.kv_read_bytes(stage.layer, stage.step) * (1.0 - policy.kv_on_gpu)
        self.hidden[key] = self.add(Op.LOAD_KV, H2D, stage, tuple(after), micro_batch=j, bytes_moved=size)
        return name

    def _read_kv(self, stage: Stage, j: int) -> TaskId:
        size = self.layout.kv_read_bytes(stage.layer, stage.step) * self.layout.policy.kv_on_disk
        return self.add(Op.READ_DISK, DISK, stage, micro_batch=j, bytes_moved=size)

    def _write_kv(self, stage: Stage, j: int, after: TaskId) -> None:
        size = self.layout.requests("decode") * self.layout.kv_new_bytes * self.layout.policy.kv_on_disk
        self.add(Op.WRITE_DISK, DISK, stage, (after,), micro_batch=j, bytes_moved=size)

    def _copies(self, stage: Stage, following: Stage | None, j: int, phase: Phase) -> None:
        """Copies of a position towards the GPU: hidden states first, then a page of the next stage."""
        layout, policy = self.layout, self.layout.policy
        if phase == "decode" and not policy.attention_on_gpu and (stage, j) in self.hidden:
            size = layout.tokens(phase) * (1.0 - policy.kv_on_gpu) * layout.result_bytes
            loaded = self.add(
                Op.LOAD_HIDDEN, H2D, stage, (self.hidden[(stage, j)],), micro_batch=j, part=1, bytes_moved=size
            )
            self.before_post[(stage, j)].append(loaded)
        if following is None or policy.weight_slots == 1:  # one slot: free only when this stage is done
            return
        if self.schedule.paged:
            self._prepare(following, j)
            self._load(following, j)
        elif not self.schedule.block_first and j == 0:
            self._block(following, phase)

    def _after(self, stage: Stage, j: int) -> None:
        """The rest of a layer once attention is there: output projection, router, experts."""
        layout, phase = self.layout, stage.phase
        operators = layout.operators(phase, stage.layer)
        after = (*self.before_post[(stage, j)], *self._weights(stage))
        on_gpu = self._experts_on_gpu(stage) or not operators["experts"]
        work = operators["post"] + (operators["experts"] if on_gpu else ())
        last = j == layout.micro_batches(phase) - 1
        slot = self.loaded.get(stage, 0.0) if last else 0.0
        releases = (Hold("gpu", "weight slots", slot),) if slot else ()
        post = self.add(
            Op.POST_ATTENTION,
            GPU,
            stage,
            after,
            micro_batch=j,
            operators=work,
            launches=POST_KERNELS,
            releases=releases if on_gpu else (),
        )
        if not on_gpu:
            row = layout.tokens(phase) * layout.row_bytes
            stored = self.add(Op.STORE_HIDDEN, D2H, stage, (post,), micro_batch=j, bytes_moved=row)
            experts = self.add(Op.EXPERTS, CPU, stage, (stored,), micro_batch=j, operators=operators["experts"])
            post = self.add(
                Op.LOAD_HIDDEN, H2D, stage, (experts,), micro_batch=j, part=2, bytes_moved=row, releases=releases
            )
        self.done[(stage, j)] = post
        if phase == "prefill":
            self._offload_prefill(stage, j, post)

    def _offload_prefill(self, stage: Stage, j: int, post: TaskId) -> None:
        """KV cache of the prompts to where it lies; hidden states to CPU memory where several micro-batches wait."""
        layout, policy = self.layout, self.layout.policy
        off_gpu = 1.0 - policy.kv_on_gpu
        if off_gpu > 0:
            attention = self.before_post[(stage, j)][0]
            stored = self.add(
                Op.STORE_KV, D2H, stage, (attention,), micro_batch=j, bytes_moved=layout.kv_prompt_bytes() * off_gpu
            )
            self._keep_stored(stage, stored)
            if policy.kv_on_disk > 0:
                size = layout.kv_prompt_bytes() * policy.kv_on_disk
                self.add(Op.WRITE_DISK, DISK, stage, (stored,), micro_batch=j, bytes_moved=size)
        if layout.micro_batches("prefill") > 1 and stage.layer < layout.num_layers - 1:
            row = layout.tokens("prefill") * layout.row_bytes
            kept = self.add(Op.STORE_HIDDEN, D2H, stage, (post,), micro_batch=j, bytes_moved=row)
            after = Stage(stage.phase, stage.step, stage.layer + 1)
            self.hidden[(after, j)] = self.add(
                Op.LOAD_HIDDEN, H2D, after, (kept,), micro_batch=j, part=0, bytes_moved=row
            )

    def _keep_stored(self, stage: Stage, stored: TaskId) -> None:
        """Decode loads a cache once prefill has stored it; its micro-batches are others, so it waits for the last."""
        for j in range(self.layout.micro_batches("decode")):
            self.kv_stored[(stage.layer, j)] = stored

    def _finish(self, stage: Stage, j: int) -> None:
        """Logits and the next token of a micro-batch, and its embedding for the next step."""
        layout = self.layout
        last = Stage(stage.phase, stage.step, layout.num_layers - 1)
        ends = stage.layer == layout.num_layers and j == layout.micro_batches(stage.phase) - 1
        slot = self.loaded.get(stage, 0.0) if ends else 0.0
        head = self.add(
            Op.LM_HEAD,
            GPU,
            Stage(stage.phase, stage.step, layout.num_layers),
            (self.done[(last, j)], *(self._weights(stage) if stage.layer == layout.num_layers else [])),
            micro_batch=j,
            operators=layout.head(stage.phase),
            launches=1,
            releases=(Hold("gpu", "weight slots", slot),) if slot else (),
        )
        sample = self.add(
            Op.SAMPLE, GPU, Stage(stage.phase, stage.step, layout.num_layers), (head,), micro_batch=j, launches=1
        )
        if stage.layer == layout.num_layers:
            self.done[(stage, j)] = head
        self.last_sample[j] = sample
        if stage.phase == "decode":
            following = Stage("decode", stage.step + 1, 0)
            if following in self.number:
                self._embed(following, j)

"""Issuing tasks: what is known of a graph while it is laid out, one task or its twins at a time.

Terms: a *stage* is a layer of one pass, or its streamed lm_head; a *position* is one micro-batch in one stage. On a
tensor-parallel group of GPUs a task of the GPU or of its link is issued once per GPU, each with its part of the work:
*twins*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from hrm.graph import Hold, Lane, LaneKind, Op, Operator, Phase, Task, TaskId
from hrm.holds import HoldSizes
from hrm.layout import Layout

__all__ = ["Issued", "Issuer", "Schedule", "Shared", "Stage"]

Issued: TypeAlias = tuple[TaskId, ...]
"""A task, or its twins on the GPUs of a group."""

GPU, CPU, H2D, D2H = LaneKind.GPU, LaneKind.CPU, LaneKind.H2D, LaneKind.D2H
PIN, DISK = LaneKind.PIN, LaneKind.DISK

PER_DEVICE = (GPU, H2D, D2H)


class Stage(NamedTuple):
    """One layer of one pass; layer L is the streamed lm_head.

    `group` numbers the passes that micro-batches make apart from each other: one micro-batch at a time in prefill with
    a ring of experts, a part of the batch on several GPUs in a pipeline.
    """

    phase: Phase
    step: int
    layer: int
    group: int = 0


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
    on_cpu : bool
        Everything is computed on the CPU.
    serial : bool
        Every task waits for the one issued before it, of the same devices.
    one_micro_batch : bool
        It has one micro-batch, its KV cache on the GPU.
    static_experts : bool
        Some experts stay on the GPU and the others on the CPU, each computed where it is.
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
    static_experts: bool = False


@dataclass(slots=True)
class Shared:
    """What the launchers of one graph know together. Mutable on purpose: it grows as tasks are issued."""

    tasks: list[Task] = field(default_factory=list)
    done: dict[tuple[Stage, int], tuple[Issued, ...]] = field(default_factory=dict)  # what ends a position
    embedded: dict[tuple[Phase, int, int], Issued] = field(default_factory=dict)
    sampled: dict[tuple[Phase, int, int], Issued] = field(default_factory=dict)
    kv_stored: dict[tuple[int, int], Issued] = field(default_factory=dict)  # last store of a layer and micro-batch
    kv_written: list[Issued] = field(default_factory=list)  # writes of the prompts' KV cache, in order
    stored_rows: dict[tuple[Stage, int], Issued] = field(default_factory=dict)  # hidden states on their way elsewhere
    prefilled: Issued | None = None  # the last first token
    passes: set[tuple[Phase, int]] = field(default_factory=set)  # that the graph covers
    split: dict[int, tuple[tuple[Operator, ...], tuple[Operator, ...]]] = field(default_factory=dict)


@dataclass(slots=True)
class Issuer:
    """Adds tasks to a graph. Mutable on purpose: it remembers what it issued.

    `devices` are the GPUs it issues for: all of a tensor-parallel group, or one of a pipeline.
    """

    layout: Layout
    schedule: Schedule
    sizes: HoldSizes
    shared: Shared
    devices: tuple[int, ...]
    latest: Issued = ()

    def add(
        self,
        op: Op,
        kind: LaneKind,
        stage: Stage,
        after: tuple[Issued, ...] = (),
        *,
        micro_batch: int | None = None,
        page: int | None = None,
        part: int | None = None,
        operators: tuple[Operator, ...] = (),
        bytes_moved: float = 0.0,
        each: bool = False,
        launches: int = 0,
        acquires: tuple[Hold, ...] = (),
        releases: tuple[Hold, ...] = (),
    ) -> Issued:
        """Issue one task, or its twins; work, bytes and holds are those of all twins, with `each` bytes of each."""
        phase, step, layer, _ = stage
        tasks = self.shared.tasks
        if self.schedule.serial and self.latest:
            after = (*after, self.latest)
        if kind not in PER_DEVICE:
            waits = tuple(dict.fromkeys([name for issued in after for name in issued]))
            name = TaskId(op, phase, step, layer, micro_batch, page, None, part)
            tasks.append(Task(name, Lane(kind), waits, operators, bytes_moved, launches, acquires, releases))
            self.latest = (name,)
            return (name,)
        count = self.layout.group_size
        if count == 1:
            waits = tuple(dict.fromkeys([name for issued in after for name in issued]))
            device = self.devices[0]
            name = TaskId(op, phase, step, layer, micro_batch, page, device, part)
            tasks.append(Task(name, Lane(kind, device), waits, operators, bytes_moved, launches, acquires, releases))
            self.latest = (name,)
            return (name,)
        operators = self._twin(operators)
        moved = bytes_moved if each else bytes_moved / count
        acquires = tuple(hold._replace(bytes=hold.bytes / count) for hold in acquires)
        releases = tuple(hold._replace(bytes=hold.bytes / count) for hold in releases)
        twins = []
        for position, device in enumerate(self.devices):
            waits = tuple(
                dict.fromkeys(
                    name
                    for issued in after
                    for name in (issued if len(issued) == 1 or op is Op.ALL_REDUCE else (issued[position],))
                )
            )
            name = TaskId(op, phase, step, layer, micro_batch, page, device, part)
            tasks.append(Task(name, Lane(kind, device), waits, operators, moved, launches, acquires, releases))
            twins.append(name)
        self.latest = tuple(twins)
        return self.latest

    def _twin(self, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        """The part of each GPU of the group."""
        if not operators:
            return operators
        found = self.shared.split.get(id(operators))
        if found is None:
            share = 1.0 / self.layout.group_size
            twin = tuple(Operator(name, share * work) for name, work in operators)
            found = self.shared.split[id(operators)] = (operators, twin)  # the key lives as long as the entry
        return found[1]

    def members(self, stage: Stage) -> range:
        """Micro-batches that pass a stage."""
        count, groups = self.layout.micro_batches(stage.phase), self.num_groups(stage.phase)
        return range(stage.group * count // groups, (stage.group + 1) * count // groups)

    def num_groups(self, phase: Phase) -> int:
        """Parts of the batch that pass the layers apart from each other."""
        count = self.layout.micro_batches(phase)
        return min(self.layout.gpus, count) if self.layout.pipelined else 1

    def stages(self, phase: Phase, first: int, last: int) -> list[Stage]:
        """Stages of a range of steps that these devices compute, in order."""
        every = range(self.layout.num_layers + (0 if self.layout.policy.lm_head_on_gpu else 1))
        mine = [layer for layer in every if not self.layout.pipelined or self.layout.device_of(layer) in self.devices]
        groups = range(self.num_groups(phase))
        return [Stage(phase, step, layer, group) for step in range(first, last) for group in groups for layer in mine]

    def _ends_pass(self, stage: Stage) -> bool:
        """Whether these devices have no more of this pass to compute."""
        layout = self.layout
        if stage.layer == layout.num_layers - 1:
            return layout.policy.lm_head_on_gpu
        return stage.layer == layout.num_layers or (
            layout.pipelined and layout.device_of(stage.layer + 1) not in self.devices
        )

    def _experts_on_gpu(self, stage: Stage) -> bool:
        if stage.phase == "prefill" or self.layout.policy.ffn_on_gpu:
            return True
        return self.schedule.static_experts and self.layout.copies_experts

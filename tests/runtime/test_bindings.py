"""Buffers are used again only when the graph says that whoever used them is done.

Happens-before is what lanes (tasks in issue order) and dependencies together enforce, whatever the timing. Two tasks of
which one writes a buffer that the other uses must be ordered by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from cases import Case, cases, corners, layout_of, model_folder, policy_of
from hypothesis import given, settings

from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId
from hrm.layout import Layout
from hrm.memory import PIPELINE_DEPTH
from hrm.schedules import SCHEDULES, Steps, schedule_graph
from runtime.bindings import Bindings, StageKey, WeightPiece, as_load, bind_buffers

PASSES = (Steps(prefill=True), Steps(first=0, last=3))
"""Graphs of one run: prefill, and decode."""


def happens_before(graph: TaskGraph) -> list[int]:
    """For every task the set of tasks that are over when it starts, as bits."""
    found: list[int] = []
    latest: dict[Lane, int] = {}
    for number, (task, before) in enumerate(zip(graph.tasks, graph.before, strict=True)):
        reached = 0
        for other in (*before, *((latest[task.lane],) if task.lane in latest else ())):
            reached |= found[other] | 1 << other
        found.append(reached)
        latest[task.lane] = number
    return found


class Buffers:
    """Which buffer every task of a graph reads or writes, by what its kernel is told to do."""

    def __init__(self, layout: Layout, schedule: str, graph: TaskGraph) -> None:
        self.layout, self.policy = layout, layout.policy
        copies = SCHEDULES[schedule].static_experts and not self.policy.everything_on_cpu and layout.copies_experts
        self.experts_on_gpu = self.policy.ffn_on_gpu or copies
        self.bindings: Bindings = bind_buffers(layout, graph, experts_on_gpu=self.experts_on_gpu)
        self.rings = self.policy.weight_slots == "experts"

    def used_by(self, task: Task) -> Iterator[tuple[tuple[str, int], bool]]:
        """(kind and number of a buffer, whether it is written)."""
        name, numbers = task.id, self.bindings.numbers
        decode = name.phase == "decode"
        if name.op in (Op.LOAD_WEIGHTS, Op.STAGE_WEIGHTS) or (name.op is Op.READ_DISK and name.micro_batch is None):
            yield from self._copied(task)
        elif name.op in (Op.PRE_ATTENTION, Op.POST_ATTENTION, Op.LM_HEAD) or (
            name.op is Op.EXPERTS and task.lane.kind is LaneKind.GPU and name.page is not None
        ):
            yield from self._computed_with(task)
        if self.policy.everything_on_cpu or not decode:
            return
        at = ("decode", name.step, name.layer, name.micro_batch)
        on_cpu = task.lane.kind is LaneKind.CPU
        if name.op is Op.OFFLOAD_QKV:
            yield ("qkv", numbers[(name.op, *at)]), True
        elif name.op is Op.ATTENTION and on_cpu:
            yield ("qkv", numbers[(Op.OFFLOAD_QKV, *at)]), False
            yield ("result", numbers[(Op.OFFLOAD_QKV, *at)]), True
        elif name.op is Op.LOAD_HIDDEN and name.part == 1:
            yield ("result", numbers[(Op.OFFLOAD_QKV, *at)]), False
        elif name.op is Op.STORE_HIDDEN:
            yield ("expert input", numbers[(name.op, *at)]), True
        elif name.op is Op.EXPERTS and on_cpu:
            yield ("expert input", numbers[(Op.STORE_HIDDEN, *at)]), False
            yield ("expert output", numbers[(Op.STORE_HIDDEN, *at)]), True
            stage = StageKey("decode", name.step, name.layer)
            if stage in self.bindings.landings:
                yield ("experts from disk", self.bindings.landings[stage]), False
        elif name.op is Op.LOAD_HIDDEN and name.part == 2:
            yield ("expert output", numbers[(Op.STORE_HIDDEN, *at)]), False
        elif name.op is Op.LOAD_KV:
            yield ("KV slot", numbers[(name.op, *at)]), True
        elif name.op is Op.ATTENTION and (Op.LOAD_KV, *at) in numbers:
            yield ("KV slot", numbers[(Op.LOAD_KV, *at)]), True  # it adds the new token

    def _copied(self, task: Task) -> Iterator[tuple[tuple[str, int], bool]]:
        stage = StageKey(task.id.phase, task.id.step, task.id.layer)
        if task.id.op is Op.READ_DISK and stage in self.bindings.landings:
            yield ("experts from disk", self.bindings.landings[stage]), True
            return
        piece = self.bindings.pieces[as_load(task.id)]
        loads = task.id.op is Op.LOAD_WEIGHTS
        if piece.pinned is not None:
            sides = ("disk", "memory") if loads else ("disk",) if task.id.op is Op.READ_DISK else ("memory",)
            for side in sides:
                yield (f"pinned piece from {side}", piece.pinned), not loads
        if loads:
            for kind in self._kinds(piece, task.id):
                yield (kind, piece.slot), True

    def _kinds(self, piece: WeightPiece, name: TaskId) -> list[str]:
        if piece.head is not None:
            return ["lm_head"]
        if piece.expert is not None:
            return ["place of the ring"]
        if self.rings:
            return ["slot of other weights"]
        goes = name.phase == "prefill" or self.experts_on_gpu
        size = self.layout.streamed(name.layer, name.phase, experts=goes).piece(piece.number, piece.parts)
        found = ["slot of other weights"] if size.dense > 0 else []
        return found + (["slot of experts"] if size.experts + size.disk > 0 else [])

    def _computed_with(self, task: Task) -> Iterator[tuple[tuple[str, int], bool]]:
        name = task.id
        if name.op is Op.EXPERTS:
            assert name.page is not None
            group, expert = divmod(name.page, self.layout.scenario.model.streamed_experts)
            place = self.bindings.places.get((StageKey(name.phase, name.step, name.layer, group), expert))
            if place is not None:
                yield ("place of the ring", place), False
            return
        group = (name.micro_batch or 0) if self.rings and name.phase == "prefill" else 0
        stage = StageKey(name.phase, name.step, name.layer, group)
        if name.op is Op.LM_HEAD:
            if (stage, name.page or 0) in self.bindings.heads:
                yield ("lm_head", self.bindings.heads[(stage, name.page or 0)]), False
        elif stage in self.bindings.slots:
            yield ("slot of other weights", self.bindings.slots[stage]), False
            if name.op is Op.POST_ATTENTION and not self.rings:
                yield ("slot of experts", self.bindings.slots[stage]), False


def find_reuse(layout: Layout, schedule: str, graph: TaskGraph) -> str | None:
    """The first two uses of one buffer that nothing keeps apart; None where there are none."""
    buffers, over = Buffers(layout, schedule, graph), happens_before(graph)
    uses: dict[tuple[str, int], list[tuple[int, bool]]] = defaultdict(list)
    for number, task in enumerate(graph.tasks):
        for buffer, writes in buffers.used_by(task):
            uses[buffer].append((number, writes))
    for (kind, place), found in uses.items():
        for position, (later, writes) in enumerate(found):
            for earlier, wrote in found[:position]:
                if (writes or wrote) and earlier != later and not over[later] >> earlier & 1:
                    return f"{kind} {place}: {graph.tasks[later].id} does not wait for {graph.tasks[earlier].id}"
    return None


def reuses(family: str, case: Case) -> list[str]:
    layout = layout_of(model_folder(family), case)
    found = [find_reuse(layout, case.schedule, schedule_graph(layout, case.schedule, steps)) for steps in PASSES]
    return [each for each in found if each]

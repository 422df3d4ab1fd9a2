"""Which buffer every task of a graph uses: slots, places of the ring, pinned pieces, buffers of QKV and hidden states.

A schedule reuses buffers in the order it issues tasks, and its dependencies make that safe. Here the same order is
walked once, before anything runs, so that lanes share no counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hrm.graph import Op, Phase, Task, TaskGraph, TaskId
from hrm.layout import Layout
from hrm.memory import PIPELINE_DEPTH

__all__ = ["Bindings", "StageKey", "WeightPiece", "bind_buffers"]

RING_PIECES = 4
"""Pieces of the pinned ring (`hrm.weight_copies.STAGING_DEPTH`)."""

SLOTS = 2
"""Of KV caches, of the lm_head, and of experts read for the CPU."""


class StageKey(NamedTuple):
    """One layer of one pass; `group` is the micro-batch in prefill with a ring of experts, else 0."""

    phase: Phase
    step: int
    layer: int
    group: int = 0


class WeightPiece(NamedTuple):
    """What one copy of weights brings.

    `number` of `parts` equal pieces of what is streamed of a stage (of one piece of the lm_head: `head`; of one expert:
    `expert`), into buffer `slot`, through piece `pinned` of the ring if it passes it.
    """

    stage: StageKey
    number: int
    parts: int
    slot: int
    pinned: int | None
    expert: int | None = None
    head: int | None = None


@dataclass(slots=True)
class Bindings:
    """By task id, or by stage.

    Attributes
    ----------
    pieces : dict
        Of LOAD_WEIGHTS, and of STAGE_WEIGHTS and READ_DISK by the id they would have as a load.
    slots : dict
        Slot of a stage's streamed weights.
    places : dict
        Place of an expert of a ring: (stage, expert).
    heads : dict
        Buffer of a piece of the lm_head: (stage, piece).
    landings : dict
        Buffer of the experts read from disk for the CPU, by stage.
    numbers : dict
        Which of a few buffers a position uses, by (op, step, layer, micro-batch).
    """

    pieces: dict[TaskId, WeightPiece] = field(default_factory=dict)
    slots: dict[StageKey, int] = field(default_factory=dict)
    places: dict[tuple[StageKey, int], int] = field(default_factory=dict)
    heads: dict[tuple[StageKey, int], int] = field(default_factory=dict)
    landings: dict[StageKey, int] = field(default_factory=dict)
    numbers: dict[tuple[Op, Phase, int, int, int], int] = field(default_factory=dict)


def as_load(task: TaskId) -> TaskId:
    """Id of the copy to the GPU that a staging copy or a read feeds."""
    return task._replace(op=Op.LOAD_WEIGHTS, device=0)


def ring_places(layout: Layout) -> int:
    """Experts the ring holds: where a part of each stays on the GPU, what comes of it is smaller."""
    share = 1.0 - layout.policy.weights_on_gpu
    return int(layout.policy.ring_experts / share + 1e-9) if share > 0 else 0


def bind_buffers(layout: Layout, graph: TaskGraph, *, experts_on_gpu: bool) -> Bindings:
    """Walk a graph in order of issue.

    Parameters
    ----------
    experts_on_gpu : bool
        Whether the GPU computes the routed experts of decode; else those on disk are read for the CPU.
    """
    found = Bindings()
    for_cpu = {
        task.id
        for task in graph.tasks
        if task.id.op is Op.READ_DISK and task.id.micro_batch is None
        if layout.policy.everything_on_cpu or (task.id.phase == "decode" and not experts_on_gpu)
    }
    _bind_weights(layout, graph, found, for_cpu)
    counters: dict[Op, Iterator[int]] = {}
    for task in graph.tasks:
        name = task.id
        if name in for_cpu:
            stage = StageKey(name.phase, name.step, name.layer)
            found.landings[stage] = len(found.landings) % SLOTS
        depth = _depth(task)
        if depth and name.micro_batch is not None:
            count = counters.setdefault(name.op, _count())
            found.numbers[(name.op, name.phase, name.step, name.layer, name.micro_batch)] = next(count) % depth
    return found


def _depth(task: Task) -> int:
    """Buffers that tasks of a kind take in turn."""
    if task.id.phase == "prefill":
        return 0
    return {Op.OFFLOAD_QKV: PIPELINE_DEPTH, Op.STORE_HIDDEN: PIPELINE_DEPTH, Op.LOAD_KV: SLOTS}.get(task.id.op, 0)


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _bind_weights(layout: Layout, graph: TaskGraph, found: Bindings, for_cpu: set[TaskId]) -> None:
    policy, layers = layout.policy, layout.num_layers
    ring = policy.weight_slots == "experts"
    slots = 1 if policy.weight_slots == 1 else 2
    loads = [task.id for task in graph.tasks if task.id.op is Op.LOAD_WEIGHTS]
    through = {
        as_load(task.id)
        for task in graph.tasks
        if task.id.op in (Op.STAGE_WEIGHTS, Op.READ_DISK) and task.id.micro_batch is None and task.id not in for_cpu
    }
    counts: dict[tuple[Phase, int, int], int] = {}  # loads of a stage, without those of a ring's experts
    parts_of: dict[tuple[Phase, int, int, int], int] = {}  # loads of an expert of a ring
    for name in loads:
        if ring and name.layer < layers and name.part != 0:
            expert_key = (name.phase, name.step, name.layer, name.page or 0)
            parts_of[expert_key] = parts_of.get(expert_key, 0) + 1
        else:
            key = (name.phase, name.step, name.layer)
            counts[key] = counts.get(key, 0) + 1
    pinned = places = brought = 0
    holders: list[StageKey] = []
    experts, pieces = layout.scenario.model.streamed_experts, layout.head_pieces()
    for name in loads:
        page, groups = name.page or 0, layout.micro_batches("prefill") if ring and name.phase == "prefill" else 1
        ring_piece = None
        if name in through:
            ring_piece, pinned = pinned % RING_PIECES, pinned + 1
        if name.layer == layers:
            every = counts[(name.phase, name.step, name.layer)] // groups
            stage = StageKey(name.phase, name.step, name.layer, page // every)
            parts = every // pieces
            head = page % every // parts
            if (stage, head) not in found.heads:
                found.heads[(stage, head)] = brought % min(SLOTS, pieces)
                brought += 1
            slot = found.heads[(stage, head)]
            found.pieces[name] = WeightPiece(stage, page % every % parts, parts, slot, ring_piece, head=head)
            continue
        if ring and name.part != 0:
            stage, expert = StageKey(name.phase, name.step, name.layer, page // experts), page % experts
            if (stage, expert) not in found.places:
                found.places[(stage, expert)] = places % ring_places(layout)
                places += 1
            place, parts = found.places[(stage, expert)], parts_of[(name.phase, name.step, name.layer, page)]
            found.pieces[name] = WeightPiece(stage, (name.part or 1) - 1, parts, place, ring_piece, expert=expert)
            continue
        count = counts[(name.phase, name.step, name.layer)] // groups
        stage = StageKey(name.phase, name.step, name.layer, page // count if ring else 0)
        if stage not in found.slots:
            found.slots[stage] = len(holders) % slots
            holders.append(stage)
        found.pieces[name] = WeightPiece(stage, page % count, count, found.slots[stage], ring_piece)

"""Buffers are used again only when the graph says that whoever used them is done.

Happens-before is what lanes (tasks in issue order) and dependencies together enforce, whatever the timing. Two tasks of
which one writes a buffer that the other uses must be ordered by it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from accesses import watch_runs
from cases import (
    LONGEST,
    Case,
    cases,
    corners,
    layout_of,
    make_prompts,
    model_folder,
    open_tiny,
    policy_of,
    run_session,
)
from hypothesis import given, settings
from hypothesis import strategies as st

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
    """What is wrong in the two graphs of a run."""
    layout = layout_of(model_folder(family), case)
    found = [find_reuse(layout, case.schedule, schedule_graph(layout, case.schedule, steps)) for steps in PASSES]
    return [each for each in found if each]


def some_corners(schedule: str, count: int, seed: int) -> list[Case]:
    every = [case for case in corners() if case.schedule == schedule]
    return random.Random(seed).sample(every, min(count, len(every)))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces so small that tiny weights pass the pinned ring in several, and the lm_head comes in three."""
    monkeypatch.setattr("hrm.weight_copies.PIECE_BYTES", 3000.0)
    for module in ("hrm.layout", "hrm.memory"):
        monkeypatch.setattr(f"{module}.HEAD_BUFFER_BYTES", 5000.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_a_buffer_is_used_again_only_by_who_waits_for_its_last_use(schedule: str, family: str) -> None:
    for case in some_corners(schedule, 30, seed=1):
        assert not reuses(family, case), case


@settings(max_examples=60, deadline=None)
@given(cases(most_micro_batches=6), st.sampled_from(["mixtral", "qwen2_moe", "llama"]))
def test_a_buffer_is_used_again_only_when_it_is_free_whatever_the_policy(case: Case, family: str) -> None:
    assert not reuses(family, case)


@pytest.mark.parametrize("schedule", ["cgopipe", "s3", "s4", "serial"])
def test_pieces_of_the_pinned_ring_and_of_the_lm_head_are_free_when_used_again(
    schedule: str, small_pieces: None
) -> None:
    for case in some_corners(schedule, 20, seed=2):
        policy = replace(case.policy, lm_head_on_gpu=False, pin_weights=False)
        assert not reuses("mixtral", Case(schedule, policy)), policy


FIVE: dict[str, Any] = {
    "num_micro_batches": 5,
    "micro_batch_size": 1,
    "ffn_on_gpu": False,
    "attention_on_gpu": True,
    "kv_on_gpu": 1.0,
}
"""Experts on the CPU, and nothing else there that holds the GPU back."""


def without(graph: TaskGraph, op: Op, waits_for: Op) -> TaskGraph:
    """The graph without what tasks of one kind wait for of another."""
    return TaskGraph(
        replace(task, after=tuple(other for other in task.after if other.op is not waits_for))
        if task.id.op is op
        else task
        for task in graph.tasks
    )


@pytest.mark.parametrize(
    ("changes", "op", "waits_for", "kind"),
    [
        (FIVE, Op.STORE_HIDDEN, Op.LOAD_HIDDEN, "expert input"),
        ({}, Op.LOAD_WEIGHTS, Op.POST_ATTENTION, "slot of experts"),
        ({"weight_slots": "experts", "ring_experts": 2}, Op.LOAD_WEIGHTS, Op.EXPERTS, "place of the ring"),
        ({"pin_weights": False}, Op.STAGE_WEIGHTS, Op.LOAD_WEIGHTS, "pinned piece from memory"),
        ({}, Op.POST_ATTENTION, Op.LOAD_HIDDEN, "qkv"),
    ],
)
def test_a_graph_that_does_not_wait_is_found_out(changes: dict[str, Any], op: Op, waits_for: Op, kind: str) -> None:
    case = Case("s4" if changes.get("attention_on_gpu") else "cgopipe", policy_of(**changes))
    layout = layout_of(model_folder("mixtral"), case)
    graph = schedule_graph(layout, case.schedule, PASSES[1])
    assert find_reuse(layout, case.schedule, graph) is None
    found = find_reuse(layout, case.schedule, without(graph, op, waits_for))
    assert found is not None and found.startswith(kind)


def test_as_many_buffers_are_taken_in_turn_as_there_are() -> None:
    case = Case("cgopipe", policy_of(**FIVE | {"attention_on_gpu": False, "kv_on_gpu": 0.0}))
    layout = layout_of(model_folder("mixtral"), case)
    numbers = bind_buffers(layout, schedule_graph(layout, "cgopipe", PASSES[1]), experts_on_gpu=False).numbers
    for op in (Op.OFFLOAD_QKV, Op.STORE_HIDDEN):
        taken = [number for (kind, *_), number in numbers.items() if kind is op]
        assert taken == [place % PIPELINE_DEPTH for place in range(3 * 3 * 5)]  # steps, layers, micro-batches


# What kernels do, not what they are told

SHORT = (3, 1, 2, 4, 2, 1, 3, 2)


def races(family: str, case: Case, *, broken: tuple[Op, Op] | None = None) -> list[str]:
    """Tasks that touch the same memory, one writing, that nothing keeps apart."""
    session = open_tiny(model_folder(family), case, lengths=SHORT, generated=3)
    with watch_runs() as ran:
        run_session(session, make_prompts(SHORT))
    if session.disk is not None:
        session.disk.close()
    found = []
    for graph, accesses in ran:
        over = happens_before(graph if broken is None else without(graph, *broken))
        for thing, earlier, later in accesses.conflicts():
            if earlier >= 0 and not over[later] >> earlier & 1:
                found.append(f"{thing}: {graph.tasks[later].id} does not wait for {graph.tasks[earlier].id}")
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_two_tasks_touch_the_same_memory_unordered(schedule: str) -> None:
    for case in some_corners(schedule, 8, seed=3):
        count = case.policy.num_micro_batches
        policy = replace(case.policy, batch_size=2 * count, micro_batch_size=2, micro_batch_token_budget=2 * LONGEST)
        assert not races("qwen2_moe", Case(schedule, policy)), policy


def test_no_two_tasks_touch_the_same_piece_unordered(small_pieces: None) -> None:
    for schedule in ("cgopipe", "s3", "s4"):
        changes = {"lm_head_on_gpu": False, "dense_weights_on_gpu": False, "weights_on_disk": 0.5}
        for pinned in (True, False):
            case = Case(schedule, policy_of(schedule, pin_weights=pinned, num_micro_batches=4, **changes))
            assert not races("mixtral", case)


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        (FIVE, (Op.STORE_HIDDEN, Op.LOAD_HIDDEN)),
        ({}, (Op.LOAD_WEIGHTS, Op.POST_ATTENTION)),
        ({"kv_on_gpu": 0.5}, (Op.POST_ATTENTION, Op.LOAD_HIDDEN)),
        ({"embedding_on_gpu": False}, (Op.LOAD_HIDDEN, Op.EMBED)),
    ],
)
def test_watching_finds_what_a_graph_leaves_out(changes: dict[str, Any], broken: tuple[Op, Op]) -> None:
    case = Case("s4" if changes.get("attention_on_gpu") else "cgopipe", policy_of(**changes))
    assert not races("mixtral", case)
    assert races("mixtral", case, broken=broken)

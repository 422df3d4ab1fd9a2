"""Schedules: exact timelines of a tiny model, what they refuse, and what every graph has to hold."""

from collections import defaultdict
from typing import Any

import pytest
import timelines
from hypothesis import given, settings
from tiny import tiny_profile, tiny_scenario
from tiny_policies import Case, cases, policy_of

from hrm.errors import InputError
from hrm.graph import LaneKind, Op, Task, TaskGraph, TaskId, finish_times
from hrm.layout import Layout
from hrm.schedules import SCHEDULES, Steps, check_schedule, schedule_graph
from simulator.durations import table_durations
from simulator.engine import simulate

SECONDS = {
    Op.EMBED: 0.0,
    Op.PRE_ATTENTION: 1.0,
    Op.ATTENTION: 3.0,
    Op.POST_ATTENTION: 2.0,
    Op.EXPERTS: 2.0,
    Op.LM_HEAD: 1.0,
    Op.SAMPLE: 0.0,
    Op.OFFLOAD_QKV: 1.0,
    Op.LOAD_HIDDEN: 1.0,
    Op.STORE_HIDDEN: 1.0,
    Op.STAGE_WEIGHTS: 3.0,
    Op.LOAD_WEIGHTS: 2.0,
    Op.LOAD_KV: 4.0,
    Op.STORE_KV: 1.0,
}
STEP = Steps(first=0, last=1)


def graph_of(schedule: str, steps: Steps = STEP, **changes: Any) -> TaskGraph:
    return schedule_graph(Layout(tiny_scenario(), policy_of(**changes)), schedule, steps)


def ends_of(graph: TaskGraph) -> dict[str, float]:
    ends = finish_times(graph, table_durations(SECONDS))
    return {str(task.id): end for task, end in zip(graph.tasks, ends, strict=True)}


def by_hand(text: str) -> list[tuple[str, float, float]]:
    rows = [line.split() for line in text.strip().splitlines()]
    return [(name, float(start), float(end)) for name, start, end in rows]


GPU_ATTENTION = {"attention_on_gpu": True}
TIMELINES = {
    "cgopipe": ("cgopipe", timelines.CGOPIPE, STEP, {"num_micro_batches": 3}),
    "cgopipe staged": (
        "cgopipe",
        timelines.CGOPIPE_STAGED,
        Steps(first=0, last=2),
        {"num_micro_batches": 1, "pin_weights": False},
    ),
    "cgopipe one slot": ("cgopipe", timelines.CGOPIPE_ONE_SLOT, STEP, {"weight_slots": 1}),
    "ring": ("cgopipe", timelines.RING, STEP, {"num_micro_batches": 1, "weight_slots": "experts", "ring_experts": 2}),
    "s2": ("s2", timelines.S2, STEP, {"num_micro_batches": 3}),
    "s3": ("s3", timelines.S3, STEP, {}),
    "s4": ("s4", timelines.S4, STEP, GPU_ATTENTION),
    "streaming": (
        "streaming",
        timelines.STREAMING,
        Steps(first=0, last=2),
        {"num_micro_batches": 1, "attention_on_gpu": True, "kv_on_gpu": 1.0},
    ),
    "serial": ("serial", timelines.SERIAL, STEP, {"num_micro_batches": 1}),
    "prefill": ("cgopipe", timelines.PREFILL, Steps(prefill=True), {}),
}


@pytest.mark.parametrize("name", TIMELINES)
def test_timeline_is_the_one_by_hand(name: str) -> None:
    schedule, expected, steps, changes = TIMELINES[name]
    graph = graph_of(schedule, steps, **changes)
    trace = simulate(graph, table_durations(SECONDS))
    assert [(str(span.task), span.start_s, span.end_s) for span in trace.spans] == by_hand(expected)


def test_every_schedule_has_a_timeline() -> None:
    assert {schedule for schedule, _, _, _ in TIMELINES.values()} == set(SCHEDULES)


def order_on(kind: LaneKind, graph: TaskGraph) -> list[str]:
    return [
        f"{task.id.op.value} l{task.id.layer} {task.id.page if task.id.micro_batch is None else task.id.micro_batch}"
        for task in graph.tasks
        if task.lane.kind is kind
    ]


def test_cgopipe_puts_a_page_of_the_next_layer_behind_each_load_of_hidden_states() -> None:
    graph = graph_of("cgopipe", num_micro_batches=3)
    assert order_on(LaneKind.H2D, graph)[3:] == [
        *(f"{op}" for j in range(3) for op in (f"load_hidden l0 {j}", f"load_weights l1 {j}")),
        *(f"load_hidden l1 {j}" for j in range(3)),
    ]


def test_s2_puts_the_whole_layer_behind_the_first_load_of_hidden_states() -> None:
    assert order_on(LaneKind.H2D, graph_of("s2", num_micro_batches=3))[:5] == [
        "load_weights l0 0",
        "load_hidden l0 0",
        "load_weights l1 0",
        "load_hidden l0 1",
        "load_hidden l0 2",
    ]


def test_s3_puts_the_whole_layer_before_all_loads_of_hidden_states() -> None:
    assert order_on(LaneKind.H2D, graph_of("s3", num_micro_batches=3))[:5] == [
        "load_weights l0 0",
        "load_weights l1 0",
        "load_hidden l0 0",
        "load_hidden l0 1",
        "load_hidden l0 2",
    ]


def test_s4_loads_the_cache_of_the_next_micro_batch_before_the_next_page() -> None:
    assert order_on(LaneKind.H2D, graph_of("s4", **GPU_ATTENTION, num_micro_batches=3))[3:9] == [
        "load_kv l0 0",
        "load_kv l0 1",
        "load_weights l1 0",
        "load_kv l0 2",
        "load_weights l1 1",
        "load_weights l1 2",
    ]


def test_a_third_cache_waits_for_the_buffer_of_the_first_also_in_the_next_layer() -> None:
    graph = graph_of("s4", **GPU_ATTENTION, num_micro_batches=3)
    waits = {
        f"l{t.id.layer} b{t.id.micro_batch}": [f"l{o.layer} b{o.micro_batch}" for o in t.after if o.op is Op.ATTENTION]
        for t in graph.tasks
        if t.id.op is Op.LOAD_KV
    }
    assert waits == {
        "l0 b0": [],
        "l0 b1": [],
        "l0 b2": ["l0 b0"],
        "l1 b0": ["l0 b1"],
        "l1 b1": ["l0 b2"],
        "l1 b2": ["l1 b0"],
    }


def test_a_cache_is_loaded_after_the_step_before_added_to_it() -> None:
    graph = graph_of("s4", Steps(first=0, last=2), **GPU_ATTENTION)
    loads = {task.id: task.after for task in graph.tasks if task.id.op is Op.LOAD_KV}
    for name, after in loads.items():
        stored = name._replace(op=Op.STORE_KV, step=name.step - 1)
        assert (stored in after) == (name.step == 1)


def test_a_slot_is_written_once_the_stage_before_last_is_done() -> None:
    graph = graph_of("cgopipe", Steps(first=0, last=2), num_micro_batches=2)
    waits = {(t.id.step, t.id.layer): t.after for t in graph.tasks if t.id.op is Op.LOAD_WEIGHTS}
    post = TaskId(Op.POST_ATTENTION, "decode", 0, 0, 1, None, 0, None)
    assert waits == {(0, 0): (), (0, 1): (), (1, 0): (post,), (1, 1): (post._replace(layer=1),)}


def test_the_ring_between_cpu_memory_and_link_is_two_pages_deep() -> None:
    graph = graph_of("cgopipe", num_micro_batches=3, pin_weights=False)
    staged = [task for task in graph.tasks if task.id.op is Op.STAGE_WEIGHTS]
    loads = [task.id for task in graph.tasks if task.id.op is Op.LOAD_WEIGHTS]
    assert [task.after for task in staged] == [(), ()] + [(load,) for load in loads[:-2]]


def test_pages_are_equal_pieces_and_a_block_is_all_of_it() -> None:
    """Four experts of 192 byte, streamed from CPU memory: 768 byte a layer."""
    for schedule, pages in (("cgopipe", 3), ("s2", 1), ("s3", 1)):
        graph = graph_of(schedule, num_micro_batches=3)
        sizes = [task.bytes_moved for task in graph.tasks if task.id.op is Op.LOAD_WEIGHTS and task.id.layer == 1]
        assert sizes == [768.0 / pages] * pages


def test_decode_after_prefill_loads_all_pages_of_its_first_layer() -> None:
    graph = graph_of("cgopipe", Steps(prefill=True, first=0, last=1), num_micro_batches=3)
    loads = [t for t in graph.tasks if t.id.op is Op.LOAD_WEIGHTS and t.id.phase == "decode" and t.id.layer == 0]
    assert [task.bytes_moved for task in loads] == [256.0] * 3


def test_a_streamed_head_gives_its_slot_back() -> None:
    """256 byte of the table, as one more layer."""
    graph = graph_of("cgopipe", num_micro_batches=1, lm_head_on_gpu=False)
    head = next(task for task in graph.tasks if task.id.op is Op.LM_HEAD)
    assert [hold.bytes for hold in head.releases] == [256.0]


def test_lookahead_ends_with_the_micro_batches() -> None:
    """With one micro-batch cgopipe is s3 without its block: nothing to look ahead to."""
    assert max(ends_of(graph_of("cgopipe", num_micro_batches=1)).values()) == 17.0
    assert max(ends_of(graph_of("s3", num_micro_batches=1)).values()) == 17.0


@pytest.mark.parametrize(
    ("name", "changes", "fact", "way_out"),
    [
        ("s5", {}, "there is no such schedule", "cgopipe"),
        ("cgopipe", GPU_ATTENTION, "attention on the CPU, the plan on the GPU", "--attention cpu"),
        ("s2", GPU_ATTENTION, "attention on the CPU, the plan on the GPU", "--attention cpu"),
        ("s3", GPU_ATTENTION, "attention on the CPU, the plan on the GPU", "--attention cpu"),
        ("s4", {}, "attention on the GPU, the plan on the CPU", "--attention gpu"),
        ("streaming", {}, "attention on the GPU, the plan on the CPU", "--attention gpu"),
        ("streaming", GPU_ATTENTION, "n_ub = 2 and r_c = 0", "--num-micro-batches 1"),
        ("streaming", GPU_ATTENTION | {"num_micro_batches": 1}, "n_ub = 1 and r_c = 0", "--kv-on-gpu 1"),
        ("s2", {"weight_slots": "experts", "ring_experts": 2}, "ring of experts", "--weight-slots 2"),
        ("s3", {"weight_slots": "experts", "ring_experts": 2}, "ring of experts", "--weight-slots 2"),
        ("cgopipe", {"everything_on_cpu": True}, "everything on the CPU", "uses the GPU"),
    ],
)
def test_a_combination_a_schedule_does_not_have_names_a_way_out(
    name: str, changes: dict[str, Any], fact: str, way_out: str
) -> None:
    with pytest.raises(InputError) as error:
        check_schedule(name, policy_of(**changes))
    assert fact in str(error.value)
    assert way_out in str(error.value)
    assert repr(name) in str(error.value)


def test_no_steps_at_all_are_refused() -> None:
    with pytest.raises(InputError, match="steps 3 to 3 are none"):
        graph_of("cgopipe", Steps(first=3, last=3))


def test_several_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="has 2 GPUs"):
        Layout(tiny_scenario(profile=tiny_profile(gpus=2)), policy_of())


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_policy_a_schedule_accepts_makes_a_graph_that_computes_every_layer_once(case: Case) -> None:
    """Making the graph checks ids and order; every layer then has each micro-batch once, and all of its weights."""
    layout, graph = case.layout, schedule_graph(*case)
    found: dict[tuple[Any, ...], list[Task]] = defaultdict(list)
    for task in graph.tasks:
        found[(task.id.phase, task.id.step, task.id.layer, task.id.op)].append(task)
    passes = [("prefill", 0)] * case.steps.prefill + [("decode", s) for s in range(case.steps.first, case.steps.last)]
    for phase, step in passes:
        count = layout.micro_batches(phase)  # type: ignore[arg-type]
        times = count if phase == "prefill" and layout.policy.weight_slots == "experts" else 1
        for layer in range(layout.num_layers):
            for op in (Op.PRE_ATTENTION, Op.POST_ATTENTION):
                assert [t.id.micro_batch for t in found[(phase, step, layer, op)]] == list(range(count))
        assert len(found[(phase, step, layout.num_layers, Op.SAMPLE)]) == count
        on_gpu = phase == "prefill" or layout.policy.ffn_on_gpu
        for layer in range(layout.num_layers + 1):
            wanted = layout.streamed(layer, experts=on_gpu)
            loads = found[(phase, step, layer, Op.LOAD_WEIGHTS)]
            assert sum(t.bytes_moved for t in loads) == pytest.approx(times * wanted.total)
            reads = [t for t in found[(phase, step, layer, Op.READ_DISK)] if t.id.page is not None]
            assert sum(t.bytes_moved for t in reads) == pytest.approx(times * wanted.disk)
            staged = sum(t.bytes_moved for t in found[(phase, step, layer, Op.STAGE_WEIGHTS)])
            assert staged == pytest.approx(0.0 if layout.policy.pin_weights else times * wanted.cpu)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_the_tasks_take_they_give_back(case: Case) -> None:
    graph = schedule_graph(*case)
    taken = sum(hold.bytes for task in graph.tasks for hold in task.acquires)
    given_back = sum(hold.bytes for task in graph.tasks for hold in task.releases)
    assert given_back == pytest.approx(taken)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_weights_are_used_only_once_they_are_there(case: Case) -> None:
    """Whatever computes with a page or an expert waits for its copy, by itself or through what it waits for."""
    graph = schedule_graph(*case)
    index = {task.id: position for position, task in enumerate(graph.tasks)}
    loads: dict[tuple[str, int, int], list[TaskId]] = defaultdict(list)
    for task in graph.tasks:
        if task.id.op is Op.LOAD_WEIGHTS and case.layout.policy.weight_slots != "experts":
            loads[(task.id.phase, task.id.step, task.id.layer)].append(task.id)
    for task in graph.tasks:
        if task.id.op is Op.POST_ATTENTION:
            # The last copy is enough: a lane does its tasks in order.
            assert set(loads[(task.id.phase, task.id.step, task.id.layer)][-1:]) <= set(task.after)
        if task.id.op is Op.EXPERTS and task.lane.kind is LaneKind.GPU:
            copy = task.id._replace(op=Op.LOAD_WEIGHTS)
            assert (copy in task.after) == (copy in index)

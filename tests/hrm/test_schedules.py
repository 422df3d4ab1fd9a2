"""Schedules: exact timelines of a tiny model, what they refuse, and what every graph has to hold."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import timelines
from hypothesis import given, settings
from tiny import tiny_profile, tiny_scenario
from tiny_policies import EVERYTHING_ON_CPU, Case, cases, policy_of

from hrm.errors import InputError
from hrm.graph import LaneKind, Op, Task, TaskGraph, TaskId, finish_times
from hrm.holds import hold_sizes
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
STATIC = {"attention_on_gpu": True, "ffn_on_gpu": False, "kv_on_gpu": 1.0, "weights_on_gpu": 0.5}
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
    "static experts": (
        "static_experts",
        timelines.STATIC_EXPERTS,
        STEP,
        STATIC | {"num_micro_batches": 1},
    ),
    "CPU only": ("cpu_only", timelines.CPU_ONLY, STEP, EVERYTHING_ON_CPU),
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


def test_the_ring_between_cpu_memory_and_link_is_four_pieces_deep() -> None:
    graph = graph_of("cgopipe", num_micro_batches=3, pin_weights=False)
    staged = [task for task in graph.tasks if task.id.op is Op.STAGE_WEIGHTS]
    loads = [task.id for task in graph.tasks if task.id.op is Op.LOAD_WEIGHTS]
    assert [task.after for task in staged] == [()] * 4 + [(load,) for load in loads[:-4]]


def test_a_block_larger_than_a_piece_passes_the_ring_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """768 byte through pieces of 300 are three of 256; pinned, it is one copy."""
    monkeypatch.setattr("hrm.weight_copies.PIECE_BYTES", 300.0)
    for pinned, pieces in ((False, 3), (True, 1)):
        graph = graph_of("s3", pin_weights=pinned)
        sizes = [task.bytes_moved for task in graph.tasks if task.id.op is Op.LOAD_WEIGHTS and task.id.layer == 0]
        assert sizes == [768.0 / pieces] * pieces


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


def test_a_streamed_head_comes_in_pieces_for_two_buffers_each_for_all_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 byte of the table through buffers of 100: three pieces; the third waits for the last use of the first."""
    monkeypatch.setattr("hrm.layout.HEAD_BUFFER_BYTES", 100.0)
    graph = graph_of("cgopipe", num_micro_batches=2, lm_head_on_gpu=False)
    loads = [task for task in graph.tasks if task.id.op is Op.LOAD_WEIGHTS and task.id.layer == 2]
    assert [task.bytes_moved for task in loads] == [pytest.approx(256.0 / 3)] * 3
    heads = [task.id for task in graph.tasks if task.id.op is Op.LM_HEAD]
    assert [(head.page, head.micro_batch) for head in heads] == [(p, j) for p in range(3) for j in range(2)]
    assert [task.after for task in loads] == [(), (), (heads[1],)]


def test_lookahead_ends_with_the_micro_batches() -> None:
    """With one micro-batch cgopipe is s3 without its block: nothing to look ahead to."""
    assert max(ends_of(graph_of("cgopipe", num_micro_batches=1)).values()) == 17.0
    assert max(ends_of(graph_of("s3", num_micro_batches=1)).values()) == 17.0


def test_static_experts_are_copied_once_the_tokens_of_a_whole_step_lie_right_of_p1() -> None:
    """2 tokens visit 3 experts: 576 byte, 2 x 2 x 192 FLOP. The CPU takes max(768 / 100, 576 / 250) = 7.68 s of each
    micro-batch, a copy of the layer at 50 byte/s 15.36: two are not yet right of P1, three are."""
    profile = tiny_profile()
    way = replace(profile.link.host_to_device, pinned_bytes_per_s=50.0, with_opposite_bytes_per_s=50.0)
    slow = replace(profile, link=replace(profile.link, host_to_device=way))
    for count, copied in ((1, False), (2, False), (3, True)):
        layout = Layout(tiny_scenario(profile=slow), policy_of(**STATIC, num_micro_batches=count))
        assert layout.copies_experts is copied
        ops = [task.id.op for task in schedule_graph(layout, "static_experts", STEP).tasks]
        assert (Op.LOAD_WEIGHTS in ops) is copied


def test_the_disk_writes_what_a_step_added_behind_the_next_reads_and_before_it_is_read_again() -> None:
    """Else the disk would wait for attention to end before it reads on."""
    scenario = tiny_scenario(profile=tiny_profile(disk=True))
    layout = Layout(scenario, policy_of(num_micro_batches=3, kv_on_disk=0.5))
    graph = schedule_graph(layout, "cgopipe", Steps(first=0, last=2))
    lane = [(t.id.op, t.id.step, t.id.layer, t.id.micro_batch) for t in graph.tasks if t.lane.kind is LaneKind.DISK]
    assert lane[:5] == [
        (Op.READ_DISK, 0, 0, 0),
        (Op.READ_DISK, 0, 0, 1),
        (Op.READ_DISK, 0, 0, 2),
        (Op.WRITE_DISK, 0, 0, 0),
        (Op.READ_DISK, 0, 1, 0),
    ]
    for layer in range(2):
        for j in range(3):
            assert lane.index((Op.WRITE_DISK, 0, layer, j)) < lane.index((Op.READ_DISK, 1, layer, j))
    assert sum(op is Op.WRITE_DISK for op, *_ in lane) == 2 * 2 * 3


def started_without(graph: TaskGraph, stuck: int) -> set[int]:
    """Tasks that start though one never ends: those that neither wait for it nor follow such a task on their lane."""
    held, lanes = {stuck}, {graph.tasks[stuck].lane}
    for number in range(stuck + 1, len(graph)):
        task = graph.tasks[number]
        if task.lane in lanes or held.intersection(graph.before[number]):
            held.add(number)
            lanes.add(task.lane)
    return set(range(len(graph))) - held | {stuck}


def most_between(graph: TaskGraph, pairs: list[tuple[int, int]]) -> int:
    """Most buffers in use at once, whichever lane is slow: each from the start of one task to the end of another."""
    return max(
        sum(first in started for first, _ in pairs[place:])
        for place, (_, last) in enumerate(pairs)
        for started in [started_without(graph, last)]
    )


DISK_CASES = {
    "cgopipe": {},
    "s2": {},
    "s3": {},
    "s4": {"attention_on_gpu": True},
    "serial": {},
    "experts of a ring": {"weight_slots": "experts", "ring_experts": 3, "weights_on_disk": 0.5},
    "a ring, attention on the GPU": {"weight_slots": "experts", "ring_experts": 3, "attention_on_gpu": True},
}


def graph_with_disk(name: str, **changes: Any) -> TaskGraph:
    policy = policy_of(num_micro_batches=4, kv_on_disk=0.5, **(DISK_CASES[name] | changes))
    schedule = name if name in SCHEDULES else "s4" if policy.attention_on_gpu else "cgopipe"
    layout = Layout(tiny_scenario(profile=tiny_profile(disk=True)), policy)
    return schedule_graph(layout, schedule, Steps(prefill=True, first=0, last=3))


@pytest.mark.parametrize("prefill", [1, 2, 8])
@pytest.mark.parametrize("name", DISK_CASES)
def test_however_slow_the_disk_little_waits_in_cpu_memory_to_be_written(name: str, prefill: int) -> None:
    """Prompts: two micro-batches' KV cache, as the plan counts; of steps one token each in a few positions."""
    graph = graph_with_disk(name, prefill_micro_batch_size=prefill)
    number = {task.id: place for place, task in enumerate(graph.tasks)}
    pairs: dict[str, list[tuple[int, int]]] = {"prefill": [], "decode": []}
    for task in graph.tasks:
        if task.id.op is Op.WRITE_DISK:
            source = next(other for other in task.after if other.op in (Op.STORE_KV, Op.ATTENTION))
            pairs[task.id.phase].append((number[source], number[task.id]))
    assert len(pairs["prefill"]) == 2 * 8 // prefill
    assert len(pairs["decode"]) == 3 * 2 * 4
    assert most_between(graph, pairs["prefill"]) == (1 if name == "serial" else 2)
    few = {"serial": 2, "s4": 5, "experts of a ring": 4, "a ring, attention on the GPU": 6}.get(name, 3)
    assert most_between(graph, pairs["decode"]) == few


@pytest.mark.parametrize("name", DISK_CASES)
def test_no_more_is_read_from_disk_than_landing_buffers_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, and as many more as the pinned ring has room for: of 160 byte each, four, or two where weights have half."""
    for ring, most in ((0.0, 2), (640.0, 4 if name == "experts of a ring" else 6)):
        monkeypatch.setattr("hrm.holds.STAGING_BUFFER_BYTES", ring)
        graph = graph_with_disk(name)
        number = {task.id: place for place, task in enumerate(graph.tasks)}
        readers = {
            read: number[task.id]
            for task in graph.tasks
            for read in task.after
            if read.op is Op.READ_DISK and read.micro_batch is not None and task.id.op in (Op.ATTENTION, Op.LOAD_KV)
        }
        pairs = [(number[read], reader) for read, reader in readers.items()]
        assert len(pairs) == 3 * 2 * 4
        found = most_between(graph, pairs)
        assert found <= most
        assert found == most or ring or name == "serial"


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
        ("cgopipe", EVERYTHING_ON_CPU, "everything on the CPU", "uses the GPU"),
        ("cpu_only", {}, "not everything on the CPU", "CPU-only plan"),
        ("static_experts", GPU_ATTENTION, "F_g = 1 and r_w = 0", "F_g = 0 and r_w > 0"),
        ("static_experts", STATIC | {"weights_on_gpu": 0.0}, "F_g = 0 and r_w = 0", "F_g = 0 and r_w > 0"),
        ("static_experts", STATIC | {"kv_on_gpu": 0.5}, "r_c = 0.5", "--kv-on-gpu 1"),
        (
            "s4",
            GPU_ATTENTION | {"weight_slots": "experts", "ring_experts": 2, "parallelism": "pipeline"},
            "a part of it at a time",
            "--weight-slots 2",
        ),
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


def on_two_gpus(schedule: str, steps: Steps = STEP, **changes: Any) -> TaskGraph:
    scenario = tiny_scenario(profile=tiny_profile(gpus=2))
    return schedule_graph(Layout(scenario, policy_of(**changes)), schedule, steps)


@pytest.mark.parametrize(
    ("expected", "schedule", "changes"),
    [
        (timelines.TENSOR_PARALLEL, "cgopipe", {"num_micro_batches": 1}),
        (timelines.PIPELINE, "s4", GPU_ATTENTION | {"parallelism": "pipeline", "kv_on_gpu": 1.0}),
    ],
    ids=["tensor", "pipeline"],
)
def test_timeline_on_two_gpus_is_the_one_by_hand(expected: str, schedule: str, changes: dict[str, Any]) -> None:
    trace = simulate(on_two_gpus(schedule, **changes), table_durations(SECONDS | {Op.ALL_REDUCE: 1.0}))
    assert [(str(span.task), span.start_s, span.end_s) for span in trace.spans] == by_hand(expected)


def test_twins_share_the_work_and_each_has_the_whole_hidden_state() -> None:
    """Of 2 requests: 2 x 16 values of 2 byte down, 2 x 8 back, half of it per GPU; a sum moves 2 x 16 byte."""
    graph = on_two_gpus("cgopipe", num_micro_batches=1)
    moved = {(t.id.op, t.id.device): t.bytes_moved for t in graph.tasks if t.id.layer == 0}
    for device in (0, 1):
        assert moved[(Op.OFFLOAD_QKV, device)] == 2 * 16 * 2 / 2
        assert moved[(Op.LOAD_HIDDEN, device)] == 2 * 8 * 2 / 2
        assert moved[(Op.LOAD_WEIGHTS, device)] == 768.0 / 2
        assert moved[(Op.ALL_REDUCE, device)] == 2 * (2 - 1) / 2 * 2 * 16
    one = graph_of("cgopipe", num_micro_batches=1)
    flops = [sum(float(o.work.flops) for t in g.tasks for o in t.operators) for g in (graph, one)]
    assert flops[0] == pytest.approx(flops[1])


def test_in_a_pipeline_every_part_of_the_batch_loads_its_layers_anew() -> None:
    """Two parts of the batch: each device loads its one layer twice a step, so all links together twice the model."""
    graph = on_two_gpus("s4", **GPU_ATTENTION, parallelism="pipeline")
    loads = [(t.id.layer, t.id.device, t.bytes_moved) for t in graph.tasks if t.id.op is Op.LOAD_WEIGHTS]
    assert sorted(loads) == [(0, 0, 768.0)] * 2 + [(1, 1, 768.0)] * 2


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_policy_a_schedule_accepts_makes_a_graph_that_computes_every_layer_once(case: Case) -> None:
    """Making the graph checks ids and order; every layer then has each micro-batch once, and all of its weights."""
    layout, graph = case.layout, schedule_graph(*case)
    policy = layout.policy
    found: dict[tuple[Any, ...], list[Task]] = defaultdict(list)
    for task in graph.tasks:
        found[(task.id.phase, task.id.step, task.id.layer, task.id.op)].append(task)
    passes = [("prefill", 0)] * case.steps.prefill + [("decode", s) for s in range(case.steps.first, case.steps.last)]
    twins = 1 if policy.everything_on_cpu else layout.group_size
    for phase, step in passes:
        count = layout.micro_batches(phase)  # type: ignore[arg-type]
        parts = min(layout.gpus, count) if layout.pipelined else 1
        times = count if phase == "prefill" and policy.weight_slots == "experts" else parts
        halves = 2 if twins > 1 else 1
        for layer in range(layout.num_layers):
            for op, each in ((Op.PRE_ATTENTION, twins), (Op.POST_ATTENTION, twins * halves)):
                assert sorted(t.id.micro_batch for t in found[(phase, step, layer, op)]) == sorted(
                    [*range(count)] * each
                )
        assert len(found[(phase, step, layout.num_layers, Op.SAMPLE)]) == count * twins
        if policy.everything_on_cpu:
            continue
        on_gpu = (
            phase == "prefill" or policy.ffn_on_gpu or (case.schedule == "static_experts" and layout.copies_experts)
        )
        for layer in range(layout.num_layers + 1):
            wanted = layout.streamed(layer, phase, experts=on_gpu)  # type: ignore[arg-type]
            loads = found[(phase, step, layer, Op.LOAD_WEIGHTS)]
            assert sum(t.bytes_moved for t in loads) == pytest.approx(times * wanted.total)
            reads = [t for t in found[(phase, step, layer, Op.READ_DISK)] if t.id.page is not None]
            here = layout.read_for_cpu(layer) if layer < layout.num_layers and not on_gpu else 0.0
            assert sum(t.bytes_moved for t in reads) == pytest.approx(times * wanted.disk + parts * here)
            staged = sum(t.bytes_moved for t in found[(phase, step, layer, Op.STAGE_WEIGHTS)])
            assert staged == pytest.approx(0.0 if policy.pin_weights else times * wanted.cpu)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_the_tasks_take_they_give_back_but_for_what_stays(case: Case) -> None:
    """After prefill the KV cache stays, and with decode the hidden states of the batch on the GPU."""
    graph, layout = schedule_graph(*case), case.layout
    sizes = hold_sizes(layout.scenario, layout.sizes, layout.policy)
    left: dict[tuple[str, str], float] = defaultdict(float)
    for task in graph.tasks:
        for hold in task.acquires:
            left[(hold.level, hold.term)] += hold.bytes
        for hold in task.releases:
            left[(hold.level, hold.term)] -= hold.bytes
    stays = {(level, "KV cache"): size for level, size in sizes.kv_cache.items() if case.steps.prefill}
    if case.steps.prefill and case.steps.last and not layout.policy.everything_on_cpu:
        stays[("gpu", "hidden states of the batch")] = sizes.of_the_batch
    for key in left.keys() | stays.keys():
        assert left.get(key, 0.0) == pytest.approx(stays.get(key, 0.0), abs=1e-6), key


@settings(max_examples=100, deadline=None)
@given(cases())
def test_weights_are_used_only_once_they_are_there(case: Case) -> None:
    """Whatever computes with a page or an expert waits for its copy, by itself or through what it waits for."""
    graph = schedule_graph(*case)
    policy = case.layout.policy
    index = {task.id: position for position, task in enumerate(graph.tasks)}
    loads: dict[tuple[Any, ...], list[TaskId]] = defaultdict(list)
    parts = min(case.layout.gpus, case.layout.micro_batches("decode")) if case.layout.pipelined else 1
    for task in graph.tasks:
        if task.id.op is Op.LOAD_WEIGHTS and policy.weight_slots != "experts":
            loads[(task.id.phase, task.id.step, task.id.layer, task.id.device)].append(task.id)
    for task in graph.tasks:
        if task.id.op is Op.POST_ATTENTION and task.id.part != 1 and parts == 1 and not case.layout.pipelined:
            # The last copy is enough: a lane does its tasks in order.
            there = loads[(task.id.phase, task.id.step, task.id.layer, task.id.device)]
            assert set(there[-1:]) <= set(task.after)
        if task.id.op is Op.EXPERTS and task.lane.kind is LaneKind.GPU and policy.weight_slots == "experts":
            copy = task.id._replace(op=Op.LOAD_WEIGHTS)
            assert (copy in task.after) == (copy in index)

"""Durations: the roofline of a task by hand, tables, traces, and jitter from a seed."""

import statistics
from typing import Any

import pytest
from tiny import FP16, tiny_profile

from hrm.cost import Work
from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, Operator, Task, TaskId
from hrm.profile import Efficiency
from hrm.rates import derive_rates
from hrm.trace import Span, Trace
from simulator.durations import jittered, roofline_durations, table_durations, trace_durations


def task(kind: LaneKind, op: Op, **changes: Any) -> Task:
    return Task(TaskId(op, "decode", 0, 0), Lane(kind), **changes)


def seconds(one: Task, **changes: Any) -> float:
    return roofline_durations(derive_rates(tiny_profile(**changes), FP16))(one)


def test_a_computation_is_the_sum_of_its_operators_each_at_its_own_roof() -> None:
    """GPU 400 FLOP/s, 200 byte/s: 800 FLOP and 200 byte take 2 s, 40 FLOP and 600 byte 3 s; their sum would take 4."""
    work = (Operator("QKV projection", Work(800.0, 200.0, 0.0)), Operator("router", Work(40.0, 600.0, 0.0)))
    assert seconds(task(LaneKind.GPU, Op.PRE_ATTENTION, operators=work)) == 5.0


def test_attention_on_the_cpu_has_a_memory_rate_of_its_own() -> None:
    work = (Operator("attention", Work(100.0, 500.0, 0.0)),)
    shares = Efficiency(cpu_attention=0.5)
    assert seconds(task(LaneKind.CPU, Op.ATTENTION, operators=work)) == 2.0
    assert seconds(task(LaneKind.CPU, Op.ATTENTION, operators=work), efficiency=shares) == 4.0
    assert seconds(task(LaneKind.CPU, Op.EXPERTS, operators=work), efficiency=shares) == 2.0


def test_attention_on_the_gpu_may_have_one_too_in_decode_and_leaves_the_rest_as_it_was() -> None:
    """400 byte at 200 byte/s, and at a quarter of that; no other operator and no prompt is touched."""
    attention = task(LaneKind.GPU, Op.ATTENTION, operators=(Operator("attention", Work(0.0, 400.0, 0.0)),))
    prompts = Task(TaskId(Op.ATTENTION, "prefill", 0, 0), Lane(LaneKind.GPU), operators=attention.operators)
    norms = task(LaneKind.GPU, Op.PRE_ATTENTION, operators=(Operator("norms", Work(0.0, 400.0, 0.0)),))
    assert [seconds(one) for one in (attention, prompts, norms)] == [2.0, 2.0, 2.0]
    shares = Efficiency(gpu_attention=0.25)
    assert [seconds(one, efficiency=shares) for one in (attention, prompts, norms)] == [8.0, 2.0, 2.0]
    both = Efficiency(gpu_bandwidth=0.5)
    assert [seconds(one, efficiency=both) for one in (attention, prompts, norms)] == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("kind", "op", "expected"),
    [
        (LaneKind.H2D, Op.LOAD_WEIGHTS, 2.0),
        (LaneKind.D2H, Op.STORE_KV, 4.0),
        (LaneKind.PIN, Op.STAGE_WEIGHTS, 5.0),
        (LaneKind.DISK, Op.READ_DISK, 20.0),
        (LaneKind.DISK, Op.WRITE_DISK, 40.0),
    ],
)
def test_a_copy_is_its_bytes_over_the_rate_of_its_lane(kind: LaneKind, op: Op, expected: float) -> None:
    assert seconds(task(kind, op, bytes_moved=200.0), disk=True) == expected


def test_latencies_are_per_launch_per_copy_and_per_layer() -> None:
    shares = Efficiency(overhead_per_micro_batch_s=0.25)
    assert seconds(task(LaneKind.GPU, Op.PRE_ATTENTION, launches=4), launch_s=0.5, efficiency=shares) == 2.0
    assert seconds(task(LaneKind.GPU, Op.POST_ATTENTION, launches=7), launch_s=0.5, efficiency=shares) == 3.75
    assert seconds(task(LaneKind.H2D, Op.LOAD_WEIGHTS, bytes_moved=100.0), copy_s=0.25) == 1.25
    assert seconds(task(LaneKind.D2H, Op.STORE_KV, bytes_moved=100.0), copy_s=0.25) == 2.25


def test_a_disk_task_without_a_disk_and_a_lane_without_a_rate_are_named() -> None:
    with pytest.raises(InputError, match="read_disk/decode/s0/l0 needs a disk"):
        seconds(task(LaneKind.DISK, Op.READ_DISK, bytes_moved=1.0))
    with pytest.raises(InputError, match="all_reduce/decode/s0/l0 runs on gpu_to_gpu"):
        seconds(task(LaneKind.P2P, Op.ALL_REDUCE, bytes_moved=1.0))


def test_a_table_names_the_kind_it_does_not_have() -> None:
    table = table_durations({Op.SAMPLE: 2.0})
    assert table(task(LaneKind.GPU, Op.SAMPLE)) == 2.0
    with pytest.raises(InputError, match="no duration for embed"):
        table(task(LaneKind.GPU, Op.EMBED))


def test_a_trace_gives_its_own_durations_and_names_a_task_of_another_plan() -> None:
    known = task(LaneKind.GPU, Op.SAMPLE)
    again = trace_durations(Trace(spans=(Span(known.id, known.lane, 3.0, 7.0),), kind="measured"))
    assert again(known) == 4.0
    with pytest.raises(InputError, match="the trace has no embed/decode/s0/l0"):
        again(task(LaneKind.GPU, Op.EMBED))


def test_jitter_is_the_same_for_a_seed_and_spreads_as_told() -> None:
    tasks = [Task(TaskId(Op.SAMPLE, "decode", step, 0), Lane(LaneKind.GPU, 0)) for step in range(2000)]
    spread = [jittered(lambda task: 1.0, 0.1, 7)(one) for one in tasks]
    assert spread == [jittered(lambda task: 1.0, 0.1, 7)(one) for one in tasks]
    assert spread != [jittered(lambda task: 1.0, 0.1, 8)(one) for one in tasks]
    assert statistics.median(spread) == pytest.approx(1.0, abs=0.01)
    assert statistics.stdev(spread) == pytest.approx(0.1, rel=0.1)
    assert jittered(lambda task: 3.0, 0.0, 7)(tasks[0]) == 3.0


@pytest.mark.parametrize("share", [-0.1, 2.0, float("nan")])
def test_a_spread_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="is no spread"):
        jittered(lambda task: 1.0, share, 0)

"""Sharing: who is slowed down by whom and by how much, by hand; nobody is when alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import FP16, tiny_profile

from hrm.cost import Work
from hrm.graph import Lane, LaneKind, Op, Operator, Task, TaskGraph, TaskId
from hrm.profile_files import load_profile
from hrm.rates import derive_rates
from simulator.contention import Sharing, progressive_filling, sharing_of
from simulator.durations import roofline_durations
from simulator.engine import simulate

PROFILE = tiny_profile(h2d_with_opposite=75.0, d2h_with_opposite=40.0)
RATES = derive_rates(PROFILE, FP16)
SHARING = sharing_of(PROFILE, RATES)

QUARTERS = st.integers(0, 8).map(lambda n: n / 4)


def task(kind: LaneKind, op: Op, size: float, *, layer: int = 0) -> Task:
    """A copy of so many bytes, or attention on the CPU that reads them."""
    lane = Lane(kind, 0 if kind in (LaneKind.H2D, LaneKind.D2H) else None)
    name = TaskId(op, "decode", 0, layer, None, None, lane.device)
    if kind is LaneKind.CPU:
        return Task(name, lane, operators=(Operator("attention", Work(0.0, size, 0.0)),))
    return Task(name, lane, bytes_moved=size)


UP = task(LaneKind.H2D, Op.LOAD_WEIGHTS, 200.0)  # 2 s at 100 byte/s
DOWN = task(LaneKind.D2H, Op.STORE_KV, 100.0)  # 2 s at 50 byte/s
READ = task(LaneKind.CPU, Op.ATTENTION, 500.0)  # 2 s at 250 byte/s, all that CPU memory has
STAGE = task(LaneKind.PIN, Op.STAGE_WEIGHTS, 80.0)  # 2 s at 40 byte/s


def ends(*tasks: Task, sharing: Sharing = SHARING) -> list[float]:
    trace = simulate(TaskGraph(tasks), roofline_durations(RATES), sharing)
    return [span.end_s for span in trace.spans]


@pytest.mark.parametrize("one", [UP, DOWN, READ, STAGE], ids=lambda t: t.id.op.value)
def test_alone_a_task_is_as_fast_as_without_sharing(one: Task) -> None:
    assert ends(one) == pytest.approx([2.0])


@pytest.mark.parametrize("machine", ["colab-t4", "kaggle-t4x2", "t4", "l4", "t4-paper"])
@pytest.mark.parametrize("one", [UP, DOWN, READ, STAGE], ids=lambda t: t.id.op.value)
def test_alone_also_where_a_copy_is_faster_than_the_memory_rate_of_few_cores(machine: str, one: Task) -> None:
    """Colab: 12.4 GB/s to the GPU, 10 GB/s for the CPU."""
    profile = load_profile(machine)
    rates = derive_rates(profile, FP16)
    seconds = roofline_durations(rates)
    found = simulate(TaskGraph([one]), seconds, sharing_of(profile, rates)).makespan_s
    assert found == pytest.approx(seconds(one), rel=1e-9)


def emulated(memory: float) -> Sharing:
    """The machine with its accelerator emulated on a second core, and so much memory bandwidth for all [byte/s]."""
    gpu, totals = replace(PROFILE.gpu, host_cores=1), replace(PROFILE.host_totals, memory_bytes_per_s=memory)
    profile = replace(PROFILE, gpu=gpu, host_totals=totals)
    return sharing_of(profile, derive_rates(profile, FP16))


COMPUTE = Task(  # 2 s at 200 byte/s of the accelerator's memory
    TaskId(Op.POST_ATTENTION, "decode", 0, 0, 0, None, 0),
    Lane(LaneKind.GPU, 0),
    operators=(Operator("norms", Work(0.0, 400.0, 0.0)),),
)


@pytest.mark.parametrize("one", [UP, DOWN, READ, STAGE, COMPUTE], ids=lambda t: t.id.op.value)
def test_an_emulated_task_alone_is_as_fast_as_without_sharing(one: Task) -> None:
    assert ends(one, sharing=emulated(450.0)) == pytest.approx([2.0])


def test_an_emulated_copy_passes_memory_twice() -> None:
    """Copy 2 x 100 byte/s and attention 250 byte/s of 360 byte/s: both at 0.8 of their speed."""
    assert ends(UP, READ, sharing=emulated(360.0)) == pytest.approx([2.5, 2.5])


def test_emulated_copies_take_a_core_each() -> None:
    """Accelerator, attention and a copy on two cores: all at two thirds of their speed."""
    assert ends(COMPUTE, READ, UP, sharing=emulated(1e4)) == pytest.approx([3.0, 3.0, 3.0])


def test_emulated_directions_lose_to_each_other_what_memory_and_cores_take_and_no_more() -> None:
    assert ends(UP, DOWN) != pytest.approx([2.0, 2.0])
    assert ends(UP, DOWN, sharing=emulated(300.0)) == pytest.approx([2.0, 2.0])
    assert ends(UP, DOWN, sharing=emulated(200.0)) == pytest.approx([3.0, 3.0])


def test_two_tasks_that_each_need_all_of_a_resource_run_at_half_speed() -> None:
    both = Sharing(capacities={"cpu_memory": 100.0}, demand=lambda task, seconds: {"cpu_memory": 100.0})
    assert ends(READ, STAGE, sharing=both) == pytest.approx([4.0, 4.0])


def test_what_is_left_when_one_ends_goes_to_the_other() -> None:
    """Both at half speed until the 2 s task ends at 4 s; the other, 4 s long, has 2 s left."""
    both = Sharing(capacities={"cpu_memory": 100.0}, demand=lambda task, seconds: {"cpu_memory": 100.0})
    long = task(LaneKind.H2D, Op.LOAD_WEIGHTS, 400.0)
    assert ends(READ, long, sharing=both) == pytest.approx([4.0, 6.0])


def test_attention_and_a_copy_share_cpu_memory() -> None:
    """250 + 100 byte/s wanted of 250: both at 5/7 of their speed."""
    assert ends(READ, UP) == pytest.approx([2.8, 2.8])


def test_the_two_directions_of_the_link_get_their_duplex_share() -> None:
    """Up at 75 %, down at 80 %: down ends at 2.5 s with 1.875 s of the copy up done; the rest goes at full speed."""
    assert ends(UP, DOWN) == pytest.approx([2.625, 2.5])


def test_attention_and_staging_share_the_only_core() -> None:
    """Each wants the whole core; memory (250 + 80 of 250) would let them go faster."""
    assert ends(READ, STAGE) == pytest.approx([4.0, 4.0])


def test_one_direction_after_the_other_loses_nothing() -> None:
    after = Task(DOWN.id, DOWN.lane, (UP.id,), bytes_moved=100.0)
    assert ends(UP, after) == pytest.approx([2.0, 4.0])


@pytest.mark.parametrize(
    ("demands", "tops", "capacities", "speeds"),
    [
        ([{"m": 1.0}], [1.0], {"m": 2.0}, [1.0]),
        ([{"m": 1.0}, {"m": 1.0}], [1.0, 1.0], {"m": 1.0}, [0.5, 0.5]),
        ([{"m": 3.0}, {"m": 1.0}], [1.0, 1.0], {"m": 2.0}, [0.5, 0.5]),
        ([{"m": 1.0}, {"m": 1.0}], [0.25, 1.0], {"m": 1.0}, [0.25, 0.75]),  # what the first leaves, the second takes
        ([{"m": 1.0}, {"m": 1.0}, {"c": 1.0}], [1.0, 1.0, 1.0], {"m": 1.0, "c": 1.0}, [0.5, 0.5, 1.0]),
        ([{"m": 1.0, "c": 1.0}, {"m": 1.0}, {"c": 3.0}], [1.0] * 3, {"m": 1.0, "c": 1.0}, [0.25, 0.75, 0.25]),
        ([{}, {"m": 1.0}], [1.0, 0.0], {"m": 1.0}, [1.0, 0.0]),
        ([], [], {"m": 1.0}, []),
    ],
)
def test_speeds_by_hand(
    demands: list[dict[str, float]], tops: list[float], capacities: dict[str, float], speeds: list[float]
) -> None:
    assert progressive_filling(demands, tops, capacities) == pytest.approx(speeds)


@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from("mc"), QUARTERS), st.integers(0, 4).map(lambda n: n / 4)),
        max_size=6,
    )
)
def test_no_capacity_is_exceeded_and_none_is_left_to_a_task_that_could_use_it(
    tasks: list[tuple[dict[str, float], float]],
) -> None:
    capacities = {"m": 1.5, "c": 1.0}
    demands, tops = [demand for demand, _ in tasks], [top for _, top in tasks]
    speeds = progressive_filling(demands, tops, capacities)
    used = {
        name: sum(speed * demand.get(name, 0.0) for demand, speed in zip(demands, speeds, strict=True))
        for name in capacities
    }
    assert all(used[name] <= capacities[name] * (1 + 1e-9) for name in capacities)
    for demand, top, speed in zip(demands, tops, speeds, strict=True):
        assert 0.0 <= speed <= top + 1e-9
        full = any(demand.get(name, 0.0) > 0 and used[name] >= capacities[name] * (1 - 1e-6) for name in capacities)
        assert full or speed >= top - 1e-9

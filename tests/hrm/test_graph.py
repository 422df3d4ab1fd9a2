"""The task graph: what it accepts, how tasks are called, and the closed form of the rule, by hand."""

import pytest

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, Task, TaskGraph, TaskId, finish_times

GPU, CPU, H2D = Lane(LaneKind.GPU, 0), Lane(LaneKind.CPU), Lane(LaneKind.H2D, 0)


def named(op: Op, layer: int = 0) -> TaskId:
    return TaskId(op, "decode", 0, layer)


LOAD = Task(named(Op.LOAD_WEIGHTS), H2D)
PRE = Task(named(Op.PRE_ATTENTION), GPU)


def test_ids_read_as_paths_and_leave_out_what_a_task_does_not_have() -> None:
    assert str(TaskId(Op.LOAD_WEIGHTS, "decode", 3, 7, page=2)) == "load_weights/decode/s3/l7/p2"
    assert str(TaskId(Op.LOAD_WEIGHTS, "decode", 3, 7, page=2, device=0)) == "load_weights/decode/s3/l7/p2/g0"
    assert str(TaskId(Op.ATTENTION, "prefill", 0, 0, 5, None, 1, 1)) == "attention/prefill/s0/l0/b5/g1/part1"


def test_lanes_of_the_host_have_no_number() -> None:
    assert [str(GPU), str(CPU), str(H2D)] == ["gpu0", "cpu", "host_to_device0"]


def test_two_tasks_with_one_id_are_refused() -> None:
    with pytest.raises(InputError, match=r"two tasks are called pre_attention/decode/s0/l0 \(numbers 0 and 2\)"):
        TaskGraph([PRE, LOAD, PRE])


def test_a_dependency_issued_later_is_refused_and_both_are_named() -> None:
    waiting = Task(named(Op.POST_ATTENTION), GPU, (LOAD.id,))
    with pytest.raises(
        InputError, match="post_attention/decode/s0/l0 waits for load_weights/decode/s0/l0, which is issued later"
    ):
        TaskGraph([waiting, LOAD])


def test_a_dependency_that_is_missing_is_refused_and_both_are_named() -> None:
    waiting = Task(named(Op.POST_ATTENTION), GPU, (LOAD.id,))
    with pytest.raises(
        InputError, match="post_attention/decode/s0/l0 waits for load_weights/decode/s0/l0, which is not in the graph"
    ):
        TaskGraph([PRE, waiting])


def test_a_task_cannot_wait_for_itself() -> None:
    with pytest.raises(InputError, match="sample/decode/s0/l0 waits for sample/decode/s0/l0"):
        TaskGraph([Task(named(Op.SAMPLE), GPU, (named(Op.SAMPLE),))])


def test_ends_are_the_later_of_dependencies_and_lane_plus_the_seconds() -> None:
    """load 0-5; pre 0-2; attention (CPU) after pre 2-6; post after attention and load 6-9; next pre behind it 9-11."""
    attention = Task(named(Op.ATTENTION), CPU, (PRE.id,))
    post = Task(named(Op.POST_ATTENTION), GPU, (attention.id, LOAD.id))
    following = Task(named(Op.PRE_ATTENTION, 1), GPU)
    graph = TaskGraph([LOAD, PRE, attention, post, following])
    seconds = {LOAD.id: 5.0, PRE.id: 2.0, attention.id: 4.0, post.id: 3.0, following.id: 2.0}
    assert finish_times(graph, lambda task: seconds[task.id]) == [5.0, 2.0, 6.0, 9.0, 11.0]
    assert graph.before == ((), (), (1,), (2, 0), ())
    assert graph.lanes == (H2D, GPU, CPU)
    assert [graph.of_lane(lane) for lane in graph.lanes] == [(0,), (1, 3, 4), (2,)]
    assert len(graph) == 5


def test_an_empty_graph_has_no_ends() -> None:
    assert finish_times(TaskGraph([]), lambda task: 1.0) == []

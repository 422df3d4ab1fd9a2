"""Every kind of task that a schedule can make has a kernel, and every kernel is for one of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases import Case, cases, corners, layout_of, model_folder, policy_of
from hypothesis import given, settings

from hrm.errors import InputError
from hrm.graph import LaneKind, Op, Task
from hrm.layout import Layout
from hrm.schedules import SCHEDULES, Steps, schedule_graph
from runtime.kernels import KERNELS, kernel_of

KINDS = set[tuple[Op, LaneKind]]


def kinds_of(layout: Layout, schedule: str) -> KINDS:
    """What one run has to execute."""
    return {
        (task.id.op, task.lane.kind)
        for steps in (Steps(prefill=True), Steps(first=0, last=2))
        for task in schedule_graph(layout, schedule, steps).tasks
    }


def test_what_schedules_make_and_what_there_are_kernels_for_is_the_same() -> None:
    every = list(corners())
    found: KINDS = set()
    for schedule in SCHEDULES:
        mine = [case for case in every if case.schedule == schedule]
        for case in random.Random(4).sample(mine, min(60, len(mine))):
            found |= kinds_of(layout_of(model_folder("mixtral"), case), schedule)
    assert found == set(KERNELS)


@settings(max_examples=60, deadline=None)
@given(cases(most_micro_batches=6))
def test_no_policy_makes_a_task_without_a_kernel(case: Case) -> None:
    for family in ("qwen2_moe", "llama"):
        assert kinds_of(layout_of(model_folder(family), case), case.schedule) <= set(KERNELS)


def two_gpus(parallelism: str) -> list[Task]:
    case = Case("s4", replace(policy_of("s4"), parallelism=parallelism))
    layout = layout_of(model_folder("mixtral"), case)
    profile = layout.scenario.profile
    scenario = replace(layout.scenario, profile=replace(profile, gpu=replace(profile.gpu, count=2)))
    return list(schedule_graph(Layout(scenario, case.policy), "s4", Steps(first=0, last=1)).tasks)


def test_a_sum_over_several_gpus_is_refused_by_name() -> None:
    tasks = [task for task in two_gpus("tensor") if task.id.op is Op.ALL_REDUCE]
    with pytest.raises(InputError) as raised:
        kernel_of(tasks[0])
    assert str(raised.value) == (
        "runtime: all_reduce/decode/s0/l0/b0/g0/part0 on gpu0 has no kernel (a plan for one GPU)"
    )


@pytest.mark.parametrize("parallelism", ["tensor", "pipeline"])
def test_a_task_of_a_second_gpu_is_refused_by_name(parallelism: str) -> None:
    second = [task for task in two_gpus(parallelism) if task.lane.device == 1]
    assert second
    for task in second:
        with pytest.raises(InputError, match=f"{task.id} on {task.lane} has no kernel"):
            kernel_of(task)

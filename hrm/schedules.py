"""Schedules: pure functions from a policy and a range of steps to a task graph (Figure 6 and Algorithm 1 of the paper).

All go through the layers in zigzag order: a layer's weights serve every micro-batch before the next layer's. They
differ in where attention runs, in how the next layer's weights are cut into pages and where in the order of issue a
page stands, and in how far ahead they look. Buffers are dependencies: a page for a slot waits for the last task that
uses what lies in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hrm.cpu_launcher import CpuLauncher
from hrm.errors import InputError
from hrm.graph import Phase, TaskGraph
from hrm.holds import hold_sizes, standing
from hrm.issuing import Schedule, Shared
from hrm.launcher import LOOKAHEAD, Launcher
from hrm.layout import Layout
from hrm.policy import Policy
from hrm.ring_launcher import RingLauncher

__all__ = ["SCHEDULES", "Steps", "check_schedule", "held_before", "middle_steps", "schedule_graph"]


class Steps(NamedTuple):
    """Which passes a graph covers: the prefill of the batch, and decode steps `first` to `last` - 1."""

    prefill: bool = False
    first: int = 0
    last: int = 0


def middle_steps(decode_steps: int, count: int = 1) -> tuple[Steps, Steps]:
    """The decode steps that a trace shows, from the middle of a batch; and those with a neighbour on either side.

    Neighbours fill and drain the pipeline, so that the steps between them run as they do within a batch.

    Parameters
    ----------
    decode_steps : int
        Of the batch, at least one.
    count : int
        Consecutive steps to show.

    Raises
    ------
    InputError
        More steps than there are.
    """
    if not 1 <= count <= max(1, decode_steps):
        raise InputError(
            f"{count} of {decode_steps} decode steps" if decode_steps else "one generated token takes no decode step",
            where="--steps",
            way_out=f"from 1 to {decode_steps}" if decode_steps > 1 else "1, or leave it out",
        )
    first = min(decode_steps // 2, decode_steps - count)
    shown = Steps(first=first, last=first + count)
    return shown, Steps(first=max(0, first - 1), last=min(decode_steps, first + count + 1))


SCHEDULES: Mapping[str, Schedule] = {
    each.name: each
    for each in (
        Schedule(
            name="cgopipe",
            summary="CPU attention two micro-batches ahead, weights in pages between the other copies (Algorithm 1)",
            lookahead=LOOKAHEAD,
            paged=True,
            block_first=False,
            attention_on_gpu=False,
        ),
        Schedule(
            name="s2",
            summary="CPU attention ahead, weights as one block after the first hidden-state load (FastDecode-like)",
            lookahead=LOOKAHEAD,
            paged=False,
            block_first=False,
            attention_on_gpu=False,
        ),
        Schedule(
            name="s3",
            summary="CPU attention, one micro-batch at a time, weights as one block a layer ahead (FlexGen(c))",
            lookahead=0,
            paged=False,
            block_first=True,
            attention_on_gpu=False,
        ),
        Schedule(
            name="s4",
            summary="GPU attention, the next micro-batch's KV cache prefetched, weights a layer ahead (FlexGen)",
            lookahead=0,
            paged=True,
            block_first=False,
            attention_on_gpu=True,
        ),
        Schedule(
            name="streaming",
            summary="GPU attention with the whole KV cache there, one micro-batch (DeepSpeed ZeRO-Inference)",
            lookahead=0,
            paged=True,
            block_first=False,
            attention_on_gpu=True,
            one_micro_batch=True,
        ),
        Schedule(
            name="static_experts",
            summary="GPU attention; some experts stay on the GPU, the others are computed on the CPU (Fiddler-like)",
            lookahead=0,
            paged=True,
            block_first=False,
            attention_on_gpu=True,
            static_experts=True,
        ),
        Schedule(
            name="cpu_only",
            summary="everything on the CPU",
            lookahead=0,
            paged=True,
            block_first=False,
            attention_on_gpu=False,
            on_cpu=True,
        ),
        Schedule(
            name="serial",
            summary="the policy with nothing overlapped: the worst case",
            lookahead=0,
            paged=True,
            block_first=False,
            attention_on_gpu=None,
            serial=True,
        ),
    )
}


def check_schedule(name: str, policy: Policy) -> Schedule:
    """The schedule of that name, if the policy is one it can run.

    Raises
    ------
    InputError
        No such schedule, or a combination with A_g, n_ub, r_c or weight slots that it does not have.
    """
    schedule = SCHEDULES.get(name)
    where = f"schedule {name!r}"
    if schedule is None:
        raise InputError("there is no such schedule", where=where, way_out=f"one of {', '.join(SCHEDULES)}")
    if policy.everything_on_cpu != schedule.on_cpu and not schedule.serial:
        raise InputError(
            f"the plan computes {'everything' if policy.everything_on_cpu else 'not everything'} on the CPU",
            where=where,
            way_out="a plan that uses the GPU"
            if policy.everything_on_cpu
            else "the CPU-only plan (hrm compare has it)",
        )
    if policy.everything_on_cpu:
        return schedule
    if policy.weight_slots == "experts" and not (schedule.paged or schedule.serial):
        raise InputError(
            "it copies a layer as one block, the plan has a ring of experts",
            where=where,
            way_out="--weight-slots 2 (or 1)",
        )
    if schedule.attention_on_gpu is not None and schedule.attention_on_gpu != policy.attention_on_gpu:
        place = "GPU" if schedule.attention_on_gpu else "CPU"
        raise InputError(
            f"it has attention on the {place}, the plan on the {'GPU' if policy.attention_on_gpu else 'CPU'}",
            where=where,
            way_out=f"hrm plan --attention {place.lower()}",
        )
    if schedule.static_experts:
        _check_static_experts(policy, where)
    if policy.parallelism == "pipeline" and _rings(policy):
        raise InputError(
            "a ring of experts serves the whole batch, a pipeline a part of it at a time",
            where=where,
            way_out="--weight-slots 2 (or 1)",
        )
    if schedule.one_micro_batch and (policy.num_micro_batches > 1 or policy.kv_on_gpu < 1.0):
        raise InputError(
            f"it has one micro-batch and its KV cache on the GPU, the plan n_ub = {policy.num_micro_batches} and "
            f"r_c = {policy.kv_on_gpu:.3g}",
            where=where,
            way_out="hrm plan --attention gpu --num-micro-batches 1 --kv-on-gpu 1",
        )
    return schedule


def _check_static_experts(policy: Policy, where: str) -> None:
    if policy.ffn_on_gpu or policy.weights_on_gpu <= 0.0:
        raise InputError(
            f"it computes experts where they lie, some of them on the GPU; the plan has F_g = {policy.ffn_on_gpu:d} "
            f"and r_w = {policy.weights_on_gpu:.3g}",
            where=where,
            way_out="a plan with F_g = 0 and r_w > 0 (hrm compare makes one)",
        )
    if policy.kv_on_gpu < 1.0:
        raise InputError(
            f"it has the KV cache on the GPU, the plan r_c = {policy.kv_on_gpu:.3g}",
            where=where,
            way_out="hrm plan --attention gpu --kv-on-gpu 1",
        )


def schedule_graph(layout: Layout, name: str, steps: Steps) -> TaskGraph:
    """Lay out a range of steps under a schedule.

    Parameters
    ----------
    layout : Layout
        Scenario and policy.
    name : str
        One of `SCHEDULES`.
    steps : Steps
        Passes to cover.

    Returns
    -------
    TaskGraph

    Raises
    ------
    InputError
        The policy is not one that the schedule can run.
    """
    schedule = check_schedule(name, layout.policy)
    if not steps.prefill and steps.last <= steps.first:
        raise InputError(f"steps {steps.first} to {steps.last} are none", where="steps", way_out="at least one step")
    if layout.policy.everything_on_cpu:
        kind: type[Launcher] = CpuLauncher
    else:
        kind = RingLauncher if _rings(layout.policy) else Launcher
    shared = Shared(passes={("decode", step) for step in range(steps.first, steps.last)})
    sizes = hold_sizes(layout.scenario, layout.sizes, layout.policy)
    apart = layout.pipelined and kind is Launcher
    group = (0,) if layout.folded else tuple(range(layout.gpus))
    groups = [(device,) for device in range(layout.gpus)] if apart else [group]
    launchers = [
        kind(layout=layout, schedule=schedule, sizes=sizes, shared=shared, devices=devices) for devices in groups
    ]
    if steps.prefill:
        _issue(launchers, "prefill", 0, 1)
    if steps.last > steps.first:
        _issue(launchers, "decode", steps.first, steps.last)
    for launcher in launchers:
        launcher.finish()
    return TaskGraph(shared.tasks)


def held_before(layout: Layout, steps: Steps) -> dict[str, float]:
    """Bytes by level that are held when the first task of a graph starts [byte].

    What is there all along; and where the graph has no prefill, what prefill leaves.
    """
    found = standing(layout.scenario, layout.sizes, layout.policy)
    if not steps.prefill:
        sizes = hold_sizes(layout.scenario, layout.sizes, layout.policy)
        for level, size in sizes.kv_cache.items():
            found[level] = found.get(level, 0.0) + size
        if not layout.policy.everything_on_cpu:
            found["gpu"] += sizes.of_the_batch
    return found


def _rings(policy: Policy) -> bool:
    return policy.weight_slots == "experts"


def _issue(launchers: list[Launcher], phase: Phase, first: int, last: int) -> None:
    """All passes of a phase; in a pipeline a device is one pass behind the device before it.

    A pass of the next step starts once the device at the end has given the tokens of this one, so with fewer parts of
    the batch than devices some turns are empty.
    """
    turns = [launcher.issue(launcher.stages(phase, first, last)) for launcher in launchers]
    if len(launchers) == 1:
        for _ in turns[0]:
            pass
        return
    parts = launchers[0].num_groups(phase)
    length = max(parts, len(launchers))
    passes = (last - first) * length
    for wave in range(passes + len(launchers) - 1):
        active = []
        for behind, turn in enumerate(turns):
            if 0 <= wave - behind < passes and (wave - behind) % length < parts:
                active.append(turn)
        while active:  # position by position, so that the lanes of the host serve all devices in turn
            active = [turn for turn in active if not next(turn, True)]

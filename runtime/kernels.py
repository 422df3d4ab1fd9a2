"""The table of kernels: what runs a task, by its kind and its lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hrm.errors import InputError
from hrm.graph import LaneKind, Op, Task
from runtime import compute_kernels as compute
from runtime import copy_kernels as copies
from runtime.run_state import RunState

__all__ = ["KERNELS", "Kernel", "kernel_of"]

Kernel = Callable[[RunState, Task], Callable[[], None] | None]
"""Runs a task; what it returns, if anything, is to be done in CPU memory once the task's copies are there."""

GPU, CPU, H2D, D2H = LaneKind.GPU, LaneKind.CPU, LaneKind.H2D, LaneKind.D2H

KERNELS: Mapping[tuple[Op, LaneKind], Kernel] = {
    (Op.EMBED, GPU): compute.embed_on_gpu,
    (Op.EMBED, CPU): compute.embed_on_cpu,
    (Op.PRE_ATTENTION, GPU): compute.start_layer,
    (Op.PRE_ATTENTION, CPU): compute.start_layer,
    (Op.ATTENTION, GPU): compute.attend_on_gpu,
    (Op.ATTENTION, CPU): compute.attend_on_cpu,
    (Op.POST_ATTENTION, GPU): compute.finish_layer,
    (Op.POST_ATTENTION, CPU): compute.finish_layer,
    (Op.EXPERTS, GPU): compute.compute_experts_on_gpu,
    (Op.EXPERTS, CPU): compute.compute_experts_on_cpu,
    (Op.LM_HEAD, GPU): compute.give_logits,
    (Op.LM_HEAD, CPU): compute.give_logits,
    (Op.SAMPLE, GPU): compute.sample_tokens,
    (Op.SAMPLE, CPU): compute.sample_tokens,
    (Op.OFFLOAD_QKV, D2H): copies.offload_qkv,
    (Op.LOAD_HIDDEN, H2D): copies.load_hidden,
    (Op.STORE_HIDDEN, D2H): copies.store_hidden,
    (Op.STAGE_WEIGHTS, LaneKind.PIN): copies.stage_weights,
    (Op.LOAD_WEIGHTS, H2D): copies.load_weights,
    (Op.LOAD_KV, H2D): copies.load_kv,
    (Op.STORE_KV, D2H): copies.store_kv,
    (Op.READ_DISK, LaneKind.DISK): copies.read_disk,
    (Op.WRITE_DISK, LaneKind.DISK): copies.write_disk,
}


def kernel_of(task: Task) -> Kernel:
    """The kernel of a task.

    Raises
    ------
    InputError
        There is none: the schedule, or the number of GPUs, is not one this runtime runs.
    """
    found = KERNELS.get((task.id.op, task.lane.kind))
    if found is None or task.lane.device:  # of several GPUs the first is 0
        raise InputError(f"{task.id} on {task.lane} has no kernel", where="runtime", way_out="a plan for one GPU")
    return found

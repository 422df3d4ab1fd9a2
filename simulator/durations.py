"""From a task to seconds: the roofline of its operators, the rate of its copy, or a table.

The same rates as the cost model (`hrm.rates`), so that what differs between prediction and simulation is order,
dependencies and sharing, never a constant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hrm.errors import InputError
from hrm.full_cost import WIDE_OPERATORS
from hrm.graph import LaneKind, Op, Operator, Task, TaskId
from hrm.rates import Rates
from hrm.trace import Trace

__all__ = ["Durations", "jittered", "roofline_durations", "table_durations", "trace_durations"]

Durations: TypeAlias = Callable[[Task], float]
"""Seconds of a task when nothing else runs [s]."""

NEVER_QUANTISED = (*WIDE_OPERATORS, "attention", "lm_head", "embedding")


def roofline_durations(rates: Rates, *, shared: bool = False) -> Durations:
    """Seconds by the roofline: each operator as `hrm.rates` prices it, each copy bytes / rate.

    Parameters
    ----------
    rates : Rates
        Peaks times efficiencies of the profile, of all GPUs together.
    shared : bool
        What the links of several GPUs share in the host is shared by the simulator, so that a link alone has its own
        rate; else each has its equal part of the host's.
    """
    count = float(rates.gpus)
    up, down = rates.h2d_bytes_per_s / count, rates.d2h_bytes_per_s / count
    if shared:
        up, down = rates.h2d_per_gpu_bytes_per_s, rates.d2h_per_gpu_bytes_per_s
    reduced = min(up, down) if rates.all_reduce_bytes_per_s is None else rates.all_reduce_bytes_per_s
    known: dict[tuple[Any, ...], tuple[float, tuple[Operator, ...]]] = {}

    def seconds(task: Task) -> float:
        # The same work comes again with every micro-batch, layer and step: keyed by the operators themselves, which
        # are kept, so that their id stays theirs.
        key = (task.lane.kind, task.id.op, task.id.phase, task.id.part, task.bytes_moved, id(task.operators))
        found = known.get(key)
        if found is None or found[1] is not task.operators:
            found = known[key] = (alone(task), task.operators)
        return found[0]

    def alone(task: Task) -> float:
        kind, phase = task.lane.kind, task.id.phase
        if kind is LaneKind.GPU:
            total = task.launches * rates.launch_s
            if task.id.op is Op.POST_ATTENTION and task.id.part != 0:  # once, also where it comes in two halves
                total += rates.overhead_s
            if task.id.op is Op.ALL_REDUCE:
                return total + task.bytes_moved / reduced
            for operator in task.operators:
                if operator.name == "attention" and phase == "decode":
                    total += float(rates.gpu_attention_seconds(count * operator.work))
                    continue
                wide = operator.name in NEVER_QUANTISED
                total += float(rates.gpu_seconds(count * operator.work, phase, wide=wide))
            return total
        if kind is LaneKind.CPU:
            run = rates.cpu_attention_seconds if task.id.op is Op.ATTENTION else rates.cpu_seconds
            return sum(float(run(operator.work)) for operator in task.operators)
        if kind is LaneKind.H2D:
            return task.bytes_moved / up + rates.copy_s
        if kind is LaneKind.D2H:
            return task.bytes_moved / down + rates.copy_s
        if kind is LaneKind.PIN:
            return task.bytes_moved / rates.staging_bytes_per_s
        if kind is LaneKind.DISK:
            rate = rates.disk_write_bytes_per_s if task.id.op is Op.WRITE_DISK else rates.disk_read_bytes_per_s
            if rate <= 0:
                raise InputError(f"{task.id} needs a disk, the profile has none", where="simulation")
            return task.bytes_moved / rate
        raise InputError(f"{task.id} runs on {task.lane}, which has no rate", where="simulation")

    return seconds


def table_durations(table: Mapping[Op, float]) -> Durations:
    """The same seconds for every task of a kind; a kind that is missing is an error when it is met."""

    def seconds(task: Task) -> float:
        try:
            return table[task.id.op]
        except KeyError:
            raise InputError(f"the table has no duration for {task.id.op}", where="durations") from None

    return seconds


def trace_durations(trace: Trace) -> Durations:
    """The durations of a trace, by task id.

    Raises
    ------
    InputError
        When met: a task that the trace does not have (it is from another plan).
    """
    known: dict[TaskId, float] = {span.task: span.end_s - span.start_s for span in trace.spans}

    def seconds(task: Task) -> float:
        try:
            return known[task.id]
        except KeyError:
            raise InputError(f"the trace has no {task.id}", where="durations", way_out="a trace of this plan") from None

    return seconds


def jittered(durations: Durations, share: float, seed: int) -> Durations:
    """Durations times exp(N(0, share^2)), drawn per task from a seed, the same for the same task and seed."""
    if not 0.0 <= share < 2.0:
        raise InputError(f"{share} is no spread", where="--jitter", way_out="a share from 0 to 2, e.g. 0.05")

    def seconds(task: Task) -> float:
        return durations(task) * random.Random(f"{seed}/{task.id}").lognormvariate(0.0, share)

    return seconds

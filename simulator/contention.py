"""Tasks that share what several lanes draw on: memory bandwidth, both directions of the link, cores.

A running task has a demand on each shared resource at full speed. Where demands exceed a resource, the tasks on it
slow down together (progressive filling: every task runs as fast as the tightest resource it uses allows, none faster
than alone). Nothing is a constant factor: alone, a task is as fast as without contention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hrm.graph import LaneKind, Op, Operator, Task
from hrm.profile import HardwareProfile
from hrm.rates import Rates

__all__ = ["Demand", "Sharing", "progressive_filling", "sharing_of"]

Demand = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What is shared.

    Attributes
    ----------
    capacities : mapping of str to float
        By resource: cpu_memory [byte/s], cores [1].
    demand : callable
        (task, seconds alone) -> demand on each resource at full speed.
    duplex : mapping of LaneKind to float
        Speed of a link direction while the other one is busy [share].
    """

    capacities: Mapping[str, float]
    demand: Callable[[Task, float], Demand]
    duplex: Mapping[LaneKind, float] = field(default_factory=dict)


def sharing_of(profile: HardwareProfile, rates: Rates, *, alike: int = 1) -> Sharing:
    """Sharing on a machine: DRAM, the link's two directions, host cores, and what the links of several GPUs share.

    With `alike` GPUs of which only the first one is laid out, what it draws from the host the others draw too.

    Cores: attention and experts on the CPU use all of them, a staging copy one, disk input half of one (estimated);
    DMA uses none. DRAM: a staging copy reads and writes; DMA and disk pass it once. An emulated accelerator computes on
    cores of its own beside the CPU's, in the same DRAM; copies from and to it take a core each and pass DRAM twice, and
    what both directions lose to each other is just that. Several GPUs: the host's total of
    each direction; a sum over GPUs through the host takes its part of either direction of each link.
    """
    cores, emulated = float(profile.cpu.cores), float(profile.gpu.host_cores)
    through_host = rates.gpus > 1 and rates.all_reduce_bytes_per_s is None
    capacities = {"cpu_memory": rates.memory_bytes_per_s, "cores": cores + emulated}
    if rates.gpus > 1:
        capacities |= {"up": rates.h2d_bytes_per_s, "down": rates.d2h_bytes_per_s}
    if through_host:
        for device in range(rates.gpus):
            capacities[f"up{device}"] = rates.h2d_per_gpu_bytes_per_s
            capacities[f"down{device}"] = rates.d2h_per_gpu_bytes_per_s

    def wanted(task: Task, seconds: float) -> Demand:
        kind = task.lane.kind
        moved = task.bytes_moved / seconds
        if kind is LaneKind.CPU:
            touched = sum(float(operator.work.bytes_touched) for operator in task.operators)
            return {"cpu_memory": touched / seconds, "cores": 0.0 if task.id.op is Op.EMBED else cores}
        if kind in (LaneKind.H2D, LaneKind.D2H):
            way = "up" if kind is LaneKind.H2D else "down"
            if emulated:
                return {"cpu_memory": 2.0 * moved, "cores": 1.0}
            return {"cpu_memory": moved, way: moved, f"{way}{task.lane.device}": moved}
        if kind is LaneKind.GPU and emulated:
            touched = sum(float(operator.work.bytes_touched) for operator in task.operators)
            return {"cpu_memory": touched / seconds, "cores": emulated}
        if task.id.op is Op.ALL_REDUCE and through_host:
            device = task.lane.device
            links = dict.fromkeys(("up", "down", f"up{device}", f"down{device}"), moved)
            return {"cpu_memory": 2.0 * moved, **links}
        if kind is LaneKind.PIN:
            return {"cpu_memory": 2.0 * moved, "cores": 1.0}
        if kind is LaneKind.DISK:
            return {"cpu_memory": moved, "cores": 0.5}
        return {}

    known: dict[tuple[Any, ...], tuple[Demand, tuple[Operator, ...]]] = {}

    def demand(task: Task, seconds: float) -> Demand:
        if seconds <= 0.0:
            return {}
        key = (task.lane, task.id.op, task.bytes_moved, id(task.operators), seconds)
        found = known.get(key)
        if found is None or found[1] is not task.operators:
            # The rate of a copy is what it reaches alone, even where the CPU's own rate, of few cores, is lower.
            own = (f"up{task.lane.device}", f"down{task.lane.device}")
            times = 1 if task.lane.device is None else alike
            amounts = {
                name: min(amount, capacities[name]) * (1 if name in own else times)
                for name, amount in wanted(task, seconds).items()
                if name in capacities
            }
            found = known[key] = (amounts, task.operators)
        return found[0]

    return Sharing(
        capacities=capacities,
        demand=demand,
        duplex={} if emulated else {LaneKind.H2D: 1.0 - rates.h2d_loss, LaneKind.D2H: 1.0 - rates.d2h_loss},
    )


def progressive_filling(
    demands: Sequence[Demand], tops: Sequence[float], capacities: Mapping[str, float]
) -> list[float]:
    """Speed of every task: raise all together, stop those whose top or whose resource is reached, go on with the rest.

    Parameters
    ----------
    demands : sequence of mapping
        Of each task at full speed, by resource.
    tops : sequence of float
        Largest speed of each task (1 = as alone).
    capacities : mapping
        By resource.

    Returns
    -------
    list of float
        Between 0 and its top each; no resource is exceeded.
    """
    wanted = dict.fromkeys(capacities, 0.0)
    for demand, top in zip(demands, tops, strict=True):
        for name, amount in demand.items():
            wanted[name] = wanted.get(name, 0.0) + amount * top
    if all(wanted[name] <= capacity for name, capacity in capacities.items()):
        return list(tops)  # nobody is in anybody's way, which is the usual case
    speeds = [0.0] * len(demands)
    left = dict(capacities)
    open_ = [i for i in range(len(demands)) if tops[i] > 0.0]
    while open_:
        pull = {name: sum(demands[i].get(name, 0.0) for i in open_) for name in left}
        step = min(tops[i] - speeds[i] for i in open_)
        for name, pulled in pull.items():
            if pulled > 0.0:
                step = min(step, left[name] / pulled)
        for i in open_:
            speeds[i] += step
        for name, pulled in pull.items():
            left[name] = max(0.0, left[name] - step * pulled)
        tight = {name for name, pulled in pull.items() if pulled > 0.0 and left[name] <= 1e-9 * capacities[name]}
        still = [
            i
            for i in open_
            if tops[i] - speeds[i] > 1e-12 and not any(demands[i].get(name, 0.0) > 0.0 for name in tight)
        ]
        if len(still) == len(open_):  # nothing closes any more
            break
        open_ = still
    return speeds

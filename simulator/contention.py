"""Tasks that share what several lanes draw on: memory bandwidth, both directions of the link, cores.

A running task has a demand on each shared resource at full speed. Where demands exceed a resource, the tasks on it
slow down together (progressive filling: every task runs as fast as the tightest resource it uses allows, none faster
than alone). Nothing is a constant factor: alone, a task is as fast as without contention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hrm.graph import LaneKind, Op, Task
from hrm.profile import HardwareProfile
from hrm.rates import Rates

__all__ = ["Sharing", "progressive_filling", "sharing_of"]

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


def sharing_of(profile: HardwareProfile, rates: Rates) -> Sharing:
    """Sharing on a machine: DRAM, the link's two directions, host cores.

    Cores: attention and experts on the CPU use all of them, a staging copy one, disk input half of one (estimated);
    DMA uses none. DRAM: a staging copy reads and writes; DMA and disk pass it once.
    """
    cores = float(profile.cpu.cores)

    def wanted(task: Task, seconds: float) -> Demand:
        if seconds <= 0.0:
            return {}
        kind = task.lane.kind
        if kind is LaneKind.CPU:
            touched = sum(float(operator.work.bytes_touched) for operator in task.operators)
            return {"cpu_memory": touched / seconds, "cores": 0.0 if task.id.op is Op.EMBED else cores}
        if kind in (LaneKind.H2D, LaneKind.D2H):
            return {"cpu_memory": task.bytes_moved / seconds}
        if kind is LaneKind.PIN:
            return {"cpu_memory": 2.0 * task.bytes_moved / seconds, "cores": 1.0}
        if kind is LaneKind.DISK:
            return {"cpu_memory": task.bytes_moved / seconds, "cores": 0.5}
        return {}

    capacities = {"cpu_memory": rates.cpu_bytes_per_s, "cores": cores}

    def demand(task: Task, seconds: float) -> Demand:
        # The rate of a copy is what it reaches alone, even where the CPU's own rate, of few cores, is lower.
        return {name: min(amount, capacities[name]) for name, amount in wanted(task, seconds).items()}

    return Sharing(
        capacities=capacities,
        demand=demand,
        duplex={LaneKind.H2D: 1.0 - rates.h2d_loss, LaneKind.D2H: 1.0 - rates.d2h_loss},
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

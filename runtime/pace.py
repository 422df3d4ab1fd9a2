"""Links and disk at the rates of a profile, where the accelerator is emulated: a demonstration, no measurement.

Copies in memory are faster than a real link. Paced, a copy lasts at least as long as the profile says, so that the
lanes wait for each other as they would there; what a copy takes then says nothing of this machine or that one.
"""

from __future__ import annotations

from hrm.errors import InputError
from hrm.graph import LaneKind, Op, Task
from hrm.rates import derive_rates
from hrm.scenario import Scenario
from runtime.executor import Pace

__all__ = ["PACED_KINDS", "pace_links"]

PACED_KINDS = (LaneKind.H2D, LaneKind.D2H, LaneKind.DISK)
"""Lanes that are paced."""


def pace_links(scenario: Scenario) -> Pace:
    """Least seconds of every copy over the link or the disk: bytes / rate, and a link's latency [s]; 0 for other tasks.

    Raises
    ------
    InputError
        When met: a task needs a disk and the profile has none.
    """
    rates = derive_rates(scenario.profile, scenario.formats)

    def seconds(task: Task) -> float:
        kind = task.lane.kind
        if kind is LaneKind.H2D:
            return task.bytes_moved / rates.h2d_per_gpu_bytes_per_s + rates.copy_s
        if kind is LaneKind.D2H:
            return task.bytes_moved / rates.d2h_per_gpu_bytes_per_s + rates.copy_s
        if kind is not LaneKind.DISK:
            return 0.0
        rate = rates.disk_write_bytes_per_s if task.id.op is Op.WRITE_DISK else rates.disk_read_bytes_per_s
        if rate <= 0:
            raise InputError(f"{task.id} needs a disk, the profile has none", where="--pace-links")
        return task.bytes_moved / rate

    return seconds

"""What every measurement needs: the device, the sizes, the stopwatch, where results go and whom to tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hrm.graph import LaneKind
from runtime.calibration.lanes import Load, keep_busy, run_on, synchronise
from runtime.calibration.samples import Samples, Stopwatch, Unit
from runtime.calibration.sizes import Sizes
from runtime.device import Device

__all__ = ["Bench", "make_bench"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every measurement needs.

    Attributes
    ----------
    dtypes : tuple of str
        Number formats to measure, the one that shares of peaks are taken from first.
    tell : callable
        Called with a line of progress.
    """

    device: Device
    sizes: Sizes
    watch: Stopwatch
    dtypes: tuple[str, ...]
    tell: Callable[[str], None]
    samples: Samples = field(default_factory=Samples)

    def time_on(self, kind: LaneKind, run: Callable[[], object], loads: Sequence[Load] = ()) -> list[float]:
        """Seconds of one call on a lane, for every repeat, while other lanes are kept busy [s].

        Where every lane is one thread of the host and there are cores for all of them, it is timed by its processor
        time: other processes have no part in that.
        """
        watch, kinds = self.watch, [kind, *(load[0] for load in loads)]
        threads = sum(self.device.lane_cores(each)[1] for each in kinds)
        if not self.device.cuda and LaneKind.DISK not in kinds and threads == len(kinds) <= len(self.device.cores):
            watch = replace(watch, clock=time.thread_time)
        with keep_busy(self.device, loads):
            return run_on(self.device, kind, lambda: watch.measure(run, synchronise))

    def rate_on(
        self,
        kind: LaneKind,
        name: str,
        unit: Unit,
        amount: float,
        run: Callable[[], object],
        loads: Sequence[Load] = (),
    ) -> float:
        """Measure `amount` per second on a lane and keep it; the median."""
        self.tell(name)
        return self.samples.add_rate(name, unit, amount, self.time_on(kind, run, loads)).median

    def seconds_on(self, kind: LaneKind, name: str, run: Callable[[], object], loads: Sequence[Load] = ()) -> float:
        """Measure the seconds of one call on a lane and keep them; the median [s]."""
        self.tell(name)
        return self.samples.add(name, "s", self.time_on(kind, run, loads)).median


def make_bench(
    device: Device, sizes: Sizes, *, dtypes: Sequence[str], tell: Callable[[str], None] = lambda _: None
) -> Bench:
    """A bench with a stopwatch for these sizes; on a machine so busy that it takes long, repeats become fewer."""
    end = time.perf_counter() + sizes.hurry_after_s
    watch = Stopwatch(
        repeats=sizes.repeats, least_s=sizes.least_s, most_s=sizes.most_s, late=lambda: time.perf_counter() > end
    )
    return Bench(device=device, sizes=sizes, watch=watch, dtypes=tuple(dtypes), tell=tell)

"""Time of every task on one axis: CUDA events on streams, perf_counter on host lanes."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Clock"]

REANCHOR_MS = 4096.0
"""Up to here float32 is as fine as the device's own resolution of about half a microsecond [ms]."""


TRIES = 8
"""Readings of both clocks, of which the closest counts."""


class Clock:
    """Seconds since it was made; the first event of the device and the host's counter are read together."""

    def __init__(self, *, cuda: bool) -> None:
        self._anchor: Any = None
        self._anchor_s = 0.0
        if cuda:
            torch.cuda.synchronize()
        self._began, closest = time.perf_counter(), float("inf")
        for _ in range(TRIES if cuda else 0):  # the event was reached between two readings: the closest two say when
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before = time.perf_counter()
            event.record()
            event.synchronize()
            after = time.perf_counter()
            if after - before < closest:
                self._anchor, closest = event, after - before
                self._began = (before + after) / 2

    def now(self) -> float:
        """Host time [s]."""
        return time.perf_counter() - self._began

    def of_event(self, event: Any) -> float:
        """When a recorded event was reached [s]; ask in order of time, or nearly so.

        The device gives milliseconds in float32: over hours whole tenths of one would be lost. So the event that time
        is counted from moves on.
        """
        milliseconds: float = self._anchor.elapsed_time(event)
        found = self._anchor_s + milliseconds * 1e-3
        if milliseconds > REANCHOR_MS:
            self._anchor, self._anchor_s = event, found
        return found

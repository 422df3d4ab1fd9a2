"""Time of every task on one axis: CUDA events on streams, perf_counter on host lanes."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Clock"]


class Clock:
    """Seconds since it was made; the first event of the device and the host's counter are read together."""

    def __init__(self, *, cuda: bool) -> None:
        self._first: Any = None
        if cuda:
            torch.cuda.synchronize()
            self._first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._first.record()
            self._first.synchronize()
        self._began = time.perf_counter()

    def now(self) -> float:
        """Host time [s]."""
        return time.perf_counter() - self._began

    def of_event(self, event: Any) -> float:
        """When a recorded event was reached [s]."""
        milliseconds: float = self._first.elapsed_time(event)
        return milliseconds * 1e-3

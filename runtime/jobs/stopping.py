"""SIGTERM: the step is finished, what has ended is written, the next start goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Stopper", "stop_on_sigterm"]


class Stopper:
    """Whether somebody asked to stop. While nothing could end soon (`may_wait` says no), stopping is at once."""

    def __init__(self) -> None:
        self.asked = False
        self.may_wait: Callable[[], bool] = lambda: False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first one waits for the end of the step, the second one for nothing."""
        if self.asked or not self.may_wait():
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_on_sigterm() -> Iterator[Stopper]:
    """Within, SIGTERM asks the stopper; only the main thread can be asked."""
    stopper = Stopper()
    if threading.current_thread() is not threading.main_thread():
        yield stopper
        return
    before = signal.signal(signal.SIGTERM, stopper.on_signal)
    try:
        yield stopper
    finally:
        signal.signal(signal.SIGTERM, before)

"""Lanes to measure on: the threads, cores and streams that the runtime gives to a lane, without a task graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from hrm.graph import LaneKind
from runtime.device import Device
from runtime.threads import settle_thread

__all__ = ["keep_busy", "run_on", "synchronise"]

Result = TypeVar("Result")
STREAMS = (LaneKind.GPU, LaneKind.H2D, LaneKind.D2H)
Load = tuple[LaneKind, Callable[[], object]]
"""Something to do again and again, and the lane that does it."""


def synchronise() -> None:
    """Wait for what the calling thread has issued on its stream; nothing to wait for without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def run_on(device: Device, kind: LaneKind, work: Callable[[], Result]) -> Result:
    """What `work` returns, done on a thread of its own as the runtime's worker of that lane."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with _as_lane(device, kind):
                results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"calibration {kind.name}", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def keep_busy(device: Device, loads: Sequence[Load]) -> Iterator[None]:
    """Other lanes do their work over and over inside the block; it begins when each has done it once.

    Raises
    ------
    Exception
        What went wrong on one of them.
    """
    with ExitStack() as stack:
        for kind, work in loads:
            stack.enter_context(_repeating(device, kind, work))
        yield


@contextmanager
def _repeating(device: Device, kind: LaneKind, work: Callable[[], object]) -> Iterator[None]:
    stop, started = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with _as_lane(device, kind):
                while not stop.is_set():
                    work()
                    synchronise()
                    started.set()
        except BaseException as error:
            errors.append(error)
            started.set()

    thread = threading.Thread(target=run, name=f"calibration load {kind.name}", daemon=True)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def _as_lane(device: Device, kind: LaneKind) -> Iterator[None]:
    settle_thread(*device.lane_cores(kind))
    stream: Any = nullcontext()
    if device.cuda and kind in STREAMS:
        stream = torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    with torch.inference_mode(), stream:
        yield

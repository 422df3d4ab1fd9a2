"""Streams and events as CUDA has them, without a GPU: what is issued runs later, on a thread per stream, in order.

An event that was recorded stands for all that its stream was given before; a stream that waits for one runs nothing
until then; the host goes on. So code that forgets to wait for a stream meets work that has not run.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

_here = threading.local()


class FakeStream:
    """Runs what it is given, in order, on a thread of its own."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def give(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def wait_event(self, event: FakeEvent) -> None:
        reached = event.reached
        assert reached is not None, "a wait for an event that nobody recorded does not wait"
        self.give(lambda: reached.wait() and None)

    def synchronize(self) -> None:
        event = FakeEvent()
        event.record(self)
        event.synchronize()


class FakeEvent:
    """A point in a stream; `seconds` is when it was reached."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.reached: threading.Event | None = None
        self.seconds = float("nan")

    def record(self, stream: FakeStream | None = None) -> None:
        self.reached = reached = threading.Event()

        def reach() -> None:
            self.seconds = time.perf_counter()
            reached.set()

        if stream is None:
            reach()
        else:
            stream.give(reach)

    def synchronize(self) -> None:
        assert self.reached is not None, "a wait for an event that nobody recorded does not wait"
        self.reached.wait()

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.seconds - self.seconds) * 1e3


def current_stream() -> FakeStream:
    found: FakeStream = _here.stream
    return found


@contextlib.contextmanager
def on_stream(stream: FakeStream) -> Iterator[None]:
    _here.stream = stream
    yield
    del _here.stream


@contextlib.contextmanager
def fake_cuda(streams: list[FakeStream]) -> Iterator[None]:
    """Within it torch.cuda has these streams."""

    def synchronize() -> None:
        for stream in streams:
            stream.synchronize()

    with pytest.MonkeyPatch.context() as patch:
        faked: dict[str, Any] = {
            "Event": FakeEvent,
            "stream": on_stream,
            "current_stream": current_stream,
            "synchronize": synchronize,
        }
        for name, value in faked.items():
            patch.setattr(torch.cuda, name, value)
        yield

"""Points of a sweep solved in several processes, each with one thread; none outlives the sweep."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

from simulator.sweep_points import Study
from simulator.sweep_rows import Bounds, Row, solve_point
from simulator.sweep_values import Point

__all__ = ["available_cores", "solve_points"]

THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def solve_points(study: Study, points: Sequence[Point], jobs: int) -> Iterator[tuple[Point, list[Row]]]:
    """Rows of the points as they are found, in any order; with one job in this process."""
    if min(jobs, len(points)) <= 1:
        bounds: Bounds = {}
        for point in points:
            yield point, solve_point(study, point, bounds)
        return
    before = {child.pid for child in multiprocessing.active_children()}
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(
        min(jobs, len(points)), mp_context=context, initializer=_start_worker, initargs=(study,)
    )
    running: dict[Future[list[Row]], Point] = {}
    waiting = iter(points)
    try:
        with _one_thread_each(), _ignoring_interrupts():
            for point in islice(waiting, 2 * jobs):
                running[executor.submit(_solve_here, point)] = point
        while running:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                point = running.pop(future)
                yield point, future.result()
                following = next(waiting, None)
                if following is not None:
                    running[executor.submit(_solve_here, following)] = following
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            if child.pid not in before:
                child.terminate()
        raise
    executor.shutdown()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Workers that start in here compute with one thread each."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Workers that start in here leave Ctrl-C to their parent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_WORKER: dict[str, Any] = {}
"""What a worker process works on."""


def _start_worker(study: Study) -> None:
    _WORKER.update(study=study, bounds={})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed leaves no workers behind."""
    from multiprocessing.connection import wait as wait_for

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _solve_here(point: Point) -> list[Row]:
    return solve_point(_WORKER["study"], point, _WORKER["bounds"])

"""Copies between host and device by size: pinned, pageable, both directions, beside other work; staging, page-locking.

Sources and targets are gone round in, so that what is copied comes from memory and not from a processor's cache. With
the accelerator emulated a copy is one of memory, done by a thread; page-locked and other memory are then the same.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from hrm.graph import LaneKind
from runtime.calibration.bench import Bench
from runtime.calibration.lanes import Load

__all__ = ["COPY_LANES", "CopyBuffers", "measure_copies", "measure_staging"]

COPY_LANES = (LaneKind.H2D, LaneKind.D2H)
MIB = 2**20
SMALL_BYTES = 4096
HAND_OVERS = 200


class CopyBuffers:
    """Memory to copy between."""

    def __init__(self, bench: Bench) -> None:
        device, size = bench.device, bench.sizes.span_bytes
        self.gpu, self.pinned = device.gpu_bytes(size), device.pinned_bytes(size)
        self.pageable = device.host_bytes(size)
        for number, memory in enumerate((self.gpu, self.pinned, self.pageable)):
            memory.fill_(number + 1)

    def run(self, kind: LaneKind, host: str, size: int) -> Callable[[], object]:
        """One copy of so many bytes, each call of the next piece of the buffers."""
        memory = self.pinned if host == "pinned" else self.pageable
        source, target = (memory, self.gpu) if kind is LaneKind.H2D else (self.gpu, memory)
        starts = _starts(memory.numel(), size, backwards=kind is LaneKind.D2H)
        return lambda: _copy(source, target, next(starts), size)


def _starts(total: int, size: int, *, backwards: bool) -> Iterator[int]:
    places = [number * size for number in range(max(1, total // size))]
    return itertools.cycle(places[::-1] if backwards else places)


def _copy(source: Tensor, target: Tensor, start: int, size: int) -> None:
    target[start : start + size].copy_(source[start : start + size], non_blocking=True)


def measure_copies(bench: Bench, beside: Sequence[tuple[str, Sequence[Load]]]) -> CopyBuffers:
    """Copies alone and, at the largest size, beside each of the loads (words, what keeps other lanes busy)."""
    buffers = CopyBuffers(bench)
    for kind in COPY_LANES:
        for host in ("pinned", "pageable"):
            for size in bench.sizes.copies:
                _measure_one(bench, buffers, kind, host, size)
    largest = bench.sizes.copies[-1]
    for kind, other in (COPY_LANES, COPY_LANES[::-1]):
        opposite: Load = (other, buffers.run(other, "pinned", largest))
        _measure_one(bench, buffers, kind, "pinned", largest, "the other direction copies", [opposite])
        for words, loads in beside:
            for host in ("pinned", "pageable"):
                _measure_one(bench, buffers, kind, host, largest, words, loads)
            both = f"the other direction copies and {words}"
            _measure_one(bench, buffers, kind, "pinned", largest, both, [opposite, *loads])
    _measure_latency(bench, buffers)
    return buffers


def _measure_one(
    bench: Bench,
    buffers: CopyBuffers,
    kind: LaneKind,
    host: str,
    size: int,
    words: str = "",
    loads: Sequence[Load] = (),
) -> None:
    name = f"copy {kind} {host} {_mib(size)}" + (f" while {words}" if words else "")
    bench.rate_on(kind, name, "byte/s", float(size), buffers.run(kind, host, size), loads)


def _mib(size: int) -> str:
    return f"{size / MIB:g} MiB"


def _measure_latency(bench: Bench, buffers: CopyBuffers) -> None:
    """A copy of a page, and, emulated, how long one lane's thread takes to wake the next."""
    bench.seconds_on(LaneKind.H2D, "copy of 4 KiB", buffers.run(LaneKind.H2D, "pinned", SMALL_BYTES))
    if bench.device.emulated:
        bench.tell("hand-over between threads")
        seconds = bench.watch.measure(_hand_over)
        bench.samples.add("hand-over between threads", "s", [each / (2 * HAND_OVERS) for each in seconds])


def _hand_over() -> None:
    """Two threads wake each other in turn, as lanes do with a condition."""
    changed, turn = threading.Condition(), [0]

    def play(me: int) -> None:
        for _ in range(HAND_OVERS):
            with changed:
                while turn[0] != me:
                    changed.wait()
                turn[0] = 1 - me
                changed.notify_all()

    players = [threading.Thread(target=play, args=(me,)) for me in range(2)]
    for player in players:
        player.start()
    for player in players:
        player.join()


def measure_staging(bench: Bench, buffers: CopyBuffers) -> None:
    """Copies from pageable to page-locked memory by numbers of threads, and page-locking itself."""
    size = bench.sizes.copies[-1]
    for threads in bench.sizes.staging_threads:
        name = f"staging {threads} thread{'s' * (threads > 1)}"
        bench.tell(name)
        starts = _starts(buffers.pageable.numel(), size, backwards=False)
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:

            def run(pool: ThreadPoolExecutor = pool, threads: int = threads, starts: Iterator[int] = starts) -> None:
                first, part = next(starts), size // threads
                wait(
                    [
                        pool.submit(_copy, buffers.pageable, buffers.pinned, first + number * part, part)
                        for number in range(threads)
                    ]
                )

            alone = threads == 1  # as the runtime's lane does it; several threads are timed by the wall
            copy = _next_copy(buffers, starts, size)
            seconds = bench.time_on(LaneKind.PIN, copy) if alone else bench.watch.measure(run)
        bench.samples.add_rate(name, "byte/s", float(size), seconds)
    _measure_pinning(bench)


def _next_copy(buffers: CopyBuffers, starts: Iterator[int], size: int) -> Callable[[], object]:
    return lambda: _copy(buffers.pageable, buffers.pinned, next(starts), size)


def _measure_pinning(bench: Bench) -> None:
    """Page-locking fresh memory; emulated, having its pages at all, since nothing is locked then."""
    device, size = bench.device, bench.sizes.pin_bytes
    name = "page-locking" if device.cuda else "first write of fresh pages"
    bench.tell(name)

    def lock() -> None:
        memory = device.host_bytes(size)
        if device.cuda:
            device.lock_pages(memory)
            device.unlock_pages(memory)
        else:
            memory.fill_(1)

    bench.samples.add_rate(name, "byte/s", float(size), bench.time_on(LaneKind.PIN, lock))

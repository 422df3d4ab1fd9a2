"""Several GPUs: an all-reduce between them, and what all copy from and to the host at once. Untested on hardware."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hrm.graph import LaneKind
from runtime.calibration.bench import Bench
from runtime.calibration.copies import COPY_LANES

__all__ = ["measure_several"]


def measure_several(bench: Bench) -> None:
    """All of it where there are several GPUs; else says why not."""
    count = torch.cuda.device_count() if bench.device.cuda else 0
    if count < 2:
        bench.samples.skip("all-reduce", f"there {'is one GPU' if count else 'is no GPU'}")
        return
    size = bench.sizes.copies[-1]
    _measure_all_reduce(bench, count, size)
    host = [bench.device.pinned_bytes(size) for _ in range(count)]
    on_gpu = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{number}") for number in range(count)]
    for kind in COPY_LANES:
        bench.tell(f"copy {kind} of all GPUs")
        pairs = list(zip(host, on_gpu, strict=True) if kind is LaneKind.H2D else zip(on_gpu, host, strict=True))
        with ThreadPoolExecutor(count) as pool:

            def run(pool: ThreadPoolExecutor = pool, pairs: list[tuple[Tensor, Tensor]] = pairs) -> None:
                list(pool.map(_copy_and_wait, pairs, range(count)))

            seconds = bench.watch.measure(run)
        bench.samples.add_rate(f"copy {kind} of all GPUs", "byte/s", float(count * size), seconds)


def _copy_and_wait(pair: tuple[Tensor, Tensor], number: int) -> None:
    pair[1].copy_(pair[0], non_blocking=True)
    torch.cuda.synchronize(number)


def _measure_all_reduce(bench: Bench, count: int, size: int) -> None:
    """Bytes that every GPU sends over the seconds: 2 (n - 1) / n of the tensor, by a ring."""
    from torch.cuda import nccl

    bench.tell("all-reduce")
    parts = [torch.zeros(size // 2, dtype=torch.float16, device=f"cuda:{number}") for number in range(count)]
    if not nccl.is_available(parts):  # type: ignore[no-untyped-call]
        bench.samples.skip("all-reduce", "torch has no NCCL")
        return

    def wait() -> None:
        for number in range(count):
            torch.cuda.synchronize(number)

    seconds = bench.watch.measure(lambda: nccl.all_reduce(parts), wait)  # type: ignore[no-untyped-call]
    bench.samples.add_rate("all-reduce", "byte/s", 2.0 * (count - 1) / count * size, seconds)

"""What the disk reaches: large pieces written and read past the page cache, as the disk tier does it."""

from __future__ import annotations

from pathlib import Path

from hrm.errors import InputError
from hrm.graph import LaneKind
from runtime.calibration.bench import Bench
from runtime.disk_file import DiskFile

__all__ = ["measure_disk"]


def measure_disk(bench: Bench, folder: Path) -> str:
    """Write and read a file of `disk_bytes` in pieces; returns what to know of it, such as that it lies in memory.

    Every repeat goes over the whole file. Where the system refuses, the disk is skipped.
    """
    sizes, samples = bench.sizes, bench.samples
    pieces = max(1, sizes.disk_bytes // sizes.disk_piece)
    buffer = bench.device.host_bytes(sizes.disk_piece)
    buffer.random_(0, 255)
    try:
        file = DiskFile(folder)
    except InputError as error:
        samples.skip("disk", str(error))
        return ""
    try:
        offsets = [file.extend(sizes.disk_piece) for _ in range(pieces)]

        def write() -> None:
            for offset in offsets:
                file.write(offset, buffer)
            file.flush()

        def read() -> None:
            for offset in offsets:
                file.read(offset, buffer)

        amount = float(pieces * sizes.disk_piece)
        bench.rate_on(LaneKind.DISK, "disk write", "byte/s", amount, write)
        bench.rate_on(LaneKind.DISK, "disk read", "byte/s", amount, read)
        return file.remark
    except InputError as error:
        samples.skip("disk", str(error))
        return ""
    finally:
        file.close()

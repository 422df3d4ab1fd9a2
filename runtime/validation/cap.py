"""A cap on the memory of this process that the kernel enforces: RLIMIT_DATA, on anonymous memory beyond what it has.

RLIMIT_DATA bounds private writable mappings (heap, private mmap, stacks of threads): what a run takes in CPU memory.
The memory of the emulated accelerator is shared and does not count, nor does CUDA's own, nor mapped files. A memory
cgroup would count the emulated accelerator and the page cache of the disk tier as well, so none is used.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hrm.errors import InputError

__all__ = ["ENFORCED_BY", "capped", "read_status_bytes"]

ENFORCED_BY = "RLIMIT_DATA"
STATUS = Path("/proc/self/status")

PROBE_BYTES = 64 * 2**20
"""More than a cap by this much is asked for, to see that it is refused."""


def read_status_bytes(key: str, status: Path = STATUS) -> int | None:
    """A size of this process as the kernel counts it, e.g. VmData or VmHWM [byte]; None where it does not say."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024  # "kB" there is 1024 byte
    return None


@contextmanager
def capped(size: float) -> Iterator[int]:
    """Within it this process gets no more than so much anonymous memory beyond what it has [byte].

    Yields
    ------
    int
        What it has.

    Raises
    ------
    InputError
        This system does not enforce it.
    """
    held = read_status_bytes("VmData")
    if held is None:
        raise InputError(f"{STATUS} does not say VmData", where=ENFORCED_BY, way_out="Linux 4.7 or newer")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + int(size)
    if hard != resource.RLIM_INFINITY and limit > hard:
        raise InputError(f"the hard limit is {hard / 2**30:.2f} GiB", where=ENFORCED_BY, way_out="ulimit -Hd unlimited")
    probe = int(size) + PROBE_BYTES
    if not _is_given(probe):
        raise InputError(f"the system does not give {probe / 2**30:.2f} GiB", where="memory", way_out="smaller caps")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        if _is_given(probe):
            raise InputError("is not enforced by this system", where=ENFORCED_BY, way_out="Linux 4.7 or newer")
        yield held
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _is_given(size: int) -> bool:
    """Whether so much can be mapped; no page of it is touched."""
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True

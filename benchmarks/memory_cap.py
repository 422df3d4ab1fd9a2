"""A limit on the memory of processes, page cache included: a memory cgroup (v1 or v2) made inside one that is given."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryCap", "make_cap"]


@dataclass(frozen=True, slots=True)
class MemoryCap:
    """A cgroup. `members` is the file a process writes its number to in order to enter it."""

    folder: Path

    @property
    def members(self) -> Path:
        """Where processes enter."""
        return self.folder / "cgroup.procs"

    def limit(self, size: int) -> None:
        """Let the processes in it have no more than this together [byte]; what they have above it is reclaimed."""
        name = "memory.max" if (self.folder / "memory.max").exists() else "memory.limit_in_bytes"
        (self.folder / name).write_text(str(size), encoding="utf-8")


@contextmanager
def make_cap(parent: Path) -> Iterator[MemoryCap]:
    """A new cgroup within a given one; it is removed once its processes have ended.

    Raises
    ------
    OSError
        None can be made there, or it has no memory controller.
    """
    folder = parent / f"hrm-benchmark-{os.getpid()}"
    folder.mkdir()
    try:
        if not any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            raise OSError(f"{parent}: cgroups made here do not limit memory")
        yield MemoryCap(folder)
    finally:
        for _ in range(50):  # the last process may still be on its way out
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)

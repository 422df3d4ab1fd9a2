"""The disk tier: one scratch file, read past the page cache where the file system allows it.

Reading past the cache (O_DIRECT) gives the disk's own rate, whatever ran before, and leaves the page cache alone, which
counts as this process's memory in a container. It wants offsets, addresses and lengths in whole blocks; what is not is
read through the cache.

Large buffers lie in huge pages (`Device.host_bytes`): scattered over small ones, a read is cut into many small
requests. On a virtual disk (Firecracker) that gave 1.4 GB/s instead of 4.2; several threads did not win it back, and
with huge pages they gained nothing over one.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from pathlib import Path

from torch import Tensor

from hrm.errors import InputError

__all__ = ["BLOCK", "DiskFile"]

BLOCK = 4096
"""Unit of reads past the page cache [byte]."""

LARGEST_READ = 64 * 2**20
"""Of one system call [byte]."""


def _view(memory: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in CPU memory, uint8 [n], pinned or not."""
    if not memory.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * memory.numel()).from_address(memory.data_ptr())).cast("B")


class DiskFile:
    """A scratch file that grows by regions and goes away with its process."""

    def __init__(self, folder: Path | None = None) -> None:
        where = Path(folder) if folder is not None else Path(tempfile.gettempdir())
        try:
            handle, name = tempfile.mkstemp(prefix="hrm-tier-", dir=where)
        except OSError as error:
            raise InputError(
                f"no file can be made there: {error.strerror or error}", where=str(where), way_out="--disk-dir DIR"
            ) from None
        self.folder, self.size, self._plain = where, 0, handle
        self._lock = threading.Lock()
        self._direct: int | None = None
        try:
            self._direct = os.open(name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:  # such as tmpfs
            self._direct = None
        if not hasattr(os, "O_DIRECT"):
            self._direct = None
        os.unlink(name)

    @property
    def past_the_cache(self) -> bool:
        """Whether whole blocks are read past the page cache."""
        return self._direct is not None

    def close(self) -> None:
        """Give the space back."""
        for handle in (self._plain, self._direct):
            if handle is not None:
                os.close(handle)
        self._plain, self._direct = -1, None

    def extend(self, size: int) -> int:
        """A new region of whole blocks; returns where it begins [byte].

        Raises
        ------
        InputError
            The disk has no room for it.
        """
        with self._lock:
            first = self.size
            self.size += -(-size // BLOCK) * BLOCK
            try:
                os.posix_fallocate(self._plain, first, self.size - first)
            except OSError as error:
                raise InputError(
                    f"no room for {size / 2**30:.2f} GiB more: {error.strerror or error}",
                    where=str(self.folder),
                    way_out="--disk-dir DIR on a larger disk",
                ) from None
        return first

    def write(self, offset: int, data: Tensor) -> None:
        """Write bytes, uint8 [n], through the page cache."""
        view, done = _view(data), 0
        while done < len(view):
            try:
                done += os.pwrite(self._plain, view[done : done + LARGEST_READ], offset + done)
            except OSError as error:
                raise InputError(f"writing failed: {error.strerror or error}", where=str(self.folder)) from None

    def flush(self) -> None:
        """Bring everything to the disk and forget it in the page cache."""
        os.fsync(self._plain)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, into: Tensor) -> None:
        """Read `into`, uint8 [n]; past the page cache where offset, address and length are whole blocks."""
        size = into.numel()
        whole = size - size % BLOCK if self._direct is not None else 0
        if whole and (offset % BLOCK or into.data_ptr() % BLOCK):
            whole = 0
        view = _view(into)
        done = 0
        while done < whole:
            assert self._direct is not None
            done += self._one(self._direct, view[done : min(whole, done + LARGEST_READ)], offset + done)
        while done < size:
            done += self._one(self._plain, view[done : done + LARGEST_READ], offset + done)

    def _one(self, handle: int, view: memoryview, offset: int) -> int:
        try:
            count = os.preadv(handle, [view], offset)
        except OSError as error:
            raise InputError(f"reading failed: {error.strerror or error}", where=str(self.folder)) from None
        if count == 0:
            raise InputError("the scratch file is shorter than it was", where=str(self.folder))
        return count

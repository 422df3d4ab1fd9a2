"""The disk tier: one scratch file, read and written past the page cache where the file system allows it.

Going past the cache (O_DIRECT) gives the disk's own rate, whatever ran before, and leaves the page cache alone, which
counts as this process's memory in a container. It wants offsets, addresses and lengths in whole blocks; what is not
goes through the cache. The kernel keeps the two in step: before a read past the cache it writes back what of that range
is still to be written, and a write past it drops what the cache has of it.

Large buffers lie in huge pages (`Device.host_bytes`): scattered over small ones, a read is cut into many small
requests. On a virtual disk (Firecracker) that gave 1.4 GB/s instead of 4.2; several threads did not win it back, and
with huge pages they gained nothing over one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from hrm.errors import InputError

__all__ = ["BLOCK", "DiskFile", "file_system"]

BLOCK = 4096
"""Unit of reads and writes past the page cache [byte]."""

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that keep their files in memory."""

LARGEST_PIECE = 64 * 2**20
"""Of one system call [byte]."""


def _view(memory: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in CPU memory, uint8 [n], pinned or not."""
    if not memory.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * memory.numel()).from_address(memory.data_ptr())).cast("B")


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Kind of the file system of a folder, such as "ext4"; empty where the system does not say."""
    try:
        device = os.stat(folder).st_dev
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2:3] == [f"{os.major(device)}:{os.minor(device)}"]:
            found = rest.split()[0]
    return found


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
        self._refused: int | None = None  # opened to go past the cache, which then was not done
        try:
            self._direct = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        except OSError:  # such as tmpfs
            self._direct = None
        if not hasattr(os, "O_DIRECT"):
            self._direct = None
        os.unlink(name)

    @property
    def past_the_cache(self) -> bool:
        """Whether whole blocks are read and written past the page cache."""
        return self._direct is not None

    @property
    def remark(self) -> str:
        """What a person should know of where it lies; empty where it is a disk that is read past the page cache."""
        kind = file_system(self.folder)
        if kind in IN_MEMORY:
            return f"the disk tier lies in {self.folder}, which is CPU memory ({kind}): --disk-dir DIR on a disk"
        if self.past_the_cache:
            return ""
        return f"the disk tier in {self.folder} is read through the page cache: {kind or 'it'} does nothing past it"

    def close(self) -> None:
        """Give the space back."""
        for handle in (self._plain, self._direct, self._refused):
            if handle is not None:
                os.close(handle)
        self._plain, self._direct, self._refused = -1, None, None

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
        """Write bytes, uint8 [n]; past the page cache where offset, address and length are whole blocks."""
        self._move(os.pwritev, "writing", offset, data)

    def flush(self) -> None:
        """Bring everything to the disk and forget it in the page cache."""
        os.fsync(self._plain)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, into: Tensor) -> None:
        """Read `into`, uint8 [n]; past the page cache where offset, address and length are whole blocks."""
        self._move(os.preadv, "reading", offset, into)

    def _move(self, call: Callable[..., int], doing: str, offset: int, memory: Tensor) -> None:
        view, done = _view(memory), 0
        aligned = offset % BLOCK == 0 and memory.data_ptr() % BLOCK == 0
        whole = len(view) - len(view) % BLOCK if aligned else 0
        while done < len(view):
            past = self._direct if done < whole and done % BLOCK == 0 else None
            end = min(len(view) if past is None else whole, done + LARGEST_PIECE)
            try:
                count = call(self._plain if past is None else past, [view[done:end]], offset + done)
            except OSError as error:
                if past is not None and error.errno == errno.EINVAL:  # opened so, and then not done
                    self._direct, self._refused = None, past
                    continue
                raise InputError(f"{doing} failed: {error.strerror or error}", where=str(self.folder)) from None
            if count == 0:
                raise InputError("the scratch file is shorter than it was", where=str(self.folder))
            done += count

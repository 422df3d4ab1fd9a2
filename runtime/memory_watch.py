"""Memory of this process as the kernel counts it: what a run takes, seen from outside.

The emulated GPU memory is shared memory and shows as RssShmem, that of the CPU level as RssAnon, files that are mapped
as neither. On CUDA torch says what it reserved on the GPU.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from hrm.validation.memory import HOST_RESERVE_BYTES
from runtime.device import Device

__all__ = ["HOST_RESERVE_BYTES", "MemoryWatch", "read_resident_bytes"]

STATUS = Path("/proc/self/status")
EVERY_S = 0.02
"""Between two looks [s]: a higher peak between them is missed."""


def read_resident_bytes(status: Path = STATUS) -> dict[str, int]:
    """RssAnon and RssShmem of this process [byte]; none where the kernel does not say."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        key, _, value = line.partition(":")
        if key in ("RssAnon", "RssShmem"):
            found[key] = int(value.split()[0]) * 1024  # "kB" there is 1024 byte
    return found


class MemoryWatch:
    """Looks at this process from a thread of its own, from where it is made to `close`.

    What it held before (Python, torch, the CUDA context) does not count.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        if device.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._first = read_resident_bytes()
        self._highest: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_again, name="memory", daemon=True)
        if self._first:
            self._thread.start()

    def take(self) -> dict[str, int]:
        """Peaks by level since it was made, or asked the last time [byte]; none where the kernel does not say."""
        self._look()
        with self._lock:
            peaks, self._highest = self._highest, {}
        found = {}
        if peaks:
            anonymous, shared = peaks["RssAnon"], peaks["RssShmem"]
            found = {"gpu": shared, "cpu": anonymous} if self._device.emulated else {"cpu": anonymous + shared}
        if self._device.cuda:
            found["gpu"] = int(torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()
        return found

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look_again(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        now = read_resident_bytes()
        with self._lock:
            for key, first in self._first.items():
                self._highest[key] = max(self._highest.get(key, 0), now.get(key, 0) - first)

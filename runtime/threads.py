"""How many threads a lane computes with, and on which cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

__all__ = ["lane_threads", "settle_thread"]

_local = threading.local()


def lane_threads() -> int:
    """Threads of the calling lane; of any other thread, as many as torch takes."""
    found: int = getattr(_local, "threads", 0) or torch.get_num_threads()
    return found


def settle_thread(cores: Sequence[int], threads: int) -> None:
    """Give the calling thread its cores and its number of threads, also inside torch."""
    _local.threads = threads
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.get_num_threads()  # the first call of a thread takes the process's number over; ours must come after it
    torch.set_num_threads(threads)

"""Memory that no plan names: code that oneDNN has made for products, and what malloc keeps of freed tensors.

For every shape of a product in bf16 oneDNN makes code, 0.4 to 0.8 MiB of it (measured with torch 2.13), and keeps the
last 1024; torch keeps as many besides, in every thread. In prefill hardly any shape comes twice (tokens of a
micro-batch, visits of an expert), so that both only fill up, batch by batch, to more than 0.6 GiB. And glibc keeps what
lies below something in use: after loading, hundreds of MiB.

Larger thresholds of malloc (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD) would save page faults, but what it keeps then grows
from batch to batch beyond what a plan counts. They are left alone, as is all else that belongs to the host process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping
from functools import cache
from typing import Any

__all__ = ["KEPT_KERNELS", "bound_kernel_caches", "give_back_free_memory"]

KEPT_KERNELS = 32
"""Shapes whose code is kept: those of a layer's linear products (up to eight) for four sizes of micro-batches."""

CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables of oneDNN and of torch for the two caches: one alone bounds nothing."""


def bound_kernel_caches(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let oneDNN and torch keep the code of few shapes; what the user has set wins.

    Both read the variables at their first product, so where the process has computed one before, nothing changes.
    """
    for name in CACHES:
        environment.setdefault(name, str(KEPT_KERNELS))


def give_back_free_memory() -> None:
    """Give the system back what malloc holds and nobody uses; where the C library is not glibc, nothing happens.

    Takes milliseconds. It changes no setting of the process.
    """
    trim = _find_trim()
    if trim is not None:
        trim(0)


@cache
def _find_trim() -> Any:
    """The function malloc_trim of glibc, or None."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found

"""What oneDNN and malloc keep beside a plan, in processes of their own, as caches and heaps live as long as they do."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.host_allocator import CACHES, KEPT_KERNELS, bound_kernel_caches

SHAPES = """
import torch
from runtime.memory_watch import read_resident_bytes
{before}
x, w = torch.randn(900, 64).bfloat16(), torch.randn(64, 64).bfloat16()
out = torch.empty(900, 64, dtype=torch.bfloat16)
for rows in range(100, 100 + {warm}):
    torch.mm(x[:rows], w, out=out[:rows])
first = read_resident_bytes()["RssAnon"]
for rows in range(200, 700):
    torch.mm(x[:rows], w, out=out[:rows])
print(read_resident_bytes()["RssAnon"] - first)
"""

HOLES = """
import torch
from runtime.host_allocator import give_back_free_memory
from runtime.memory_watch import read_resident_bytes
every = [torch.ones(2**14) for _ in range(1024)]  # 64 KiB each: below what malloc maps for itself
full = read_resident_bytes()["RssAnon"]
kept = every[::64]
del every
give_back_free_memory()
print(full - read_resident_bytes()["RssAnon"], sum(float(each.sum()) for each in kept))
"""

needs_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")


def printed(code: str) -> list[float]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]


def test_what_the_user_has_set_wins() -> None:
    environment = {CACHES[0]: "7"}
    bound_kernel_caches(environment)
    assert environment == {CACHES[0]: "7", CACHES[1]: str(KEPT_KERNELS)}


@needs_linux
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bf16 products by oneDNN here")
def test_products_of_new_shapes_take_no_more_memory_once_the_caches_are_full() -> None:
    """500 shapes: a tenth of what they take where nobody bounds the caches, which says that the bound does it."""
    before = "from runtime.host_allocator import bound_kernel_caches; bound_kernel_caches()"
    (bounded,) = printed(SHAPES.format(before=before, warm=2 * KEPT_KERNELS))
    (unbounded,) = printed(SHAPES.format(before="", warm=2 * KEPT_KERNELS))
    assert bounded < 0.1 * unbounded, (bounded, unbounded)


@needs_linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_holes_between_what_is_in_use_go_back_to_the_system() -> None:
    """Of 1024 tensors of 64 KiB 16 stay, spread evenly: 63 MiB of 64 are free, whole pages of them go back."""
    given_back, total = printed(HOLES)
    assert given_back > 0.9 * 63 * 2**20
    assert total == 16 * 2**14

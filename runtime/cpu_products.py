"""In which dtype a CPU multiplies matrices, and products that need another one than their operands have.

Torch multiplies bf16 fast only where the processor does (AVX-512 BF16, AMX, Arm's BF16): on a Zen 3, which has AVX2
only, 160 tokens in bf16 ran at 21 GFLOP/s and in float32 at 138. No processor at hand multiplies fp16 well. Such
operands are widened to float32, a block at a time: a second copy of a large table would take too much memory.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["WIDE_VALUES", "multiplies_bf16", "processor_has", "product_dtype", "scratch_for", "through_float32"]

WIDE_VALUES = 2**20
"""Values that are widened to float32 at a time: 4 MiB of them. With 2^21 products of two thousand columns were a tenth
faster (Zen 3), and what the matrix library keeps beside its operands grew by 75 MB."""

BF16_PRODUCTS = ("avx512_bf16", "amx_bf16", "bf16")
"""Instructions that multiply bf16, of x86 and Arm, as /proc/cpuinfo calls them."""


def processor_has(*instructions: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor has one of some instructions; where that cannot be read, no."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").lower().splitlines()
    except OSError:
        return False
    found = next((line for line in lines if line.startswith(("flags", "features"))), "")
    return not set(instructions).isdisjoint(found.split())


@cache
def multiplies_bf16() -> bool:
    """Whether this processor multiplies bf16."""
    return processor_has(*BF16_PRODUCTS)


def product_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which products of operands of these dtypes are computed: bfloat16 or float32."""
    return torch.bfloat16 if set(dtypes) == {torch.bfloat16} and multiplies_bf16() else torch.float32


def through_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, n] times weight [m, n] transposed, plus bias [m], in float32: [T, m] in the dtype of `x`.

    Blocks of rows of the weights are widened one after the other, and blocks of tokens too.
    """
    width = weight.shape[1]
    tokens, rows = (min(count, max(1, WIDE_VALUES // width)) for count in (x.shape[0], weight.shape[0]))
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    offset = torch.zeros(weight.shape[0]) if bias is None else bias.float()
    for above in range(0, x.shape[0], tokens):
        wide = x[above : above + tokens].float()
        for start in range(0, weight.shape[0], rows):
            part = weight[start : start + rows]
            block = part if part.dtype == torch.float32 else scratch_for("block", len(part), width).copy_(part)
            found = wide @ block.t()
            out[above : above + tokens, start : start + rows] = found.add_(offset[start : start + rows])
    return out


_kept = threading.local()


def scratch_for(name: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory [rows, columns] of the calling thread, used again: pages that are given back cost a fault each time."""
    buffers: dict[tuple[str, torch.dtype], Tensor] = _kept.__dict__.setdefault("buffers", {})
    found = buffers.get((name, dtype))
    if found is None or found.numel() < rows * columns:
        found = buffers[(name, dtype)] = torch.empty(rows * columns, dtype=dtype)
    return found[: rows * columns].view(rows, columns)

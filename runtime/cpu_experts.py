"""Routed experts on the CPU, in plain torch: grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Routing", "apply_experts"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Visits sorted by expert: token row and weight of each, and where every expert's begin."""

    order: Tensor
    starts: list[int]
    weights: Tensor


def apply_experts(
    x: Tensor, segments: Sequence[tuple[int, Tensor]], routing: Routing, out: Tensor, *, threads: int
) -> None:
    """Add what the experts make of x [T, h] to out, float32 [T, h]."""
    for expert, packed in segments:
        low, high = int(routing.starts[expert]), int(routing.starts[expert + 1])
        if low == high:
            continue
        rows = routing.order[low:high]
        mine, wide = x[rows], packed
        if x.dtype == torch.float16:
            mine, wide = mine.float(), packed.float()
        inner = F.silu(mine @ wide[:, 0].t()) * (mine @ wide[:, 1].t())
        out.index_add_(0, rows, (inner @ wide[:, 2]).float() * routing.weights[low:high, None])

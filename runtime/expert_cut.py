"""How the routed experts of a layer are cut over GPU memory, CPU memory and disk: by rows, realising r_w.

The packed experts of a layer are rows (expert, i, matrix): for each of the f intermediate values of an expert its row
of the gate matrix, of the up matrix and of the transposed down matrix, h values each. An expert's FFN is a sum over its
f rows, so any cut between rows leaves parts that can be computed apart and added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

__all__ = ["ExpertCut", "Tier", "cut_experts"]

Tier = Literal["gpu", "cpu", "disk"]


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """Rows of f of every expert on each level; an expert's rows on the GPU come first, those on disk last.

    Attributes
    ----------
    gpu, cpu, disk : tuple of int
        Rows per expert.
    """

    gpu: tuple[int, ...]
    cpu: tuple[int, ...]
    disk: tuple[int, ...]

    def rows(self, tier: Tier) -> tuple[int, ...]:
        """Rows per expert on a level."""
        found: tuple[int, ...] = getattr(self, tier)
        return found

    def total(self, tier: Tier) -> int:
        """Rows of all experts on a level."""
        return sum(self.rows(tier))

    def starts(self, tier: Tier) -> tuple[int, ...]:
        """First row of every expert in the packed part of a level, and the end."""
        return (0, *accumulate(self.rows(tier)))

    def first(self, tier: Tier, expert: int) -> int:
        """Which row of the whole expert its part on a level begins with."""
        before = {"gpu": 0, "cpu": self.gpu[expert], "disk": self.gpu[expert] + self.cpu[expert]}
        return before[tier]


def cut_experts(count: int, width: int, on_gpu: float, on_disk: float, *, each: bool) -> ExpertCut:
    """Cut `count` experts of `width` rows.

    Parameters
    ----------
    on_gpu, on_disk : float
        Shares of the bytes; the GPU's rounded down to whole rows, the disk's up, so that neither memory gets more.
    each : bool
        Cut every expert alike (a ring loads expert by expert), else the packed rows of the layer as one: whole experts
        on the GPU first, at most one of them in parts.
    """

    def cut(rows: int) -> tuple[int, int, int]:
        gpu = min(rows, int(on_gpu * rows + 1e-6))
        disk = min(rows - gpu, math.ceil(on_disk * rows - 1e-6))
        return gpu, rows - gpu - disk, disk

    if each:
        gpu, cpu, disk = cut(width)
        return ExpertCut((gpu,) * count, (cpu,) * count, (disk,) * count)
    gpu, cpu, _ = cut(count * width)

    def within(low: int, high: int) -> tuple[int, ...]:
        return tuple(max(0, min(high, (e + 1) * width) - max(low, e * width)) for e in range(count))

    return ExpertCut(within(0, gpu), within(gpu, gpu + cpu), within(gpu + cpu, count * width))

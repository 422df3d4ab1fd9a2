"""Rates of this machine that results are held against: products of matrices, and reading memory."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

__all__ = ["MatrixRate", "ReadRate"]


class MatrixRate:
    """Products at the shapes of the experts, in torch: their weights come from memory, as those of a model do."""

    def __init__(self, *, rows: int, hidden: int, width: int, experts: int, dtype: torch.dtype) -> None:
        self.x = torch.randn(rows, hidden).to(dtype)
        self.inner = torch.randn(rows, width).to(dtype)
        self.gates = [torch.randn(width, hidden).to(dtype) for _ in range(2 * experts)]
        self.downs = [torch.randn(hidden, width).to(dtype) for _ in range(experts)]
        self.flops = 2.0 * rows * hidden * width * (len(self.gates) + len(self.downs))

    def measure(self) -> float:
        """One pass over all experts [FLOP/s]."""
        with torch.inference_mode():
            began = time.perf_counter()
            for gate in self.gates:
                F.linear(self.x, gate)
            for down in self.downs:
                F.linear(self.inner, down)
            return self.flops / (time.perf_counter() - began)


class ReadRate:
    """Reading memory once, with all threads."""

    def __init__(self, size: int = 2**30) -> None:
        self.memory = torch.ones(size // 4, dtype=torch.float32)

    def measure(self) -> float:
        """One pass [byte/s]: the faster of two reductions."""
        found = []
        for reduce in (torch.sum, torch.max):
            began = time.perf_counter()
            reduce(self.memory)
            found.append(self.memory.numel() * 4 / (time.perf_counter() - began))
        return max(found)

"""Rates of this machine that results are held against: products of matrices, and reading memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from runtime.native_library import open_library

__all__ = ["MatrixRate", "MultiplyAddRate", "ReadRate"]


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
                linear(self.x, gate)
            for down in self.downs:
                linear(self.inner, down)
            return self.flops / (time.perf_counter() - began)


class ReadRate:
    """Reading memory once, with all threads."""

    def __init__(self, size: int = 2**30) -> None:
        self.memory = torch.ones(size // 4, dtype=torch.float32)

    def measure(self) -> float:
        """One pass [byte/s]: the fastest of two reductions of torch and the compiled probe, where there is one."""
        size, found = self.memory.numel() * 4, []
        library = open_library()
        passes: list[Callable[[], object]] = [lambda: torch.sum(self.memory), lambda: torch.max(self.memory)]
        if library is not None:
            passes.append(lambda: library.hrm_read(self.memory.data_ptr(), size, torch.get_num_threads()))
        for read in passes:
            began = time.perf_counter()
            read()
            found.append(size / (time.perf_counter() - began))
        return max(found)


class MultiplyAddRate:
    """Multiply-adds in float32: in registers where there is the compiled probe, else products of matrices."""

    def __init__(self) -> None:
        self.products = MatrixRate(rows=512, hidden=1024, width=1024, experts=4, dtype=torch.float32)

    @property
    def words(self) -> str:
        """How it is measured."""
        return "fp32 in registers" if open_library() is not None else "fp32 products of torch"

    def measure(self, rounds: int = 2_000_000) -> float:
        """Once [FLOP/s]."""
        library = open_library()
        if library is None:
            return self.products.measure()
        done, began = ctypes.c_double(), time.perf_counter()
        library.hrm_multiply_add(rounds, 0, torch.get_num_threads(), ctypes.addressof(done))
        return done.value / (time.perf_counter() - began)

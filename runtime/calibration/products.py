"""Runs that both levels are measured with: matrix products, and reading memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from runtime.calibration.bench import Bench
from runtime.calibration.layer_work import TORCH_DTYPES, Level, place
from runtime.layers import linear
from runtime.native_library import open_library

__all__ = ["product_run", "read_memory"]


def read_memory(memory: Tensor, threads: int) -> object:
    """Read bytes once, uint8 [n], with the compiled probe or, without a compiler, a sum of torch's."""
    library = open_library()
    if library is not None:
        return library.hrm_read(memory.data_ptr(), memory.numel(), threads)
    return torch.sum(memory.view(torch.float32))


def product_run(bench: Bench, level: Level, dtype: str, rows: int, inputs: int, outputs: int) -> Callable[[], object]:
    """A product [rows, inputs] x [inputs, outputs] as the runtime's layers do it, with other weights each time."""
    kind = TORCH_DTYPES[dtype]
    weights = [place(bench.device, level, outputs, inputs, kind) for _ in range(bench.sizes.weight_sets)]
    x = place(bench.device, level, rows, inputs, kind)
    turns = itertools.cycle(weights)
    return lambda: linear(x, next(turns))

"""A linear layer for few tokens on the CPU, at the pace at which its weights can be read.

Torch's own, made for many tokens, reads the weights of 8 to 64 tokens at a fraction of the memory's bandwidth
(`benchmarks/cpu_kernels.py` measures both).
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.native_library import DTYPES, open_library

__all__ = ["linear"]

MOST_TOKENS = {torch.bfloat16: 48, torch.float32: 128, torch.float16: 128}
"""Tokens up to which the compiled kernel takes a layer (`benchmarks/cpu_kernels.py --crossover`). On the one machine
measured (Zen 5, two cores) bf16 crossed between 48 and 64; the others had not at 256, so 128 is a cautious choice."""


def linear(x: Tensor, w: Tensor, bias: Tensor | None, threads: int) -> Tensor:
    """x @ w.T + bias, with float32 sums.

    Parameters
    ----------
    x : Tensor
        Tokens [T, h]: float32, bfloat16 or float16.
    w : Tensor
        Weights [n, h], of any of these dtypes.
    bias : Tensor or None
        [n].
    threads : int
        Threads to use; torch's own uses torch's.

    Returns
    -------
    Tensor
        [T, n] in the dtype of `x`.

    Raises
    ------
    ValueError
        Shapes or dtypes that do not go together.
    """
    tokens, hidden = x.shape
    if w.shape[1:] != (hidden,) or x.dtype not in DTYPES or w.dtype not in DTYPES:
        raise ValueError(f"tokens {list(x.shape)} {x.dtype} and weights {list(w.shape)} {w.dtype} do not go together")
    library = open_library() if tokens <= MOST_TOKENS[w.dtype] else None
    if library is None:
        dtype = torch.bfloat16 if x.dtype == w.dtype == torch.bfloat16 else torch.float32
        added = None if bias is None else bias.to(dtype)
        return torch.nn.functional.linear(x.to(dtype), w.to(dtype), added).to(x.dtype)
    x, w = x.contiguous(), w.contiguous()
    offset = None if bias is None else bias.float().contiguous()
    out = torch.empty(tokens, len(w), dtype=x.dtype)
    library.hrm_multiply(
        x.data_ptr(),
        DTYPES[x.dtype],
        w.data_ptr(),
        DTYPES[w.dtype],
        None if offset is None else offset.data_ptr(),
        out.data_ptr(),
        DTYPES[out.dtype],
        tokens,
        len(w),
        hidden,
        threads,
    )
    return out

"""A linear layer for few tokens on the CPU, at the pace at which its weights can be read.

Torch's own, made for many tokens, reads the weights of 8 to 64 tokens at a fraction of the memory's bandwidth
(`benchmarks/cpu_kernels.py` measures both).
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.cpu_products import processor_has, product_dtype, through_float32
from runtime.native_library import DTYPES, open_library

__all__ = ["linear"]

if processor_has("avx512f"):
    MOST_TOKENS = {torch.bfloat16: 48, torch.float32: 128, torch.float16: 128}
else:
    MOST_TOKENS = {torch.bfloat16: 96, torch.float32: 48, torch.float16: 96}
"""Tokens up to which the compiled kernel takes a layer (`benchmarks/cpu_kernels.py --crossover`). On Zen 5, two cores,
bf16 crossed between 48 and 64; the others had not at 256, so 128 is a cautious choice. On Zen 3, which has AVX2 only,
float32 crossed between 48 and 64, bf16 at about 100."""


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
        if x.dtype == w.dtype == product_dtype(x.dtype, w.dtype):
            return torch.nn.functional.linear(x, w, None if bias is None else bias.to(x.dtype))
        return through_float32(x, w, bias)
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

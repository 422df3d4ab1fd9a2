"""Decode attention on the CPU, in plain torch: one new token per request over a ragged, token-major KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend_decode"]


def attend_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    threads: int,
) -> None:
    """Attend from one token of each request over its rows of the cache."""
    count, heads, width = q.shape
    kv_heads = keys.shape[1]
    for index, (start, length) in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
        if window is not None and length > window:
            start, length = start + length - window, window
        mine = keys[start : start + length].float().permute(1, 2, 0)
        theirs = values[start : start + length].float().transpose(0, 1)
        scores = torch.softmax(q[index].float().view(kv_heads, heads // kv_heads, width) @ mine * scale, dim=-1)
        out[index] = (scores @ theirs).view(heads, width).to(out.dtype)

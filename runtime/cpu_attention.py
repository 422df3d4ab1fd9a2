"""Decode attention on the CPU: one new token per request over the keys and values that lie in host memory.

In the compiled kernel every byte of keys and values is read once, for all query heads that share it, and sums are
float32. The fallback does the same work with torch, request by request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.native_library import DTYPES, open_library

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
    """Attend from one new token per request, whose own key and value are in the pools already.

    Parameters
    ----------
    q : Tensor
        Queries [B, H, d]; query head h reads key-value head h // (H / G).
    keys, values : Tensor
        Pools [T, G, d] of the same dtype: float32, bfloat16 or float16.
    first, lengths : Tensor
        First row of a request in the pools, and how many rows it has [B], int64; at least one row each.
    out : Tensor
        Where the weighted values go [B, H, d]; may be `q` itself.
    scale : float
        Factor of the scores before the softmax.
    window : int or None
        Only the last so many rows are looked at.
    threads : int
        Threads to use; the fallback uses torch's.

    Raises
    ------
    ValueError
        Shapes, dtypes or rows that do not go together.
    """
    requests, heads, width = q.shape
    rows, groups, _ = keys.shape
    problem = _find_problem(q, keys, values, first, lengths, out)
    if problem:
        raise ValueError(problem)
    library = open_library()
    if library is None:
        _attend_in_torch(q, keys, values, first, lengths, out, scale=scale, window=window)
        return
    q, first, lengths = q.contiguous(), first.contiguous(), lengths.contiguous()
    result = out if out.is_contiguous() else torch.empty_like(q, dtype=out.dtype)
    wrong = library.hrm_attend_decode(
        q.data_ptr(),
        DTYPES[q.dtype],
        keys.data_ptr(),
        values.data_ptr(),
        DTYPES[keys.dtype],
        rows,
        keys.stride(0),
        values.stride(0),
        first.data_ptr(),
        lengths.data_ptr(),
        result.data_ptr(),
        DTYPES[out.dtype],
        requests,
        heads,
        groups,
        width,
        scale,
        window or 0,
        threads,
    )
    if wrong >= 0:
        raise ValueError(_row_problem(first, lengths, rows, wrong))
    if result is not out:
        out.copy_(result)


def _find_problem(q: Tensor, keys: Tensor, values: Tensor, first: Tensor, lengths: Tensor, out: Tensor) -> str | None:
    """What does not go together, or None."""
    requests, heads, width = q.shape
    groups = keys.shape[1]
    if keys.shape != values.shape or keys.shape[2] != width or heads % groups or out.shape != q.shape:
        return f"shapes {q.shape}, {keys.shape}, {values.shape}, {out.shape} are no attention"
    if keys.dtype != values.dtype or any(each.dtype not in DTYPES for each in (q, keys, out)):
        return f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}, {out.dtype}: wanted are {', '.join(map(str, DTYPES))}"
    if any(pool.stride()[1:] != (width, 1) for pool in (keys, values)):
        return "the heads of a token must follow each other in the pools"
    if any(each.dtype != torch.int64 or each.shape != (requests,) for each in (first, lengths)):
        return f"first and lengths must be int64 [{requests}]"
    return None


def _row_problem(first: Tensor, lengths: Tensor, rows: int, request: int) -> str:
    return f"request {request}: {lengths[request]} rows from {first[request]} on are not in a pool of {rows}"


def _attend_in_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
) -> None:
    rows, groups, width = keys.shape
    for request, (start, length) in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
        if length < 1 or start < 0 or start + length > rows:
            raise ValueError(_row_problem(first, lengths, rows, request))
    for request, (start, length) in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
        end = start + length
        begin = end - min(length, window or length)
        query = q[request].float().view(groups, -1, width)  # [G, H/G, d]
        key = keys[begin:end].float().permute(1, 2, 0)  # [G, d, t]
        value = values[begin:end].float().transpose(0, 1)  # [G, t, d]
        weights = torch.softmax(query @ key * scale, dim=-1)  # [G, H/G, t]
        out[request] = (weights @ value).view(-1, width).to(out.dtype)

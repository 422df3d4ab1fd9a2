"""What a layer does besides its products, on the CPU, each in one call of a compiled kernel.

For a few tokens the calls of torch that such a step takes cost more than its arithmetic, and for many their
intermediate tensors do. Every function here returns None (or False) where the kernels cannot be had or do not know the
dtypes: the caller then does the same with torch. Sums are float32, and results are rounded where torch rounds them.

Legend: T tokens, H query heads, G KV heads, d head width, E experts, k top-k.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from runtime.cpu_experts import Routing
from runtime.native_library import DTYPES, open_library

__all__ = ["find_best", "normalise", "put_rows", "route", "turn"]


def normalise(
    x: Tensor, weight: Tensor, eps: float, *, by_layer: bool, in_place: bool = False, threads: int
) -> Tensor | None:
    """RMS norm or LayerNorm without bias of the last dimension.

    Parameters
    ----------
    x : Tensor
        [T, h] or [T, heads, d], on the CPU; rows of tokens may lie apart.
    weight : Tensor
        [h] or [d].
    eps : float
        Added to the mean of squares, or to the variance.
    by_layer : bool
        LayerNorm, else RMS norm.
    in_place : bool
        Into `x` itself, where its memory allows.
    threads : int
        Threads to use.

    Returns
    -------
    Tensor or None
        In the shape and dtype of `x`.

    Raises
    ------
    ValueError
        Weights of another width.
    """
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"weights {list(weight.shape)} do not go with rows of {width}")
    library = _library(x, weight)
    if library is None or x.dim() not in (2, 3):
        return None
    if not _is_rows(x):
        x = x.contiguous()
    weight = weight.contiguous()
    out = x if in_place else torch.empty(x.shape, dtype=x.dtype)
    heads = 1 if x.dim() == 2 else x.shape[1]
    library.hrm_normalise(
        x.data_ptr(),
        DTYPES[x.dtype],
        x.stride(0),
        weight.data_ptr(),
        DTYPES[weight.dtype],
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        heads,
        width,
        eps,
        by_layer,
        threads,
    )
    return out


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, threads: int) -> bool:
    """Turn queries and keys to their positions, in place.

    Parameters
    ----------
    q, k : Tensor
        [T, H, d] and [T, G, d] on the CPU; rows of tokens may lie apart.
    cos, sin : Tensor
        [positions, d], in the dtype of `q` and `k`.
    positions : Tensor
        int64 [T].
    threads : int
        Threads to use.

    Returns
    -------
    bool
        Whether it was done.

    Raises
    ------
    ValueError
        Shapes that do not go together, or a position that is not in the tables.
    """
    tokens, _, width = q.shape
    if k.shape[::2] != (tokens, width) or cos.shape[1:] != (width,) or cos.shape != sin.shape or width % 2:
        raise ValueError(f"shapes {q.shape}, {k.shape}, {cos.shape}, {sin.shape} are no rotation")
    if positions.dtype != torch.int64 or positions.shape != (tokens,):
        raise ValueError(f"positions must be int64 [{tokens}]")
    library = _library(q)
    if library is None or any(each.dtype != q.dtype for each in (k, cos, sin)) or not (_is_rows(q) and _is_rows(k)):
        return False
    cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
    wrong = library.hrm_turn(
        q.data_ptr(),
        q.stride(0),
        q.shape[1],
        k.data_ptr(),
        k.stride(0),
        k.shape[1],
        cos.data_ptr(),
        sin.data_ptr(),
        DTYPES[q.dtype],
        cos.shape[0],
        positions.data_ptr(),
        tokens,
        width,
        threads,
    )
    if wrong >= 0:
        raise ValueError(f"token {wrong}: position {positions[wrong]} is not one of {cos.shape[0]}")
    return True


def route(logits: Tensor, top_k: int, power: float | None, *, threads: int) -> Routing | None:
    """Visits of tokens to their likeliest experts, sorted by expert; of equally likely ones the first.

    Parameters
    ----------
    logits : Tensor
        Of the router [T, E], on the CPU.
    top_k : int
        Experts of a token.
    power : float or None
        Weights of a token are divided by their norm of this power; None leaves them.
    threads : int
        Threads to use.

    Raises
    ------
    ValueError
        More experts wanted than there are.
    """
    tokens, count = logits.shape
    if not 1 <= top_k <= count:
        raise ValueError(f"{top_k} of {count} experts")
    library = _library(logits)
    if library is None or power not in (None, 1, 2):
        return None
    logits = logits.contiguous()
    order = torch.empty(tokens * top_k, dtype=torch.int64)
    weights = torch.empty(tokens * top_k, dtype=torch.float32)
    starts = (ctypes.c_int64 * (count + 1))()
    library.hrm_route(
        logits.data_ptr(),
        DTYPES[logits.dtype],
        tokens,
        count,
        top_k,
        power or 0,
        order.data_ptr(),
        weights.data_ptr(),
        starts,
        threads,
    )
    return Routing(order=order, starts=list(starts), weights=weights)


def find_best(scores: Tensor, *, threads: int) -> tuple[Tensor, Tensor] | None:
    """The largest of every row of scores [B, V], float32 [B], and where it is first, int64 [B]; NaN is the largest."""
    library = _library(scores)
    if library is None or not scores.shape[1]:
        return None
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    rows, count = scores.shape
    values, places = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64)
    library.hrm_find_best(
        scores.data_ptr(),
        DTYPES[scores.dtype],
        scores.stride(0),
        rows,
        count,
        values.data_ptr(),
        places.data_ptr(),
        threads,
    )
    return values, places


def put_rows(k: Tensor, v: Tensor, pool: Tensor, places: Tensor, sources: Tensor | None, *, threads: int) -> bool:
    """Copy keys and values of tokens to their rows of a pool.

    Parameters
    ----------
    k, v : Tensor
        [T, G, d] on the CPU; rows of tokens may lie apart.
    pool : Tensor
        Keys and values [2, rows, G, d], contiguous rows.
    places, sources : Tensor
        Rows of the pool, int64 [n], each another one, and which token goes there [n]; None: all T of them in turn.
    threads : int
        Threads to use.

    Returns
    -------
    bool
        Whether it was done.

    Raises
    ------
    ValueError
        Shapes that do not go together, or a token or a place that is not there.
    """
    tokens, width = k.shape[0], k.shape[1] * k.shape[2]
    if k.shape != v.shape or pool.shape[0] != 2 or pool.shape[2:] != k.shape[1:]:
        raise ValueError(f"shapes {k.shape}, {v.shape}, {pool.shape} do not go together")
    if any(each.dtype != torch.int64 or each.dim() != 1 for each in (places, sources) if each is not None) or len(
        places
    ) != (tokens if sources is None else len(sources)):
        raise ValueError("places and sources must be int64, one for each token that goes there")
    library = _library(k, pool)
    if (
        library is None
        or v.dtype != k.dtype
        or not (_is_rows(k) and _is_rows(v) and pool.stride()[2:] == (k.shape[2], 1))
    ):
        return False
    places, sources = places.contiguous(), None if sources is None else sources.contiguous()
    wrong = library.hrm_put_rows(
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        DTYPES[k.dtype],
        tokens,
        pool.data_ptr(),
        pool.data_ptr() + pool.stride(0) * pool.element_size(),
        DTYPES[pool.dtype],
        pool.stride(1),
        pool.shape[1],
        None if sources is None else sources.data_ptr(),
        places.data_ptr(),
        len(places),
        width,
        threads,
    )
    if wrong >= 0:
        source = wrong if sources is None else int(sources[wrong])
        raise ValueError(f"token {source} of {tokens} cannot go to row {places[wrong]} of {pool.shape[1]}")
    return True


def _library(*tensors: Tensor) -> ctypes.CDLL | None:
    """The kernels, where they can work on these tensors."""
    if any(each.dtype not in DTYPES or each.device.type != "cpu" for each in tensors):
        return None
    return open_library()


def _is_rows(x: Tensor) -> bool:
    """Whether all values of a token lie side by side."""
    return x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])

"""Attention kernels of a CUDA GPU, and a check that they do here what this module takes them to do.

Both phases go through the memory-efficient kernel of torch (`_efficient_attention_forward`), which takes requests of
any length side by side: request b has the queries from `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` and the keys from
`cu_seqlens_k[b]` on, up to `cu_seqlens_k[b + 1]` or, where `seqlen_k` is given, `seqlen_k[b]` of them, so that requests
may have gaps between them (ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h, `advance_to_block`).
It has as many heads of keys as of queries. Query heads that share keys are therefore given to it as further queries of
one token (decode, where no mask tells queries apart), or in as many calls as heads share keys (prompts): no key is
copied.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hrm.terminal import say

__all__ = ["attend_cache_plainly", "attend_cache_ragged", "attend_prompts_ragged", "kernel_works"]

NO_MASK, CAUSAL = 0, 1
"""`custom_mask_type`: causal counts from the top left, that is, from the first query and key of each request."""

PLAIN_BYTES = 256 * 2**20
"""Of keys that plain attention gathers at a time [byte]."""

TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Of the self check, with results of about 1: a wrong mask or offset is wrong by tenths."""


def attend_prompts_ragged(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float, window: int | None
) -> Tensor:
    """Causal attention of every prompt over itself, [T, H * d]; parameters as in `attend_prompts`."""
    tokens, heads, width = q.shape
    shared = heads // k.shape[1]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(q.device, non_blocking=True)
    longest = max(lengths)
    queries = q.view(tokens, -1, shared, width)
    out = torch.empty_like(queries)
    for member in range(shared):  # [T, G, d] each: one of the heads that share keys
        out.select(2, member).copy_(
            torch.ops.aten._efficient_attention_forward(
                queries.select(2, member).unsqueeze(0),
                k.unsqueeze(0),
                v.unsqueeze(0),
                None,
                offsets,
                offsets,
                longest,
                longest,
                0.0,
                CAUSAL,
                False,
                scale=scale,
                window_size=window if window is not None and window < longest else None,
            )[0].squeeze(0)
        )
    return out.view(tokens, heads * width)


def attend_cache_ragged(
    q: Tensor, keys: Tensor, values: Tensor, first: Tensor, lengths: Tensor, out: Tensor, *, scale: float, longest: int
) -> None:
    """Attention of one new token per request over its cache; parameters as in `attend_cache`, without a window."""
    count, heads, width = q.shape
    shared = heads // keys.shape[1]
    queries = q.to(keys.dtype).view(count, -1, shared, width).transpose(1, 2).reshape(1, count * shared, -1, width)
    last = first.narrow(0, count - 1, 1) + lengths.narrow(0, count - 1, 1)
    found = torch.ops.aten._efficient_attention_forward(
        queries,
        keys.unsqueeze(0),
        values.unsqueeze(0),
        None,
        torch.arange(0, count * shared + 1, shared, dtype=torch.int32, device=q.device),
        torch.cat((first, last)).to(torch.int32),
        shared,
        longest,
        0.0,
        NO_MASK,
        False,
        scale=scale,
        seqlen_k=lengths.to(torch.int32),
    )[0]
    out.copy_(found.view(count, shared, -1, width).transpose(1, 2).reshape(count, heads, width))


def attend_cache_plainly(
    q: Tensor, keys: Tensor, values: Tensor, first: Tensor, lengths: Tensor, out: Tensor, *, scale: float, longest: int
) -> None:
    """The same from products and a softmax, padded to the longest, in float32."""
    count, heads, width = q.shape
    groups = keys.shape[1]
    at_once = max(1, PLAIN_BYTES // (8 * longest * groups * width))
    steps = torch.arange(longest, device=q.device)
    for start in range(0, count, at_once):
        part = slice(start, min(count, start + at_once))
        seen = steps < lengths[part, None]  # [b, n]
        rows = (first[part, None] + steps).where(seen, first[part, None])
        k, v = keys[rows].float(), values[rows].float()  # [b, n, G, d]
        query = q[part].float().view(-1, groups, heads // groups, width)
        scores = torch.einsum("bgsd,bngd->bgsn", query, k) * scale
        weights = scores.masked_fill(~seen[:, None, None, :], -torch.inf).softmax(dim=-1)
        out[part] = torch.einsum("bgsn,bngd->bgsd", weights, v).reshape(-1, heads, width).to(out.dtype)


@functools.cache
def kernel_works(device: torch.device, dtype: torch.dtype, width: int, *, windowed: bool = False) -> bool:
    """Whether the kernel gives on this GPU what plain products give; says so, once, where it does not.

    Parameters
    ----------
    dtype : torch.dtype
        Of keys and values.
    width : int
        d.
    windowed : bool
        Whether prompts are attended to through a window.
    """
    try:
        window = 37 if windowed else None
        error = max(_error_of_prompts(device, dtype, width, window), _error_of_cache(device, dtype, width))
        fault = f"differs by {error:.3g} from plain attention"
        works = error < TOLERANCE[dtype]
    except RuntimeError as refused:
        works, fault = False, f"fails: {str(refused).splitlines()[0]}"
    if not works:
        say(f"the memory-efficient attention kernel {fault} ({dtype}, heads of {width}): plain products are used")
    return works


def _draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _error_of_prompts(device: torch.device, dtype: torch.dtype, width: int, window: int | None) -> float:
    """Prompts longer than the blocks of the kernel, so that some of them lie outside a window altogether."""
    lengths = (3, 300, 1, 130)
    tokens, scale = sum(lengths), width**-0.5
    q, k = _draw(device, dtype, tokens, 4, width), _draw(device, dtype, tokens + 1, 2, width)[1:]
    v = _draw(device, dtype, tokens + 2, 2, width)[2:]
    found = attend_prompts_ragged(q, k, v, lengths, scale=scale, window=window)
    starts = torch.cat([torch.full((length,), sum(lengths[:i])) for i, length in enumerate(lengths)])
    seen = torch.cat([torch.arange(1, length + 1) for length in lengths])
    skipped = (seen - window).clamp(min=0) if window is not None else torch.zeros_like(seen)
    wanted = torch.empty_like(q)
    attend_cache_plainly(
        q,
        k,
        v,
        (starts + skipped).to(device),
        (seen - skipped).to(device),
        wanted,
        scale=scale,
        longest=int((seen - skipped).max()),
    )
    return _largest(found.view_as(wanted), wanted)


def _error_of_cache(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Requests with gaps between them, the last one not at the end."""
    first, lengths = torch.tensor([2, 90, 95], device=device), torch.tensor([70, 1, 200], device=device)
    keys, values = _draw(device, dtype, 310, 2, width), _draw(device, dtype, 311, 2, width)[1:]
    q, scale = _draw(device, dtype, 3, 8, width), width**-0.5
    found, wanted = torch.empty_like(q), torch.empty_like(q)
    attend_cache_ragged(q, keys, values, first, lengths, found, scale=scale, longest=200)
    attend_cache_plainly(q, keys, values, first, lengths, wanted, scale=scale, longest=200)
    return _largest(found, wanted)


def _largest(found: Tensor, wanted: Tensor) -> float:
    """Largest difference; infinite where something is no number."""
    difference = (found.float() - wanted.float()).abs().max().item()
    return float(difference) if difference == difference else float("inf")

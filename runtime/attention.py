"""Attention on the GPU level: over prompts, and over the KV cache with one new token per request.

On CUDA both go through torch's memory-efficient kernel (`runtime.cuda_attention`), which takes requests of any length
side by side and runs on all GPUs since Maxwell (T4 included); where it fails its check, plain products take its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.cpu_attention import attend_decode
from runtime.cpu_products import WIDE_VALUES, product_dtype
from runtime.cuda_attention import attend_cache_plainly, attend_cache_ragged, attend_prompts_ragged, kernel_works

__all__ = ["attend_cache", "attend_prompts"]


def attend_prompts(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of every prompt over itself.

    Parameters
    ----------
    q, k, v : Tensor
        [T, H, d], [T, G, d] twice: the prompts one after the other.
    lengths : sequence of int
        Tokens of each prompt.

    Returns
    -------
    Tensor
        [T, H * d].
    """
    windowed = window is not None and window < max(lengths)
    if _on_gpu(q) and kernel_works(q.device, q.dtype, q.shape[-1], windowed=windowed):
        return attend_prompts_ragged(q, k, v, lengths, scale=scale, window=window)
    if len(set(lengths)) == 1:
        return _attend_alike(q, k, v, lengths[0], scale, window).reshape(q.shape[0], -1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length, members in groupby(lengths):  # neighbours of one length in one call, where they lie
        part = slice(start, start + length * len(list(members)))
        out[part] = _attend_alike(q[part], k[part], v[part], length, scale, window)
        start = part.stop
    return out.view(q.shape[0], -1)


def _attend_alike(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float, window: int | None) -> Tensor:
    """Prompts of one length: queries [n * length, H, d], and as much.

    What a CPU does not multiply in its dtype is widened, some prompts, or some heads of one, at a time: the copies stay
    small.
    """
    if _on_gpu(q) or q.dtype == product_dtype(q.dtype):
        return _attend_rows(q, k, v, length, scale, window)
    out, groups, shared = torch.empty_like(q), k.shape[1], q.shape[1] // k.shape[1]
    of_a_prompt = length * q[0].numel()
    tokens = max(1, WIDE_VALUES // of_a_prompt) * length
    count = min(groups, max(1, groups * WIDE_VALUES // of_a_prompt))
    for start, first in product(range(0, len(q), tokens), range(0, groups, count)):
        rows, kv = slice(start, start + tokens), slice(first, first + count)
        heads = slice(first * shared, (first + count) * shared)
        wide_q, wide_k, wide_v = q[rows, heads].float(), k[rows, kv].float(), v[rows, kv].float()
        out[rows, heads] = _attend_rows(wide_q, wide_k, wide_v, length, scale, window)
    return out


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float, window: int | None) -> Tensor:
    """The same in the dtype in which they are."""
    sides = [each.view(-1, length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v)]  # [n, heads, length, d]
    mask = None
    if window is not None and window < length:
        place = torch.arange(length, device=q.device)
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < window)
    found = F.scaled_dot_product_attention(
        sides[0],
        sides[1],
        sides[2],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return found.transpose(1, 2).reshape(q.shape)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def attend_cache(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    longest: int,
    threads: int,
) -> None:
    """Attention of one new token per request over its cache, on whatever device the tensors are.

    Parameters
    ----------
    q, out : Tensor
        [B, H, d].
    keys, values : Tensor
        [T, G, d], the new token's among them.
    first, lengths : Tensor
        int64 [B]: first token row of each request, and tokens to attend to.
    longest : int
        The most of `lengths`.
    """
    if not _on_gpu(q):
        attend_decode(q, keys, values, first, lengths, out, scale=scale, window=window, threads=threads)
        return
    if window is not None:
        skipped = (lengths - window).clamp(min=0)
        first, lengths, longest = first + skipped, lengths - skipped, min(longest, window)
    attend = attend_cache_ragged if kernel_works(q.device, keys.dtype, q.shape[-1]) else attend_cache_plainly
    attend(q, keys, values, first, lengths, out, scale=scale, longest=longest)

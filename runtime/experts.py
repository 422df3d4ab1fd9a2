"""Mixture of experts: visits grouped by expert, no padding, no loop over tokens; experts nobody chose are not read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.cpu_experts import Routing, apply_experts
from runtime.cuda_experts import add_experts
from runtime.weights import Segment

__all__ = ["Routing", "apply_segments", "group_visits", "join_routings", "to_host"]

TOKENS_AT_A_TIME = 1024
"""Tokens whose answers are added to hidden states at a time."""


def group_visits(experts: Tensor, weights: Tensor, count: int) -> Routing:
    """Visits of tokens to experts, sorted by expert.

    Parameters
    ----------
    experts, weights : Tensor
        [T, k]: experts of every token, and their weights in float32.
    count : int
        Experts of the layer.
    """
    top_k = experts.shape[1]
    ordered, order = torch.sort(experts.reshape(-1), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(count + 1, device=ordered.device))
    return Routing(
        order=order // top_k,
        # The one place of a decode step where the host waits for the GPU: experts nobody chose are not read. It also
        # keeps the host from issuing far ahead, where memory that is still in use would be allocated anew.
        starts=starts.tolist(),
        weights=weights.reshape(-1)[order],
    )


def _starts(experts: Tensor, count: int) -> list[int]:
    found = [0]
    for visits in torch.bincount(experts, minlength=count).tolist():
        found.append(found[-1] + visits)
    return found


def join_routings(parts: Sequence[Routing]) -> Routing:
    """Of several micro-batches, whose tokens lie one after the other."""
    if len(parts) == 1:
        return parts[0]
    count = len(parts[0].starts) - 1
    experts, tokens, start = [], [], 0
    for part in parts:
        visits = torch.tensor([part.starts[e + 1] - part.starts[e] for e in range(count)])
        experts.append(torch.repeat_interleave(torch.arange(count), visits))
        tokens.append(part.order + start)
        start += int(part.order.max()) + 1  # every token visits at least one expert
    device = parts[0].order.device
    every = torch.cat(experts)
    order = torch.argsort(every, stable=True)
    there = order.to(device)
    return Routing(
        order=torch.cat(tokens)[there],
        starts=_starts(every, count),
        weights=torch.cat([part.weights for part in parts])[there],
    )


def to_host(routing: Routing) -> Routing:
    """The same in CPU memory."""
    return Routing(order=routing.order.cpu(), starts=routing.starts, weights=routing.weights.cpu())


def apply_segments(x: Tensor, segments: Sequence[Segment], routing: Routing, out: Tensor, *, threads: int) -> None:
    """Add what experts make of x [T, h] to out [T, h], each visit with its weight."""
    if not segments:
        return
    in_place = out.dtype == torch.float32 and out.is_contiguous()
    total = out if in_place else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    if x.is_cuda:
        add_experts(x, segments, routing, total)
    else:
        apply_experts(x, segments, routing, total, threads=threads)
    if not in_place:
        # In parts: on the CPU torch makes two float32 copies of what it adds to another dtype.
        size = max(1, len(out) if x.is_cuda else TOKENS_AT_A_TIME)
        for start in range(0, len(out), size):
            out[start : start + size].add_(total[start : start + size])

"""Experts on a CUDA GPU: one by one, or those that lie whole beside each other in three grouped products.

`torch.nn.functional.grouped_mm` runs in one kernel from compute capability 9.0 on. On older GPUs torch goes from expert
to expert itself and reads the group ends back for each product, which pays only where experts are many and small.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hrm.terminal import say
from runtime.cpu_experts import Routing
from runtime.weights import Segment

__all__ = ["add_experts", "add_grouped", "add_one", "find_runs", "grouped_product_works"]

ONE_KERNEL = (9, 0)
"""Compute capability from which a grouped product is one kernel (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""

FEWEST_EXPERTS = 32
"""From which grouped products are used on older GPUs too (estimated)."""

TOLERANCE = 4e-2
"""Of the self check, relative to the largest result; a wrong expert is wrong by as much as the result is large."""

Run = list[Segment]
"""Segments of experts in a row, each with as many rows, that lie one after the other in memory."""


def add_experts(x: Tensor, segments: Sequence[Segment], routing: Routing, total: Tensor) -> None:
    """Add what experts make of x [T, h] to total [T, h] in float32; experts nobody chose are not read."""
    starts = [int(start) for start in routing.starts]
    for run in find_runs(segments):
        if _grouped_pays(run, x):
            add_grouped(x, run, starts, routing, total)
            continue
        for segment in run:
            add_one(x, segment, starts, routing, total)


def find_runs(segments: Sequence[Segment]) -> list[Run]:
    """Cut segments where the next one is not the next expert, not as large, or not next in memory."""
    runs: list[Run] = []
    for segment in segments:
        expert, packed = segment
        if runs:
            before, earlier = runs[-1][-1]
            size = earlier.numel() * earlier.element_size()
            beside = packed.data_ptr() == earlier.data_ptr() + size and packed.shape == earlier.shape
            if beside and expert == before + 1:
                runs[-1].append(segment)
                continue
        runs.append([segment])
    return runs


def _grouped_pays(run: Run, x: Tensor) -> bool:
    if len(run) < 2 or x.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    if len(run) < FEWEST_EXPERTS and torch.cuda.get_device_capability(x.device) < ONE_KERNEL:
        return False
    return grouped_product_works(x.device)


def add_one(x: Tensor, segment: Segment, starts: Sequence[int], routing: Routing, total: Tensor) -> None:
    """One expert, or a part of it."""
    expert, packed = segment
    low, high = starts[expert], starts[expert + 1]
    if low == high:
        return
    rows = routing.order[low:high]
    mine = x[rows]
    inner = F.silu(mine @ packed[:, 0].t(), inplace=True)
    inner.mul_(mine @ packed[:, 1].t())
    part = (inner @ packed[:, 2]).float()
    total.index_add_(0, rows, part.mul_(routing.weights[low:high, None]))


def add_grouped(x: Tensor, run: Run, starts: Sequence[int], routing: Routing, total: Tensor) -> None:
    """A run of experts at once."""
    (first, packed), (last, _) = run[0], run[-1]
    low, high = starts[first], starts[last + 1]
    if low == high:
        return
    rows, _, width = packed.shape
    every = packed.as_strided((len(run), rows, 3, width), (rows * 3 * width, 3 * width, width, 1))  # [e, n, 3, h]
    ends = torch.tensor([end - low for _, end in pairwise(starts[first : last + 2])], dtype=torch.int32)
    ends = ends.to(x.device, non_blocking=True)
    tokens = routing.order[low:high]
    visits = x[tokens]  # [V, h]
    inner = F.silu(F.grouped_mm(visits, every.select(2, 0).transpose(1, 2), offs=ends), inplace=True)
    inner.mul_(F.grouped_mm(visits, every.select(2, 1).transpose(1, 2), offs=ends))
    del visits
    results = F.grouped_mm(inner, every.select(2, 2), offs=ends)
    del inner
    _add_by_token(results, tokens, routing.weights[low:high], routing.order.shape[0] // x.shape[0], total)


def _add_by_token(results: Tensor, tokens: Tensor, weights: Tensor, top_k: int, total: Tensor) -> None:
    """Add results of visits [V, h] to their tokens, in order of expert: the same sum in every run.

    (`index_add_` adds what falls to one token in whatever order it comes.)
    """
    count = tokens.shape[0]
    by_token = torch.argsort(tokens, stable=True)
    ordered = tokens[by_token]
    place = torch.arange(count, device=tokens.device) - torch.searchsorted(ordered, ordered)
    visit = torch.full((total.shape[0], top_k), count - 1, dtype=torch.int64, device=tokens.device)
    share = torch.zeros((total.shape[0], top_k), dtype=torch.float32, device=tokens.device)
    visit[ordered, place] = by_token
    share[ordered, place] = weights[by_token]
    for column in range(top_k):  # a token that has fewer visits here adds nothing of the last one
        part = results[visit[:, column]].float()
        total.add_(part.mul_(share[:, column, None]))


@functools.cache
def grouped_product_works(device: torch.device) -> bool:
    """Whether grouped products give what products one by one give, with experts nobody chose; says so where not."""
    try:
        error = _error_of_groups(device)
        works, fault = error < TOLERANCE, f"differ by {error:.3g} from products one by one"
    except RuntimeError as refused:
        works, fault = False, f"fail: {str(refused).splitlines()[0]}"
    if not works:
        say(f"grouped products {fault}: experts are computed one by one, slower")
    return works


def _error_of_groups(device: torch.device) -> float:
    experts, rows, width, tokens = 5, 64, 128, 40
    generator = torch.Generator().manual_seed(0)
    packed = (torch.randn((experts * rows, 3, width), generator=generator) * width**-0.5).to(device, torch.bfloat16)
    x = torch.randn((tokens, width), generator=generator).to(device, torch.bfloat16)
    # Two visits per token: to experts 0, 2 and 3; nobody chose 1 and 4.
    order = torch.cat([torch.arange(13), torch.arange(5, 40), torch.arange(5), torch.arange(13, 40)]).to(device)
    weights = torch.rand(80, generator=generator).to(device)
    starts = [0, 13, 13, 48, 80, 80]
    routing = Routing(order=order, starts=starts, weights=weights)
    run = [(e, packed[e * rows : (e + 1) * rows]) for e in range(experts)]
    found, wanted = (torch.zeros((tokens, width), dtype=torch.float32, device=device) for _ in range(2))
    add_grouped(x, run, starts, routing, found)
    for segment in run:
        add_one(x, segment, starts, routing, wanted)
    worst = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return float(worst) if worst == worst else float("inf")

"""Experts on the CPU, from the packed rows in which they lie in host memory.

An expert's answer is a sum over its rows i: silu(x . w1_i) * (x . w3_i) * w2_i. Rows are packed as (w1_i, w3_i, w2_i),
so segments of an expert may lie in different places. Where few tokens visit an expert, a compiled kernel streams its
rows once, in the order in which they lie. Where many do, another one takes the tokens side by side, in bf16 on
processors that multiply it; elsewhere matrix products of torch are faster.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.cpu_products import WIDE_VALUES, processor_has, product_dtype, scratch_for
from runtime.native_library import DTYPES, open_library

__all__ = ["Routing", "apply_experts", "takes_many"]

if processor_has("avx512f"):
    MOST_VISITS = {torch.bfloat16: 64, torch.float32: 128, torch.float16: 128}
else:
    MOST_VISITS = {torch.bfloat16: 64, torch.float32: 64, torch.float16: 64}
"""Visits of an expert up to which the compiled kernel takes it (`benchmarks/cpu_kernels.py --crossover`). On Zen 5, two
cores, bf16 crossed at about 64; the others had not at 256, so 128 is a cautious choice. On Zen 3, which has AVX2 only,
all crossed between 64 and 96."""

MOST_STREAMED = 20
MOST_STREAMED_OF_MANY, MANY_TOKENS = 8, 512
"""The same where the kernel for many visits can do the work: 20 where few tokens are there at all; among so many
tokens 8, as the streaming kernel keeps sums for each (on the same machine)."""

VISITS_AT_A_TIME = 1024
"""Visits of an expert that are multiplied at a time: more are no faster, and scratch memory stays small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which token visits which expert.

    Parameters
    ----------
    order : Tensor
        Token of each visit, sorted by expert [V], int64.
    starts : list of int
        Visits of expert e are starts[e] to starts[e + 1] [E + 1].
    weights : Tensor
        Routing weight of each visit [V], float32.
    """

    order: Tensor
    starts: list[int]
    weights: Tensor


def apply_experts(
    x: Tensor,
    segments: Sequence[tuple[int, Tensor]],
    routing: Routing,
    out: Tensor,
    *,
    threads: int,
) -> None:
    """Add the weighted answers of experts to `out`. Segments of experts that nobody visits are not read.

    Parameters
    ----------
    x : Tensor
        Tokens [T, h]: float32, bfloat16 or float16.
    segments : Sequence of (int, Tensor)
        Experts and rows of theirs, packed [n, 3, h], contiguous; one dtype for all.
    routing : Routing
        Who visits whom.
    out : Tensor
        Sums of the answers [T, h], float32, contiguous.
    threads : int
        Threads to use; matrix products use torch's.

    Raises
    ------
    ValueError
        Shapes or dtypes that do not go together.
    """
    starts = routing.starts
    visited = [(expert, rows) for expert, rows in segments if starts[expert + 1] > starts[expert] and len(rows)]
    if not visited:
        return
    problem = _find_problem(x, visited, routing, out)
    if problem:
        raise ValueError(problem)
    library = open_library()
    grouped = library is not None and takes_many(library, x, visited[0][1])
    if grouped:
        most = MOST_STREAMED if len(x) < MANY_TOKENS else MOST_STREAMED_OF_MANY
    else:
        most = 0 if library is None else MOST_VISITS[visited[0][1].dtype]
    few = [each for each in visited if starts[each[0] + 1] - starts[each[0]] <= most]
    many: defaultdict[int, list[Tensor]] = defaultdict(list)
    for expert, rows in visited:
        if starts[expert + 1] - starts[expert] > most:
            many[expert].append(rows)
    if few and library is not None:
        stream = _stream if len(x) <= MANY_TOKENS else _stream_some
        stream(library, x, few, routing, out, threads)
    for expert, pieces in many.items():
        for start in range(starts[expert], starts[expert + 1], VISITS_AT_A_TIME):
            here = slice(start, min(start + VISITS_AT_A_TIME, starts[expert + 1]))
            if grouped and library is not None:
                _group(library, x, pieces, routing.order[here], routing.weights[here], out, threads)
            else:
                _multiply(x, pieces, routing.order[here], routing.weights[here], out)


def takes_many(library: ctypes.CDLL, x: Tensor, rows: Tensor) -> bool:
    """Whether the compiled kernel for many visits can do the work."""
    return x.dtype == rows.dtype == torch.bfloat16 and bool(library.hrm_expert_scratch(1, x.shape[1]))


def _find_problem(x: Tensor, segments: Sequence[tuple[int, Tensor]], routing: Routing, out: Tensor) -> str | None:
    """What does not go together, or None."""
    tokens, hidden = x.shape
    dtype = segments[0][1].dtype
    if any(rows.shape[1:] != (3, hidden) or rows.dtype != dtype or not rows.is_contiguous() for _, rows in segments):
        return f"segments must be contiguous [n, 3, {hidden}] of one dtype"
    if x.dtype not in DTYPES or dtype not in DTYPES:
        return f"dtypes {x.dtype}, {dtype}: wanted are {', '.join(map(str, DTYPES))}"
    if out.shape != x.shape or out.dtype != torch.float32 or not out.is_contiguous():
        return f"out must be contiguous float32 [{tokens}, {hidden}]"
    if routing.order.dtype != torch.int64 or routing.weights.dtype != torch.float32:
        return "the routing must have int64 tokens and float32 weights"
    return None


def _stream(
    library: ctypes.CDLL,
    x: Tensor,
    segments: Sequence[tuple[int, Tensor]],
    routing: Routing,
    out: Tensor,
    threads: int,
) -> None:
    """All segments in one call of the compiled kernel."""
    x, order, weights = x.contiguous(), routing.order.contiguous(), routing.weights.contiguous()
    count = len(segments)
    longs = ctypes.c_int64 * count
    library.hrm_apply_experts(
        x.data_ptr(),
        DTYPES[x.dtype],
        (ctypes.c_void_p * count)(*[rows.data_ptr() for _, rows in segments]),
        longs(*[len(rows) for _, rows in segments]),
        longs(*[routing.starts[expert] for expert, _ in segments]),
        longs(*[routing.starts[expert + 1] for expert, _ in segments]),
        count,
        DTYPES[segments[0][1].dtype],
        order.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        *x.shape,
        threads,
    )


def _stream_some(
    library: ctypes.CDLL,
    x: Tensor,
    segments: Sequence[tuple[int, Tensor]],
    routing: Routing,
    out: Tensor,
    threads: int,
) -> None:
    """The same among many tokens: some experts at a time, with the tokens that visit them.

    The kernel keeps a float32 copy and sums of all tokens that it is given, for each thread.
    """
    starts = routing.starts
    batches: list[list[tuple[int, Tensor]]] = [[]]
    visits, last = 0, -1
    for expert, rows in sorted(segments, key=lambda segment: segment[0]):
        if expert != last:
            last, count = expert, starts[expert + 1] - starts[expert]
            if visits + count > MANY_TOKENS and batches[-1]:
                batches.append([])
                visits = 0
            visits += count
        batches[-1].append((expert, rows))
    for batch in batches:
        experts = list(dict.fromkeys(expert for expert, _ in batch))
        parts = [slice(starts[expert], starts[expert + 1]) for expert in experts]
        tokens, order = torch.unique(torch.cat([routing.order[part] for part in parts]), return_inverse=True)
        own = Routing(
            order=order,
            starts=list(itertools.accumulate((part.stop - part.start for part in parts), initial=0)),
            weights=torch.cat([routing.weights[part] for part in parts]),
        )
        answer = torch.zeros(len(tokens), x.shape[1])
        renumbered = [(experts.index(expert), rows) for expert, rows in batch]
        _stream(library, x[tokens], renumbered, own, answer, threads)
        out.index_add_(0, tokens, answer)


def _group(
    library: ctypes.CDLL,
    x: Tensor,
    pieces: Sequence[Tensor],
    tokens: Tensor,
    weights: Tensor,
    out: Tensor,
    threads: int,
) -> None:
    """One expert by the compiled kernel for many visits."""
    x, tokens, weights = x.contiguous(), tokens.contiguous(), weights.contiguous()
    visits, hidden, count = len(tokens), x.shape[1], len(pieces)
    scratch = scratch_for("grouped", library.hrm_expert_scratch(visits, hidden) // 64 + 1, 64, torch.uint8)
    library.hrm_multiply_expert(
        x.data_ptr(),
        (ctypes.c_void_p * count)(*[rows.data_ptr() for rows in pieces]),
        (ctypes.c_int64 * count)(*[len(rows) for rows in pieces]),
        count,
        tokens.data_ptr(),
        weights.data_ptr(),
        visits,
        out.data_ptr(),
        hidden,
        scratch.data_ptr(),
        threads,
    )


def _multiply(x: Tensor, pieces: Sequence[Tensor], tokens: Tensor, weights: Tensor, out: Tensor) -> None:
    """One expert by matrix products of torch, in bf16 where this processor multiplies that, else in float32."""
    dtype = product_dtype(x.dtype, pieces[0].dtype)
    count, hidden = len(tokens), x.shape[1]
    rows = max(1, WIDE_VALUES // (3 * hidden))
    own = scratch_for("own", count, hidden, dtype)
    own.copy_(x[tokens]) if x.dtype != dtype else torch.index_select(x, 0, tokens, out=own)
    answer = scratch_for("answer", count, hidden).zero_()
    for piece in pieces:
        for part in (piece,) if piece.dtype == dtype else torch.split(piece, rows):
            wide = part  # [n, 3, h]
            if part.dtype != dtype:
                wide = scratch_for("block", len(part), 3 * hidden).copy_(part.view(len(part), -1)).view(part.shape)
            inner, up = (scratch_for(name, count, len(wide), dtype) for name in ("inner", "up"))
            torch.mm(own, wide[:, 0].t(), out=inner)
            torch.mm(own, wide[:, 1].t(), out=up)
            torch.nn.functional.silu(inner, inplace=True)
            inner *= up  # [v, n]
            if dtype == torch.float32:
                answer.addmm_(inner, wide[:, 2])
            else:
                answer.add_(torch.mm(inner, wide[:, 2], out=scratch_for("found", count, hidden, dtype)))
    out.index_add_(0, tokens, answer.mul_(weights.unsqueeze(1)))

"""Requests of different length into balanced micro-batches: Algorithm 2 of MoE-Lightning (arXiv 2411.11217), corrected.

The next N requests in input order are placed longest first, each into the open micro-batch that holds the fewest tokens
(prompt plus generation). One at `micro_batch_size` requests is closed. What does not fit the token budget waits for the
next batch, where it is placed before anything newer.

Corrected against the print: a part-filled micro-batch runs, all of them may be closed, a request that fits no empty
micro-batch is rejected instead of being retried for ever, and tokens are counted with the generated ones.

Balance
-------
Among the requests of one batch, the fullest and the emptiest micro-batch differ by at most one request (the longest of
the batch), hence the fullest holds at most ``mean + longest * (1 - 1/n)``, within one request of the best possible.
Longest first gives this by itself: let M be the fullest with requests a1 >= a2 >= ..., X another with b1 >= b2 >= ...

- X is open: the last request of M went there while M held no more than X.
- X is closed, so it has at least as many requests as M. If X had i requests whenever M took its (i+1)-th, then
  a(i+1) <= b(i), and the sums differ by at most a1. Otherwise take the last i where it had fewer: M held no more than X
  then, and a(j+1) <= b(j) for j > i, so they differ by at most a(i+1).

Where waiting requests were placed out of that order, `rebalance_loads` restores it by exchanges.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hrm.errors import InputError

__all__ = [
    "Batch",
    "Batching",
    "MicroBatch",
    "Request",
    "assign_batch",
    "batch_requests",
    "fill_micro_batches",
    "rebalance_loads",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete.

    Attributes
    ----------
    index : int
        Place in the input.
    prompt_tokens, generation_tokens : int
        Length of the prompt and of what is generated for it [tokens].
    """

    index: int
    prompt_tokens: int
    generation_tokens: int

    @property
    def tokens(self) -> int:
        """KV-cache entries the request holds when it ends [tokens]."""
        return self.prompt_tokens + self.generation_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Requests that go through a layer together, longest first."""

    requests: tuple[Request, ...]

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all its requests [tokens]."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens of all its requests [tokens]: what its KV cache must hold."""
        return sum(request.tokens for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The non-empty micro-batches that are in flight together."""

    micro_batches: tuple[MicroBatch, ...]

    @property
    def size(self) -> int:
        """Number of requests."""
        return sum(micro_batch.size for micro_batch in self.micro_batches)

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens of all its requests [tokens]."""
        return sum(micro_batch.tokens for micro_batch in self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """All batches in the order they run, and the requests that fit no empty micro-batch, in input order."""

    batches: tuple[Batch, ...]
    rejected: tuple[Request, ...]


def fill_micro_batches(
    tokens: Sequence[int], *, num_micro_batches: int, micro_batch_size: int, token_budget: int | None = None
) -> list[list[int]]:
    """Place requests, in the order given, each into the open micro-batch with the fewest tokens.

    If a request does not fit the emptiest open micro-batch it fits no other open one, since all have the same budget:
    looking at the emptiest is the whole of "try the others before deferring".

    Parameters
    ----------
    tokens : sequence of int
        Tokens of each request, in placing order [tokens].
    num_micro_batches, micro_batch_size : int
        Micro-batches, and requests that close one.
    token_budget : int, optional
        Tokens one micro-batch may hold [tokens]; no limit if None.

    Returns
    -------
    list of list of int
        Per micro-batch the positions in `tokens`, in placing order. Positions in none of them are deferred.
    """
    slots: list[list[int]] = [[] for _ in range(num_micro_batches)]
    open_loads = [(0, slot) for slot in range(num_micro_batches)]  # a heap: (tokens held, micro-batch)
    for position, size in enumerate(tokens):
        if not open_loads:
            break
        load, slot = open_loads[0]
        if token_budget is not None and load + size > token_budget:
            continue
        slots[slot].append(position)
        if len(slots[slot]) == micro_batch_size:
            heapq.heappop(open_loads)
        else:
            heapq.heapreplace(open_loads, (load + size, slot))
    return slots


def rebalance_loads(slots: list[list[int]], tokens: Sequence[int], *, micro_batch_size: int) -> None:
    """Exchange requests, in place, until no two micro-batches differ by more than the longest request placed.

    Takes the fullest and the emptiest: as long as they differ by more, either the emptiest has a free place for the
    longest request of the fullest, or it is full and some request of the fullest is longer than one of it (if none
    were, it would hold at least as much). Each step leaves both strictly between the two former sums, so the budget
    stays kept, the sum of squares falls, and the loop ends. Longest-first placement needs no step at all.

    Parameters
    ----------
    slots : list of list of int
        Per micro-batch the positions in `tokens`; changed in place.
    tokens : sequence of int
        Tokens of each request [tokens].
    micro_batch_size : int
        Most requests of a micro-batch.
    """
    longest = max((tokens[position] for slot in slots for position in slot), default=0)
    loads = [sum(tokens[position] for position in slot) for slot in slots]
    while True:
        full = max(range(len(slots)), key=loads.__getitem__)
        empty = min(range(len(slots)), key=loads.__getitem__)
        if loads[full] - loads[empty] <= longest:
            return
        given = max(slots[full], key=tokens.__getitem__)
        slots[full].remove(given)
        slots[empty].append(given)
        moved = tokens[given]
        if len(slots[empty]) > micro_batch_size:
            returned = min(slots[empty], key=tokens.__getitem__)
            slots[empty].remove(returned)
            slots[full].append(returned)
            moved -= tokens[returned]
        loads[full] -= moved
        loads[empty] += moved


def assign_batch(
    requests: Sequence[Request],
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    token_budget: int,
    num_waiting: int = 0,
) -> tuple[Batch, tuple[Request, ...], tuple[Request, ...]]:
    """Spread the requests of one batch over its micro-batches (Algorithm 2, corrected).

    Parameters
    ----------
    requests : sequence of Request
        The requests of the batch, in input order.
    num_micro_batches, micro_batch_size : int
        At most so many micro-batches, of at most so many requests.
    token_budget : int
        Prompt and generated tokens one micro-batch may hold [tokens].
    num_waiting : int, optional
        The first so many requests were deferred before: they are placed first and in the order given, so that longer
        newcomers cannot push them out again and again.

    Returns
    -------
    tuple of (Batch, tuple of Request, tuple of Request)
        The batch; the deferred requests; those that fit no empty micro-batch. The last two in the order given.

    Raises
    ------
    InputError
        If a number is less than 1 (`num_waiting`: less than 0).

    References
    ----------
    Cao et al., MoE-Lightning, ASPLOS 2025, arXiv 2411.11217, Algorithm 2.
    """
    _check_counts(num_micro_batches=num_micro_batches, micro_batch_size=micro_batch_size, token_budget=token_budget)
    if num_waiting < 0:
        raise InputError(f"num_waiting is {num_waiting}", way_out="0 or more")
    fitting = [position for position, request in enumerate(requests) if request.tokens <= token_budget]
    num_first = sum(position < num_waiting for position in fitting)

    def longest_first(position: int) -> tuple[int, int]:
        # The paper says longest prompt: the same where all generate the same, and without balance where they do not.
        return -requests[position].tokens, -requests[position].prompt_tokens

    ordered = fitting[:num_first] + sorted(fitting[num_first:], key=longest_first)
    tokens = [requests[position].tokens for position in ordered]
    slots = fill_micro_batches(
        tokens, num_micro_batches=num_micro_batches, micro_batch_size=micro_batch_size, token_budget=token_budget
    )
    rebalance_loads(slots, tokens, micro_batch_size=micro_batch_size)
    groups = [sorted((ordered[place] for place in slot), key=longest_first) for slot in slots if slot]
    placed = {position for group in groups for position in group}
    micro_batches = tuple(MicroBatch(requests=tuple(requests[position] for position in group)) for group in groups)
    deferred = tuple(requests[position] for position in fitting if position not in placed)
    rejected = tuple(request for request in requests if request.tokens > token_budget)
    return Batch(micro_batches=micro_batches), deferred, rejected


def batch_requests(
    requests: Sequence[Request], *, batch_size: int, num_micro_batches: int, micro_batch_size: int, token_budget: int
) -> Batching:
    """Cut a stream of requests into batches, each spread over its micro-batches.

    Every batch takes those deferred so far, then the next requests in input order, `batch_size` in all. Sorting the
    whole input instead would make the first batch all long. The request that has waited longest is placed first, so
    every batch places at least one, the loop ends, and a request waits at most as many batches as there were deferred
    requests before it.

    Parameters
    ----------
    requests : sequence of Request
        All requests, in input order.
    batch_size : int
        Most requests of a batch, N.
    num_micro_batches, micro_batch_size : int
        At most so many micro-batches, of at most so many requests.
    token_budget : int
        Prompt and generated tokens one micro-batch may hold [tokens].

    Returns
    -------
    Batching
        Every request is in exactly one micro-batch or in `rejected`.

    Raises
    ------
    InputError
        If a number is less than 1.
    """
    _check_counts(
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        token_budget=token_budget,
    )
    rejected = tuple(request for request in requests if request.tokens > token_budget)
    queue = [request for request in requests if request.tokens <= token_budget]
    batches: list[Batch] = []
    deferred: tuple[Request, ...] = ()
    taken = 0
    while deferred or taken < len(queue):
        arriving = queue[taken : taken + batch_size - len(deferred)]
        taken += len(arriving)
        batch, deferred, _ = assign_batch(
            [*deferred, *arriving],
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            token_budget=token_budget,
            num_waiting=len(deferred),
        )
        batches.append(batch)
    return Batching(batches=tuple(batches), rejected=rejected)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name} is {count!r}", way_out="a whole number, 1 or more")

"""A batch that goes on without the requests that are done: fewer rows, in fewer or smaller micro-batches.

The KV cache of those that stay lies where it lay; only which row of the batch a part of it belongs to changes. Slots
and landing buffers keep the size they have, so micro-batches are made anew within what these hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from hrm.launcher import LOOKAHEAD
from hrm.layout import Layout
from hrm.policy import Policy
from runtime.kv_cache import KvCache
from runtime.placement import MicroBatchRows, Placement
from runtime.run_state import RunState

__all__ = ["keep_rows", "repack"]

TIERS = ("gpu", "cpu", "disk")


def repack(
    rows: Sequence[int], cache: KvCache, policy: Policy, micro_batch_size: int
) -> tuple[list[list[list[int]]], Policy]:
    """Micro-batches for the rows that stay.

    As few as their size allows, but enough to overlap, if there were so many before: the rows of each level are spread
    evenly over them. What a slot or a landing buffer holds is never exceeded; each request alone fits, so there always
    is an answer.

    Parameters
    ----------
    rows : sequence of int
        Rows that stay, at least one.
    cache : KvCache
    policy : Policy
        Of the batch as it ran so far.
    micro_batch_size : int
        Most requests that buffers of a micro-batch are made for.

    Returns
    -------
    tuple of (list, Policy)
        By micro-batch and level the rows; the policy with their number and size.
    """
    slot = float(cache.slot_tokens) or math.inf
    landing = float(cache.landing_tokens)
    count = max(-(-len(rows) // micro_batch_size), min(len(rows), policy.num_micro_batches, LOOKAHEAD + 1))
    for parts in range(count, len(rows) + 1):
        size = -(-len(rows) // parts)
        if size > micro_batch_size or size * (parts - 1) >= len(rows):
            continue
        found = _spread(rows, cache, parts, size, slot, landing)
        if found is not None:
            sized = replace(
                policy,
                batch_size=len(rows),
                micro_batch_size=size,
                num_micro_batches=parts,
                prefill_micro_batch_size=min(policy.prefill_micro_batch_size, len(rows)),
            )
            return found, sized
    raise AssertionError("a request alone fits the buffers it was in")


def _spread(
    rows: Sequence[int], cache: KvCache, parts: int, size: int, slot: float, landing: float
) -> list[list[list[int]]] | None:
    """Longest first, each to the micro-batch that has the fewest tokens on its level; None where one finds no room."""
    found: list[list[list[int]]] = [[[], [], []] for _ in range(parts)]
    loads = [[0, 0, 0] for _ in range(parts)]
    landed, requests = [0] * parts, cache.placement.requests
    for tier, name in enumerate(TIERS):
        capacity = cache.pools[
            name
        ].capacity  # on disk in whole blocks, which a landing buffer holds and a slot does not
        mine = sorted((row for row in rows if row in capacity), key=lambda row: (-capacity[row], row))
        for row in mine:
            tokens = requests[row].tokens
            fits = [
                j
                for j in range(parts)
                if sum(map(len, found[j])) < size
                and (tier == 0 or loads[j][1] + loads[j][2] + tokens <= slot)
                and (tier < 2 or landed[j] + capacity[row] <= landing)
            ]
            if not fits:
                return None
            j = min(fits, key=lambda j: (loads[j][tier], sum(loads[j]), j))
            found[j][tier].append(row)
            loads[j][tier] += tokens
            landed[j] += capacity[row] if tier == 2 else 0
    return found


def keep_rows(state: RunState, rows: Sequence[int], micro_batch_size: int) -> RunState:
    """The state of a batch with some of its rows only, between two graphs.

    Parameters
    ----------
    state : RunState
        Between two decode steps; its cache is the new state's from here on.
    rows : sequence of int
        Rows that stay.
    micro_batch_size : int
        Of the plan: what buffers are made for.
    """
    parts, policy = repack(rows, state.cache, state.layout.policy, micro_batch_size)
    order = [row for part in parts for tier in part for row in tier]
    decode, first = [], 0
    for part in parts:
        decode.append(MicroBatchRows(first, *(len(tier) for tier in part)))
        first = decode[-1].last
    before = state.placement
    placement = Placement(tuple(before.requests[row] for row in order), tuple(decode), ())
    cache = state.cache
    cache.placement = placement
    for pool in cache.pools.values():
        mine = [(row, old) for row, old in enumerate(order) if old in pool.first]
        pool.rows = tuple(row for row, _ in mine)
        pool.first = {row: pool.first[old] for row, old in mine}
        pool.capacity = {row: pool.capacity[old] for row, old in mine}
    chosen = torch.tensor(order, device=state.generated.device)
    kept = replace(
        state,
        layout=Layout(state.layout.scenario, policy),
        placement=placement,
        prompts=[state.prompts[row] for row in order],
        generated=state.generated[chosen],
        hidden=state.hidden[chosen],
        indices={},
        active={},
        positions={},
        waiting={},
    )
    if state.device.cuda:  # made here, whole, as several lanes read them, each in a stream of its own
        for j in range(len(decode)):
            for name in TIERS:
                kept.index(j, name)
        torch.cuda.synchronize()
    return kept

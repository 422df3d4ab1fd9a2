"""Requests of a job into batches for which the plan has room, whatever lengths it was made for.

A plan counts the prompts of its own workload. A job has others: where they are longer, a batch takes fewer of them, so
that no buffer is larger than planned. All batches are known before the first one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hrm.attention_tasks import KV_BUFFERS
from hrm.batching import Request
from hrm.errors import InputError
from hrm.layout import Layout
from hrm.memory import KV_LANDINGS
from hrm.points import prefill_choice
from hrm.policy import Policy
from hrm.scenario import Scenario
from runtime.arena import Arenas
from runtime.arena_terms import make_arenas
from runtime.batches import SizedBatch, cut_batches
from runtime.disk_file import BLOCK
from runtime.placement import Placement, place_batch

__all__ = ["cut_to_room", "longest_prompt"]

FEWER = 0.9
"""Of the requests that are too many, how many are tried next."""


def longest_prompt(scenario: Scenario, policy: Policy) -> int:
    """Prompt tokens that a prefill micro-batch of the plan has room for [token]."""
    return int(prefill_choice(scenario, float(policy.batch_size), float(policy.prefill_micro_batch_size)).tokens)


def cut_to_room(requests: Sequence[Request], policy: Policy, scenario: Scenario) -> list[SizedBatch]:
    """Batches of all requests, in input order, each within the room of the plan.

    Raises
    ------
    InputError
        A request has no room even alone.
    """
    arenas = make_arenas(scenario, policy, Layout(scenario, policy))
    queue, found = list(requests), []
    while queue:
        taken = min(len(queue), policy.batch_size)
        while True:
            batch = _fitting(queue[:taken], policy, scenario, arenas)
            if batch is not None:
                break
            if taken == 1:
                raise InputError(
                    f"the plan has no room for request {queue[0].index}, of {queue[0].tokens:,} tokens with what is "
                    "generated",
                    where="requests",
                    way_out="a plan for these prompts: hrm plan --prompts FILE",
                )
            taken = min(taken - 1, int(taken * FEWER)) or 1
        found.append(batch)
        placed = {request.index for request in batch.requests}
        queue = [request for request in queue if request.index not in placed]
    return found


def _fitting(requests: Sequence[Request], policy: Policy, scenario: Scenario, arenas: Arenas) -> SizedBatch | None:
    """The first batch of some requests, if the plan has room for it."""
    if sum(request.prompt_tokens for request in requests) > scenario.workload.batch_tokens(policy.batch_size):
        return None
    batch = next(cut_batches(requests, policy, scenario))
    most = longest_prompt(scenario, policy)
    while True:
        placement = place_batch(batch.micro_batches, batch.policy)
        fullest = max(sum(placement.requests[row].prompt_tokens for row in part) for part in placement.prefill)
        if fullest <= most:
            break
        fewer = batch.policy.prefill_micro_batch_size - 1
        if fewer < 1:
            return None
        batch = SizedBatch(batch.micro_batches, replace(batch.policy, prefill_micro_batch_size=fewer))
    return batch if _has_room(placement, scenario, arenas) else None


def _has_room(placement: Placement, scenario: Scenario, arenas: Arenas) -> bool:
    """Whether no level has more of a batch's KV cache, and of the buffers it passes, than planned."""
    one, layers = scenario.model.kv_bytes_per_token_per_layer(scenario.formats.kv), scenario.model.n_layers

    def on_disk(tokens: int) -> float:
        """In whole blocks of the disk file, keys and values each [byte]."""
        return 2.0 * BLOCK * -(-tokens * one / 2.0 // BLOCK)

    for tier in ("gpu", "cpu"):
        rows = [row for part in placement.decode for row in part.tier_rows(tier)]
        if not _fits(sum(placement.requests[row].tokens for row in rows) * one * layers, arenas, tier, "KV cache"):
            return False
    read = [sum(on_disk(placement.requests[row].tokens) for row in part.tier_rows("disk")) for part in placement.decode]
    there = {row for part in placement.decode for row in part.tier_rows("disk")}
    written = [
        sum(on_disk(placement.requests[row].prompt_tokens) for row in part if row in there)
        for part in placement.prefill
    ]
    slots = "gpu" in arenas.levels and "KV slots" in arenas["gpu"].planned
    off_gpu = [
        sum(placement.requests[row].tokens for tier in ("cpu", "disk") for row in part.tier_rows(tier))
        for part in placement.decode
    ]
    return (
        _fits(sum(read) * layers, arenas, "disk", "KV cache")
        and _fits(KV_LANDINGS * max(read + written), arenas, "cpu", "KV landing buffers")
        and (not slots or _fits(KV_BUFFERS * max(off_gpu) * one, arenas, "gpu", "KV slots"))
    )


def _fits(size: float, arenas: Arenas, level: str, term: str) -> bool:
    return size <= 0 or (level in arenas.levels and size <= arenas[level].room(term))

"""The requests of one batch: which micro-batch each is in, in prefill and in decode, and where its KV cache lies.

Rows are requests in the order of decode micro-batches; within one, those whose KV cache stays on the GPU come first,
then those in CPU memory, then those on disk, so that every level has a range of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hrm.batching import MicroBatch, Request, fill_micro_batches
from hrm.graph import Phase
from hrm.policy import Policy

__all__ = ["MicroBatchRows", "Placement", "most_on_disk", "place_batch", "rounding_requests"]


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """Rows of one decode micro-batch: first to last, and where the levels change.

    `on_gpu`, `on_cpu`, `on_disk` are counts of requests by where their KV cache lies.
    """

    first: int
    on_gpu: int
    on_cpu: int
    on_disk: int

    @property
    def size(self) -> int:
        """Requests."""
        return self.on_gpu + self.on_cpu + self.on_disk

    @property
    def last(self) -> int:
        """One past the last row."""
        return self.first + self.size

    def tier_rows(self, tier: str) -> range:
        """Rows on one level."""
        cpu = self.first + self.on_gpu
        disk = cpu + self.on_cpu
        return {"gpu": range(self.first, cpu), "cpu": range(cpu, disk), "disk": range(disk, self.last)}[tier]


@dataclass(frozen=True, slots=True)
class Placement:
    """One batch.

    Attributes
    ----------
    requests : tuple of Request
        By row.
    decode : tuple of MicroBatchRows
        Decode micro-batches.
    prefill : tuple of tuple of int
        Rows of every prefill micro-batch.
    """

    requests: tuple[Request, ...]
    decode: tuple[MicroBatchRows, ...]
    prefill: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Requests."""
        return len(self.requests)

    def rows(self, phase: Phase, micro_batch: int) -> Sequence[int]:
        """Rows of a micro-batch."""
        if phase == "prefill":
            return self.prefill[micro_batch]
        part = self.decode[micro_batch]
        return range(part.first, part.last)

    def tier(self, row: int) -> str:
        """Level of a row's KV cache."""
        for part in self.decode:
            if row < part.last:
                return next(tier for tier in ("gpu", "cpu", "disk") if row in part.tier_rows(tier))
        raise IndexError(row)


def _spread(count: int, of: int, *, last: bool) -> list[int]:
    """`count` places spread evenly over so many, the last or the first of each stretch.

    In a descending list the last ones add up to no more than their share of it, and the first ones to no less.
    """
    if last:
        return [-(-(place + 1) * of // count) - 1 for place in range(count)]
    return [place * of // count for place in range(count)]


def _tiers(ordered: list[Request], gpu: int, disk: int) -> tuple[list[Request], list[Request], list[Request]]:
    """Requests, longest first, by level: spread so that tokens are shared like requests, the GPU's rounded down."""
    picked = set(_spread(gpu, len(ordered), last=True)) if gpu else set()
    on_gpu = [request for place, request in enumerate(ordered) if place in picked]
    rest = [request for place, request in enumerate(ordered) if place not in picked]
    picked = set(_spread(disk, len(rest), last=False)) if disk else set()
    on_disk = [request for place, request in enumerate(rest) if place in picked]
    return on_gpu, [request for place, request in enumerate(rest) if place not in picked], on_disk


def _none_on_cpu(policy: Policy) -> bool:
    return policy.kv_on_disk > 0 and policy.kv_on_gpu + policy.kv_on_disk >= 1.0 - 1e-9


def rounding_requests(policy: Policy) -> dict[str, float]:
    """Longest requests of a micro-batch by which each level holds more than its share of the tokens at most.

    Of the GPU's share less than one request is lost as their number is rounded down, and less than one as the shortest
    of each stretch are taken: "slot" is what those add to its share off the GPU. What goes to disk is rounded to the
    nearest, and the longest of each stretch.
    """
    lost = 2.0 if 0.0 < policy.kv_on_gpu < 1.0 else 0.0
    disk = 0.0
    if 0.0 < policy.kv_on_disk < 1.0:
        disk = 2.0 if _none_on_cpu(policy) else 1.5 + lost / 2
    cpu = 0.0 if _none_on_cpu(policy) else lost + 0.5 * (policy.kv_on_disk > 0)
    return {"gpu": 0.0, "slot": lost, "cpu": cpu, "disk": disk}


def most_on_disk(policy: Policy) -> int:
    """Requests of a micro-batch whose KV cache is on disk, at most."""
    size = policy.micro_batch_size
    if policy.everything_on_cpu or policy.kv_on_disk <= 0:
        return 0
    if _none_on_cpu(policy):
        return size - int(policy.kv_on_gpu * (size - 1) + 1e-6)
    return min(size, round(policy.kv_on_disk * size))


def place_batch(micro_batches: Sequence[MicroBatch], policy: Policy) -> Placement:
    """Place the requests of a batch.

    r_c and the disk's share are realised as whole requests per micro-batch: on the GPU never more than its share of the
    tokens, elsewhere as many more as `rounding_requests` says.

    Parameters
    ----------
    micro_batches : sequence of MicroBatch
        Of Algorithm 2, as many as the policy has.
    policy : Policy
    """
    requests: list[Request] = []
    decode = []
    for part in micro_batches:
        ordered = sorted(part.requests, key=lambda request: (-request.tokens, request.index))
        size = len(ordered)
        gpu = size if policy.kv_on_gpu >= 1.0 else min(policy.kv_requests_on_gpu, int(policy.kv_on_gpu * size + 1e-6))
        disk = min(size - gpu, round(policy.kv_on_disk * size))
        if _none_on_cpu(policy):
            disk = size - gpu
        if policy.everything_on_cpu:  # such plans have the whole cache in CPU memory
            disk = 0
        tiers = _tiers(ordered, gpu, disk)
        decode.append(MicroBatchRows(len(requests), *(len(tier) for tier in tiers)))
        requests += [request for tier in tiers for request in tier]
    count = -(-len(requests) // policy.prefill_micro_batch_size)
    longest = sorted(range(len(requests)), key=lambda row: -requests[row].prompt_tokens)
    dealt = fill_micro_batches(
        [requests[row].prompt_tokens for row in longest],
        num_micro_batches=count,
        micro_batch_size=policy.prefill_micro_batch_size,
    )
    prefill = tuple(tuple(sorted(longest[place] for place in slot)) for slot in dealt if slot)
    return Placement(tuple(requests), tuple(decode), prefill)

"""Requests into batches that a policy can run, the last and the odd ones with a policy of their own size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hrm.batching import MicroBatch, Request, assign_batch
from hrm.errors import InputError
from hrm.points import prefill_choice
from hrm.policy import Policy
from hrm.prediction import Prediction
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.trivial import predict_policy

__all__ = ["SizedBatch", "cut_batches", "predict_batch"]


@dataclass(frozen=True, slots=True)
class SizedBatch:
    """Micro-batches, and the policy with their number and size."""

    micro_batches: tuple[MicroBatch, ...]
    policy: Policy

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests."""
        return tuple(request for part in self.micro_batches for request in part.requests)


def cut_batches(requests: Sequence[Request], policy: Policy, scenario: Scenario) -> Iterator[SizedBatch]:
    """Batches of a stream of requests by Algorithm 2, in the order they run.

    A smaller batch has prefill micro-batches that hold no more tokens at worst than those of the plan.

    Raises
    ------
    InputError
        A request fits no empty micro-batch.
    """
    budget = policy.micro_batch_token_budget
    for request in requests:
        if budget and request.tokens > budget:
            raise InputError(
                f"request {request.index} has {request.tokens:,} tokens with what is generated, a micro-batch of the "
                f"plan holds {budget:,}",
                where="requests",
                way_out="hrm plan --prompts FILE for these prompts",
            )
    budget = budget or sum(request.tokens for request in requests) or 1
    queue, waiting = list(requests), 0
    while queue:
        taken, queue = queue[: policy.batch_size], queue[policy.batch_size :]
        batch, deferred, _ = assign_batch(
            taken,
            num_micro_batches=min(policy.num_micro_batches, -(-len(taken) // policy.micro_batch_size)),
            micro_batch_size=policy.micro_batch_size,
            token_budget=budget,
            num_waiting=min(waiting, len(taken)),
        )
        parts = list(batch.micro_batches)
        while (sized := _sized(parts, policy, scenario)) is None:  # too few for so many parts: the smallest waits
            smallest = min(parts, key=lambda part: part.size)
            parts.remove(smallest)
            deferred = (*deferred, *smallest.requests)
        waiting = len(deferred)
        queue = [*sorted(deferred, key=lambda request: request.index), *queue]
        yield SizedBatch(tuple(parts), sized)


def _sized(parts: Sequence[MicroBatch], policy: Policy, scenario: Scenario) -> Policy | None:
    """The policy for as many requests as there are, or None where they do not make so many micro-batches."""
    size, count = sum(part.size for part in parts), len(parts)
    if size == policy.batch_size and count == policy.num_micro_batches:
        return policy
    micro = -(-size // count)
    if not micro * (count - 1) < size <= micro * count:
        return None
    most = _prefill_tokens(scenario, policy.batch_size, policy.prefill_micro_batch_size)
    prefill = min(policy.prefill_micro_batch_size, size)
    while prefill > 1 and _prefill_tokens(scenario, size, prefill) > most:  # fewer requests share fewer micro-batches
        prefill -= 1
    return replace(
        policy,
        batch_size=size,
        micro_batch_size=micro,
        num_micro_batches=count,
        prefill_micro_batch_size=prefill,
    )


def _prefill_tokens(scenario: Scenario, batch_size: int, requests: int) -> float:
    """Prompt tokens of a prefill micro-batch of at most so many requests, at worst."""
    return float(prefill_choice(scenario, float(batch_size), float(requests)).tokens)


def predict_batch(scenario: Scenario, batch: SizedBatch) -> Prediction:
    """What the cost model says of a batch as it is run: its requests, their lengths."""
    lengths = tuple(request.prompt_tokens for request in batch.requests)
    workload = replace(scenario.workload, prompt_lengths=lengths, num_requests=len(lengths), padded=False)
    as_run = replace(scenario, workload=workload)
    rates = derive_rates(scenario.profile, scenario.formats)
    return predict_policy(as_run, measure_sizes(as_run), rates, batch.policy)

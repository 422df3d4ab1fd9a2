"""What the cost model says of a job as it ran: of every batch, and of every graph with the requests that were in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hrm.graph import Phase
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.trivial import predict_policy
from runtime.batches import SizedBatch, predict_batch
from runtime.jobs.job_watch import Stretch

__all__ = ["Price", "predicted_rate", "price_stretches"]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds predicted for a graph, in all and by lane [s]."""

    seconds: float
    lanes: dict[str, float]


def predicted_rate(scenario: Scenario, batch: SizedBatch) -> float:
    """Token/s that the cost model says of a batch, all its requests run to the plan's length [token/s]."""
    found = predict_batch(scenario, batch)
    return len(batch.requests) * scenario.workload.generation_length / (found.prefill_s + found.decode_s)


def price_stretches(
    scenario: Scenario, batches: Sequence[SizedBatch], stretches: Sequence[Stretch]
) -> dict[Phase, list[Price]]:
    """Price of every graph, by phase and in the order they ran.

    Decode is priced at the mean context of its requests in the middle of its steps, and with the micro-batches they
    were in; so requests that have left cost nothing.
    """
    found: dict[Phase, list[Price]] = {"prefill": [], "decode": []}
    for each in stretches:
        if each.phase == "prefill":
            whole = predict_batch(scenario, batches[each.batch])
            found["prefill"].append(Price(whole.prefill_s, dict(whole.prefill.lanes)))
        else:
            found["decode"].append(_price_decode(scenario, each))
    return found


def _price_decode(scenario: Scenario, stretch: Stretch) -> Price:
    """As a workload whose prompts are what was there before, and which generates what these steps give."""
    before = max(1, round(stretch.prompt_tokens / stretch.requests)) + stretch.first
    workload = replace(
        scenario.workload,
        prompt_lengths=(before,),
        num_requests=stretch.requests,
        generation_length=stretch.steps + 1,
        padded=False,
    )
    as_run = replace(scenario, workload=workload)
    rates = derive_rates(scenario.profile, scenario.formats)
    whole = predict_policy(as_run, measure_sizes(as_run), rates, stretch.policy)
    return Price(whole.decode_s, {lane: seconds * stretch.steps for lane, seconds in whole.decode.lanes.items()})

"""The full cost model for a row that was measured: the policy that ran, on the machine as the system used it.

Decode and prefill come from `hrm.prediction`; a system whose lanes do not overlap takes their sum instead of the
busiest one, and one that gathers weights copies them to every GPU (`hrm.published.systems`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from hrm.errors import HrmError, InputError
from hrm.paper_cost import paper_terms
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.prediction import Prediction, predict
from hrm.published.constants import Values
from hrm.published.policies import RowPolicy, published_policy, room_for_weights
from hrm.published.rows import Row
from hrm.published.settings import System, find_setting, find_system, scenario_of
from hrm.published.systems import behaviour_of, profile_for
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.search import find_policy

__all__ = ["FullRow", "full_row", "policy_of_row", "scenario_for"]

NOT_A_LANE = ("cpu_memory",)
"""What several lanes draw on; it does nothing by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRow:
    """What the full cost model says of a row.

    Attributes
    ----------
    tokens_per_s : float
        Generated tokens over prefill and decode [token/s].
    prefill_s, decode_s : float
        Of the batch [s].
    layer_s : float
        Of one decode step and layer [s].
    prefill_lanes, decode_lanes : mapping of str to float
        Seconds of every lane over prefill, and over all decode steps [s].
    bottleneck : str
        Lane, or sum of lanes, that sets the larger part of the time, with its phase.
    note : str
        What of the policy was not published.
    """

    tokens_per_s: float
    prefill_s: float
    decode_s: float
    layer_s: float
    prefill_lanes: Mapping[str, float]
    decode_lanes: Mapping[str, float]
    bottleneck: str
    note: str = ""


def scenario_for(row: Row, values: Values, *, num_requests: int) -> Scenario:
    """The row's requests on its machine as its system used it, with these constants."""
    profile = profile_for(find_setting(row), find_system(row), values)
    return scenario_of(row, profile=profile, num_requests=num_requests)


def policy_of_row(row: Row) -> tuple[Policy, str]:
    """The policy that ran, in full, and what of it was not published.

    A MoE-Lightning row without a micro-batch runs the plan that the planner finds for its N, with public values.

    Raises
    ------
    InputError, InfeasibleError
        The row has no policy; the message says why.
    """
    system = find_system(row)
    if row.micro_batch_size is None and row.batch_size is not None and system.schedule == "cgopipe":
        return _planned(row, row.batch_size)
    published = published_policy(row)
    return _whole_policy(row, system, published), published.note


@lru_cache(maxsize=64)
def _planned(row: Row, batch_size: int) -> tuple[Policy, str]:
    """The best plan for N among the authors' grid of micro-batches: those that divide N and fit their GPU limit.

    Every published policy of theirs is one of these.
    """
    scenario = scenario_for(row, {}, num_requests=batch_size)
    terms = paper_terms(scenario_of(row, profile=find_setting(row).authors_profile, num_requests=batch_size))
    best: tuple[float, Policy] | None = None
    reason: HrmError | None = None
    for mu in (*range(1, 5), *range(36, batch_size + 1, 32)):
        if batch_size % mu or room_for_weights(terms, float(mu), float(batch_size)) < 0:
            continue
        pins = Pins(
            batch_size=batch_size,
            micro_batch_size=mu,
            attention_on_gpu=False,
            ffn_on_gpu=True,
            weights_on_disk=0.0,
            kv_on_disk=0.0,
            weight_slots=2,
            pin_weights=False,
        )
        try:
            found = find_policy(scenario, pins, max_hours=1000.0)
        except HrmError as error:
            reason = error
            continue
        rate = found.prediction.throughput_tokens_per_s
        if best is None or rate > best[0]:
            best = (rate, found.policy)
    if best is None:
        raise reason or InputError("no micro-batch of the authors' grid divides its N", where=row.id)
    policy = best[1]
    return policy, (
        f"mu = {policy.micro_batch_size}, n_ub = {policy.num_micro_batches}: this planner's plan for its N over the "
        "authors' grid of micro-batches"
    )


def _whole_policy(row: Row, system: System, published: RowPolicy) -> Policy:
    behaviour, streaming = behaviour_of(system), system.schedule == "streaming"
    longest = scenario_for(row, {}, num_requests=published.batch_size).workload.max_request_tokens
    return Policy(
        batch_size=published.batch_size,
        micro_batch_size=published.micro_batch_size,
        num_micro_batches=published.num_micro_batches,
        prefill_micro_batch_size=min(published.micro_batch_size, published.batch_size),
        attention_on_gpu=published.attention_on_gpu,
        ffn_on_gpu=True,
        weights_on_gpu=published.weights_on_gpu,
        kv_on_gpu=published.kv_on_gpu,
        weight_slots=2,
        dense_weights_on_gpu=not streaming,
        embedding_on_gpu=not streaming,
        lm_head_on_gpu=not streaming,
        pin_weights=behaviour.pins_weights,
        micro_batch_token_budget=published.micro_batch_size * longest,
        parallelism=system.parallelism,
    )


def full_row(row: Row, values: Values) -> FullRow:
    """Predict a row.

    Parameters
    ----------
    row : Row
    values : mapping of str to float
        Constants by name; those left out have their public value.

    Raises
    ------
    InputError, InfeasibleError
        The row cannot be predicted; the message says why.
    """
    system = find_system(row)
    policy, note = policy_of_row(row)
    scenario = scenario_for(row, values, num_requests=policy.batch_size)
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    found = predict(scenario, sizes, rates, policy)
    prefill = _as_it_runs(found, "prefill", system, scenario, policy)
    decode = _as_it_runs(found, "decode", system, scenario, policy)
    steps = float(sizes.decode_steps)
    prefill_s, step_s = _pass_seconds(prefill, found, "prefill", system), _pass_seconds(decode, found, "decode", system)
    decode_s = steps * step_s
    longer, lanes = ("prefill", prefill) if prefill_s > decode_s else ("decode", decode)
    binds = max(lanes, key=lambda lane: lanes[lane])
    return FullRow(
        tokens_per_s=policy.batch_size * scenario.workload.generation_length / (prefill_s + decode_s),
        prefill_s=prefill_s,
        decode_s=decode_s,
        layer_s=step_s / scenario.model.n_layers,
        prefill_lanes=prefill,
        decode_lanes={lane: steps * seconds for lane, seconds in decode.items()},
        bottleneck=f"{longer}: {binds}" + ("" if behaviour_of(system).overlaps else ", of a sum"),
        note=note,
    )


def _as_it_runs(found: Prediction, phase: str, system: System, scenario: Scenario, policy: Policy) -> dict[str, float]:
    """Seconds of every lane, weights copied as often as the system copies them [s]."""
    passed = found.prefill if phase == "prefill" else found.decode
    lanes = {lane: seconds for lane, seconds in passed.lanes.items() if lane not in NOT_A_LANE}
    gpus = scenario.profile.gpu.count
    if gpus > 1 and system.parallelism == "pipeline" and phase == "prefill":
        # One pass of every part of the batch: while the first GPU begins the last ones wait, and the other way round.
        parts = float(min(gpus, -(-policy.batch_size // policy.prefill_micro_batch_size)))
        lanes = {lane: seconds * (parts + gpus - 1.0) / parts for lane, seconds in lanes.items()}
    if gpus > 1 and behaviour_of(system).gathers_weights:
        sizes = measure_sizes(scenario)
        moved = found.decode.bytes_moved["host_to_device"]
        weights = min(moved, sizes.streamed_bytes)
        lanes["host_to_device"] *= 1.0 + (gpus - 1) * weights / moved if moved > 0 else 1.0
    return lanes


def _pass_seconds(lanes: Mapping[str, float], found: Prediction, phase: str, system: System) -> float:
    passed = found.prefill if phase == "prefill" else found.decode
    if not behaviour_of(system).overlaps:
        return sum(lanes.values())
    if max(lanes.values()) <= max(passed.lanes.values()):
        return passed.seconds  # the model's own, with what no lane shows
    return max(passed.seconds, *lanes.values())

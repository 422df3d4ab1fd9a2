"""The full cost model for a row that was measured: the policy that ran, on the machine as the system used it.

Decode and prefill come from `hrm.prediction`; a system whose lanes do not overlap takes their sum instead of the
busiest one, and one that gathers weights copies them to every GPU (`hrm.published.systems`). A row is made into a `Run`
first, in which any piece of the model can be exchanged before it is priced (`hrm.published.terms`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from hrm.policy import Policy
from hrm.prediction import Prediction, predict
from hrm.published.constants import CONSTANTS, Values
from hrm.published.policies import RowPolicy, published_policy
from hrm.published.rows import Row
from hrm.published.settings import System, find_setting, find_system, scenario_of
from hrm.published.systems import Behaviour, behaviour_of, profile_for
from hrm.published.unpublished import choose_policy, is_unpublished
from hrm.rates import derive_rates
from hrm.scenario import Scenario, Sizes, measure_sizes

__all__ = ["FullRow", "Run", "constants_of_row", "full_row", "policy_of_row", "price_run", "run_of_row", "scenario_for"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row as the full cost model sees it: requests on a machine, the policy, and how the system runs a pass."""

    scenario: Scenario
    policy: Policy
    behaviour: Behaviour
    note: str = ""


def scenario_for(row: Row, values: Values, *, num_requests: int) -> Scenario:
    """The row's requests on its machine as its system used it, with these constants."""
    profile = profile_for(find_setting(row), find_system(row), values)
    return scenario_of(row, profile=profile, num_requests=num_requests)


def policy_of_row(row: Row) -> tuple[Policy, str]:
    """The policy that ran, in full, and what of it was not published.

    Where its micro-batch or its batch was not published, one is chosen (`hrm.published.unpublished`), with public
    values of the constants, and the note says so.

    Raises
    ------
    InputError, InfeasibleError
        The row has no policy; the message says why.
    """
    system = find_system(row)
    if is_unpublished(row, system):
        return _chosen(row, system)
    published = published_policy(row)
    return _whole_policy(row, system, published), published.note


@lru_cache(maxsize=256)
def _chosen(row: Row, system: System) -> tuple[Policy, str]:
    policy, note = choose_policy(row, system, lambda requests: scenario_for(row, {}, num_requests=requests))
    if isinstance(policy, RowPolicy):
        return _whole_policy(row, system, policy), note
    return policy, note


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
    known = tuple((name, float(values[name])) for name in constants_of_row(row) if name in values)
    return _full_row(row, known)


@lru_cache(maxsize=8192)
def _full_row(row: Row, values: tuple[tuple[str, float], ...]) -> FullRow:
    """Once for each set of the constants that the row depends on: a fit moves one at a time."""
    return price_run(run_of_row(row, dict(values)))


def constants_of_row(row: Row) -> tuple[str, ...]:
    """Names of the constants that a row depends on.

    Raises
    ------
    InputError
        Its setting or its system is not known.
    """
    setting, system = find_setting(row), find_system(row)
    own = f"{system.family}.gpu_flops"
    wanted = [
        own if own in CONSTANTS else f"{setting.gpu}.gpu_flops",
        f"{system.family}.copies" if behaviour_of(system).own_copy_path else f"{setting.host}.link",
        f"{system.family}.overhead",
        f"{system.name}.cpu_attention",
    ]
    return tuple(name for name in wanted if name in CONSTANTS)


def run_of_row(row: Row, values: Values) -> Run:
    """A row with these constants, ready to be priced.

    Raises
    ------
    InputError, InfeasibleError
        The row cannot be predicted; the message says why.
    """
    policy, note = policy_of_row(row)
    scenario = scenario_for(row, values, num_requests=policy.batch_size)
    return Run(scenario=scenario, policy=policy, behaviour=behaviour_of(find_system(row)), note=note)


def price_run(run: Run) -> FullRow:
    """Seconds of a run, and what sets them."""
    scenario, policy, behaviour = run.scenario, run.policy, run.behaviour
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    found = predict(scenario, sizes, rates, policy)
    prefill, decode = _as_it_runs(found, "prefill", run), _as_it_runs(found, "decode", run)
    steps = float(sizes.decode_steps)
    prefill_s = _pass_seconds(prefill, found, "prefill", behaviour)
    step_s = _pass_seconds(decode, found, "decode", behaviour)
    # The model's own sum over growing contexts, unless the system's lanes are other than the model's; a sum of lanes is
    # linear in the context, so the step in the middle stands for all.
    own = behaviour.overlaps and step_s == found.decode.seconds
    decode_s = found.decode_s if own else steps * step_s
    longer, lanes = ("prefill", prefill) if prefill_s > decode_s else ("decode", decode)
    binds = max(lanes, key=lambda lane: lanes[lane])
    return FullRow(
        tokens_per_s=policy.batch_size * scenario.workload.generation_length / (prefill_s + decode_s),
        prefill_s=prefill_s,
        decode_s=decode_s,
        layer_s=step_s / scenario.model.n_layers,
        prefill_lanes=prefill,
        decode_lanes={lane: steps * seconds for lane, seconds in decode.items()},
        bottleneck=f"{longer}: {binds}" + ("" if behaviour.overlaps else ", of a sum"),
        note=run.note,
    )


def _as_it_runs(found: Prediction, phase: str, run: Run) -> dict[str, float]:
    """Seconds of every lane, weights copied as often as the system copies them [s]."""
    scenario, policy = run.scenario, run.policy
    passed = found.prefill if phase == "prefill" else found.decode
    lanes = {lane: seconds for lane, seconds in passed.lanes.items() if lane not in NOT_A_LANE}
    gpus = scenario.profile.gpu.count
    if gpus > 1 and policy.parallelism == "pipeline" and phase == "prefill":
        # One pass of every part of the batch: while the first GPU begins the last ones wait, and the other way round.
        parts = float(min(gpus, -(-policy.batch_size // policy.prefill_micro_batch_size)))
        lanes = {lane: seconds * (parts + gpus - 1.0) / parts for lane, seconds in lanes.items()}
    if gpus > 1 and run.behaviour.gathers_weights:
        moved = passed.bytes_moved["host_to_device"]
        weights = min(moved, _streamed_bytes(measure_sizes(scenario), policy))
        lanes["host_to_device"] *= 1.0 + (gpus - 1) * weights / moved if moved > 0 else 1.0
    return lanes


def _streamed_bytes(sizes: Sizes, policy: Policy) -> float:
    """Weights that one pass copies to the GPU [byte]."""
    dense = 0.0 if policy.dense_weights_on_gpu else sizes.dense_bytes
    head = 0.0 if policy.lm_head_on_gpu else sizes.lm_head_bytes
    return sizes.streamed_bytes * (1.0 - policy.weights_on_gpu) + dense + head


def _pass_seconds(lanes: Mapping[str, float], found: Prediction, phase: str, behaviour: Behaviour) -> float:
    passed = found.prefill if phase == "prefill" else found.decode
    if not behaviour.overlaps:
        return sum(lanes.values())
    if max(lanes.values()) <= max(passed.lanes.values()):
        return passed.seconds  # the model's own, with what no lane shows
    return max(passed.seconds, *lanes.values())

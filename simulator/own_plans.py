"""Plans that suit a schedule: a given policy with what it cannot run replaced, and candidates for its own best plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hrm.errors import HrmError, InfeasibleError, InputError
from hrm.issuing import Schedule
from hrm.pins import Pins, option_name
from hrm.points import candidate_batches
from hrm.policy import Policy
from hrm.prediction import Prediction
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.search import find_policy
from hrm.trivial import Trivial, predict_policy, trivial_plans

__all__ = ["Candidates", "cpu_only_plan", "overrides_for", "same_policy", "whole_experts"]

MICRO_BATCH_FACTORS = (0.25, 0.5, 2.0)
"""Of the best plan's micro-batches, pinned in turn: what a schedule makes of their number is not in the cost model."""

FEW_MICRO_BATCHES = (1, 2, 3)

LEVEL = 0.97
"""Serial plans that the sum of their lanes puts so close to the best are tried; simulation differs from it by less."""

BATCH_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Of the largest batch, for a schedule that can put experts where the KV cache of the others was."""

OTHERS_ON_CPU = (
    "attention_on_gpu",
    "ffn_on_gpu",
    "dense_weights_on_gpu",
    "embedding_on_gpu",
    "lm_head_on_gpu",
    "pin_weights",
)


def overrides_for(schedule: Schedule, base: Policy, scenario: Scenario) -> dict[str, Any]:
    """What of a policy a schedule needs otherwise.

    Parameters
    ----------
    schedule : Schedule
    base : Policy
    scenario : Scenario

    Returns
    -------
    dict of str to value
        By field of `Policy`; empty where the schedule runs the policy as it is.
    """
    if schedule.name == "cpu_only":
        wanted: dict[str, Any] = dict.fromkeys(OTHERS_ON_CPU, False)
        wanted |= {"everything_on_cpu": True, "micro_batch_size": base.batch_size, "num_micro_batches": 1}
        wanted |= {"weights_on_gpu": 0.0, "kv_on_gpu": 0.0, "kv_on_disk": 0.0, "weight_slots": 2, "ring_experts": 0}
        return _changed(base, wanted)
    wanted = {"everything_on_cpu": False}
    if schedule.attention_on_gpu is not None:
        wanted["attention_on_gpu"] = schedule.attention_on_gpu
    if schedule.one_micro_batch:
        wanted |= {"micro_batch_size": base.batch_size, "num_micro_batches": 1}
    if schedule.one_micro_batch or schedule.name == "static_experts":
        wanted |= {"kv_on_gpu": 1.0, "kv_on_disk": 0.0}
    if schedule.name == "static_experts":
        wanted |= {"ffn_on_gpu": False, "weights_on_gpu": whole_experts(scenario, base.weights_on_gpu)}
    if base.weight_slots == "experts" and not (schedule.paged or schedule.serial):
        wanted |= {"weight_slots": 2, "ring_experts": 0}
    return _changed(base, wanted)


def same_policy(schedule: Schedule, base: Policy, scenario: Scenario) -> Policy:
    """A policy under another schedule: the same N, mu and r_w, with what the schedule needs otherwise.

    It need not fit the machine.

    Raises
    ------
    InputError
        There is none: not one whole expert of a layer is on the GPU where the schedule needs some.
    """
    if schedule.name == "static_experts" and whole_experts(scenario, base.weights_on_gpu) == 0.0:
        count = scenario.model.streamed_experts
        raise InputError(f"r_w = {base.weights_on_gpu:.3g} is less than one of {count} experts of a layer on the GPU")
    changes = overrides_for(schedule, base, scenario)
    if "num_micro_batches" in changes or "micro_batch_size" in changes:
        n, n_ub = base.batch_size, changes.get("num_micro_batches", base.num_micro_batches)
        mu = changes.get("micro_batch_size", base.micro_batch_size)
        changes["micro_batch_token_budget"] = int(scenario.workload.micro_batch_token_bound(n, n_ub, mu))
    return replace(base, **changes)


def whole_experts(scenario: Scenario, share: float) -> float:
    """A share of the experts rounded down to whole ones, the same number in every layer."""
    count = max(1, scenario.model.streamed_experts)
    return int(share * count + 1e-9) / count


def _changed(base: Policy, wanted: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in wanted.items() if getattr(base, key) != value}


@dataclass(slots=True)
class Candidates:
    """Plans to choose from for every schedule, found once and kept.

    Attributes
    ----------
    scenario : Scenario
    pins : Pins
        Variables that are given.
    max_hours : float
        Bound on one batch [h].
    trivial : tuple of Trivial
        From the search for the best plan: the plan that leaves the GPU alone is among them.
    """

    scenario: Scenario
    pins: Pins
    max_hours: float
    trivial: tuple[Trivial, ...] = ()
    on_progress: Callable[[str], None] | None = None
    _found: dict[Pins, list[tuple[Policy, Prediction]]] = field(default_factory=dict)

    def of(self, schedule: Schedule) -> list[tuple[Policy, Prediction]]:
        """Plans that a schedule can run, the best by prediction first; at least one.

        What is serial takes the sum of its lanes, so its plans are those with the least of that, and few.

        Raises
        ------
        InfeasibleError
            None fits, or the pinned variables leave none.
        InputError
            The pinned variables are not what the schedule needs.
        """
        if schedule.name == "cpu_only":
            return [self._cpu_only()]
        if schedule.name == "static_experts":
            return self._static()
        if schedule.attention_on_gpu is None:  # either place of attention
            both, errors = [], []
            for on_gpu in (False, True):
                try:
                    both += self._several(self._merged(attention_on_gpu=on_gpu))
                except HrmError as error:
                    errors.append(error)
            if not both:
                raise errors[0]
            both.sort(key=_rate_without_overlap, reverse=True)
            enough = LEVEL * _rate_without_overlap(both[0])
            return [entry for entry in both if _rate_without_overlap(entry) >= enough]
        wanted: dict[str, Any] = {"attention_on_gpu": schedule.attention_on_gpu}
        if schedule.one_micro_batch:
            return self._several(self._merged(**wanted, num_micro_batches=1, kv_on_gpu=1.0))
        return self._several(self._merged(**wanted))

    def _merged(self, **wanted: Any) -> Pins:
        for key, value in wanted.items():
            given = getattr(self.pins, key)
            if given is not None and given != value:
                raise InputError(
                    "pinned to something else than this schedule needs",
                    where=option_name(key),
                    way_out="leave it out",
                )
        return replace(self.pins, **wanted)

    def _several(self, pins: Pins) -> list[tuple[Policy, Prediction]]:
        if pins in self._found:
            return self._found[pins]
        first = self._find(pins, explain=True)
        found = {first[0]: first[1]}
        if pins.num_micro_batches is None and pins.micro_batch_size is None:
            n_ub = first[0].num_micro_batches
            counts = {max(1, round(n_ub * factor)) for factor in MICRO_BATCH_FACTORS} | {*FEW_MICRO_BATCHES}
            for count in sorted(counts - {n_ub}):
                try:
                    policy, prediction = self._find(replace(pins, num_micro_batches=count), explain=False)
                except HrmError:  # a number of micro-batches that nothing fits with, or that no batch makes
                    continue
                found[policy] = prediction
        self._found[pins] = sorted(found.items(), key=_rate, reverse=True)
        return self._found[pins]

    def _find(self, pins: Pins, *, explain: bool) -> tuple[Policy, Prediction]:
        if self.on_progress is not None:
            given = ", ".join(f"{key} = {value:g}" for key, value in pins.given.items() if key not in self.pins.given)
            self.on_progress(f"searching policies with {given}".replace("_", " "))
        result = find_policy(self.scenario, pins, max_hours=self.max_hours, explain=explain)
        return result.policy, result.prediction

    def _cpu_only(self) -> tuple[Policy, Prediction]:
        for plan in self.trivial:
            if plan.policy is not None and plan.prediction is not None and plan.policy.everything_on_cpu:
                return plan.policy, plan.prediction
            if plan.name.startswith("CPU only") and plan.reason:
                raise InfeasibleError(plan.reason)
        return cpu_only_plan(self.scenario, self.pins, self.max_hours)

    def _static(self) -> list[tuple[Policy, Prediction]]:
        """Whole experts on the GPU beside the KV cache, as many as fit, at several sizes of the batch."""
        wanted = self._merged(attention_on_gpu=True, ffn_on_gpu=False, kv_on_gpu=1.0)
        largest, _ = self._find(wanted, explain=True)
        sizes, rates = measure_sizes(self.scenario), derive_rates(self.scenario.profile, self.scenario.formats)
        found: dict[Policy, Prediction] = {}
        for smaller in _smaller_batches(largest, self.scenario):
            for policy in self._with_experts(smaller):
                prediction = predict_policy(self.scenario, sizes, rates, policy)
                if all(use.fits for use in prediction.memory.values()):
                    found[policy] = prediction
                    break
        if not found:
            raise InfeasibleError("with the KV cache on the GPU not one expert of every layer fits beside it")
        return sorted(found.items(), key=_rate, reverse=True)

    def _with_experts(self, policy: Policy) -> Iterator[Policy]:
        """The policy with all but one, ..., one expert of every layer on the GPU."""
        count = self.scenario.model.streamed_experts
        for kept in range(count - 1, 0, -1):
            share = kept / count
            yield replace(policy, weights_on_gpu=share, weights_on_disk=min(policy.weights_on_disk, 1.0 - share))


def cpu_only_plan(scenario: Scenario, pins: Pins, max_hours: float) -> tuple[Policy, Prediction]:
    """The best plan that leaves the GPU alone, where it has all that is pinned.

    Parameters
    ----------
    scenario : Scenario
    pins : Pins
        With ``weights_on_disk = 0`` the disk is left out.
    max_hours : float
        Bound on one batch [h].

    Raises
    ------
    InfeasibleError
        It does not fit.
    InputError
        It has another value of a pinned variable.
    """
    if pins.weights_on_disk == 0.0:
        scenario = replace(scenario, profile=replace(scenario.profile, disk=None))
    counts = Pins(batch_size=pins.batch_size)
    grid = candidate_batches(scenario.workload.num_requests, counts)
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    for plan in trivial_plans(scenario, sizes, rates, grid, counts, max_hours * 3600.0):
        if not plan.name.startswith("CPU only"):
            continue
        if plan.policy is None or plan.prediction is None:
            raise InfeasibleError(f"on the CPU alone: {plan.reason}")
        for key, value in pins.given.items():
            if getattr(plan.policy, key) != value:
                raise InputError(
                    f"the plan on the CPU alone has {getattr(plan.policy, key)}",
                    where=option_name(key),
                    way_out="leave it out",
                )
        return plan.policy, plan.prediction
    raise InfeasibleError("no plan on the CPU alone")


def _smaller_batches(largest: Policy, scenario: Scenario) -> Iterator[Policy]:
    """A policy, and with smaller batches of as many micro-batches."""
    for share in BATCH_SHARES:
        mu = max(1, int(largest.micro_batch_size * share))
        n = min(largest.batch_size, mu * largest.num_micro_batches)
        budget = int(scenario.workload.micro_batch_token_bound(n, largest.num_micro_batches, mu))
        yield replace(
            largest,
            batch_size=n,
            micro_batch_size=mu,
            prefill_micro_batch_size=min(n, largest.prefill_micro_batch_size),
            micro_batch_token_budget=budget,
        )


def _rate(entry: tuple[Policy, Prediction]) -> float:
    return entry[1].throughput_tokens_per_s


def _rate_without_overlap(entry: tuple[Policy, Prediction]) -> float:
    """Throughput where every lane waits for every other [token/s]; CPU memory is no lane, those that use it are."""
    prediction = entry[1]
    prefill, step = (
        sum(seconds for lane, seconds in phase.lanes.items() if lane != "cpu_memory")
        for phase in (prediction.prefill, prediction.decode)
    )
    steps = prediction.decode_s / prediction.decode.seconds if prediction.decode_s else 0.0
    return prediction.throughput_tokens_per_s * prediction.batch_s / (prefill + steps * step)

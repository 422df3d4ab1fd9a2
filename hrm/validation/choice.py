"""Which policies are measured beside the chosen one: neighbours, flips, random ones, trivial ones, one of each regime.

Everything here is decided by the cost model and a seed, before anything but the chosen plan has been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hrm.diverse import are_different
from hrm.errors import HrmError, InputError
from hrm.pins import Pins
from hrm.points import candidate_batches
from hrm.policy import Policy
from hrm.scenario import measure_sizes
from hrm.schedules import SCHEDULES
from hrm.trivial import trivial_plans
from hrm.validation.candidates import Candidate, Pricer, regime_of, settled, terms_of
from hrm.validation.neighbours import VARIABLES, one_step
from hrm.validation.pool import draw_policies

__all__ = ["AGAIN", "CHOSEN", "Choice", "Chosen", "choose_candidates", "in_neighbourhood"]

CHOSEN = "chosen"
AGAIN = "chosen again"
"""The same policy once more in the same turns: the difference between the two is noise (an A/A comparison)."""

RANDOM = 10
DRAWN = 600
"""Policies drawn to find random ones and those of every regime among."""

FAR = 1.15
SLOWEST = 4.0
"""Random plans take at least FAR, at most SLOWEST times as long for a token as the chosen one, as predicted."""

CLEAR = 0.80
"""The second largest term of a policy that another binds: at most so much of it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy and its schedule."""

    policy: Policy
    schedule: str


@dataclass(slots=True)
class Chosen:
    """What is measured, and what could not be had.

    Attributes
    ----------
    candidates : list of Candidate
        The chosen plan first.
    lacking : dict of str to str
        Why, by kind.
    """

    candidates: list[Candidate] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)


def in_neighbourhood(candidate: Candidate) -> bool:
    """Whether a candidate is the chosen plan, one step from it, or one flip."""
    words = {CHOSEN, AGAIN, *(f"{name} {way}" for name in VARIABLES for way in ("up", "down"))}
    return any(kind in words or kind.startswith("flip ") for kind in candidate.kinds)


def choose_candidates(
    pricer: Pricer,
    policy: Policy,
    schedule: str,
    *,
    noise: float,
    seed: int,
    count_random: int = RANDOM,
) -> Chosen:
    """Choose what is measured beside a plan.

    Parameters
    ----------
    pricer : Pricer
    policy : Policy
    schedule : str
    noise : float
        Of a measured latency of the plan [share].
    seed : int
        Same seed, same policies.
    count_random : int
        Random plans.
    """
    model = pricer.scenario.model
    rows = model.streamed_ffn
    found = Chosen()
    seen: dict[Choice, int] = {}

    def settle(other: Policy) -> Policy:
        return settled(pricer.scenario, other)

    def add(kind: str, other: Policy, name: str) -> None:
        place = Choice(other, name)
        if kind != AGAIN and place in seen:
            index = seen[place]
            known = found.candidates[index]
            found.candidates[index] = replace(known, kinds=(*known.kinds, kind))
            return
        seen.setdefault(place, len(found.candidates))
        regime = regime_of(pricer.predict(other))
        found.candidates.append(Candidate(name=kind, kinds=(kind,), policy=other, schedule=name, regime=regime))

    def offer(kind: str, other: Policy, name: str) -> None:
        try:
            why = pricer.why_not(other, name)
        except InputError as error:
            why = error.fact
        if why:
            found.lacking[kind] = why
        else:
            add(kind, other, name)

    base = settle(policy)
    add(CHOSEN, base, schedule)
    add(AGAIN, base, schedule)
    for variable in VARIABLES:
        for direction, way in ((1, "up"), (-1, "down")):
            step, why = one_step(
                base,
                variable,
                direction,
                rows=rows,
                noise=noise,
                latency=lambda other: pricer.latency(settle(other)),
                why_not=lambda other: _why_not(pricer, settle(other), schedule),
            )
            if step is None:
                found.lacking[f"{variable} {way}"] = why
            else:
                add(f"{variable} {way}", settle(step), schedule)
    for kind, flipped, name in _flips(base, schedule):
        offer(kind, settle(flipped), name)
    for kind, other in _trivial(pricer, base, found.lacking):
        offer(kind, settle(other), other.schedule)

    def usable(other: Policy) -> bool:
        return not pricer.why_not(settle(other), other.schedule)

    drawn = [settle(each) for each in draw_policies(base, model, rows=rows, seed=seed, count=DRAWN, usable=usable)]
    slow = [each for each in drawn if _per_token(pricer, each) <= SLOWEST * _per_token(pricer, base)]
    picked = _far_apart(slow, base, pricer, count_random)
    for number, other in enumerate(picked, 1):
        add(f"random {number}", other, other.schedule)
    if len(picked) < count_random:
        found.lacking[f"random {len(picked) + 1} to {count_random}"] = (
            f"of {DRAWN} policies drawn, {len(drawn)} can be run, and no more of them differ and are predicted to take "
            f"{FAR:g} to {SLOWEST:g} times as long for a token as the chosen one"
        )
    _add_regimes(slow, pricer, add, found.lacking)
    return found


def _why_not(pricer: Pricer, policy: Policy, schedule: str) -> str:
    try:
        return pricer.why_not(policy, schedule)
    except InputError as error:
        return error.fact


def _per_token(pricer: Pricer, policy: Policy) -> float:
    return 1.0 / pricer.predict(policy).throughput_tokens_per_s


def _flips(policy: Policy, schedule: str) -> Iterator[tuple[str, Policy, str]]:
    """The plan with attention on the other side, page-locking the other way, and under every other schedule."""
    if policy.everything_on_cpu:
        return
    other = replace(policy, attention_on_gpu=not policy.attention_on_gpu)
    yield "flip A_g", other, other.schedule
    yield "flip pinning", replace(policy, pin_weights=not policy.pin_weights), schedule
    for name in SCHEDULES:
        if name not in (schedule, "cpu_only"):
            yield f"flip schedule to {name}", policy, name


def _trivial(pricer: Pricer, policy: Policy, lacking: dict[str, str]) -> Iterator[tuple[str, Policy]]:
    """All in GPU memory, all on the CPU, and the plan in one micro-batch."""
    scenario = pricer.scenario
    pins = Pins(batch_size=policy.batch_size)
    grid = candidate_batches(max(scenario.workload.num_requests, policy.batch_size), pins)
    try:
        plans = trivial_plans(scenario, measure_sizes(scenario), pricer.rates, grid, pins, float("inf"))
    except HrmError as error:
        lacking["trivial plans"] = str(error)
        plans = ()
    for plan in plans:
        if plan.policy is None:
            lacking[f"trivial: {plan.name}"] = plan.reason
        else:
            yield f"trivial: {plan.name}", plan.policy
    if not policy.everything_on_cpu:
        one = replace(policy, micro_batch_size=policy.batch_size, num_micro_batches=1)
        yield "trivial: one micro-batch", one


def _far_apart(drawn: list[Policy], base: Policy, pricer: Pricer, count: int) -> list[Policy]:
    """The first so many that are slow enough and differ from the plan and from each other."""
    picked: list[Policy] = []
    for each in drawn:
        if len(picked) == count:
            break
        if _per_token(pricer, each) < FAR * _per_token(pricer, base):
            continue
        if all(are_different(each, other) for other in (base, *picked)):
            picked.append(each)
    return picked


def _add_regimes(
    drawn: list[Policy],
    pricer: Pricer,
    add: Callable[[str, Policy, str], None],
    lacking: dict[str, str],
) -> None:
    """The fastest drawn policy that each term clearly binds, and the two fastest with two terms within a tenth."""
    by_rate = sorted(drawn, key=lambda each: _per_token(pricer, each))

    def shares(policy: Policy) -> list[tuple[str, float]]:
        terms: Mapping[str, float] = terms_of(pricer.predict(policy))
        return sorted(terms.items(), key=lambda entry: -entry[1])

    for term in ("link", "cpu", "gpu"):
        for each in by_rate:
            first, second = shares(each)[:2]
            if first[0] == term and second[1] <= CLEAR * first[1]:
                add(f"bound by {term}", each, each.schedule)
                break
        else:
            lacking[f"bound by {term}"] = (
                f"none of {len(drawn)} drawn policies that can be run has its other terms at {CLEAR:.0%} of this one"
            )
    balanced: list[Policy] = []
    for each in by_rate:
        if regime_of(pricer.predict(each)) == "balanced" and all(are_different(each, other) for other in balanced):
            balanced.append(each)
            add(f"balanced {len(balanced)}", each, each.schedule)
        if len(balanced) == 2:
            return
    missing = " and ".join(str(number) for number in range(len(balanced) + 1, 3))
    lacking[f"balanced {missing}"] = f"none of {len(drawn)} drawn policies has its two largest terms within a tenth"

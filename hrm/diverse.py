"""The best policies of the search that differ in something a person would call different, for the simulator to judge.

The cost model takes the busiest lane as the time of a pass, so plans that it puts within a few per cent may come out in
another order once lanes wait for each other. The neighbours of the best plan are no help there (they are the same plan
with one request more), so each next plan is the best of those that are not near one already kept: the points around
those are taken out of the search, and it runs again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from hrm.branch_and_bound import BranchAndBound, Incumbent, SolvedPoint
from hrm.errors import InputError
from hrm.pins import Pins
from hrm.points import Point
from hrm.policy import Policy, WeightSlots
from hrm.prediction import Prediction, predict
from hrm.scenario import Scenario
from hrm.search import SearchResult, find_policy, with_exact_budget

__all__ = [
    "CANDIDATE_GAP",
    "MOST_CANDIDATES",
    "Candidate",
    "Judged",
    "Refinement",
    "are_different",
    "check_count",
    "find_policies",
]

MOST_CANDIDATES = 50
"""Each is replayed in the simulator, which takes seconds."""

NEAR = 1.1
"""Micro-batches, and their sizes, within this ratio of each other make one plan: a tenth moves no bottleneck."""

CANDIDATE_GAP = 1e-3
"""Relative gap to which the plans after the first are solved."""

RING_SHARE = 0.5
"""Largest share of rings of experts, while there are others: the cost model puts most first, the simulator few."""

KIND_SHARE = 1 / 3
"""Largest share of the plans of one kind, while there are others: many micro-batch sizes are often equally good."""

SLOWEST = 2.0
"""Plans predicted to take more than so many times as long as the first are not looked at: waits cost less than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One of the best plans by prediction.

    Attributes
    ----------
    policy : Policy
    prediction : Prediction
    solved : SolvedPoint or None
        Its program; None where it is a trivial plan.
    """

    policy: Policy
    prediction: Prediction
    solved: SolvedPoint | None

    @property
    def seconds(self) -> float:
        """Predicted seconds of all batches [s]."""
        return self.prediction.num_batches * self.prediction.batch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A candidate with what the simulator says of it.

    Attributes
    ----------
    policy : Policy
    predicted_tokens_per_s : float
        Generated tokens of all requests over prefill + decode of all batches [token/s].
    simulated_tokens_per_s : float or None
        The same from the simulator; None where the plan leaves no lanes to simulate (all on the CPU).
    """

    policy: Policy
    predicted_tokens_per_s: float
    simulated_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """What the simulator made of the best plans by prediction.

    Attributes
    ----------
    candidates : tuple of Judged
        The plan of the cost model first, then the others by prediction.
    pairs, inversions : int
        Pairs of simulated candidates, and those that the simulator puts in the other order.
    largest_change : float
        Of those pairs, by how much at most the one predicted slower is faster [share].
    chosen : int
        Index of the candidate that the plan returns.
    """

    candidates: tuple[Judged, ...]
    pairs: int
    inversions: int
    largest_change: float
    chosen: int

    def to_dict(self) -> dict[str, Any]:
        """As the JSON document of a plan has it."""
        return {
            "candidates": [
                {
                    "policy": each.policy.to_dict(),
                    "schedule": each.policy.schedule,
                    "predicted_throughput_tokens_per_s": each.predicted_tokens_per_s,
                    "simulated_throughput_tokens_per_s": each.simulated_tokens_per_s,
                }
                for each in self.candidates
            ],
            "pairs": self.pairs,
            "inversions": self.inversions,
            "largest_change": self.largest_change,
            "chosen": self.chosen,
        }


def check_count(count: int) -> None:
    """Refuse a number of plans that is none, or too many to replay.

    Raises
    ------
    InputError
        It is not from 1 to `MOST_CANDIDATES`.
    """
    if not 1 <= count <= MOST_CANDIDATES:
        raise InputError(f"{count} is out of range", where="--refine", way_out=f"from 1 to {MOST_CANDIDATES} plans")


def find_policies(
    scenario: Scenario,
    pins: Pins | None = None,
    count: int = 8,
    *,
    best: SearchResult | None = None,
    max_hours: float = 24.0,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Candidate, ...]:
    """Find the best policies of which no two are nearly the same (`are_different`), rings of experts among them.

    Parameters
    ----------
    scenario : Scenario
    pins : Pins, optional
        Variables that are given.
    count : int
        How many are wanted, at most `MOST_CANDIDATES`.
    best : SearchResult, optional
        What `find_policy` said, where it is known already.
    max_hours : float
        Bound on prefill + decode of one batch [h].
    on_progress : callable, optional
        Called with a line of text now and then.

    Returns
    -------
    tuple of Candidate
        The plan of `find_policy` first, then the others by prediction: a ring may be predicted faster than the first.
        Fewer than `count` where there are no more. All fit the memory limits.

    Raises
    ------
    InputError
        `count` is out of range, or the pins leave nothing to choose from.
    InfeasibleError
        No policy fits.
    """
    check_count(count)
    pins = pins or Pins()
    best = best or find_policy(scenario, pins, max_hours=max_hours)
    kept = [Candidate(policy=best.policy, prediction=best.prediction, solved=best.solved)]
    others = [
        Candidate(policy=each.policy, prediction=each.prediction, solved=None)
        for each in best.trivial
        if each.policy is not None and each.prediction is not None
    ]
    slowest = kept[0].seconds * SLOWEST
    others = [each for each in others if each.seconds <= slowest]
    streams = _streams(scenario, pins, max_hours, slowest)
    while len(kept) < count:
        if on_progress is not None:
            on_progress(f"{len(kept)} of {count} plans that differ")
        options = [each for each in others if all(are_different(each.policy, known.policy) for known in kept)]
        options += [each for each in (stream.find_next(kept) for stream in streams) if each is not None]
        if not options:
            break
        kept.append(min(_in_short_supply(options, kept, count), key=lambda each: each.seconds))
    return (kept[0], *sorted(kept[1:], key=lambda each: each.seconds))


def _in_short_supply(options: list[Candidate], kept: list[Candidate], count: int) -> list[Candidate]:
    """Options of kinds that have not had their share yet; all of them where every kind has."""
    kinds = Counter(_kind(each.policy) for each in kept)
    rings = sum(_is_ring(each.policy) for each in kept)
    scarce = [
        each
        for each in options
        if kinds[_kind(each.policy)] < max(2, math.ceil(count * KIND_SHARE))
        and not (_is_ring(each.policy) and rings >= count * RING_SHARE)
    ]
    return scarce or options


def are_different(first: Policy, second: Policy) -> bool:
    """Whether a person would call two policies different.

    They are where they differ in A_g, F_g, the kind of weight slots, page-locking, or in having KV cache on disk at
    all, or else where their micro-batches differ by a tenth or more, in number or in size.
    """
    if _kind(first) != _kind(second):
        return True
    return not _near(first, float(second.micro_batch_size), float(second.num_micro_batches))


def _kind(policy: Policy) -> tuple[object, ...]:
    streams = policy.weights_on_gpu < 1.0  # else the slots have size zero
    locked = policy.pin_weights and not policy.everything_on_cpu
    slots = policy.weight_slots if streams else 0
    return (
        policy.everything_on_cpu,
        policy.attention_on_gpu,
        policy.ffn_on_gpu,
        slots,
        locked,
        policy.kv_on_disk > 0,
    )


def _is_ring(policy: Policy) -> bool:
    return policy.weight_slots == "experts"


def _near(policy: Policy, micro_batch: Any, micro_batches: Any) -> Any:
    """Whether micro-batches of that size and number (numbers or arrays) are about those of a policy."""
    size = np.maximum(micro_batch / policy.micro_batch_size, policy.micro_batch_size / micro_batch)
    number = np.maximum(micro_batches / policy.num_micro_batches, policy.num_micro_batches / micro_batches)
    return (size < NEAR) & (number < NEAR)


@dataclass(slots=True)
class _Stream:
    """Plans of one kind, best first. Mutable on purpose: it remembers its last answer."""

    scenario: Scenario
    pins: Pins
    slots: WeightSlots
    max_hours: float
    slowest: float  # seconds of all batches
    avoided: list[Policy] = field(default_factory=list)
    last: Candidate | None = None
    searches: int = 0

    def find_next(self, kept: Sequence[Candidate]) -> Candidate | None:
        """The best plan that is different from all that are kept; None where there is none any more."""
        while self.searches == 0 or self.last is not None:
            if self.last is not None:
                if all(are_different(self.last.policy, each.policy) for each in kept):
                    return self.last
                self.avoided.append(self.last.policy)
            self.searches += 1
            self.last = self._search([*self.avoided, *(each.policy for each in kept if self._covers(each.policy))])
        return None

    def _search(self, avoided: list[Policy]) -> Candidate | None:
        """The best plan of the points that are not near those."""
        best = Incumbent(seconds=self.slowest)
        search = BranchAndBound.start(self.scenario, self.pins, self.max_hours, CANDIDATE_GAP, best, (self.slots,))

        def unwanted(point: Point) -> npt.NDArray[np.bool_]:
            gone = np.zeros(np.asarray(point.size).shape, dtype=bool)
            for policy in avoided:
                gone |= _near(policy, point.micro_batch, point.micro_batches)
            return gone

        search.exclude(unwanted)
        search.run(None)
        if best.policy is None:
            return None
        policy = with_exact_budget(self.scenario, best.policy)
        prediction = predict(self.scenario, search.sizes, search.rates, policy)
        return Candidate(policy=policy, prediction=prediction, solved=best.solved)

    def _covers(self, policy: Policy) -> bool:
        """Whether a kept policy takes its neighbours out of this stream.

        Where KV cache may lie on disk the best plan near one without any there is that one again.
        """
        pins = self.pins
        return (
            not policy.everything_on_cpu
            and policy.pin_weights == pins.pin_weights
            and (policy.attention_on_gpu, policy.ffn_on_gpu) == (pins.attention_on_gpu, pins.ffn_on_gpu)
            and policy.weight_slots == self.slots
            and (pins.kv_on_disk != 0.0 or policy.kv_on_disk == 0.0)
        )


def _streams(scenario: Scenario, pins: Pins, max_hours: float, slowest: float) -> list[_Stream]:
    """One for every kind of plan that the pins leave."""
    flags = (True, False)
    disk = (None, 0.0) if pins.kv_on_disk is None and scenario.profile.disk is not None else (pins.kv_on_disk,)
    every: tuple[WeightSlots, ...] = (1, 2, "experts")
    kinds = product(
        flags if pins.pin_weights is None else (pins.pin_weights,),
        disk,
        flags if pins.attention_on_gpu is None else (pins.attention_on_gpu,),
        flags if pins.ffn_on_gpu is None else (pins.ffn_on_gpu,),
        every if pins.weight_slots is None else (pins.weight_slots,),
    )
    return [
        _Stream(
            scenario=scenario,
            pins=replace(pins, pin_weights=pin, kv_on_disk=share, attention_on_gpu=attention, ffn_on_gpu=ffn),
            slots=slots,
            max_hours=max_hours,
            slowest=slowest,
        )
        for pin, share, attention, ffn, slots in kinds
        if ffn or not pins.weights_on_gpu  # experts that are computed on the CPU lie there
    ]

"""Policies to be measured: what a candidate is, as it will run, and whether it can.

Every candidate runs one batch of its own size, so it is predicted for exactly that batch: `as_run` gives the scenario
with as many requests as the policy takes at once, their prompts spread evenly over those of the workload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hrm.executable import describe_execution
from hrm.host_facts import HostFacts
from hrm.policy import Policy
from hrm.prediction import Prediction
from hrm.rates import Rates, derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.schedules import check_schedule
from hrm.trivial import predict_policy

__all__ = ["Candidate", "Pricer", "as_run", "settled", "terms_of"]

BALANCED = 0.10
"""Two terms within so much of each other bind together [share]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy under a schedule, and why it is measured.

    Attributes
    ----------
    name : str
        Unique, e.g. ``"r_w up"``.
    kinds : tuple of str
        Every reason, the first of which gave the name.
    policy : Policy
    schedule : str
    regime : str
        What binds its decode step by the cost model: link, cpu, gpu, disk, or ``"balanced"``.
    """

    name: str
    kinds: tuple[str, ...]
    policy: Policy
    schedule: str
    regime: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As files have it."""
        return {
            "name": self.name,
            "kinds": list(self.kinds),
            "policy": self.policy.to_dict(),
            "schedule": self.schedule,
            "regime": self.regime,
        }

    @staticmethod
    def from_dict(document: Mapping[str, Any], *, where: str) -> Candidate:
        """Rebuild one.

        Raises
        ------
        InputError
            Its policy makes no sense.
        """
        return Candidate(
            name=str(document["name"]),
            kinds=tuple(document["kinds"]),
            policy=Policy.from_dict(document["policy"], where=where),
            schedule=str(document["schedule"]),
            regime=str(document["regime"]),
        )


def as_run(scenario: Scenario, requests: int) -> Scenario:
    """The scenario of one batch of so many requests, their prompts spread evenly over those of the workload."""
    lengths = scenario.workload.padded_prompt_lengths
    spread = tuple(lengths[(2 * i + 1) * len(lengths) // (2 * requests) % len(lengths)] for i in range(requests))
    workload = replace(scenario.workload, prompt_lengths=spread, num_requests=requests, padded=False)
    return replace(scenario, workload=workload)


def settled(scenario: Scenario, policy: Policy) -> Policy:
    """The policy with the smallest token budget under which its own batch fills its micro-batches."""
    workload = as_run(scenario, policy.batch_size).workload
    budget = workload.micro_batch_token_budget(policy.batch_size, policy.num_micro_batches, policy.micro_batch_size)
    return replace(policy, micro_batch_token_budget=budget)


def terms_of(prediction: Prediction) -> dict[str, float]:
    """Seconds of a decode step by what may bind it: link, cpu, gpu and disk [s]."""
    lanes = prediction.decode.lanes
    link = max(lanes.get(name, 0.0) for name in ("host_to_device", "device_to_host", "staging"))
    return {
        "link": link,
        "cpu": lanes.get("cpu", 0.0),
        "gpu": lanes.get("gpu", 0.0),
        "disk": lanes.get("disk", 0.0),
    }


def regime_of(prediction: Prediction) -> str:
    """The term that binds a decode step, or ``"balanced"`` where the two largest are within a tenth."""
    terms = sorted(terms_of(prediction).items(), key=lambda entry: -entry[1])
    if terms[1][1] >= (1.0 - BALANCED) * terms[0][1]:
        return "balanced"
    return terms[0][0]


@dataclass(slots=True)
class Pricer:
    """The cost model on candidates of one scenario, and whether they can be run; remembers what it was asked.

    Attributes
    ----------
    scenario : Scenario
        Of the plan, with the layers that are run.
    config : mapping
        The keys of the model's config.json.
    host : HostFacts or None
        The machine that is to run them; None where that is not asked (a dry run).
    """

    scenario: Scenario
    config: Mapping[str, Any]
    host: HostFacts | None
    rates: Rates
    _known: dict[Policy, Prediction]

    @staticmethod
    def start(scenario: Scenario, config: Mapping[str, Any], host: HostFacts | None) -> Pricer:
        """One that has priced nothing yet."""
        return Pricer(scenario, config, host, derive_rates(scenario.profile, scenario.formats), {})

    def predict(self, policy: Policy) -> Prediction:
        """What the full cost model says of a batch of the policy."""
        if policy not in self._known:
            scenario = as_run(self.scenario, policy.batch_size)
            self._known[policy] = predict_policy(scenario, measure_sizes(scenario), self.rates, policy)
        return self._known[policy]

    def latency(self, policy: Policy) -> float:
        """Predicted seconds of a layer in decode [s]."""
        return self.predict(policy).layer_latency_s

    def why_not(self, policy: Policy, schedule: str) -> str:
        """Why a policy cannot be run under a schedule; empty where it can.

        Raises
        ------
        InputError
            The schedule does not run the policy.
        """
        check_schedule(schedule, policy)
        prediction = self.predict(policy)
        over = [level for level, use in prediction.memory.items() if not use.fits]
        if over:
            return f"does not fit {' and '.join(f'{level} memory' for level in over)}"
        scenario = as_run(self.scenario, policy.batch_size)
        host = self.host or HostFacts(
            torch="cpu", gpus=(), cpu_bytes=float("inf"), lockable_bytes=float("inf"), disk_bytes=float("inf")
        )
        found = describe_execution(scenario, policy, config=self.config, memory=prediction.memory, host=host)
        return "" if found.here else found.why


Runnable = Callable[[Policy, str], str]

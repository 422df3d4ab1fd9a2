"""The order of a validation: noise first, then choices, predictions and their hash, and only then the measurements.

What measures and what simulates are handed in, so that this order can be tested without either.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hrm.errors import InputError
from hrm.policy import Policy
from hrm.scenario import Scenario
from hrm.validation.candidates import Candidate, Pricer, as_run, regime_of, settled
from hrm.validation.choice import CHOSEN, Chosen, choose_candidates
from hrm.validation.forecasts import SimulateCandidate, analytic_forecasts, write_forecasts
from hrm.validation.measures import measure_run
from hrm.validation.noise import pooled_noise
from hrm.validation.records import HASH_FILE, PREDICTIONS_FILE, SETUP_FILE, write_json, write_run

__all__ = ["Forecaster", "Measurer", "Request", "estimate_seconds", "predict_candidates", "validate_plan"]

FIRST_RUNS = 8
"""Runs of the plan before anything is predicted: their noise says which steps away from it could be seen."""

Tell = Callable[[str], None]


class Measurer(Protocol):
    """What runs a candidate."""

    def measure(self, candidate: Candidate) -> list[dict[str, Any]]:
        """Run one batch; the records of the runs it took, warm-ups (``warm_up``) included."""
        ...


@dataclass(frozen=True, slots=True)
class Forecaster:
    """The simulator: of a batch its phases, of the plan a few contexts, and two layers to be drawn."""

    simulate: SimulateCandidate
    contexts: Callable[[Scenario, Policy, str], list[dict[str, Any]]]
    layers: Callable[[Scenario, Policy, str], dict[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be validated.

    Attributes
    ----------
    pricer : Pricer
    policy : Policy
    schedule : str
    memory : callable
        Bytes of a candidate by level as the machine sees them: plan, and what it may take besides.
    repeats, seed : int
    randoms : int
        Random policies.
    per_turn : int
        Timed runs of a policy when its turn comes: one, or where models cannot stay loaded more, after one warm-up.
    setup : mapping
        What the report says of plan, machine, command and versions.
    """

    pricer: Pricer
    policy: Policy
    schedule: str
    memory: Callable[[Candidate], dict[str, Any]]
    repeats: int
    seed: int
    randoms: int = 10
    per_turn: int = 1
    setup: Mapping[str, Any]


def validate_plan(
    request: Request, measurer: Measurer, forecaster: Forecaster, folder: Path, *, tell: Tell = lambda _: None
) -> None:
    """Measure a plan and what is around it, and leave everything in a folder (`hrm.validation.records`).

    Raises
    ------
    InputError
        The plan cannot be run, or a file cannot be written.
    """
    if request.repeats < 2:
        raise InputError(
            f"{request.repeats} repeats", where="--repeats", way_out="2 or more: one says nothing of noise"
        )
    if request.pricer.scenario.workload.generation_length < 2:
        raise InputError(
            "one token is generated, and prefill gives it: there is no decode to measure",
            where="hrm validate run",
            way_out="a plan with --gen-len 2 or more",
        )
    pricer = request.pricer
    policy = settled(pricer.scenario, request.policy)
    why = pricer.why_not(policy, request.schedule)
    if why:
        raise InputError(f"this plan cannot be run: {why}", where="hrm validate run", way_out="a plan for this machine")
    write_json(folder / SETUP_FILE, request.setup)
    plan = Candidate(
        name=CHOSEN,
        kinds=(CHOSEN,),
        policy=policy,
        schedule=request.schedule,
        regime=regime_of(pricer.predict(policy)),
    )
    first: list[float] = []
    order = 0
    while len(first) < FIRST_RUNS:
        tell(f"noise: run {len(first) + 1} of {FIRST_RUNS} of the plan")
        for record in measurer.measure(plan):
            write_run(folder, f"aa-{order:02d}", {"order": order, "predictions_sha256": None, **record})
            order += 1
            if not record["warm_up"]:
                first.append(_latency(record, pricer, plan))
    noise = pooled_noise([first])
    tell("choosing policies")
    chosen = choose_candidates(
        pricer, policy, request.schedule, noise=noise, seed=request.seed, count_random=request.randoms
    )
    document = predict_candidates(request, chosen, forecaster, noise=noise, tell=tell)
    noted = write_forecasts(document, folder / PREDICTIONS_FILE)
    (folder / HASH_FILE).write_text(f"{noted}  {PREDICTIONS_FILE}\n", encoding="utf-8")
    _measure_all(chosen.candidates, request, measurer, folder, noted, tell)


def predict_candidates(
    request: Request, chosen: Chosen, forecaster: Forecaster, *, noise: float, tell: Tell = lambda _: None
) -> dict[str, Any]:
    """What every predictor says of every candidate, as it is written and hashed."""
    scenario = request.pricer.scenario
    found: dict[tuple[Policy, str], dict[str, Any]] = {}
    rows = []
    for number, each in enumerate(chosen.candidates, 1):
        place = (each.policy, each.schedule)
        if place not in found:
            tell(f"predicting {number} of {len(chosen.candidates)}: {each.name}")
            batch = as_run(scenario, each.policy.batch_size)
            found[place] = {
                "forecasts": {
                    **analytic_forecasts(batch, each.policy),
                    "simulated": forecaster.simulate(batch, each.policy, each.schedule),
                },
                "memory": request.memory(each),
            }
        rows.append({**each.to_dict(), **found[place]})
    plan = chosen.candidates[0]
    batch = as_run(scenario, plan.policy.batch_size)
    return {
        "noise": noise,
        "seed": request.seed,
        "repeats": request.repeats,
        "candidates": rows,
        "lacking": dict(chosen.lacking),
        "contexts": forecaster.contexts(batch, plan.policy, plan.schedule),
        "trace": forecaster.layers(batch, plan.policy, plan.schedule),
    }


def estimate_seconds(document: Mapping[str, Any], *, turns: int) -> float:
    """Seconds that the measurements of `predict_candidates` take, as simulated [s].

    Parameters
    ----------
    document : mapping
    turns : int
        How often every policy is loaded, with a run that warms it up.
    """
    rows, repeats = document["candidates"], int(document["repeats"])
    batches = [float(row["forecasts"]["simulated"][key]) for row in rows for key in ("prefill_s", "decode_s")]
    loads = [float(row["forecasts"]["full"]["loading_s"]) for row in rows]
    return (repeats + turns) * sum(batches) + turns * sum(loads) + FIRST_RUNS * sum(batches[:2])


def _measure_all(
    candidates: list[Candidate], request: Request, measurer: Measurer, folder: Path, noted: str, tell: Tell
) -> None:
    """All candidates in turn, in another order every time."""
    shuffle = random.Random(f"order/{request.seed}")
    order, done = 0, 0
    while done < request.repeats:
        turn = list(candidates)
        shuffle.shuffle(turn)
        count = min(request.per_turn, request.repeats - done)
        for place, each in enumerate(turn, 1):
            tell(f"measuring: {done + 1} of {request.repeats}, policy {place} of {len(turn)}: {each.name}")
            for repeat in range(done, done + count):
                for record in measurer.measure(each):
                    name = re.sub("[^a-z0-9_]+", "-", each.name.lower())
                    facts = {"candidate": each.name, "repeat": repeat, "order": order, "predictions_sha256": noted}
                    write_run(folder, f"{order:03d}-{name}", {**record, **facts})
                    order += 1
        done += count


def _latency(record: Mapping[str, Any], pricer: Pricer, candidate: Candidate) -> float:
    return measure_run(
        record,
        layers=pricer.scenario.model.n_layers,
        requests=candidate.policy.batch_size,
        generated=pricer.scenario.workload.generation_length,
    ).layer_latency_s

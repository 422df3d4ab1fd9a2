"""What `hrm validate memory` measures: each schedule at its own best plan, under one cap of CPU memory after the other.

A cap is on what a process takes beside what it held when everything was imported. Of it a plan gets all but
`HOST_RESERVE_BYTES`, and nothing is reserved for others. The search and the simulator are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hrm.errors import HrmError, InfeasibleError, InputError
from hrm.pins import Pins
from hrm.planning import LIMIT_WORDS
from hrm.plans import Plan, PlanInputs, save_plan
from hrm.points import candidate_batches
from hrm.policy import Policy
from hrm.profile_files import profile_document, with_overrides
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes, truncated
from hrm.search import SolverReport, find_policy
from hrm.trivial import predict_policy, trivial_plans
from hrm.units import GIB, parse_quantity
from hrm.validation.candidates import Pricer, as_run
from hrm.validation.forecasts import Forecast, SimulateCandidate, analytic_forecasts
from hrm.validation.memory import HOST_RESERVE_BYTES, planned_bytes

__all__ = [
    "MEMORY_SCHEDULES",
    "Study",
    "Theory",
    "choose_caps",
    "find_bounds",
    "point_name",
    "predict_points",
    "read_caps",
]

MEMORY_SCHEDULES = ("cgopipe", "s4")
"""The two that are compared: attention on the CPU, and on the GPU."""

FEWEST_CAPS = 2
MOST_CAPS = 50

UNLIMITED = "1e15 B"
"""Memory of a bound."""

CLOSE = 0.02
"""How close to the least memory that any plan fits in the smallest cap is chosen [share]."""

OwnPlan = Callable[[Scenario, float, str, Callable[[Policy], str]], Policy]
"""Scenario, bound on a batch [h], schedule, and what says why a policy cannot be run (empty where it can) -> policy."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Theory:
    """What is handed in: the best plan of a schedule by simulation, and the simulator on one batch."""

    own_plan: OwnPlan
    simulate: SimulateCandidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is asked.

    Attributes
    ----------
    whole : Scenario
        Machine, model, workload and formats.
    model : mapping
        Name and config of the model, for saved plans.
    layers : int or None
        Run and planned for the first so many layers.
    max_hours : float
        Bound on one batch [h].
    emulated : bool
        A core of the CPU stands in for the GPU.
    """

    whole: Scenario
    model: Mapping[str, Any]
    layers: int | None
    max_hours: float
    emulated: bool

    @property
    def scenario(self) -> Scenario:
        """With the layers that are run."""
        return self.whole if self.layers is None else truncated(self.whole, self.layers)

    def under(self, cap_bytes: float) -> Scenario:
        """The scenario of a plan for a process with such a cap.

        Raises
        ------
        InputError
            The cap leaves nothing to plan with.
        """
        return _under(self.scenario, cap_bytes)


def _under(scenario: Scenario, cap_bytes: float) -> Scenario:
    room = cap_bytes - HOST_RESERVE_BYTES
    if room <= 0:
        raise InputError(
            f"{cap_bytes / GIB:.3g} GiB is no more than the reserve of a process, {HOST_RESERVE_BYTES / GIB:.3g} GiB",
            where="--caps",
            way_out="a larger cap",
        )
    profile = with_overrides(scenario.profile, {"cpu.memory": f"{room!r} B", "cpu.reserved": "0 B"})
    return replace(scenario, profile=profile)


def read_caps(text: str) -> tuple[float, ...]:
    """Caps from a list with commas, ascending [byte].

    Raises
    ------
    InputError
        One is no size, or there twice, or there are too few.
    """
    sizes = [parse_quantity(part.strip(), "size", where="--caps") for part in text.split(",")]
    caps = tuple(sorted(float(size) for size in sizes))
    if len(set(caps)) < len(caps):
        raise InputError("a cap is there twice", where="--caps", way_out="each once")
    _check_count(len(caps), "--caps")
    return caps


def _check_count(count: int, where: str) -> None:
    if not FEWEST_CAPS <= count <= MOST_CAPS:
        raise InputError(f"{count} caps", where=where, way_out=f"from {FEWEST_CAPS} to {MOST_CAPS}")


def choose_caps(study: Study, points: int, *, most_bytes: float, tell: Tell) -> tuple[float, ...]:
    """Caps in equal ratios, from the least memory that a plan of either schedule fits in to the most that one takes.

    Parameters
    ----------
    study : Study
    points : int
    most_bytes : float
        What is free here [byte].

    Raises
    ------
    InfeasibleError
        No plan fits in what is free.
    InputError
        Too few or too many points.
    """
    _check_count(points, "--points")
    tell("choosing caps")
    largest = 0.0
    first: HrmError | None = None
    for schedule in MEMORY_SCHEDULES:
        try:
            policy = _find(study, most_bytes, schedule)
        except InfeasibleError as error:
            first = first or error
            continue
        batch = as_run(study.scenario, policy.batch_size)
        largest = max(largest, planned_bytes(batch, policy, emulated=False)["cpu"] + HOST_RESERVE_BYTES)
    if largest == 0.0:
        assert first is not None
        raise first
    low, high = float(HOST_RESERVE_BYTES), largest
    while high > (1.0 + CLOSE) * low:
        middle = (low + high) / 2.0
        low, high = (low, middle) if _anything_fits(study, middle) else (middle, high)
    return tuple(float(np.ceil(cap / 2**20) * 2**20) for cap in np.geomspace(high, max(largest, 1.05 * high), points))


def _anything_fits(study: Study, cap_bytes: float) -> bool:
    for schedule in MEMORY_SCHEDULES:
        try:
            _find(study, cap_bytes, schedule)
        except HrmError:
            continue
        return True
    return False


def _find(study: Study, cap_bytes: float, schedule: str) -> Policy:
    pins = Pins(attention_on_gpu=schedule == "s4")
    return find_policy(study.under(cap_bytes), pins, max_hours=study.max_hours, explain=False).policy


def find_bounds(study: Study) -> dict[str, Any]:
    """What no cap binds: the roofline with CPU memory no limit, and everything in the memory of a GPU that had room.

    Both by the full cost model, whose batch is the busiest resource's time, with the rates of the profile.
    """
    scenario = study.scenario
    free = replace(scenario, profile=with_overrides(scenario.profile, {"cpu.memory": UNLIMITED}))
    found: dict[str, Any] = {}
    try:
        best = find_policy(free, max_hours=study.max_hours, explain=False)
        found["roofline"] = _bound(best.prediction.throughput_tokens_per_s, best.policy, best.prediction.bottleneck)
    except HrmError as error:
        found["roofline"] = {"tokens_per_s": None, "why": str(error)}
    limits = {"gpu.memory": UNLIMITED, "gpu.usable_memory": UNLIMITED, "cpu.memory": UNLIMITED}
    large = replace(scenario, profile=with_overrides(scenario.profile, limits))
    sizes, rates = measure_sizes(large), derive_rates(large.profile, large.formats)
    grid = candidate_batches(large.workload.num_requests, Pins())
    everything = trivial_plans(large, sizes, rates, grid, Pins(), study.max_hours * 3600.0)[0]
    if everything.policy is None or everything.prediction is None:
        found["all_on_gpu"] = {"tokens_per_s": None, "why": everything.reason}
    else:
        predicted = everything.prediction
        found["all_on_gpu"] = _bound(predicted.throughput_tokens_per_s, everything.policy, predicted.bottleneck)
    return found


def _bound(rate: float, policy: Policy, bottleneck: str) -> dict[str, Any]:
    return {"tokens_per_s": rate, "batch_size": policy.batch_size, "bottleneck": bottleneck, "why": ""}


def point_name(schedule: str, cap_bytes: float) -> str:
    """Of a schedule under a cap, unique to a MiB."""
    return f"{schedule} {cap_bytes / 2**20:.0f} MiB"


def predict_point(
    study: Study, cap_bytes: float, schedule: str, theory: Theory, host: Any, folder: Path | None
) -> dict[str, Any]:
    """The best plan of a schedule under a cap, saved for `hrm run`, and what is predicted of it.

    Parameters
    ----------
    study : Study
    cap_bytes : float
    schedule : str
    theory : Theory
    host : HostFacts
        Of the machine that is to run it.
    folder : Path or None
        Where plans are saved.

    Returns
    -------
    dict
        With ``infeasible`` in place of a plan where none fits: the limit, and by how much.
    """
    name = point_name(schedule, cap_bytes)
    row: dict[str, Any] = {"name": name, "schedule": schedule, "cap_bytes": cap_bytes, "infeasible": ""}
    scenario = study.under(cap_bytes)
    pricer = Pricer.start(scenario, study.model["config"], host)
    try:
        policy = theory.own_plan(scenario, study.max_hours, schedule, lambda each: pricer.why_not(each, schedule))
    except HrmError as error:
        return {**row, "infeasible": _why(error)}
    batch = as_run(scenario, policy.batch_size)
    forecasts: dict[str, Forecast | None] = {
        **analytic_forecasts(batch, policy),
        "simulated": theory.simulate(batch, policy, schedule),
    }
    seen = planned_bytes(batch, policy, emulated=study.emulated)
    moved = seen["cpu"] - planned_bytes(batch, policy, emulated=False)["cpu"]
    if folder is not None:
        save_plan(_saved(study, cap_bytes, policy), folder / plan_file(name))
    return {
        **row,
        "plan": plan_file(name),
        "policy": policy.to_dict(),
        "forecasts": forecasts,
        "planned_bytes": seen,
        "accelerator_bytes": moved,
        "limit_bytes": cap_bytes + moved,
        "terms": {level: dict(use.terms) for level, use in pricer.predict(policy).memory.items()},
    }


def _why(error: HrmError) -> str:
    """Which limit by how much at the smallest batch, where the error says so."""
    if isinstance(error, InfeasibleError) and error.limit in LIMIT_WORDS and error.missing_bytes > 0:
        return f"{error.missing_bytes / GIB:,.3f} GiB over {LIMIT_WORDS[error.limit]} at the smallest batch"
    return " ".join(str(error).split())


def plan_file(name: str) -> str:
    """Of a point, in the folder of its records."""
    return f"{name.replace(' ', '-')}.json"


def _saved(study: Study, cap_bytes: float, policy: Policy) -> Plan:
    """The plan as `hrm run` reads it: with the whole model, of which `--layers` are run."""
    whole = _under(study.whole, cap_bytes)
    sizes, rates = measure_sizes(whole), derive_rates(whole.profile, whole.formats)
    inputs = PlanInputs(
        hardware={"name": whole.profile.name, "document": profile_document(whole.profile)},
        model=study.model,
        cost_model="full",
        max_hours=study.max_hours,
        pins=Pins(),
    )
    solver = SolverReport(
        name="the best by simulation of several by the cost model",
        status="feasible",
        gap=float("nan"),
        seconds=0.0,
        points_bounded=0,
        programs_solved=0,
    )
    return Plan(
        scenario=whole,
        inputs=inputs,
        policy=policy,
        prediction=predict_policy(whole, sizes, rates, policy),
        solver=solver,
        marginal_values={},
    )


def predict_points(
    study: Study, caps: Sequence[float], theory: Theory, host: Any, folder: Path | None, tell: Tell
) -> list[dict[str, Any]]:
    """Every point of every schedule."""
    rows = []
    for number, cap in enumerate(caps, 1):
        for schedule in MEMORY_SCHEDULES:
            tell(f"planning {schedule} under {cap / GIB:.3g} GiB, cap {number} of {len(caps)}")
            rows.append(predict_point(study, cap, schedule, theory, host, folder))
    return rows

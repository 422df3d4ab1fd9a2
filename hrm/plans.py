"""Plan: inputs, policy, prediction and how both were found; one JSON document, both ways."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hrm import __version__
from hrm.cost import Formats
from hrm.diverse import Refinement
from hrm.dtypes import KV_DTYPES, WEIGHT_DTYPES, parse_dtype
from hrm.errors import InputError
from hrm.executable import ExecutablePlan, Execution, describe_execution
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.prediction import MemoryUse, Phase, Prediction
from hrm.profile import Efficiency
from hrm.scenario import COMPUTE_DTYPES, Scenario, measure_sizes
from hrm.search import SolverReport
from hrm.shown import Shown
from hrm.trivial import Trivial
from hrm.units import GIB

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

__all__ = ["Alternative", "CostModel", "Plan", "PlanInputs", "TurningPoints", "read_plan_document", "save_plan"]

CostModel = Literal["full", "paper"]
FORMAT = 1

WEIGHT_TERMS = ("resident expert weights", "expert weights", "non-expert weights", "embedding", "lm_head")
"""Terms of memory that are homes of weights, each byte in one of them, whatever the policy."""

OTHER_INPUTS = "leave the inputs of a plan as they are: hrm plan makes a new one for others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What something else would give.

    Attributes
    ----------
    name : str
        In words, e.g. "int4 weights".
    throughput_tokens_per_s : float or None
        None where it does not fit either.
    note : str
        What it takes, or why it does not fit.
    """

    name: str
    throughput_tokens_per_s: float | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurningPoints:
    """Where work should move (Eqs. 9, 10), for the experts of one layer.

    Attributes
    ----------
    p1_flop_per_byte, p2_flop_per_byte : float
        Below P1 it is faster to compute experts where they lie, on the CPU; below P2 the link binds.
    balance_flop_per_byte : float
        Past it a larger batch no longer helps, only a larger micro-batch (Eq. 11).
    break_even_tokens : int or None
        Tokens in a batch from which copying the experts to the GPU beats computing them on the CPU.
    """

    p1_flop_per_byte: float
    p2_flop_per_byte: float
    balance_flop_per_byte: float
    break_even_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What the plan was asked for, as given.

    Attributes
    ----------
    hardware, model : mapping
        Name and self-contained document of each.
    cost_model : {"full", "paper"}
    max_hours : float
        Bound on one batch [h].
    pins : Pins
    command : tuple of str
        Words of the command as typed, after ``hrm``; none where a program made the plan.
    """

    hardware: Mapping[str, Any]
    model: Mapping[str, Any]
    cost_model: CostModel
    max_hours: float
    pins: Pins
    command: tuple[str, ...] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """The keys of the model's config.json, none where only its name was given."""
        found: Mapping[str, Any] = self.model.get("config", {})
        return found


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Shown):
    """The best policy found, what it should do, and what it was found for.

    Attributes
    ----------
    scenario : Scenario
    inputs : PlanInputs
    policy : Policy
    prediction : Prediction
    solver : SolverReport
    trivial : tuple of Trivial
        All in GPU memory, CPU only: never better than the plan.
    alternatives : tuple of Alternative
        Solved when disk is used, or when asked for.
    marginal_values : dict of str to float
        Token/s per GiB or GB/s more (`hrm.sensitivity`).
    turning_points : TurningPoints or None
    warnings, notes : tuple of str
        What a person should know before trusting the plan; what was assumed.
    refinement : Refinement or None
        What the simulator made of the best plans by prediction; None where it was not asked.
    executable_plan : ExecutablePlan or None
        The best plan that the runtime can run, where this is none and there is one (`hrm.executable`).
    """

    scenario: Scenario
    inputs: PlanInputs
    policy: Policy
    prediction: Prediction
    solver: SolverReport
    trivial: tuple[Trivial, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    marginal_values: Mapping[str, float]
    turning_points: TurningPoints | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refinement: Refinement | None = None
    executable_plan: ExecutablePlan | None = None

    @property
    def execution(self) -> Execution:
        """Whether the runtime can run it, and this machine now."""
        return describe_execution(
            self.scenario,
            self.policy,
            config=self.inputs.config,
            cost_model=self.inputs.cost_model,
            memory=self.prediction.memory,
        )

    @property
    def calibrated(self) -> bool:
        """Whether the profile has fitted or measured efficiencies, else it works from peaks."""
        return self.scenario.profile.efficiency != Efficiency()

    @property
    def interval(self) -> tuple[float, float] | None:
        """80 % interval of the throughput, from the errors of the published rows [token/s].

        None for Eq. 12's, and where the accelerator is emulated: those rows say nothing of such a machine.
        """
        from hrm.published.intervals import interval_of  # only where it is asked for: it reads a file

        if self.inputs.cost_model == "paper" or self.scenario.profile.gpu.host_cores:
            return None
        return interval_of(self.prediction.throughput_tokens_per_s, self.calibrated)

    @property
    def parallelism(self) -> dict[str, Any]:
        """How several GPUs work together."""
        gpus = self.scenario.profile.gpu.count
        return {"kind": "tensor" if gpus > 1 else "none", "degree": gpus}

    @property
    def bottleneck(self) -> str:
        """Phase and lane that set the larger part of the time; the paper's model has no prefill."""
        if self.inputs.cost_model == "paper":
            return f"decode: {self.prediction.decode.bottleneck}"
        return self.prediction.bottleneck

    @property
    def formats_as_run(self) -> dict[str, str]:
        """Storage of weights (routed experts) and KV cache, and arithmetic."""
        formats, model = self.scenario.formats, self.scenario.model
        return {"weights": formats.experts(model), "kv": formats.kv, "compute": formats.compute}

    def save(self, path: str | Path) -> Path:
        """Write it with its inputs, for `hrm simulate` and `hrm run`.

        Raises
        ------
        InputError
            The file cannot be written.
        """
        save_plan(self, Path(path))
        return Path(path)

    def print_to(self, console: Console) -> None:
        """The screen of `hrm plan`."""
        from hrm.report import print_plan  # it imports this module

        print_plan(self, console)

    def to_frame(self) -> pd.DataFrame:
        """A row per phase and resource: seconds of one pass over all layers [s], and the share of it that is busy."""
        import pandas as pd

        phases = {"prefill": self.prediction.prefill, "decode step": self.prediction.decode}
        return pd.DataFrame(
            [
                {
                    "phase": name,
                    "resource": lane.replace("_", " "),
                    "seconds": seconds,
                    "share busy": seconds / phase.seconds if phase.seconds else 0.0,
                    "bytes moved": phase.bytes_moved.get(lane),
                }
                for name, phase in phases.items()
                for lane, seconds in phase.lanes.items()
            ]
        )

    def to_dict(self, *, complete: bool = False) -> dict[str, Any]:
        """The plan as a JSON document; not-a-number becomes null.

        Parameters
        ----------
        complete : bool
            With the whole hardware profile, model config and prompt lengths, so that it can be run elsewhere.
        """
        workload, prediction = self.scenario.workload, self.prediction
        inputs: dict[str, Any] = {
            "hardware": {"name": self.inputs.hardware["name"]},
            "model": {"name": self.inputs.model["name"]},
            "workload": {
                "name": workload.name,
                "generation_length": workload.generation_length,
                "num_requests": workload.num_requests,
                "padded": workload.padded,
                "mean_prompt_tokens": workload.mean_prompt_tokens,
                "max_prompt_tokens": workload.max_prompt_tokens,
            },
            "weights_dtype": self.scenario.formats.weights,
            "cost_model": self.inputs.cost_model,
            "max_hours": self.inputs.max_hours,
            "pins": self.inputs.pins.given,
            "command": list(self.inputs.command),
        }
        if complete:
            profile, model = self.scenario.profile, self.scenario.model
            inputs["hardware"] = {**self.inputs.hardware, "origin": profile.origin}
            inputs["model"] = {**self.inputs.model, "origin": model.origin, "hub_id": model.hub_id}
            inputs["workload"] |= {
                "prompt_lengths": list(workload.prompt_lengths),
                "origin": workload.origin,
                "note": workload.note,
            }
        points = self.turning_points
        document = {
            "format": FORMAT,
            "hrm_version": __version__,
            "inputs": inputs,
            "policy": {**self.policy.to_dict(), "dtypes": self.formats_as_run},
            "parallelism": self.parallelism,
            "schedule": self.policy.schedule,
            "predicted": {
                "throughput_tokens_per_s": prediction.throughput_tokens_per_s,
                "interval_80_percent": None if self.interval is None else list(self.interval),
                "decode_throughput_tokens_per_s": prediction.decode_throughput_tokens_per_s,
                "prefill_s": prediction.prefill_s,
                "decode_s": prediction.decode_s,
                "startup_s": prediction.startup_s,
                "completion_s": prediction.completion_s,
                "num_batches": prediction.num_batches,
                "layer_latency_s": prediction.layer_latency_s,
                "bottleneck": self.bottleneck,
                "decode_step": _phase(prediction.decode),
                "prefill": _phase(prediction.prefill),
            },
            "memory": {level: _memory(use) for level, use in prediction.memory.items()},
            "solver": {
                "name": self.solver.name,
                "status": self.solver.status,
                "gap": self.solver.gap,
                "seconds": self.solver.seconds,
                "points_bounded": self.solver.points_bounded,
                "programs_solved": self.solver.programs_solved,
            },
            "trivial_plans": [
                {
                    "name": plan.name,
                    "throughput_tokens_per_s": plan.prediction.throughput_tokens_per_s if plan.prediction else None,
                    "reason": plan.reason,
                }
                for plan in self.trivial
            ],
            "alternatives": [
                {"name": each.name, "throughput_tokens_per_s": each.throughput_tokens_per_s, "note": each.note}
                for each in self.alternatives
            ],
            "marginal_values": dict(self.marginal_values),
            "turning_points": None
            if points is None
            else {
                "p1_flop_per_byte": points.p1_flop_per_byte,
                "p2_flop_per_byte": points.p2_flop_per_byte,
                "balance_flop_per_byte": points.balance_flop_per_byte,
                "break_even_tokens": points.break_even_tokens,
            },
            "refinement": None if self.refinement is None else self.refinement.to_dict(),
            "executable": self.execution.to_dict(),
            "executable_plan": None if self.executable_plan is None else self.executable_plan.to_dict(),
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }
        cleaned: dict[str, Any] = _without_nan(document)
        return cleaned


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "seconds": phase.seconds,
        "lanes_s": dict(phase.lanes),
        "bytes": dict(phase.bytes_moved),
        "bottleneck": phase.bottleneck,
    }


def _memory(use: MemoryUse) -> dict[str, Any]:
    return {
        "peak_bytes": use.peak_bytes,
        "limit_bytes": use.limit_bytes,
        "phase": use.phase,
        "terms": dict(use.terms),
    }


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null says that there is no such number."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return value


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan with its inputs.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    try:
        path.write_text(json.dumps(plan.to_dict(complete=True), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def read_plan_document(path: Path) -> tuple[Scenario, Policy, dict[str, Any]]:
    """Read what `save_plan` wrote: its scenario and policy, and the whole document.

    Raises
    ------
    InputError
        The file is no plan, or something in it makes no sense: names file, key and value.
    """
    try:
        return _read_plan(path)
    except InputError as error:
        if error.where.startswith(str(path)):
            raise
        raise InputError(error.fact, where=f"{path}: {error.where}".rstrip(": "), way_out=error.way_out) from None


def _read_plan(path: Path) -> tuple[Scenario, Policy, dict[str, Any]]:
    from hrm.families import read_spec
    from hrm.model_files import read_config_file
    from hrm.profile_files import profile_from_document
    from hrm.workload import Workload

    document = read_config_file(path, way_out="what hrm plan -o FILE writes")
    where = str(path)
    if document.get("format") != FORMAT:
        raise InputError(
            f"format is {document.get('format')!r}", where=where, way_out=f"a plan of format {FORMAT}: hrm plan -o FILE"
        )
    inputs = _at(document, "inputs", where)
    hardware, model = _at(inputs, "hardware", where), _at(inputs, "model", where)
    workload = _at(inputs, "workload", where)
    if "document" not in hardware or "config" not in model or "prompt_lengths" not in workload:
        raise InputError("this is the short form of a plan", where=f"{where}: inputs", way_out="hrm plan -o FILE")
    policy = _at(document, "policy", where)
    formats = _at(policy, "dtypes", where)
    profile = profile_from_document(
        _at(hardware, "document", f"{where}: inputs.hardware"),
        name=_text(hardware, "name", f"{where}: inputs.hardware"),
        origin=f"{where}: hardware",
    )
    spec = read_spec(
        _at(model, "config", f"{where}: inputs.model"),
        file=f"{where}: model",
        name=_text(model, "name", f"{where}: inputs.model"),
        hub_id=_text(model, "hub_id", f"{where}: inputs.model"),
    )
    lengths, place = workload["prompt_lengths"], f"{where}: inputs.workload"
    if not isinstance(lengths, list) or not isinstance(workload.get("padded"), bool):
        raise InputError("prompt_lengths is no list, or padded no flag", where=place, way_out="hrm plan -o FILE")
    weights = inputs.get("weights_dtype")
    scenario = Scenario(
        # Where the numbers once came from, so that the plan names it like the one that was saved.
        profile=replace(profile, origin=str(hardware.get("origin", profile.origin))),
        model=replace(spec, origin=str(model.get("origin", spec.origin))),
        workload=Workload(
            name=_text(workload, "name", place),
            prompt_lengths=tuple(lengths),
            generation_length=workload.get("generation_length"),  # type: ignore[arg-type]  # Workload refuses others
            num_requests=workload.get("num_requests"),  # type: ignore[arg-type]
            padded=workload["padded"],
            origin=_text(workload, "origin", place),
            note=_text(workload, "note", place),
        ),
        formats=Formats(
            weights=None if weights is None else _dtype(inputs, "weights_dtype", WEIGHT_DTYPES, f"{where}: inputs"),
            kv=_dtype(formats, "kv", KV_DTYPES, f"{where}: policy.dtypes"),
            compute=_dtype(formats, "compute", COMPUTE_DTYPES, f"{where}: policy.dtypes"),
        ),
    )
    found = Policy.from_dict(policy, where=where)
    _check_belongs(scenario, found, document, where)
    return scenario, found, document


def _check_belongs(scenario: Scenario, policy: Policy, document: Mapping[str, Any], where: str) -> None:
    """Refuse a plan whose policy and memory are those of other inputs than it has.

    Wherever a policy keeps the weights, on all levels together they are those of the model; so the memory that the plan
    states says which model, in which formats, it was made for.
    """
    model, requests = scenario.model, scenario.workload.num_requests
    if policy.ring_experts > model.streamed_experts:
        raise InputError(
            f"a ring of {policy.ring_experts} experts, but {model.name} has {model.streamed_experts} in a layer",
            where=f"{where}: policy.ring_experts",
            way_out=OTHER_INPUTS,
        )
    if policy.batch_size > requests:
        raise InputError(
            f"a batch of {policy.batch_size:,} of {requests:,} requests",
            where=f"{where}: policy.batch_size",
            way_out=OTHER_INPUTS,
        )
    inputs, memory = _at(document, "inputs", where), _at(document, "memory", where)
    if inputs.get("cost_model") == "paper":
        return  # its own terms, with two slots in CPU memory too
    stated = 0.0
    for level in memory:
        terms = _at(_at(memory, level, f"{where}: memory"), "terms", f"{where}: memory.{level}")
        stated += sum(size for term, size in terms.items() if term in WEIGHT_TERMS and isinstance(size, int | float))
    has = measure_sizes(scenario).weight_bytes
    if not math.isclose(stated, has, rel_tol=1e-6):
        raise InputError(
            f"it holds {stated / GIB:,.2f} GiB of weights, but {model.name} as its inputs have it "
            f"{has / GIB:,.2f} GiB: a plan of another model, or of other formats",
            where=f"{where}: memory",
            way_out=OTHER_INPUTS,
        )


def _text(document: Mapping[str, Any], key: str, where: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise InputError(f"the key {key!r} is missing or no text", where=where, way_out="hrm plan -o FILE")
    return value


def _dtype(document: Mapping[str, Any], key: str, allowed: Iterable[str], where: str) -> str:
    return parse_dtype(_text(document, key, where), where=f"{where}.{key}", allowed=allowed)


def _at(document: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise InputError(f"the key {key!r} is missing or no object", where=where, way_out="hrm plan -o FILE")
    return value

"""Of what a trace is: plan, schedule, names, and how far it can be trusted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hrm.graph import Lane
from hrm.scenario import Scenario

__all__ = ["TraceFacts", "facts_of_plan", "fingerprint_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """Of what a trace is, and how far it can be trusted.

    Attributes
    ----------
    plan : str
        `fingerprint_plan` of the plan.
    schedule : str
    layers : int
        Of the model.
    model, hardware, workload : str
        Names.
    paced : tuple of Lane
        Lanes whose tasks last as long as they were told to (an emulated accelerator): no evidence of anything.
    clock_error_s : float
        How far the clocks of two lanes, or two readings of one, may be apart [s].
    origin : mapping of str to str
        Whatever else says where it comes from: date, device, versions.
    """

    plan: str
    schedule: str
    layers: int
    model: str = ""
    hardware: str = ""
    workload: str = ""
    paced: tuple[Lane, ...] = ()
    clock_error_s: float = 0.0
    origin: Mapping[str, str] = field(default_factory=dict)


def fingerprint_plan(document: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that tell plans apart: by machine, model, workload and policy, not by how it was found.

    Parameters
    ----------
    document : mapping
        A plan as `hrm plan -o` saves it.
    """
    inputs = document["inputs"]
    workload = inputs["workload"]
    said = [
        inputs["hardware"]["document"],
        inputs["model"]["config"],
        [workload[key] for key in ("prompt_lengths", "generation_length", "num_requests", "padded")],
        inputs.get("weights_dtype"),
        document["policy"],
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def facts_of_plan(
    scenario: Scenario,
    document: Mapping[str, Any],
    *,
    schedule: str,
    paced: Iterable[Lane] = (),
    clock_error_s: float = 0.0,
    origin: Mapping[str, str] | None = None,
) -> TraceFacts:
    """The facts of a trace of a saved plan (`hrm.plans.read_plan_document` gives scenario and document)."""
    return TraceFacts(
        plan=fingerprint_plan(document),
        schedule=schedule,
        layers=scenario.model.n_layers,
        model=scenario.model.name,
        hardware=scenario.profile.name,
        workload=scenario.workload.name,
        paced=tuple(paced),
        clock_error_s=clock_error_s,
        origin=dict(origin or {}),
    )

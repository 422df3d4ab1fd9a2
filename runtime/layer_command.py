"""`hrm validate layer`: what the command does but for the prediction, which comes from the simulator."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hrm.errors import InputError
from hrm.executable import describe_execution
from hrm.executable_plans import nearest_runnable
from hrm.host_facts import read_host_facts
from hrm.plans import read_plan_document
from hrm.policy import Policy
from runtime.device import choose_device
from runtime.device_names import device_name, same_gpu
from runtime.layer_check import LayerRun, check_layer, repeat_layer
from runtime.layer_room import check_layer_room
from runtime.numerics import read_numerics

__all__ = ["MeasuredLayer", "measure_layer"]


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """What was measured, of which plan; `facts` is what a report says of plan and machine."""

    run: LayerRun
    policy: Policy
    schedule: str
    document: dict[str, Any]
    facts: dict[str, Any]


def measure_layer(
    plan: Path,
    *,
    schedule: str | None,
    device: str | None,
    repeats: int,
    seed: int,
    tell: Callable[[str], None] | None,
) -> MeasuredLayer:
    """Run one layer of a plan.

    Raises
    ------
    InputError
        The runtime has no kernel for the plan, or the machine no room for a layer of it.
    """
    scenario, policy, document = read_plan_document(plan)
    config: Mapping[str, Any] = document["inputs"]["model"]["config"]
    execution = describe_execution(
        scenario, policy, config=config, cost_model=document["inputs"].get("cost_model", "full")
    )
    if not execution.supported:
        raise InputError(
            f"this plan cannot be run: {execution.why}",
            where=str(plan),
            way_out=nearest_runnable(scenario, policy, document),
        )
    numerics = read_numerics(config, where=f"{plan}: inputs.model.config")
    found = choose_device(device, cpu_only=policy.everything_on_cpu)
    host = read_host_facts(Path(tempfile.gettempdir()))
    check_layer_room(repeat_layer(scenario, 1), policy, found, host)
    name = schedule or policy.schedule
    run = check_layer(scenario, policy, name, numerics, found, repeats=repeats, seed=seed, on_progress=tell)
    hardware = scenario.profile.name
    facts = {
        "title": f"One layer of {scenario.model.name} as planned for {hardware}",
        "plan": str(plan),
        "hardware": hardware,
        "model": scenario.model.name,
        "schedule": name,
        "policy": policy.to_dict(),
        "device": device_name(found),
        "same_machine": same_gpu(scenario.profile.gpu.name, found),
        "step": run.steps.first,
        "seed": seed,
        "torch": torch.__version__,
    }
    return MeasuredLayer(run, policy, name, document, facts)

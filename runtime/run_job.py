"""What `hrm run` is to run, and where: everything that can be refused before weights are loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hrm.errors import InputError
from hrm.executable import Execution, describe_execution
from hrm.executable_plans import nearest_runnable
from hrm.host_facts import HostFacts, read_host_facts
from hrm.output_files import check_file
from hrm.plans import read_plan_document
from hrm.policy import Policy
from hrm.scenario import Scenario, truncated
from hrm.schedules import Steps, check_schedule, middle_steps
from runtime.device import Device, choose_device

__all__ = ["Job", "check_files", "choose_machine", "choose_window", "read_job"]


@dataclass(frozen=True, slots=True)
class Job:
    """A plan as it is to be run: `scenario` has the layers that are run, `whole` all of them."""

    file: Path
    whole: Scenario
    scenario: Scenario
    policy: Policy
    schedule: str
    document: dict[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """The keys of the model's config.json."""
        found: Mapping[str, Any] = self.document["inputs"]["model"]["config"]
        return found


def check_files(plan: Path, *, trace: Path | None, output: Path | None, disk_dir: Path | None) -> None:
    """Refuse files that could not be written, before anything takes long."""
    seen: dict[Path, str] = {plan.resolve(): "PLAN"}
    named: Iterable[tuple[str, Path | None]] = (("--trace", trace), ("--output", output))
    for option, path in named:
        if path is None:
            continue
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"is also {other}", where=f"{option}: {path}", way_out="another file")
        check_file(path, f"{option}: {path}")
    if disk_dir is not None and not disk_dir.is_dir():
        raise InputError("no such folder", where=f"--disk-dir: {disk_dir}")


def read_job(file: Path, layers: int | None, schedule: str | None) -> Job:
    """Read a plan, and what of it is to be run.

    Raises
    ------
    InputError
        The file is no plan, the model has not so many layers, or the schedule cannot run the policy.
    """
    whole, policy, document = read_plan_document(file)
    scenario = whole if layers is None else truncated(whole, layers)
    name = schedule or policy.schedule
    check_schedule(name, policy)
    return Job(file, whole, scenario, policy, name, document)


def choose_window(job: Job, trace: Path | None, steps: int | None, full: bool) -> Steps | None:
    """Which passes the trace has: the same as that of `hrm simulate` with the same options."""
    if trace is None:
        if steps is not None or full:
            option = "--steps" if steps is not None else "--full"
            raise InputError("says what a trace has, and none is written", where=option, way_out="--trace FILE")
        return None
    decode = job.scenario.workload.generation_length - 1
    if full and steps is None:
        return Steps(prefill=True, last=decode)
    if decode == 0:
        raise InputError(
            "one token is generated, and prefill gives it: there is no decode step to show",
            where=str(job.file),
            way_out="--full, or plan with --gen-len 2 or more",
        )
    return middle_steps(decode, 1 if steps is None else steps)[1]


def choose_machine(job: Job, device: str | None, disk_dir: Path | None, paced: bool) -> Device:
    """Where it runs, if it can.

    Raises
    ------
    InputError
        The runtime has no kernel for the plan, or this machine no room: with the nearest plan that can be run.
    """
    cpu_only = job.policy.everything_on_cpu
    if device is not None:
        choose_device(device, cpu_only=cpu_only)
    host = read_host_facts(disk_dir or Path(tempfile.gettempdir()))
    if device == "cpu":
        host = replace(host, gpus=())
    found = _describe(job, job.scenario, host)
    if not found.here:
        way_out = nearest_runnable(job.whole, job.policy, job.document, host=host)
        fewer = _most_layers(job, host) if found.supported else 0
        if fewer:
            way_out += f"; or part of this one: --layers {fewer}"
        raise InputError(
            f"this plan cannot be run{' here' * found.supported}: {found.why}", where=str(job.file), way_out=way_out
        )
    if device == "cuda" and found.device != "cuda":
        raise InputError(f"this plan would run {found.why}", where="--device cuda", way_out="--device cpu, or neither")
    chosen = choose_device(device or found.device, cpu_only=cpu_only)
    if paced and not chosen.emulated:
        fact = "nothing is emulated, links have the rate they have"
        raise InputError(fact, where="--pace-links", way_out="--device cpu and a plan that uses a GPU")
    return chosen


def _describe(job: Job, scenario: Scenario, host: HostFacts) -> Execution:
    return describe_execution(
        scenario,
        job.policy,
        config=job.config,
        cost_model=job.document["inputs"].get("cost_model", "full"),
        host=host,
    )


def _most_layers(job: Job, host: HostFacts) -> int:
    """Layers of the model, from the first on, that fit here under the plan; 0 where not one does."""
    model = job.scenario.model
    fits = 0
    for layers in range(1, model.n_layers):
        if any(model.moe_layers[:layers]) or not model.is_moe:
            if not _describe(job, truncated(job.scenario, layers), host).here:
                break
            fits = layers
    return fits

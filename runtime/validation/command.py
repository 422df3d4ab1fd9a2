"""`hrm validate run`: the part that needs torch. A plan becomes a measurer of its candidates on this machine."""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hrm import __version__
from hrm.host_facts import HostFacts, read_host_facts
from runtime.device import Device, choose_device
from runtime.device_names import device_name, same_gpu
from runtime.run_command import check_model, open_weights
from runtime.run_job import Job, choose_machine, read_job
from runtime.validation.measurer import RuntimeMeasurer

__all__ = ["Bench", "describe_machine", "open_bench", "same_machine"]

LOADED_SHARE = 0.6
"""Of the memory that is free, what models may stay loaded in between their runs."""

EMULATED = "emulated"
"""The word in a profile's name of its GPU that says it was calibrated with the accelerator emulated."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A plan, this machine, and what measures candidates on it.

    Attributes
    ----------
    job : Job
    host : HostFacts
        What is free here; without GPUs where the CPU is to stand in for one.
    measurer : RuntimeMeasurer
    facts : dict
        Device, machine and versions, for the report.
    """

    job: Job
    host: HostFacts
    measurer: RuntimeMeasurer
    facts: dict[str, Any]


def open_bench(
    plan_file: Path,
    *,
    model_dir: Path | None,
    random_weights: bool,
    layers: int | None,
    device: str | None,
    schedule: str | None,
    disk_dir: Path | None,
    seed: int,
    tell: Callable[[str], None],
) -> Bench:
    """Everything that can be refused is, before anything takes long.

    Raises
    ------
    InputError
        The plan cannot be run, or not here; the weights are not said, or are another model's.
    """
    job = read_job(plan_file, layers, schedule)
    machine = choose_machine(job, device, disk_dir, False)
    numerics = check_model(job, model_dir, random_weights, where="hrm validate run")
    host = read_host_facts(disk_dir or Path(tempfile.gettempdir()))
    if not machine.cuda:
        host = replace(host, gpus=())
    source, notes = open_weights(job, model_dir, numerics, seed)
    measurer = RuntimeMeasurer(
        scenario=job.scenario,
        source=source,
        numerics=numerics,
        device=choose_device(machine.kind, cpu_only=False),
        cpu_device=choose_device("cpu", cpu_only=True),
        room=0.0 if machine.cuda else LOADED_SHARE * host.cpu_bytes,
        disk_dir=disk_dir,
        seed=seed,
        tell=tell,
    )
    facts = {
        "device": machine.kind,
        "device_name": device_name(machine),
        "emulated": machine.emulated,
        "same_machine": same_machine(job.scenario.profile.gpu.name, machine),
        "weights": "random" if model_dir is None else model_dir.absolute().name,
        "machine": describe_machine(host),
        "versions": {"hrm": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
        "notes": list(notes),
    }
    return Bench(job, host, measurer, facts)


def same_machine(name: str, device: Device) -> bool | None:
    """Whether a profile with a GPU of that name has the rates of what runs: of this GPU, or of the emulated one."""
    if device.cuda:
        return same_gpu(name, device)
    return EMULATED in name.lower()


def describe_machine(host: HostFacts) -> dict[str, Any]:
    """System, processor, memory and GPU, for a report."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": device_name(choose_device("cpu", cpu_only=True)),
        "free_memory_bytes": host.cpu_bytes,
        "python": sys.version.split()[0],
    }
    if host.gpus:
        found["gpu"] = str(torch.cuda.get_device_name())
        found["cuda"] = str(torch.version.cuda)
        found["gpu_memory_bytes"] = float(torch.cuda.get_device_properties(0).total_memory)
    return found

"""A plan for this machine, as it is now, without being told of one: `hrm run --hw auto`.

What is free of memory is looked up; rates are not measured. They are those that `hrm calibrate` measured here
for the GPU, or else those of the bundled profile with the same GPU and about as many cores, and a CPU with fewer cores
than that profile's host counts for its share of it. Where there is no GPU, everything is planned on the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hrm.calibrated_profile import AUTO, calibrated_path
from hrm.errors import InfeasibleError, InputError
from hrm.executable import PROCESS_BYTES
from hrm.executable_plans import with_executable_plan
from hrm.families import read_spec
from hrm.host_facts import HostFacts
from hrm.model_files import find_config
from hrm.planning import make_plan
from hrm.plans import Plan
from hrm.profile import HardwareProfile
from hrm.profile_files import load_profile, profile_document, profile_names, with_overrides
from hrm.scenario import Scenario, choose_formats
from hrm.units import GIB
from hrm.workload import Workload
from runtime.device_names import same_gpu_name
from runtime.jobs.progress import rate_text

__all__ = ["describe_choice", "guess_profile", "plan_here"]

SHARE = 0.9
"""Of what is free now, what a plan may take: something else may start meanwhile."""

WITHOUT_GPU = "l4"
"""Whose host's CPU is taken for a machine without a GPU."""

SLOW_DISK = {"disk.read": "0.5 GB/s", "disk.write": "0.25 GB/s"}
"""Of a disk that nobody measured; only for a plan that does not fit without."""


def guess_profile(host: HostFacts, *, disk: bool = False) -> tuple[HardwareProfile, str]:
    """A cautious profile of a machine, and what it was made of, in words.

    Parameters
    ----------
    host : HostFacts
    disk : bool
        With a disk tier, taken to be slow.

    Raises
    ------
    InputError
        A GPU that no bundled profile has.
    """
    gpu = host.gpus[0] if host.torch == "cuda" and host.gpus else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if gpu is None:
        base, words = load_profile(WITHOUT_GPU), f"no CUDA GPU, the CPU of {WITHOUT_GPU}"
    elif (measured := _measured_here()) is not None:
        base, words = measured, f"{gpu.name}, as hrm calibrate measured this machine"
    else:
        named = [name for name in profile_names() if _is_profile_of(name, gpu.name)]
        if not named:
            raise InputError(
                f"no bundled profile has a {gpu.name}",
                where=f"--hw {AUTO}",
                way_out="hrm calibrate, which measures one, or --hw with a profile of this machine",
            )
        nearest = min(named, key=lambda name: (abs(math.log(load_profile(name).cpu.cores / cores)), name))
        base, words = load_profile(nearest), f"{gpu.name}, rates of {nearest}"
    share = min(1.0, cores / base.cpu.cores)
    changes: dict[str, object] = {
        "cpu.memory": _gib(SHARE * host.cpu_bytes),
        "cpu.reserved": _gib(PROCESS_BYTES),
        "cpu.cores": str(min(cores, base.cpu.cores)),
        "cpu.bandwidth": f"{base.cpu.bandwidth_bytes_per_s * share / 1e9:.4g} GB/s",
    }
    if gpu is None:
        changes |= {"gpu.usable_memory": "1 MB", "gpu.context": "1 MB"}  # no room for any plan but that of the CPU
    else:
        changes["gpu.usable_memory"] = _gib(min(SHARE * gpu.free_bytes, base.gpu.usable_memory_bytes))
    for key, quantity in base.quantities.items():
        if key.startswith("cpu.peak."):
            changes[key] = f"{quantity.value * share / 1e12:.4g} TFLOPS"
    if disk:
        changes |= {"disk.size": _gib(SHARE * host.disk_bytes)} | ({} if base.disk is not None else SLOW_DISK)
    else:
        changes["disk"] = None
    words += f" at {cores} of {base.cpu.cores} cores" if share < 1.0 else ""
    if disk and base.disk is None:
        words += ", a slow disk"
    words += f"; {host.cpu_bytes / GIB:.1f} GiB of CPU memory"
    words += f" and {gpu.free_bytes / GIB:.1f} GiB of GPU memory are free" if gpu else " are free"
    return with_overrides(base, changes), words


def _measured_here() -> HardwareProfile | None:
    """What `hrm calibrate` measured here, if that was a GPU: beside an emulated one it measures one core of the CPU."""
    path = calibrated_path()
    profile = load_profile(str(path)) if path.is_file() else None
    return profile if profile is not None and not profile.gpu.host_cores else None


def plan_here(
    model_dir: Path,
    workload: Workload,
    host: HostFacts,
    *,
    hardware: str = AUTO,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Plan, str]:
    """The best plan for some requests on this machine, or on that of a profile, and what was assumed, in words.

    Raises
    ------
    InfeasibleError
        No plan fits.
    InputError
        No such profile, or a model that cannot be planned.
    """
    config = find_config(str(model_dir / "config.json"))
    if hardware != AUTO:
        return _plan(load_profile(hardware), config, workload, on_progress), f"profile {hardware}"
    profile, words = guess_profile(host)
    try:
        return _plan(profile, config, workload, on_progress), words
    except InfeasibleError:
        profile, words = guess_profile(host, disk=True)
        return _plan(profile, config, workload, on_progress), words


def _plan(
    profile: HardwareProfile,
    config: dict[str, Any],
    workload: Workload,
    on_progress: Callable[[str], None] | None,
) -> Plan:
    spec = read_spec(**config)
    scenario = Scenario(profile=profile, model=spec, workload=workload, formats=choose_formats(profile, spec))
    found = make_plan(
        scenario,
        hardware={"name": profile.name, "document": profile_document(profile)},
        model={"name": spec.name, "config": config["values"]},
        on_progress=on_progress,
    )
    return with_executable_plan(found, (), on_progress=on_progress)


def describe_choice(plan: Plan, assumed: str) -> str:
    """What was chosen, in a line."""
    policy, predicted = plan.policy, plan.prediction
    if policy.everything_on_cpu:
        where = "everything on the CPU"
    else:
        where = (
            f"attention on the {'GPU' if policy.attention_on_gpu else 'CPU'}, {policy.weights_on_gpu:.0%} of the "
            f"experts and {policy.kv_on_gpu:.0%} of the KV cache on the GPU"
        )
    parts = f"{policy.num_micro_batches:,} micro-batch{'es' * (policy.num_micro_batches > 1)}"
    return (
        f"planned for {assumed}: batches of {policy.batch_size:,} in {parts}, "
        f"{where}, schedule {policy.schedule}; {rate_text(predicted.throughput_tokens_per_s)} token/s predicted"
    )


def _is_profile_of(name: str, gpu: str) -> bool:
    """A profile of one such GPU as it is; those of papers have other numbers on purpose."""
    profile = load_profile(name)
    plain = profile.gpu.count == 1 and not name.endswith(("-paper", "-figures"))
    return plain and same_gpu_name(profile.gpu.name, gpu) is True


def _gib(size: float) -> str:
    return f"{max(0.0, size) / GIB:.3f} GiB"

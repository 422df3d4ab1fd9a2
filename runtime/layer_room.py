"""Whether this machine has the memory that one layer of a plan takes.

Pages come with the first write, so memory that is not there would end in the kernel killing the process.
"""

from __future__ import annotations

from hrm.errors import InputError
from hrm.executable import PROCESS_BYTES, in_gib
from hrm.host_facts import HostFacts
from hrm.policy import Policy
from hrm.prediction import memory_by_phase
from hrm.scenario import Scenario, measure_sizes
from hrm.trivial import cpu_only_memory
from runtime.device import Device

__all__ = ["check_layer_room", "layer_bytes"]

LATER_TERMS = ("KV cache", "hidden states of all prompts")
"""What is made when the weights are loaded, and the tables they were made from are gone."""


def layer_bytes(one: Scenario, policy: Policy, device: Device) -> dict[str, float]:
    """What a check of one layer takes of every level: its weights and KV cache, the tables, the buffers [byte].

    Parameters
    ----------
    one : Scenario
        Of a model of that layer alone (`runtime.layer_check.repeat_layer`); the batch is the plan's.
    """
    sizes = measure_sizes(one)
    if policy.everything_on_cpu:
        found = {level: dict(use.terms) for level, use in cpu_only_memory(one, sizes, policy).items()}
    else:
        phases = memory_by_phase(one, sizes, policy)
        found = {level: dict(uses[0].terms) for level, uses in phases.items()}
        found["gpu"] = dict(next(use for use in phases["gpu"] if use.phase == "decode").terms)
        for level, uses in phases.items():
            for term, size in (item for use in uses for item in use.terms.items()):
                if term != "activations":  # no prefill is run, but its slots for weights are there
                    found[level][term] = max(size, found[level].get(term, 0.0))
    found["gpu"].pop("reserve", None)
    if not device.cuda:
        found["gpu"].pop("CUDA context", None)
        found["cpu"].pop("hidden states of all prompts", None)  # reserved for prefill, never written
    if policy.pin_weights and not policy.weights_on_disk:
        found["cpu"].pop("weight staging buffers", None)  # nothing passes them
    later = sum(found["cpu"].get(term, 0.0) for term in LATER_TERMS)
    table = max(sizes.embedding_bytes, sizes.lm_head_bytes)  # random ones are drawn here and then put in their place
    source = sizes.dense_bytes + max(0.0, table - later)
    return {level: sum(terms.values()) for level, terms in found.items()} | {
        "cpu": sum(found["cpu"].values()) + source + PROCESS_BYTES
    }


def check_layer_room(one: Scenario, policy: Policy, device: Device, host: HostFacts) -> None:
    """Refuse a layer that this machine has no room for.

    Raises
    ------
    InputError
        Says what is needed and what is free.
    """
    needs = layer_bytes(one, policy, device)
    checks = [("CPU memory", needs["cpu"], host.cpu_bytes), ("disk", needs["disk"], host.disk_bytes)]
    if device.cuda and host.gpus:
        checks.insert(0, (f"memory on {host.gpus[0].name}", needs["gpu"], host.gpus[0].free_bytes))
    elif device.emulated:
        checks[0] = ("CPU memory, for GPU and CPU", needs["cpu"] + needs["gpu"], host.cpu_bytes)
    for what, needed, free in checks:
        if needed > free:
            raise InputError(
                f"one layer of this plan takes {in_gib(needed)} of {what}, {in_gib(free)} are free",
                where="hrm validate layer",
                way_out="a plan for less: hrm plan with a smaller --batch, --set gpu.usable_memory=... or "
                "--set cpu.memory=...",
            )

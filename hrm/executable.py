"""Whether the project's runtime can run a plan, and whether this machine can run it now, without importing torch.

What the runtime has kernels for is stated here, and the runtime reads it here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hrm.dtypes import bytes_per_value
from hrm.errors import InputError
from hrm.host_facts import GpuFacts, HostFacts, read_host_facts
from hrm.numerics import RUNTIME_FAMILIES, read_numerics
from hrm.policy import Policy
from hrm.prediction import MemoryUse
from hrm.rates import derive_rates
from hrm.scenario import Scenario, measure_sizes
from hrm.units import GIB, MIB

__all__ = [
    "RUNTIME_DTYPES",
    "RUNTIME_FAMILIES",
    "ExecutablePlan",
    "Execution",
    "describe_execution",
    "formats_without_kernels",
    "in_gib",
    "in_words",
    "kernels_lacking_for_model",
    "weights_of_another_size",
]

RUNTIME_DTYPES = ("fp32", "bf16", "fp16")

PROCESS_BYTES = 512 * MIB
"""Python and torch, beside what a plan counts: 223 MB measured with torch 2.13 for CPUs, the rest room for CUDA's part
(estimated) [byte]."""

BF16_CAPABILITY = (8, 0)
"""Compute capability from which NVIDIA GPUs compute in bf16 (Ampere; a T4 has 7.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Whether a plan can be run.

    Attributes
    ----------
    supported : bool
        The runtime has every kernel the plan needs.
    here : bool
        This machine can run it now.
    device : {"cuda", "cpu"} or None
        What would run it here: "cpu" where all is on the CPU, or where a CPU stands in for the accelerator.
    why : str
        In words.
    """

    supported: bool
    here: bool
    device: Literal["cuda", "cpu"] | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """As the JSON document has it."""
        return {"supported": self.supported, "here": self.here, "device": self.device, "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutablePlan:
    """The best plan that the runtime has every kernel for, where the best plan is none.

    Attributes
    ----------
    policy : Policy
    throughput_tokens_per_s : float
        Predicted [token/s].
    differences : tuple of str
        What is otherwise than in the best plan, e.g. "weights bf16 instead of int4".
    command : str
        What makes it.
    """

    policy: Policy
    throughput_tokens_per_s: float
    differences: tuple[str, ...]
    command: str

    def to_dict(self) -> dict[str, Any]:
        """As the JSON document has it."""
        return {
            "policy": self.policy.to_dict(),
            "schedule": self.policy.schedule,
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            "differences": list(self.differences),
            "command": self.command,
        }


def describe_execution(
    scenario: Scenario,
    policy: Policy,
    *,
    config: Mapping[str, Any] | None = None,
    cost_model: str = "full",
    memory: Mapping[str, MemoryUse] | None = None,
    host: HostFacts | None = None,
) -> Execution:
    """Whether the runtime can run a policy, and whether this machine can now.

    Parameters
    ----------
    scenario : Scenario
    policy : Policy
    config : mapping, optional
        The keys of the model's config.json: what its shape does not say.
    cost_model : {"full", "paper"}
        Plans of the paper's model leave out what a run needs.
    memory : mapping of str to MemoryUse, optional
        Peaks by level; predicted if not given.
    host : HostFacts, optional
        What to run it on; this machine if not given.
    """
    lacking = _kernels_lacking(scenario, policy, config or {}, cost_model)
    if lacking:
        return Execution(supported=False, here=False, device=None, why=f"the runtime has {', '.join(lacking)}")
    if memory is None:
        from hrm.trivial import predict_policy

        sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
        memory = predict_policy(scenario, sizes, rates, policy).memory
    host = host or read_host_facts()
    if host.torch is None:
        return Execution(
            supported=True, here=False, device=None, why="torch is not installed (pip install '.[runtime]')"
        )
    return _place(scenario, policy, memory, host)


def _place(scenario: Scenario, policy: Policy, memory: Mapping[str, MemoryUse], host: HostFacts) -> Execution:
    """Where a plan would run on a machine: on its GPU if that fits, else on its CPU in place of it."""
    on_gpu, on_cpu = _without(memory["gpu"], "reserve"), memory["cpu"].peak_bytes + PROCESS_BYTES
    gpu, misses = (None, []) if policy.everything_on_cpu else _gpu_for(scenario, on_gpu, on_cpu, host)
    device: Literal["cuda", "cpu"] = "cpu" if gpu is None else "cuda"
    if gpu is not None:
        where = f"on {gpu.name}, in {_of(on_gpu, gpu.free_bytes)} free there and {_of(on_cpu, host.cpu_bytes)} free"
        if policy.pin_weights and memory["cpu"].peak_bytes > host.lockable_bytes:
            where += (
                f"; the limit of page-locked memory is {in_gib(host.lockable_bytes)} (ulimit -l), CUDA may go beyond"
            )
    elif policy.everything_on_cpu:
        where = f"on the CPU, in {_of(on_cpu, host.cpu_bytes)} of memory that are free"
        if on_cpu > host.cpu_bytes:
            misses = [_too_much("CPU memory", on_cpu, host.cpu_bytes)]
    else:
        both = on_cpu + _without(memory["gpu"], "reserve", "CUDA context")
        where = f"on the CPU, which stands in for the accelerator ({'; '.join(misses)}), in "
        where += f"{_of(both, host.cpu_bytes)} of memory that are free"
        misses = [*misses, _too_much("CPU memory for both", both, host.cpu_bytes)] if both > host.cpu_bytes else []
    on_disk = memory["disk"].peak_bytes
    if on_disk > host.disk_bytes:
        misses = [*misses, _too_much("disk", on_disk, host.disk_bytes)]
    if misses:
        return Execution(supported=True, here=False, device=None, why="; ".join(misses))
    return Execution(supported=True, here=True, device=device, why=where)


def _without(use: MemoryUse, *terms: str) -> float:
    """Peak of a level less what a plan counts and no run takes [byte]."""
    return use.peak_bytes - sum(use.terms.get(term, 0.0) for term in terms)


def _kernels_lacking(scenario: Scenario, policy: Policy, config: Mapping[str, Any], cost_model: str) -> list[str]:
    """What the runtime would need and does not have."""
    formats = scenario.formats
    lacking = kernels_lacking_for_model(scenario, config)
    if scenario.model.family not in RUNTIME_FAMILIES:
        return lacking
    odd = formats_without_kernels(scenario)
    if odd:
        lacking.append(f"no kernels for weights in {' and '.join(odd)}")
    other = weights_of_another_size(scenario)
    if other:  # they would take another size than the plan counts
        said = f"weights in {' and '.join(other)} beside arithmetic in {formats.compute}"
        lacking.append(f"no way to keep {said}: it keeps them in the format of the arithmetic")
    if formats.kv not in RUNTIME_DTYPES:
        lacking.append(f"no kernels for a KV cache in {formats.kv}")
    if formats.compute not in RUNTIME_DTYPES:
        lacking.append(f"no arithmetic in {formats.compute}")
    if scenario.profile.gpu.count > 1 and not policy.everything_on_cpu:
        lacking.append(f"no way to use {scenario.profile.gpu.count} GPUs")
    if cost_model == "paper":
        lacking.append("no use for a plan of Eqs. 12-14, which leaves out embedding, lm_head and prefill")
    return lacking


def kernels_lacking_for_model(scenario: Scenario, config: Mapping[str, Any]) -> list[str]:
    """What the runtime would need for a model, whatever the plan."""
    model = scenario.model
    if model.family not in RUNTIME_FAMILIES:
        return [f"no kernels for models of the family {model.family}, only for {in_words(RUNTIME_FAMILIES)}"]
    lacking = []
    if model.dense_vector_parameters:  # some checkpoints of the family llama (mlp_bias)
        lacking.append("no kernel for an MLP with biases")
    if config:
        try:
            read_numerics(config, where="config.json")
        except InputError as error:
            key, known = error.where.removeprefix("config.json: "), "the runtime has "
            if error.fact.startswith(known):
                lacking.append(error.fact.removeprefix(known))
            else:
                lacking.append(f"no reading of its config.json ({key}: {error.fact})")
    return list(dict.fromkeys(lacking))


def formats_without_kernels(scenario: Scenario) -> list[str]:
    """Formats of weights that the runtime does not have."""
    return [dtype for dtype in _stored_formats(scenario) if dtype not in RUNTIME_DTYPES]


def weights_of_another_size(scenario: Scenario) -> list[str]:
    """Formats of weights, of those the runtime has, whose values are larger or smaller than those of the arithmetic.

    The runtime keeps all weights in the format of the arithmetic: bf16 in place of fp16 takes as many bytes as the plan
    counts, fp32 in place of either does not.
    """
    compute = scenario.formats.compute
    if compute not in RUNTIME_DTYPES:
        return []
    known = [dtype for dtype in _stored_formats(scenario) if dtype in RUNTIME_DTYPES]
    return [dtype for dtype in known if bytes_per_value(dtype) != bytes_per_value(compute)]


def _stored_formats(scenario: Scenario) -> list[str]:
    """Of experts, of other matrices, and of tables and vectors; each once."""
    model, formats = scenario.model, scenario.formats
    tables = model.table_dtype(formats.weights)
    return list(dict.fromkeys((formats.experts(model), formats.linear(model), tables)))


def _gpu_for(scenario: Scenario, on_gpu: float, on_cpu: float, host: HostFacts) -> tuple[GpuFacts | None, list[str]]:
    """The device that would run a plan of so many bytes, which is the first, as torch takes it; else why none would."""
    if not host.gpus:
        return None, ["no CUDA device here"]
    if host.torch == "cpu":
        return None, ["torch is built without CUDA here"]
    gpu = host.gpus[0]
    misses = []
    if scenario.formats.compute == "bf16" and gpu.compute_capability < BF16_CAPABILITY:
        misses.append(f"{gpu.name} has no bf16")
    if on_gpu > gpu.free_bytes:
        misses.append(_too_much(f"memory on {gpu.name}", on_gpu, gpu.free_bytes))
    if on_cpu > host.cpu_bytes:
        misses.append(_too_much("CPU memory", on_cpu, host.cpu_bytes))
    return (None if misses else gpu), misses


def _too_much(what: str, needed: float, has: float) -> str:
    return f"needs {in_gib(needed)} of {what} ({in_gib(has)} free)"


def _of(needed: float, has: float) -> str:
    return f"{in_gib(needed)} of the {in_gib(has)}"


def in_gib(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / GIB:,.1f} GiB"


def in_words(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]

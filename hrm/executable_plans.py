"""The nearest plan that the runtime can run: beside a plan that it cannot, and as the way out where it refuses one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hrm.errors import HrmError
from hrm.executable import (
    BF16_CAPABILITY,
    PROCESS_BYTES,
    RUNTIME_DTYPES,
    RUNTIME_FAMILIES,
    ExecutablePlan,
    describe_execution,
    formats_without_kernels,
    in_gib,
    in_words,
    kernels_lacking_for_model,
    weights_of_another_size,
)
from hrm.host_facts import HostFacts, read_host_facts
from hrm.pins import Pins
from hrm.policy import Policy
from hrm.profile_files import with_overrides
from hrm.scenario import Scenario, choose_formats
from hrm.units import GIB

if TYPE_CHECKING:
    from hrm.plans import Plan
    from hrm.search import SearchResult

__all__ = ["nearest_runnable", "with_executable_plan"]

FREE_SHARE = 0.95
"""Of what is free now, what a plan for it may take: something else may start meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nearby:
    """Inputs that differ from those of a plan: in what, in words, and the options that say so."""

    scenario: Scenario
    differences: tuple[str, ...] = ()
    options: Mapping[str, str]

    def changed(self, scenario: Scenario, difference: str, option: str, value: str) -> _Nearby:
        """With one more difference."""
        return _Nearby(
            scenario=scenario,
            differences=(*self.differences, difference),
            options={**self.options, option: value},
        )


def with_executable_plan(
    plan: Plan, words: Sequence[str] = (), *, on_progress: Callable[[str], None] | None = None
) -> Plan:
    """The plan with the command that made it and, where the runtime cannot run it, the best plan that it can.

    Only then is there a second search: for weights, KV cache and arithmetic in formats the runtime has, on one GPU.

    Parameters
    ----------
    plan : Plan
    words : sequence of str
        The command as it was typed, after ``hrm``.
    on_progress : callable, optional
        Called with a line of text now and then.
    """
    plan = replace(plan, inputs=replace(plan.inputs, command=tuple(words)))
    if plan.inputs.cost_model == "paper":
        return plan
    nearby = _with_kernels(plan.scenario, plan.policy, plan.inputs.config)
    if nearby is None or not nearby.differences:
        return plan
    if on_progress is not None:
        on_progress("searching a plan that the runtime can run")
    found = _search(nearby, plan.inputs.pins, plan.inputs.max_hours)
    if found is None:
        said = f"with {in_words(nearby.differences)}, as the runtime would need it, no plan fits."
        return replace(plan, notes=(*plan.notes, said))
    return replace(
        plan,
        executable_plan=ExecutablePlan(
            policy=found.policy,
            throughput_tokens_per_s=found.prediction.throughput_tokens_per_s,
            differences=nearby.differences,
            command=_command(words, nearby.options),
        ),
    )


def nearest_runnable(
    scenario: Scenario, policy: Policy, document: Mapping[str, Any], *, host: HostFacts | None = None
) -> str:
    """A sentence that names the nearest plan which runs here, and the command that makes it: the way out of a refusal.

    Parameters
    ----------
    scenario : Scenario
    policy : Policy
    document : mapping
        Of the plan: `Plan.to_dict`, or as `read_plan_document` read it.
    host : HostFacts, optional
        What to run it on; this machine if not given.
    """
    host = host or read_host_facts()
    inputs = document.get("inputs", {})
    config = inputs.get("model", {}).get("config", {})
    nearby = _with_kernels(scenario, policy, config)
    if nearby is None:
        return f"it runs other models, of {in_words(RUNTIME_FAMILIES)}; hrm simulate replays this plan"
    if host.torch is None:
        return "pip install '.[runtime]' installs torch"
    if inputs.get("cost_model") == "paper":
        nearby = nearby.changed(nearby.scenario, "the full cost model", "--cost-model", "full")
    pins, max_hours, words = _pins(inputs), float(inputs.get("max_hours", 24.0)), inputs.get("command", [])
    for each in (nearby, _fitted(nearby, host)):
        found = _search(each, pins, max_hours)
        if found is not None and describe_execution(each.scenario, found.policy, config=config, host=host).here:
            rate = f"{found.prediction.throughput_tokens_per_s:,.2f} token/s predicted"
            with_ = f" with {in_words(each.differences)}" if each.differences else ""
            return f"the nearest plan that runs here{with_}, {rate}: {_command(words, each.options)}"
    gpus = ", ".join(f"{in_gib(gpu.free_bytes)} on {gpu.name}" for gpu in host.gpus) or "no CUDA device"
    free = f"{in_gib(host.cpu_bytes)} of CPU memory, {in_gib(host.disk_bytes)} of disk and {gpus}"
    return f"no plan of {scenario.model.name} fits what is free here, {free}: a smaller model (hrm models)"


def _with_kernels(scenario: Scenario, policy: Policy, config: Mapping[str, Any]) -> _Nearby | None:
    """The nearest inputs whose plans the runtime has every kernel for; None where no choice of inputs is enough."""
    model, formats = scenario.model, scenario.formats
    if kernels_lacking_for_model(scenario, config):
        return None
    nearby = _Nearby(scenario=scenario, options={})
    weights, kv, compute = formats.weights, formats.kv, formats.compute
    odd = formats_without_kernels(scenario)
    if odd:
        weights = model.checkpoint_dtype if model.checkpoint_dtype in RUNTIME_DTYPES else "bf16"
    default = choose_formats(scenario.profile, model, weights=weights)
    compute = compute if compute in RUNTIME_DTYPES else default.compute
    kv = kv if kv in RUNTIME_DTYPES else choose_formats(scenario.profile, model, weights=weights, compute=compute).kv
    other = weights_of_another_size(replace(scenario, formats=replace(formats, compute=compute)))
    if weights_of_another_size(replace(scenario, formats=replace(formats, weights=weights, compute=compute))):
        weights = compute
    before = list(dict.fromkeys((*odd, *other)))
    changed = replace(scenario, formats=replace(formats, weights=weights, kv=kv, compute=compute))
    for what, option, planned, after in (
        ("weights", "--weights-dtype", " and ".join(before), weights if before else ""),
        ("KV cache", "--kv-dtype", formats.kv, kv),
        ("arithmetic", "--compute-dtype", formats.compute, compute),
    ):
        if after and after != planned:
            nearby = nearby.changed(changed, f"{what} {after} instead of {planned}", option, after)
    gpus = scenario.profile.gpu.count
    if gpus > 1 and not policy.everything_on_cpu:
        nearby = _set(nearby, "gpu.count", "1", f"one GPU instead of {gpus}")
    return nearby


def _fitted(nearby: _Nearby, host: HostFacts) -> _Nearby:
    """The same on a machine with no more memory than is free here; a CPU's is cut in two to stand in for both."""
    profile, formats = nearby.scenario.profile, nearby.scenario.formats
    room = FREE_SHARE * (host.cpu_bytes - PROCESS_BYTES)
    gpu = host.gpus[0] if host.torch == "cuda" and host.gpus else None
    on_gpu = FREE_SHARE * gpu.free_bytes if gpu is not None else room / 2.0
    if gpu is not None and formats.compute == "bf16" and gpu.compute_capability < BF16_CAPABILITY:
        computed = replace(nearby.scenario, formats=replace(formats, compute="fp16"))
        nearby = nearby.changed(computed, "arithmetic fp16 instead of bf16", "--compute-dtype", "fp16")
    on_gpu = min(on_gpu, profile.gpu.usable_memory_bytes)
    on_cpu = (room if gpu is not None else room - on_gpu) + profile.cpu.reserved_bytes
    on_disk = FREE_SHARE * host.disk_bytes
    limits = [
        ("gpu.usable_memory", "GPU memory", on_gpu, profile.gpu.usable_memory_bytes),
        ("cpu.memory", "CPU memory", on_cpu, profile.cpu.memory_bytes),
        ("disk.size", "disk", on_disk, profile.disk.size_bytes if profile.disk else 0.0),
    ]
    for key, what, limit, before in limits:
        if limit < before:
            text = f"{math.floor(limit / GIB * 100) / 100:.2f} GiB"
            nearby = _set(nearby, key, text, f"{text} of {what} instead of {before / GIB:,.2f}")
    return nearby


def _set(nearby: _Nearby, key: str, value: str, difference: str) -> _Nearby:
    """With one number of the profile replaced."""
    scenario = nearby.scenario
    changed = replace(scenario, profile=with_overrides(scenario.profile, {key: value}))
    return nearby.changed(changed, difference, f"--set {key}", value)


def _search(nearby: _Nearby, pins: Pins, max_hours: float) -> SearchResult | None:
    """What `hrm plan` would find for these inputs; None where nothing fits."""
    from hrm.search import find_policy

    if pins.weights_on_gpu:
        pins = replace(pins, ffn_on_gpu=True)
    try:
        return find_policy(nearby.scenario, pins, max_hours=max_hours, explain=False)
    except HrmError:
        return None


def _pins(inputs: Mapping[str, Any]) -> Pins:
    """The pinned variables of a saved plan; none where they are not what they should be."""
    try:
        return Pins(**inputs.get("pins", {}))
    except (HrmError, TypeError):
        return Pins()


def _command(words: Sequence[str], options: Mapping[str, str]) -> str:
    """The command as it was typed, with these options in place of those that it has of the same name."""
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        named = [option for option in options if option.split()[0] == name]
        if not named:
            kept.append(word)
            continue
        given = value if has_value else rest.pop(0) if rest else ""
        keys = {option.partition(" ")[2] for option in named}
        if given.partition("=")[0].strip() not in keys and "" not in keys:  # --set of another key
            kept += [word] if has_value else [word, given]
    for option, value in options.items():
        name, _, key = option.partition(" ")
        kept += [name, f"{key}={value}" if key else value]
    return f"hrm {shlex.join(kept)}" if words else f"hrm plan ... {shlex.join(kept)}"

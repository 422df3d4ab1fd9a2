"""When nothing fits: the limit, by how much, and ways out that are ways out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from search_oracle import random_scenario

from hrm.errors import InfeasibleError
from hrm.model_files import load_model
from hrm.pins import Pins
from hrm.profile import DiskLevel
from hrm.profile_files import load_profile
from hrm.scenario import Scenario, choose_formats
from hrm.search import find_policy
from hrm.units import GIB
from hrm.workload import uniform_workload

ON_CPU = Pins(
    attention_on_gpu=False,
    ffn_on_gpu=False,
    dense_weights_on_gpu=False,
    embedding_on_gpu=False,
    lm_head_on_gpu=False,
    kv_on_gpu=0.0,
    weight_slots="experts",
)


def scenario_of(model: str, *, gpu_gib: float, cpu_gib: float) -> Scenario:
    """One T4 with that much usable memory beside a host with that much plannable memory and no disk."""
    profile, spec = load_profile("t4"), load_model(model)
    machine = replace(
        profile,
        gpu=replace(profile.gpu, usable_memory_bytes=gpu_gib * GIB),
        cpu=replace(profile.cpu, memory_bytes=cpu_gib * GIB, reserved_bytes=0.0),
        disk=None,
    )
    workload = uniform_workload(100, 20, num_requests=50)
    return Scenario(profile=machine, model=spec, workload=workload, formats=choose_formats(machine, spec))


def refusal(scenario: Scenario, pins: Pins | None = None, max_hours: float = 24.0) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        find_policy(scenario, pins, max_hours=max_hours)
    assert caught.value.exit_code == 3
    return caught.value


def test_cpu_memory_short_by_what_the_weights_and_the_staging_ring_are_over() -> None:
    scenario = scenario_of("mixtral-8x7b", gpu_gib=14.0, cpu_gib=80.0)
    error = refusal(scenario, ON_CPU)
    least = scenario.model.weight_bytes() + 0.5 * GIB  # 86.99 GiB of weights, four staging pieces of 128 MiB
    assert error.limit == "cpu"
    assert error.missing_bytes / GIB == pytest.approx(least / GIB - 80.0, abs=0.05)  # one request's cache and buffers
    assert error.missing_bytes > least - 80.0 * GIB
    assert "at the smallest batch (1 request)" in str(error)
    assert f"{error.missing_bytes / GIB:.2f} GiB over the limit of CPU memory" in str(error)


def test_gpu_memory_short_by_what_context_reserve_and_pinned_weights_are_over() -> None:
    scenario = scenario_of("mixtral-8x7b", gpu_gib=5.0, cpu_gib=300.0)
    everything = Pins(weights_on_gpu=1.0, dense_weights_on_gpu=True, embedding_on_gpu=True, lm_head_on_gpu=True)
    error = refusal(scenario, everything)
    context = scenario.profile.gpu.context_bytes
    least = scenario.model.weight_bytes() + context + 0.03 * 5.0 * GIB
    assert error.limit == "gpu"
    assert error.missing_bytes / GIB == pytest.approx(least / GIB - 5.0, abs=0.05)
    assert "fewer pinned variables than dense_weights_on_gpu" in str(error)


def test_time_short_is_said_in_hours() -> None:
    scenario = scenario_of("mixtral-8x7b", gpu_gib=14.0, cpu_gib=120.0)
    best = find_policy(scenario, Pins(batch_size=50)).prediction.batch_s / 3600.0
    error = refusal(scenario, Pins(batch_size=50, pin_weights=True), max_hours=best / 20.0)
    assert error.limit == "hours"
    assert error.missing_bytes == 0.0
    assert "hours over the limit of time" in str(error)
    assert "hours more time" in str(error)


def test_a_disk_is_named_where_only_cpu_memory_is_short_and_it_does_help() -> None:
    scenario = scenario_of("mixtral-8x7b", gpu_gib=14.0, cpu_gib=60.0)
    error = refusal(scenario)
    assert error.limit == "cpu"
    size = float(re.search(r"a disk that holds (\d+) GB", str(error)).group(1))  # type: ignore[union-attr]
    disk = DiskLevel(name="disk", size_bytes=size * 1e9, read_bytes_per_s=2e9, write_bytes_per_s=1e9)
    assert find_policy(replace(scenario, profile=replace(scenario.profile, disk=disk))).policy.weights_on_disk > 0.0


def test_int4_is_named_where_it_helps_and_not_where_it_does_not() -> None:
    fits = refusal(scenario_of("mixtral-8x7b", gpu_gib=14.0, cpu_gib=60.0))
    assert "--weights-dtype int4" in str(fits)
    hopeless = refusal(scenario_of("dbrx", gpu_gib=4.0, cpu_gib=30.0))
    assert "int4" not in str(hopeless)


def test_pins_that_cannot_be_met_by_any_machine_are_said_to_contradict() -> None:
    scenario = scenario_of("mixtral-8x7b", gpu_gib=14.0, cpu_gib=200.0)
    error = refusal(scenario, Pins(weights_on_gpu=1.0, weight_slots="experts"))  # nothing is left for the ring
    assert "contradict each other" in str(error)
    assert "fewer pinned variables than weight_slots, weights_on_gpu" in str(error)


def grown(scenario: Scenario, amount: float, resource: str) -> Scenario:
    """The same machine with so many GiB more."""
    profile = scenario.profile
    more = amount * GIB
    if resource == "GPU memory":
        each = profile.gpu.usable_memory_bytes + more / profile.gpu.count
        return replace(scenario, profile=replace(profile, gpu=replace(profile.gpu, usable_memory_bytes=each)))
    if resource == "CPU memory":
        memory = profile.cpu.memory_bytes + more
        return replace(scenario, profile=replace(profile, cpu=replace(profile.cpu, memory_bytes=memory)))
    if resource == "disk space":
        assert profile.disk is not None
        disk = replace(profile.disk, size_bytes=profile.disk.size_bytes + more)
        return replace(scenario, profile=replace(profile, disk=disk))
    assert resource == "page-locked memory"
    assert profile.cpu.lockable_bytes is not None
    lockable = profile.cpu.lockable_bytes + more
    return replace(scenario, profile=replace(profile, cpu=replace(profile.cpu, lockable_bytes=lockable)))


PARTS = r"([\d.]+) (?:GiB|hours) more (GPU memory|CPU memory|disk space|page-locked memory|time)"


def starved(seed: int) -> Scenario:
    """A random scenario with two fifths of its memories."""
    scenario = random_scenario(seed)
    profile = scenario.profile
    lockable = profile.cpu.lockable_bytes
    return replace(
        scenario,
        profile=replace(
            profile,
            gpu=replace(profile.gpu, usable_memory_bytes=0.4 * profile.gpu.usable_memory_bytes),
            cpu=replace(
                profile.cpu,
                memory_bytes=profile.cpu.reserved_bytes + 0.4 * (profile.cpu.memory_bytes - profile.cpu.reserved_bytes),
                lockable_bytes=None if lockable is None else 0.4 * lockable,
            ),
        ),
    )


@pytest.mark.parametrize("seed", [1, 2, 7, 9, 11, 12, 18, 22, 23, 25, 28, 36, 47])
def test_every_named_way_out_lets_a_plan_exist(seed: int) -> None:
    scenario = starved(seed)
    message = str(refusal(scenario))
    ways = message.split("what would fit: ")[1].split(", or ")
    assert ways
    for way in ways:
        changed, hours = scenario, 24.0
        if "--weights-dtype int4" in way:
            changed = replace(scenario, formats=replace(scenario.formats, weights="int4"))
        elif "a disk that holds" in way:
            size = float(re.search(r"holds (\d+) GB", way).group(1)) * 1e9  # type: ignore[union-attr]
            disk = DiskLevel(name="disk", size_bytes=size, read_bytes_per_s=3e9, write_bytes_per_s=3e9)
            changed = replace(scenario, profile=replace(scenario.profile, disk=disk))
        else:
            parts = re.findall(PARTS, way)
            assert parts, way
            for amount, resource in parts:
                if resource == "time":
                    hours += float(amount)
                else:
                    changed = grown(changed, float(amount), resource)
        assert find_policy(changed, max_hours=hours).policy.batch_size >= 1

"""Marginal values against finite differences of the program they are the duals of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import hrm.sensitivity
from hrm.full_program import build_program
from hrm.model_files import load_model
from hrm.pins import Pins
from hrm.profile_files import load_profile
from hrm.rates import Rates, derive_rates
from hrm.rows import objective_of
from hrm.scenario import Scenario, choose_formats, measure_sizes
from hrm.search import SearchResult, SolvedPoint, find_policy
from hrm.sensitivity import marginal_values
from hrm.units import GIB
from hrm.workload import load_workload

MAX_SECONDS = 24.0 * 3600.0
CASES = (
    ("l4", "mixtral-8x7b", Pins()),
    ("t4", "dbrx", Pins()),
    ("t4x2", "dbrx", Pins()),
    ("rtx4090", "qwen3-30b-a3b", Pins()),
    ("t4", "mixtral-8x7b", Pins(pin_weights=False)),
    ("a100-80g", "mixtral-8x22b", Pins(attention_on_gpu=True)),
    ("t4", "mixtral-8x7b", Pins(ffn_on_gpu=False)),
)
Case = tuple[str, str, Pins]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-{len(case[2].given)}")
def solved(request: pytest.FixtureRequest) -> tuple[Scenario, Pins, SearchResult]:
    hardware, model, pins = request.param
    profile, spec = load_profile(hardware), load_model(model)
    workload = load_workload("mtbench", generation_length=128)
    scenario = Scenario(profile=profile, model=spec, workload=workload, formats=choose_formats(profile, spec))
    return scenario, pins, find_policy(scenario, pins)


def values_of(scenario: Scenario, pins: Pins, result: SearchResult) -> dict[str, float]:
    assert result.solved is not None
    sizes, rates = measure_sizes(scenario), derive_rates(scenario.profile, scenario.formats)
    throughput = result.prediction.throughput_tokens_per_s
    return marginal_values(scenario, sizes, rates, pins, result.solved, throughput, MAX_SECONDS)


def fixed_rate(scenario: Scenario, pins: Pins, point: SolvedPoint, throughput: float, **faster: float) -> float:
    """Token/s of the program with its integers fixed, at changed memories (in `scenario`) or rates."""
    base = derive_rates(scenario.profile, scenario.formats)
    rates: Rates = replace(base, **{name: getattr(base, name) + step for name, step in faster.items()})
    program = build_program(
        scenario, measure_sizes(scenario), rates, point.point, pins, point.prefill, max_seconds=MAX_SECONDS
    )
    program.fix({name: point.values[name] for name in program.integers})
    solution = program.minimise(objective_of(measure_sizes(scenario)))
    assert solution.status == "optimal"
    return throughput / solution.objective  # the tokens of a batch stay, so only the seconds matter


def difference(scenario: Scenario, changed: Scenario, pins: Pins, result: SearchResult, **faster: float) -> float:
    """Gain of the program in token/s."""
    assert result.solved is not None
    throughput = result.prediction.throughput_tokens_per_s
    before = fixed_rate(scenario, pins, result.solved, throughput)
    after = fixed_rate(changed, pins, result.solved, throughput, **faster)
    return throughput * (after / before - 1.0)


def test_one_gib_more_memory_is_worth_its_finite_difference(solved: tuple[Scenario, Pins, SearchResult]) -> None:
    scenario, pins, result = solved
    found = values_of(scenario, pins, result)
    profile, step = scenario.profile, 1e-3 * GIB
    gpu = replace(profile.gpu, usable_memory_bytes=profile.gpu.usable_memory_bytes + step / profile.gpu.count)
    cpu = replace(profile.cpu, memory_bytes=profile.cpu.memory_bytes + step)
    for key, changed in (("gpu_memory_gib", replace(profile, gpu=gpu)), ("cpu_memory_gib", replace(profile, cpu=cpu))):
        gain = difference(scenario, replace(scenario, profile=changed), pins, result)
        assert found[key] == pytest.approx(gain * 1e3, rel=2e-3, abs=1e-5 * result.prediction.throughput_tokens_per_s)


RATES: dict[str, dict[str, float]] = {
    "link_gb_per_s": {"h2d_bytes_per_s": 1.0},
    "cpu_bandwidth_gb_per_s": {"cpu_bytes_per_s": 1.0, "cpu_attention_bytes_per_s": 1.0},
    "disk_read_gb_per_s": {"disk_read_bytes_per_s": 1.0},
}


def test_a_faster_rate_is_worth_its_finite_difference(
    solved: tuple[Scenario, Pins, SearchResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, pins, result = solved
    step = 1e5  # byte/s instead of 1 GB/s, so that no other lane takes over
    monkeypatch.setattr(hrm.sensitivity, "GB_PER_S", step)
    found = values_of(scenario, pins, result)
    assert found.keys() - {"gpu_memory_gib", "cpu_memory_gib"} <= RATES.keys()
    for key in found.keys() & RATES.keys():
        faster: dict[str, Any] = {name: step * share for name, share in RATES[key].items()}
        gain = difference(scenario, scenario, pins, result, **faster)
        assert found[key] == pytest.approx(gain, rel=2e-2, abs=1e-8 * result.prediction.throughput_tokens_per_s)


def test_what_is_worth_something_does_help_and_what_is_worth_nothing_does_not(
    solved: tuple[Scenario, Pins, SearchResult],
) -> None:
    scenario, pins, result = solved
    throughput = result.prediction.throughput_tokens_per_s
    found = values_of(scenario, pins, result)
    assert all(value >= 0.0 for value in found.values())
    for key in found.keys() & RATES.keys():
        faster: dict[str, Any] = {name: 1e9 * share for name, share in RATES[key].items()}
        gain = difference(scenario, scenario, pins, result, **faster)
        assert (gain > 1e-6 * throughput) == (found[key] > 1e-6 * throughput)
        assert gain <= 1.5 * found[key] + 1e-6 * throughput  # no more than the first gigabyte per second suggests


def test_the_bottleneck_is_worth_something_and_no_disk_has_no_value() -> None:
    profile, spec = load_profile("l4"), load_model("mixtral-8x7b")
    workload = load_workload("mtbench", generation_length=128)
    bare = replace(profile, disk=None)
    scenario = Scenario(profile=bare, model=spec, workload=workload, formats=choose_formats(bare, spec))
    found = values_of(scenario, Pins(), find_policy(scenario))
    assert "disk_read_gb_per_s" not in found
    assert found.keys() == {"gpu_memory_gib", "cpu_memory_gib", "link_gb_per_s", "cpu_bandwidth_gb_per_s"}
    assert max(found.values()) > 0.0

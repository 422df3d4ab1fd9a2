"""No plan exceeds a limit when its memory is added up independently; without a plan the limit is named.

The four machines of CI with every bundled model; `python benchmarks/grid.py` does all machines and workloads.
"""

import pytest
from memory_oracle import add_up, demands_of, limits

from hrm.errors import InfeasibleError
from hrm.model_files import load_model, model_names
from hrm.profile_files import load_profile
from hrm.scenario import Scenario, choose_formats
from hrm.search import SearchResult, find_policy
from hrm.workload import load_workload

MACHINES = ("t4", "l4", "colab-t4", "rtx4090")
WORKLOAD = load_workload("mtbench", generation_length=128)
MOE_MODELS = [name for name in model_names() if load_model(name).is_moe]
T4_WITHOUT_A_PLAN: dict[str, str] = {}
"""MoE models that have no plan on t4 in their native dtype, with the limit they exceed: at most one of 18."""


def scenario_of(machine: str, name: str) -> Scenario:
    profile, model = load_profile(machine), load_model(name)
    return Scenario(profile=profile, model=model, workload=WORKLOAD, formats=choose_formats(profile, model))


def check(scenario: Scenario, found: SearchResult) -> None:
    """Every level within its limit, and the plan's own account not below what is really needed."""
    policy, room = found.policy, limits(scenario.profile)
    added = add_up(scenario.profile, scenario.model, scenario.workload, scenario.formats, policy)
    for level, terms in added.items():
        needed, own = sum(terms.values()), found.prediction.memory[level]
        assert min(terms.values(), default=0.0) >= -1.0, (level, terms)
        assert needed <= room[level] * (1 + 1e-9) + 1.0, (level, terms)
        assert needed <= own.peak_bytes * (1 + 1e-9) + 1.0, (level, terms, own.terms)
        # The plan counts little more: bounds on token counts for any order of the requests, not waste.
        assert own.peak_bytes <= needed * 1.1 + 2**20, (level, terms, own.terms)
    need = demands_of(scenario.model, scenario.workload, scenario.formats, policy)
    if not policy.everything_on_cpu:
        assert need.decode_tokens <= policy.micro_batch_token_budget


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("machine", MACHINES)
def test_plan_fits_when_added_up_independently_or_its_limit_is_named(machine: str, name: str) -> None:
    scenario = scenario_of(machine, name)
    try:
        found = find_policy(scenario)
    except InfeasibleError as error:
        assert any(level in str(error) for level in ("GPU memory", "CPU memory", "disk")), error
        assert "GiB over the limit" in str(error)
        if machine == "t4" and name in MOE_MODELS:
            assert T4_WITHOUT_A_PLAN.get(name, "no such exception") in str(error)
        return
    assert not (machine == "t4" and name in T4_WITHOUT_A_PLAN), "this model has a plan now: take it off the list"
    check(scenario, found)
    prediction = found.prediction
    assert prediction.throughput_tokens_per_s > 0
    assert prediction.batch_s <= 24 * 3600 * (1 + 1e-6)


def test_at_most_one_of_the_18_moe_models_has_no_plan_on_t4() -> None:
    assert len(MOE_MODELS) == 18
    assert set(T4_WITHOUT_A_PLAN) <= set(MOE_MODELS)
    assert len(T4_WITHOUT_A_PLAN) <= 1

"""A plan simulated as one result, and a sweep as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hrm.errors import InputError
from hrm.plan_finding import find_plan
from hrm.plans import Plan
from simulator.plan_replay import Simulation, draw_timeline, simulate_plan, simulate_policy
from simulator.plan_sweep import draw_sweep, sweep_plans
from simulator.summary import simulate_command


@pytest.fixture(scope="module")
def plan() -> Plan:
    return find_plan("t4", "mixtral-8x7b", generation_length=4, num_requests=64, overrides={"disk": "none"})


@pytest.fixture(scope="module")
def simulation(plan: Plan) -> Simulation:
    return simulate_plan(plan)


def test_a_simulation_says_what_hrm_simulate_says(plan: Plan, simulation: Simulation, tmp_path: Path) -> None:
    saved = plan.save(tmp_path / "plan.json")
    document = simulate_command(saved, plot=tmp_path / "lanes.png")
    ours = simulation.to_dict()
    assert document.pop("simulate_seconds") > 0 and ours.pop("simulate_seconds") > 0
    assert ours == document


def test_its_table_sets_prediction_beside_simulation(plan: Plan, simulation: Simulation) -> None:
    row = simulation.to_frame().set_index("quantity").loc["throughput_tokens_per_s"]
    assert row["predicted"] == pytest.approx(plan.prediction.throughput_tokens_per_s)
    assert row["predicted / simulated"] == row["predicted"] / row["simulated"]
    assert repr(simulation).startswith("<Simulation: mixtral-8x7b on t4, mtbench, 4 generated")


def test_a_policy_that_no_search_found_is_simulated_under_the_same_rules(plan: Plan, simulation: Simulation) -> None:
    policy = plan.policy
    assert simulate_policy(plan.scenario, policy).throughput_tokens_per_s == simulation.throughput_tokens_per_s
    half = replace(policy, batch_size=policy.batch_size // 2, micro_batch_size=policy.micro_batch_size // 2)
    assert simulate_policy(plan.scenario, half).throughput_tokens_per_s < simulation.throughput_tokens_per_s


def test_a_timeline_is_drawn_and_written(simulation: Simulation, tmp_path: Path) -> None:
    picture = draw_timeline(simulation, tmp_path / "lanes.svg")
    assert picture.png[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "lanes.svg").read_text(encoding="utf-8")


def test_one_token_is_simulated_but_has_no_decode_step_to_draw() -> None:
    one = simulate_plan(
        find_plan("t4", "mixtral-8x7b", generation_length=1, num_requests=64, overrides={"disk": "none"})
    )
    assert one.trace is None and one.throughput_tokens_per_s > 0
    with pytest.raises(InputError, match="no decode step to draw"):
        draw_timeline(one)


def test_plans_of_the_papers_cost_model_are_refused() -> None:
    with pytest.raises(InputError, match="cannot be replayed"):
        simulate_plan(find_plan("l4-paper", "mixtral-8x7b", cost_model="paper", generation_length=32))


def test_a_sweep_has_a_row_per_point_and_schedule_and_is_drawn(tmp_path: Path) -> None:
    sweep = sweep_plans(
        "cpu.memory=128GiB,192GiB",
        hardware="t4",
        model="mixtral-8x7b",
        generation_length=4,
        num_requests=64,
        overrides=["disk=none"],
        schedules=("cgopipe",),
        simulate=False,
        jobs=1,
    )
    frame = sweep.to_frame()
    assert frame["schedule"].tolist() == ["cgopipe", "cgopipe"]
    assert frame["predicted_tokens_per_s"].is_monotonic_increasing
    assert repr(sweep) == "<Sweep: mixtral-8x7b on t4>"
    assert draw_sweep(sweep, tmp_path / "sweep.png").png[:4] == b"\x89PNG"

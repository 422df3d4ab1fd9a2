"""Plans, alternatives and task graphs from names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hrm.errors import InputError
from hrm.pins import Pins
from hrm.plan_finding import build_graph, find_alternatives, find_plan
from hrm.plans import Plan
from hrm.workload import uniform_workload


@pytest.fixture(scope="module")
def plan() -> Plan:
    return find_plan("t4", "mixtral-8x7b", generation_length=4, num_requests=64, overrides={"disk": "none"})


def test_a_plan_is_that_of_the_command(plan: Plan, tmp_path: Path) -> None:
    words = "plan --hw t4 --model mixtral-8x7b --workload mtbench --gen-len 4 --requests 64 --set disk=none --json"
    done = subprocess.run(
        [sys.executable, "-m", "hrm", *words.split()], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    found, ours = json.loads(done.stdout), plan.to_dict()
    for each in (found, ours):  # how long it took, what this machine has free now, and how it was asked
        each.pop("solver")
        each.pop("execution", None)
        each["inputs"].pop("command")
    assert found == json.loads(json.dumps(ours))


def test_it_prints_the_screen_of_the_command_and_its_first_line_is_its_repr(plan: Plan) -> None:
    assert repr(plan) == f"<Plan: {str(plan).splitlines()[0]}>"
    assert repr(plan).startswith("<Plan: mixtral-8x7b (46.7B parameters, 93.4 GB) on t4: One NVIDIA T4")


def test_its_table_has_the_seconds_of_every_lane_in_both_phases(plan: Plan) -> None:
    frame = plan.to_frame()
    assert list(frame.columns) == ["phase", "resource", "seconds", "share busy", "bytes moved"]
    decode = frame[frame["phase"] == "decode step"].set_index("resource")["seconds"]
    assert decode.to_dict() == {name.replace("_", " "): s for name, s in plan.prediction.decode.lanes.items()}


def test_a_saved_plan_is_the_document_of_hrm_plan_o(plan: Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.json")
    assert json.loads(path.read_text(encoding="utf-8"))["policy"] == plan.to_dict()["policy"]


def test_lengths_of_a_workload_of_ones_own_are_not_given_twice() -> None:
    own = uniform_workload(16, 4, num_requests=8)
    with pytest.raises(InputError, match="of a workload by name"):
        find_plan("t4", "mixtral-8x7b", own, generation_length=8)


@pytest.mark.parametrize("name", ["weights_dtype", "kv_dtype", "compute_dtype"])
def test_a_format_that_is_none_is_refused_by_the_name_of_its_parameter(name: str) -> None:
    with pytest.raises(InputError, match=name):
        find_plan("t4", "mixtral-8x7b", generation_length=4, **{name: "fp7"})  # type: ignore[arg-type]


def test_alternatives_begin_with_the_plan_and_differ_from_each_other(plan: Plan) -> None:
    found = find_alternatives(plan, 3)
    policies = [each.policy for each in found.candidates]
    assert len(policies) == len(set(map(str, policies))) == 3
    assert found.to_frame()["token/s"].tolist() == [64 * 4 / each.seconds for each in found.candidates]
    assert repr(found) == "<Alternatives: mixtral-8x7b on t4: plans that differ>"
    assert str(plan.policy.schedule) in str(found)


def test_alternatives_of_the_papers_cost_model_are_refused() -> None:
    plan = find_plan("l4-paper", "mixtral-8x7b", cost_model="paper", generation_length=32)
    with pytest.raises(InputError, match="one of the full cost model"):
        find_alternatives(plan)


def test_a_graph_of_prefill_or_of_decode_steps_from_the_middle(plan: Plan) -> None:
    assert {task.id.phase for task in build_graph(plan, prefill=True).tasks} == {"prefill"}
    assert {task.id.step for task in build_graph(plan).tasks} == {1}
    frame = build_graph(plan).to_frame()
    assert len(frame) == len(build_graph(plan).tasks) and frame["task"].is_unique


def test_a_schedule_that_cannot_run_the_policy_is_refused() -> None:
    plan = find_plan(
        "t4",
        "mixtral-8x7b",
        generation_length=4,
        num_requests=64,
        pins=Pins(attention_on_gpu=False),
        overrides={"disk": "none"},
    )
    with pytest.raises(InputError, match="s4"):
        build_graph(plan, "s4")

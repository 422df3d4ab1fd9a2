"""`hrm validate memory` with runs that are made up: what is predicted under a cap, in which order, and the document."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from command import plan_of

from hrm.errors import BarMissedError, InfeasibleError, InputError
from hrm.host_facts import HostFacts
from hrm.pins import Pins
from hrm.plans import read_plan_document
from hrm.policy import Policy
from hrm.profile_files import with_overrides
from hrm.scenario import Scenario
from hrm.search import find_policy
from hrm.units import GIB
from hrm.validation.candidates import settled
from hrm.validation.caps_document import build_memory_document, check_caps
from hrm.validation.caps_page import render_caps_page
from hrm.validation.caps_procedure import measure_study
from hrm.validation.caps_study import Study, Theory, choose_caps, read_caps
from hrm.validation.forecasts import file_hash, forecast_of
from hrm.validation.memory import HOST_RESERVE_BYTES
from hrm.validation.records import HASH_FILE, PREDICTIONS_FILE, read_records
from hrm.workload import uniform_workload

ROOMY = HostFacts(torch="cpu", gpus=(), cpu_bytes=1e15, lockable_bytes=1e15, disk_bytes=1e15)
GENERATED, LAYERS = 4, 16
CAPS = (8 * GIB, 16 * GIB, 20 * GIB)
SPEED = {"cgopipe": 100.0, "s4": 50.0}
"""Token/s per GiB of cap that the made-up runs give."""


@pytest.fixture(scope="module")
def study() -> Study:
    """OLMoE (12.9 GiB) on the host of an L4 with little memory on the GPU and no disk."""
    plan = plan_of("l4", "olmoe-1b-7b", workload=uniform_workload(128, GENERATED, num_requests=64))
    profile = with_overrides(plan.scenario.profile, {"gpu.usable_memory": "2 GiB", "disk": None})
    return Study(
        whole=replace(plan.scenario, profile=profile),
        model=plan.inputs.model,
        layers=None,
        max_hours=24.0,
        emulated=True,
    )


def own_plan(scenario: Scenario, max_hours: float, schedule: str, why_not: Callable[[Policy], str]) -> Policy:
    found = find_policy(scenario, Pins(attention_on_gpu=schedule == "s4"), max_hours=max_hours).policy
    assert why_not(settled(scenario, found)) == ""
    return settled(scenario, found)


def simulate(scenario: Scenario, policy: Policy, schedule: str) -> dict[str, Any]:
    return forecast_of(scenario, policy, 1.0, 1.0) | {"ops": {}, "copies": {}}


THEORY = Theory(own_plan, simulate)


@dataclass
class Fake:
    """Runs that give a throughput for their cap; notes what was there when it was asked."""

    folder: Path
    broken: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    seen: list[tuple[str, str]] = field(default_factory=list)

    def measure(self, point: Mapping[str, Any], plan: Path) -> dict[str, Any]:
        assert plan.is_file()
        self.seen.append((point["name"], file_hash(self.folder / PREDICTIONS_FILE)))
        if point["name"] in self.failed:
            return {"status": "failed", "reason": "ended with 1: no reason", "memory": None}
        taken = {"peak_bytes": 0.9 * point["cap_bytes"], "high_water_bytes": 2e9, "shared_peak_bytes": 1e9}
        if point["name"] in self.broken:
            return {"status": "broken", "reason": "took more", "memory": taken}
        wobble = 1.0 + 0.01 * (len(self.seen) % 3)
        rate = SPEED[point["schedule"]] * point["cap_bytes"] / GIB * wobble
        seconds = point["policy"]["batch_size"] * GENERATED / rate
        names = ["sample/prefill/s0/l16/b0/g0", *(f"sample/decode/s{step}/l16/b0/g0" for step in range(GENERATED - 1))]
        ends = [round(1e9 * seconds * (step + 1) / GENERATED) for step in range(GENERATED)]
        piece = {
            "steps": {"prefill": True, "first": 0, "last": GENERATED - 1},
            "kind": "emulated",
            "lanes": ["gpu0"],
            "task": names,
            "lane": [0] * len(names),
            "start_ns": [0, *ends[:-1]],
            "end_ns": ends,
        }
        return {"status": "held", "reason": "", "memory": taken, "warm_up": False, "pieces": [piece]}


def measured(study: Study, folder: Path, **faults: frozenset[str]) -> tuple[dict[str, Any], Fake]:
    """The document, and what was asked in which order."""
    fake = Fake(folder, **faults)
    facts = dict.fromkeys(("title", "hardware", "model", "device", "device_name", "weights", "date"), "any")
    setup = {
        "format": 1,
        "kind": "memory",
        **facts,
        "layers": LAYERS,
        "layers_of_model": LAYERS,
        "workload": {
            "name": "w",
            "generation_length": GENERATED,
            "mean_prompt_tokens": 128.0,
            "padded": False,
            "num_requests": 64,
        },
        "emulated": True,
        "enforced_by": "RLIMIT_DATA",
        "machine": {},
        "versions": {},
        "command": [],
        "notes": [],
    }
    measure_study(study, CAPS, THEORY, ROOMY, fake, folder, setup=setup, repeats=3, seed=0)
    return build_memory_document(read_records(folder, "memory")), fake


@pytest.fixture(scope="module")
def done(study: Study, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Fake]:
    return measured(study, tmp_path_factory.mktemp("memory"))


def test_a_plan_gets_the_cap_less_the_reserve_and_nothing_is_reserved_for_others(study: Study) -> None:
    cpu = study.under(CAPS[0]).profile.cpu
    assert (cpu.memory_bytes, cpu.reserved_bytes) == (CAPS[0] - HOST_RESERVE_BYTES, 0.0)


def test_nothing_is_measured_before_predictions_of_every_cap_are_written_and_hashed(
    done: tuple[dict[str, Any], Fake],
) -> None:
    document, fake = done
    (noted,) = {found for _, found in fake.seen}
    assert (fake.folder / HASH_FILE).read_text(encoding="utf-8") == f"{noted}  {PREDICTIONS_FILE}\n"
    assert document["predictions_sha256"] == noted


def test_every_turn_has_every_point_that_has_a_plan_once_in_an_order_of_its_own(
    done: tuple[dict[str, Any], Fake],
) -> None:
    document, fake = done
    names = [point["name"] for point in document["points"] if point["status"] != "infeasible"]
    turns = [
        [name for name, _ in fake.seen][start : start + len(names)] for start in range(0, 3 * len(names), len(names))
    ]
    assert len(names) == 4
    assert all(sorted(turn) == sorted(names) for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1


def test_a_cap_without_a_plan_says_what_lacks(done: tuple[dict[str, Any], Fake]) -> None:
    rows = [point for point in done[0]["points"] if point["cap_bytes"] == CAPS[0]]
    assert [row["status"] for row in rows] == ["infeasible"] * 2
    assert all(re.fullmatch(r"\d+\.\d{3} GiB over .* at the smallest batch", row["reason"]) for row in rows)


def test_a_run_may_take_the_cap_and_the_activations_of_the_emulated_accelerator(
    done: tuple[dict[str, Any], Fake], study: Study
) -> None:
    for point in done[0]["points"]:
        if point["status"] == "infeasible":
            continue
        assert point["accelerator_bytes"] > 0.0
        assert point["limit_bytes"] == point["cap_bytes"] + point["accelerator_bytes"]
        assert point["planned_bytes"]["cpu"] + HOST_RESERVE_BYTES <= point["limit_bytes"]


def test_plans_are_saved_as_hrm_run_reads_them(done: tuple[dict[str, Any], Fake]) -> None:
    document, fake = done
    for point in document["points"]:
        if point["status"] != "infeasible":
            scenario, policy, _ = read_plan_document(fake.folder / "plans" / point["plan"])
            assert policy.to_dict() == point["policy"]
            assert scenario.profile.cpu.memory_bytes == point["cap_bytes"] - HOST_RESERVE_BYTES


def test_throughput_and_its_interval_are_those_of_the_repeats(done: tuple[dict[str, Any], Fake]) -> None:
    for point in done[0]["points"]:
        if point["status"] == "infeasible":
            continue
        rate = SPEED[point["schedule"]] * point["cap_bytes"] / GIB
        found = point["measured"]
        assert len(found["repeats"]) == 3
        assert rate <= found["low"] <= found["median"] <= found["high"] <= 1.0201 * rate


def test_schedules_that_share_no_throughput_are_not_matched(done: tuple[dict[str, Any], Fake]) -> None:
    document = done[0]
    assert not document["matched"]["measured"]["matched"]  # 1,600 token/s and more against 1,000 and less
    assert document["verdict"]["sentence"].startswith("Not matched: s4 reaches ")


def test_runs_that_break_their_cap_are_shown_count_in_no_curve_and_end_with_their_own_exit_code(
    study: Study, tmp_path: Path
) -> None:
    name = f"s4 {CAPS[2] / 2**20:.0f} MiB"
    document, _ = measured(study, tmp_path, broken=frozenset({name}))
    point = next(each for each in document["points"] if each["name"] == name)
    assert (point["status"], point["reason"], point["measured"]) == ("broken", "took more", None)
    assert document["verdict"]["broken"] == [name]
    assert f"broke their cap: {name}" in document["verdict"]["sentence"]
    with pytest.raises(BarMissedError, match="broke its cap") as caught:
        check_caps(document)
    assert caught.value.exit_code == 4


def test_a_measurement_that_was_stopped_is_judged_by_the_runs_it_has(
    done: tuple[dict[str, Any], Fake], tmp_path: Path
) -> None:
    document, fake = done
    copy = shutil.copytree(fake.folder, tmp_path / "stopped")
    name = f"s4 {CAPS[2] / 2**20:.0f} MiB"
    for path in copy.glob(f"runs/*{name.lower().replace(' ', '-')}*"):
        path.unlink()
    found = build_memory_document(read_records(copy, "memory"))
    assert {point["status"] for point in found["points"] if point["name"] == name} == {"not run"}
    rest = [point for point in document["points"] if point["name"] != name]
    assert [point for point in found["points"] if point["name"] != name] == rest
    assert found["verdict"]["sentence"].endswith(f"not run: {name}.")
    assert render_caps_page(found)


def test_a_turn_in_which_everything_fails_is_the_last(study: Study, tmp_path: Path) -> None:
    names = frozenset(f"{schedule} {cap / 2**20:.0f} MiB" for schedule in SPEED for cap in CAPS)
    with pytest.raises(InputError, match="no run succeeded: ended with 1: no reason"):
        measured(study, tmp_path, failed=names)


def test_the_bound_of_the_roofline_is_above_every_prediction_under_a_cap(done: tuple[dict[str, Any], Fake]) -> None:
    document = done[0]
    highest = max(point["predicted"]["full"] for point in document["points"] if point["predicted"])
    assert document["bounds"]["roofline"]["tokens_per_s"] >= 0.999 * highest
    assert document["bounds"]["all_on_gpu"]["tokens_per_s"] > 0.0


def test_the_page_has_the_figure_and_every_run(done: tuple[dict[str, Any], Fake]) -> None:
    page = render_caps_page(done[0])
    assert page.count("<figure>") == 1
    assert page.count("<td>held</td>") + page.count(">held<") >= 12
    assert not re.search(r'(?:src|href)="(?!#)', page)


def test_caps_are_chosen_from_the_least_a_plan_fits_in_to_the_most_one_takes(study: Study) -> None:
    caps = choose_caps(study, 4, most_bytes=100 * GIB, tell=lambda _: None)
    assert len(caps) == 4
    assert list(caps) == sorted(caps)
    with pytest.raises(InfeasibleError):
        own_plan(study.under(0.95 * caps[0]), 24.0, "s4", lambda _: "")
    assert caps[-1] < 40 * GIB


@pytest.mark.parametrize(
    ("text", "said"),
    [("1GiB", "1 caps"), ("1GiB,1GiB", "there twice"), ("1GiB,2", "has no unit"), ("", "--caps")],
)
def test_caps_that_are_none_are_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_caps(text)


def test_caps_come_in_order() -> None:
    assert read_caps("2GiB, 1GiB,1.5 GiB") == (GIB, 1.5 * GIB, 2 * GIB)


def test_a_cap_within_the_reserve_leaves_nothing_to_plan_with(study: Study) -> None:
    with pytest.raises(InputError, match="no more than the reserve of a process"):
        study.under(HOST_RESERVE_BYTES)


def test_records_of_one_command_are_refused_by_the_other(done: tuple[dict[str, Any], Fake]) -> None:
    with pytest.raises(InputError, match="was written by hrm validate memory"):
        read_records(done[1].folder)

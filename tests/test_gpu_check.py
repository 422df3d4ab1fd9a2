"""`scripts/gpu_check.py` without a GPU: what it runs, in which time, and what its reports say."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import gpu_check
from gpu_check_report import find_title, summarise, write_page
from gpu_check_steps import GIB, Outcome, Result, Step, list_steps, run_command, run_steps

H200 = {
    "python": "3.12.3",
    "torch": "2.11.0",
    "cuda": True,
    "gpu": "NVIDIA H200",
    "gpu_memory_bytes": 140 * GIB,
    "capability": [9, 0],
    "cpu_cores": 16,
    "cpu_memory_bytes": 128 * GIB,
    "missing": [],
}


def layer_said(hardware: str, *, measured: float, simulated: float, same: bool) -> dict[str, Any]:
    return {
        "hardware": hardware,
        "same_machine": same,
        "layers_measured": 18,
        "latency": {
            "measured_s": measured,
            "measured_p10_s": measured,
            "measured_p90_s": measured,
            "bound_s": simulated / 2,
            "simulated_s": simulated,
            "busiest_lane": "host_to_device0",
            "measured_over_bound": 2 * measured / simulated,
            "measured_over_simulated": measured / simulated,
        },
        "copies": [{"copy": "D3 weights to the GPU", "measured_bytes_per_s": 52.5e9}],
        "lanes": [{"lane": "gpu0", "predicted_s": 0.1, "measured_s": 0.2}],
    }


def run_said(hardware: str, *, reserved: float) -> dict[str, Any]:
    return {
        "hardware": hardware,
        "same_gpu": False,
        "requests": 1024,
        "layers": 4,
        "prefill_s": 2.0,
        "decode_s": 3.0,
        "layer_latency_s": 0.05,
        "predicted": {"layer_latency_s": 0.25},
        "throughput_tokens_per_s": 3276.8,
        "load_s": 20.0,
        "memory": {"gpu": {"plan_bytes": 13 * GIB, "running_bytes": reserved}},
    }


class FakeMachine:
    """Runs nothing: takes `seconds` by the name of the command's last words, and says what such a command says."""

    def __init__(self, machine: dict[str, Any], *, seconds: float = 1.0, fails: Sequence[str] = ()) -> None:
        self.machine, self.seconds, self.fails = machine, seconds, fails
        self.time, self.ran = 0.0, []  # type: ignore[var-annotated]

    def now(self) -> float:
        return self.time

    def __call__(self, command: Sequence[str], timeout_s: float) -> Outcome:
        text = " ".join(command[1:])
        name, said = self.say(text)
        self.ran.append((name, timeout_s))
        taken = min(self.seconds, timeout_s)
        self.time += taken
        if any(text.startswith(start) for start in self.fails):
            return Outcome(code=2, stdout="", stderr="Traceback\nError: no room | here\n", seconds=taken)
        return Outcome(code=0 if taken < timeout_s else None, stdout=said, stderr="", seconds=taken)

    def say(self, text: str) -> tuple[str, str]:
        label = next((word for word in ("t4.json", "l4.json", "h200-as-a-t4.json") if word in text), "")
        label = "h200" if "h200-as" in text else label.removesuffix(".json")
        if text.startswith("-c"):
            return "machine", json.dumps(self.machine)
        if text.startswith("-m pytest"):
            return "tests", "....\n==== 120 passed, 3 skipped in 61.20s ====\n"
        if text.startswith("-m hrm hardware"):
            profiles = [("h100", "1 x NVIDIA H100 SXM"), ("h200x8", "8 x NVIDIA H200"), ("h200", "1 x NVIDIA H200")]
            return "profiles", json.dumps({"hardware": [{"name": name, "gpu": gpu} for name, gpu in profiles]})
        if text.startswith("-m hrm plan"):
            return "plan", json.dumps({"memory": {"gpu": {"terms": {"reserve": 0.5 * GIB}}}})
        if text.startswith("-m hrm validate"):
            return "layer", json.dumps(layer_said(label, measured=0.22, simulated=0.21, same=label == "h200"))
        return "run", json.dumps(run_said(label, reserved=13.4 * GIB))


def run_check(machine: FakeMachine, folder: Path, minutes: float = 8.0) -> tuple[int, dict[str, Any], str]:
    code = gpu_check.check(folder, minutes, runner=machine, now=machine.now)
    return code, json.loads((folder / "gpu-check.json").read_text()), (folder / "gpu-check.md").read_text()


def test_without_a_gpu_the_page_says_so_and_that_is_no_failure(tmp_path: Path) -> None:
    machine = FakeMachine({"python": "3.11.7", "torch": "2.13.0+cpu", "cuda": False, "missing": []})
    code, document, page = run_check(machine, tmp_path / "new" / "folder")
    assert code == 0 and [name for name, _ in machine.ran] == ["machine"]
    assert page.startswith("# No CUDA GPU: nothing was measured\n")
    assert "none of the checks was run" in page
    assert document["title"] == "No CUDA GPU: nothing was measured" and document["steps"] == []


def test_a_machine_of_which_nothing_can_be_said_is_a_failure(tmp_path: Path) -> None:
    code, document, _ = run_check(FakeMachine(H200, fails=("-c",)), tmp_path)
    assert code == 1 and document["machine"] == {}


def test_everything_is_run_in_order_tests_first_and_reported(tmp_path: Path) -> None:
    machine = FakeMachine(H200)
    code, document, page = run_check(machine, tmp_path)
    assert code == 0
    assert [name for name, _ in machine.ran] == ["machine", "profiles", "tests", *["plan", "layer"] * 3, *["run"] * 3]
    assert [step["status"] for step in document["steps"]] == ["passed"] * 10
    assert page.startswith("# NVIDIA H200 capped at 16 GiB and 24 GiB: not a T4 and not an L4\n")
    assert "120 passed, 3 skipped" in page and document["tests"] == "120 passed, 3 skipped in 61.20s"
    # 0.22 / 0.21 s; a verdict only where the profile is that of this GPU.
    assert "| t4 | 220.0 (220.0 to 220.0) | 105.0 (host_to_device0) | 210.0 | 1.048 | another GPU's rates |" in page
    assert "| h200 as a t4 | 220.0 (220.0 to 220.0) | 105.0 (host_to_device0) | 210.0 | 1.048 | yes |" in page
    assert "| h200 as a t4 | D3 weights to the GPU | 52.50 |" in page
    assert "| t4 | 1,024 | 2.00 | 3.00 | 50.0 | 250.0 | 13.40 of 13.50 | yes |" in page
    assert (tmp_path / "gpu-check.log").read_text().count("== ") >= 11


def test_a_step_has_its_own_limit_or_what_is_left_and_what_is_not_begun_is_listed(tmp_path: Path) -> None:
    """200 s: the machine takes 50, then 50 for the profiles; 90 s are left of 190, for the tests."""
    machine = FakeMachine(H200, seconds=50.0)
    code, document, page = run_check(machine, tmp_path, minutes=200 / 60)
    assert [(name, round(limit)) for name, limit in machine.ran] == [
        ("machine", 90),
        ("profiles", 60),
        ("tests", 90),
        ("plan", 40),
    ]
    assert code == 1  # the plan was stopped when time was up
    status = {step["name"]: (step["status"], step["why"]) for step in document["steps"]}
    assert status["tests"][0] == "passed"
    assert status["plan t4"] == ("timed out", "stopped after 40 s")
    assert status["layer t4"] == ("not run", "'plan t4' did not pass")
    assert status["plan l4"] == ("not run", "0 s were left, it takes 3 s at least")
    assert len(status) == 10
    assert "| run l4 |" in page and "not run: 'plan l4' did not pass" in page
    assert "Not measured." in page


def test_a_failure_is_named_and_what_needs_it_is_left_out(tmp_path: Path) -> None:
    machine = FakeMachine(H200, fails=("-m hrm plan --hw l4", "-m pytest"))
    code, document, page = run_check(machine, tmp_path)
    status = {step["name"]: (step["status"], step["why"]) for step in document["steps"]}
    assert code == 1
    assert status["plan l4"] == ("failed", "Error: no room | here")
    assert status["layer l4"][0] == status["run l4"][0] == "not run"
    assert status["layer t4"][0] == status["run h200 as a t4"][0] == "passed"
    assert "| plan l4 | the plan that the next ones run | failed: Error: no room / here | 1.0 |" in page
    assert "Traceback" in (tmp_path / "gpu-check.log").read_text()


@pytest.mark.parametrize(("measured", "said"), [(0.231, "yes"), (0.2311, "**no**")])
def test_as_wanted_is_up_to_1_10_of_the_simulated_time(measured: float, said: str) -> None:
    step = Step(name="layer own", command=(), most_s=1.0, least_s=1.0, about="")
    document = layer_said("h200", measured=measured, simulated=0.21, same=True)
    result = Result(step=step, status="passed", seconds=1.0, document=document)
    assert f"| {said} |" in write_page(H200, [result], minutes=8)


def test_memory_beyond_plan_and_reserve_is_shown() -> None:
    steps = [Step(name=name, command=(), most_s=1.0, least_s=1.0, about="") for name in ("plan t4", "run t4")]
    said = [{"memory": {"gpu": {"terms": {"reserve": 0.5 * GIB}}}}, run_said("t4", reserved=13.6 * GIB)]
    results = [
        Result(step=step, status="passed", seconds=1.0, document=document)
        for step, document in zip(steps, said, strict=True)
    ]
    assert summarise(results)["runs"]["t4"]["within_plan"] is False
    assert "| 13.60 of 13.50 | **no** |" in write_page(H200, results, minutes=8)


@pytest.mark.parametrize(
    ("gpu", "title"),
    [
        ("NVIDIA H200", "NVIDIA H200 capped at 16 GiB and 24 GiB: not a T4 and not an L4"),
        ("NVIDIA L40S", "NVIDIA L40S capped at 16 GiB and 24 GiB: not a T4 and not an L4"),
        ("Tesla T4", "Tesla T4, Mixtral 8x7B shapes"),
        ("NVIDIA L4", "NVIDIA L4, Mixtral 8x7B shapes"),
    ],
)
def test_a_larger_gpu_is_not_called_the_smaller_one(gpu: str, title: str) -> None:
    assert find_title({"gpu": gpu}) == title


def test_plans_that_a_gpu_has_no_memory_for_are_left_out(tmp_path: Path) -> None:
    names = [
        step.name for step in list_steps(tmp_path, H200 | {"gpu": "Tesla T4", "gpu_memory_bytes": 14.7 * GIB}, "t4")
    ]
    assert names == ["tests", "plan t4", "layer t4", "run t4"]


def test_a_command_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    marker = tmp_path / "late"
    child = f"import time; time.sleep(3); open({str(marker)!r}, 'w')"
    source = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    outcome = run_command([sys.executable, "-c", source], 1.0)
    assert outcome.code is None and outcome.stdout == "begun\n" and time.monotonic() - began < 2.5
    time.sleep(max(0.0, began + 3.5 - time.monotonic()))
    assert not marker.exists()


def test_the_commands_are_those_the_program_has(tmp_path: Path) -> None:
    """The plans are really made, and every option of the other commands is known."""
    steps = list_steps(tmp_path, H200, "h200")
    plans = [step for step in steps if step.name.startswith("plan ")]
    results = run_steps(plans, time.monotonic() + 100.0)
    assert [(result.status, result.why) for result in results] == [("passed", "")] * 3
    for result in results:
        assert result.document is not None and result.document["schedule"] == "cgopipe"
        assert result.document["policy"]["num_micro_batches"] == 8 and result.document["executable"]["supported"]
        assert result.document["memory"]["gpu"]["terms"]["reserve"] > 0
    assert results[0].document["memory"]["gpu"]["peak_bytes"] <= 14.75 * GIB  # type: ignore[index]
    assert results[2].document["memory"]["gpu"]["peak_bytes"] <= 14.75 * GIB  # type: ignore[index]
    for step in steps:
        if step.name.startswith(("layer ", "run ")):
            words = step.command[3:]
            helped = run_command(
                [*step.command[:3], words[0], *(["layer"] if "layer" in words[:2] else []), "--help"], 60
            )
            assert all(word in helped.stdout for word in words if word.startswith("--"))

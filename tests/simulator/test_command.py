"""`hrm simulate`, as a person and as a script meet it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AT_PEAKS = [
    word
    for name in ("gpu_flops_prefill", "gpu_flops_decode", "gpu_bandwidth", "gpu_overlap", "cpu_attention")
    for word in ("--set", f"efficiency.{name}=100 %")
]
"""What is observed here does not change when the efficiencies of the machine do."""


def hrm(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hrm", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plan.json: Mixtral on an L4, 14 micro-batches of 164, 16 generated tokens."""
    found = tmp_path_factory.mktemp("plans")
    done = hrm(
        *("plan", "--hw", "l4", "--model", "mixtral-8x7b", "--prompt-len", "77", "--gen-len", "16"),
        *("--micro-batch", "164", "--num-micro-batches", "14", "--attention", "cpu", "--kv-on-disk", "0"),
        *("--weights-on-disk", "0", "-o", "plan.json", "--json", *AT_PEAKS),
        folder=found,
    )
    assert done.returncode == 0, done.stderr
    return found


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    done = hrm("simulate", "plan.json", "--json", "--trace", "trace.json", "--plot", "lanes.png", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "saved to trace.json; open it in Perfetto\nsaved to lanes.png\n"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_document_has_what_scripts_are_promised(document: dict[str, Any]) -> None:
    for key in (
        "throughput_tokens_per_s",
        "prefill_s",
        "decode_s",
        "layer_latency_s",
        "bound_layer_latency_s",
        "tasks",
    ):
        assert document[key] > 0, key
    assert document["simulate_seconds"] > 0
    assert all(set(use) == {"busy_s", "utilisation"} for use in document["lanes"].values())
    generated = 164 * 14 * 16 / (document["prefill_s"] + document["decode_s"])
    assert document["throughput_tokens_per_s"] == pytest.approx(generated)


def documented_keys(head: str) -> set[str]:
    """Keys of a table of the page about the command."""
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = text.split(f"| {head} | what it is |\n")[1].split("\n\n")[0].splitlines()[1:]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_keys_of_the_document_are_those_of_the_page(document: dict[str, Any]) -> None:
    assert set(document) == documented_keys("key of `hrm simulate`")


def test_the_critical_path_adds_up_to_the_step(document: dict[str, Any]) -> None:
    path = document["critical_path"]
    assert math.fsum(path.values()) == pytest.approx(document["step_latency_s"], rel=1e-12)
    assert list(path.values()) == sorted(path.values(), reverse=True)
    assert document["step_latency_s"] == pytest.approx(32 * document["layer_latency_s"])


def test_the_bubble_is_what_the_step_takes_above_the_bound(document: dict[str, Any]) -> None:
    bound = 32 * document["bound_layer_latency_s"]
    assert document["bubble_s"] == pytest.approx(document["step_latency_s"] - bound)


def test_copies_of_the_step_are_those_of_the_model(document: dict[str, Any]) -> None:
    """D1: 2,296 requests x 32 layers x (32 + 2 x 8) heads x 128 x 2 byte; D2: 32 heads, and the embedded rows."""
    requests = 164 * 14
    copies = document["copies"]
    assert copies["D1"]["bytes"] == pytest.approx(requests * 32 * 48 * 128 * 2)
    assert copies["D2"]["bytes"] in (
        pytest.approx(requests * 32 * 32 * 128 * 2),  # embedding on the GPU
        pytest.approx(requests * (32 + 1) * 4096 * 2),  # on the CPU: one row of 4,096 more
    )
    assert copies["D4"] == {"bytes": 0.0, "seconds": 0.0}
    assert copies["D3"]["seconds"] <= document["lanes"]["host_to_device0"]["busy_s"]


def test_memory_in_the_steps_is_no_more_than_the_plan_states(document: dict[str, Any]) -> None:
    for level in ("gpu", "cpu"):
        use = document["memory"][level]
        assert 0.5 * use["stated_peak_bytes"] < use["peak_bytes"] <= use["stated_peak_bytes"] * (1 + 1e-9), level


def test_the_plot_is_a_picture(folder: Path, document: dict[str, Any]) -> None:
    assert (folder / "lanes.png").read_bytes().startswith(b"\x89PNG")


def test_the_simulated_layer_lies_above_its_bound_and_close_to_the_prediction(document: dict[str, Any]) -> None:
    assert document["layer_latency_s"] >= document["bound_layer_latency_s"] * (1 - 1e-9)
    assert document["predicted_over_simulated"]["layer_latency_s"] == pytest.approx(1.0, abs=0.02)


def test_the_trace_is_one_that_perfetto_opens(folder: Path, document: dict[str, Any]) -> None:
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {"M", "X", "s", "f", "C"} <= {event["ph"] for event in events}
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"gpu memory", "cpu memory"} <= counters
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"gpu0", "cpu", "host_to_device0", "device_to_host0"} <= names


def test_a_schedule_that_the_plan_cannot_run_is_wrong_input(folder: Path, document: dict[str, Any]) -> None:
    done = hrm("simulate", "plan.json", "--schedule", "s4", folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hrm: schedule 's4': it has attention on the GPU, the plan on the CPU (hrm plan")


def test_what_is_no_plan_is_wrong_input(folder: Path) -> None:
    (folder / "broken.json").write_text("{", encoding="utf-8")
    for name in ("broken.json", "missing.json"):
        done = hrm("simulate", name, folder=folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert name in done.stderr and "Traceback" not in done.stderr


def test_the_screen_names_what_a_person_looks_for(folder: Path) -> None:
    done = hrm("simulate", "plan.json", folder=folder)
    assert done.returncode == 0, done.stderr
    for words in ("unpadded prompts", "critical path of the step", "D3: weights, host to device", "bubble above it"):
        assert words in done.stdout, words


def test_more_steps_are_shown_whole(folder: Path) -> None:
    done = hrm("simulate", "plan.json", "--steps", "2", "--trace", "two.json", "--plot", "two.svg", folder=folder)
    assert done.returncode == 0, done.stderr
    events = json.loads((folder / "two.json").read_text(encoding="utf-8"))["traceEvents"]
    steps = {int(event["name"].split("/")[2][1:]) for event in events if event["ph"] == "X"}
    assert steps == {6, 7, 8, 9}  # 15 decode steps: the middle one is number 7; with the one after, and neighbours
    assert (folder / "two.svg").read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", "0"), "hrm: --steps: 0 of 15 decode steps (from 1 to 15)\n"),
        (("--steps", "16"), "hrm: --steps: 16 of 15 decode steps (from 1 to 15)\n"),
        (("--plot", "x.jpg"), "hrm: --plot: 'x.jpg' is not a figure this writes (a name that ends in .png or .svg)\n"),
        (("--plot", "none/x.png"), "hrm: --plot: none/x.png: its folder does not exist\n"),
        (("--trace", "none/x.json"), "hrm: --trace: none/x.json: its folder does not exist\n"),
        (("--trace", "."), "hrm: --trace: .: is a folder (the name of a file)\n"),
        (("--schedule", "s5"), "hrm: schedule 's5': there is no such schedule (one of cgopipe, "),
    ],
)
def test_wrong_options_are_refused_before_anything_is_replayed(
    folder: Path, document: dict[str, Any], arguments: tuple[str, ...], said: str
) -> None:
    done = hrm("simulate", "plan.json", *arguments, folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)


def test_a_plan_of_the_papers_cost_model_is_refused_with_the_way_out(folder: Path) -> None:
    made = hrm(
        *("plan", "--hw", "l4-paper", "--model", "mixtral-8x7b", "--cost-model", "paper", "--gen-len", "4"),
        *("-o", "paper.json", "--json"),
        folder=folder,
    )
    assert made.returncode == 0, made.stderr
    done = hrm("simulate", "paper.json", folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "hrm plan without --cost-model paper" in done.stderr


def test_one_generated_token_has_a_rate_and_no_decode_step(folder: Path) -> None:
    made = hrm(
        *("plan", "--hw", "t4", "--model", "granite-3.1-1b-a400m", "--requests", "8", "--gen-len", "1"),
        *("-o", "one.json", "--json"),
        folder=folder,
    )
    assert made.returncode == 0, made.stderr
    done = hrm("simulate", "one.json", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["throughput_tokens_per_s"] == pytest.approx(8 / found["prefill_s"])
    assert (found["step"], found["step_latency_s"], found["critical_path"]) == (None, 0.0, {})
    assert "there is no decode step" in hrm("simulate", "one.json", folder=folder).stdout
    refused = hrm("simulate", "one.json", "--plot", "x.png", folder=folder)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "one token is generated" in refused.stderr


def test_a_plan_is_not_written_over_by_its_trace_nor_one_output_by_another(folder: Path) -> None:
    before = (folder / "plan.json").read_text()
    for options in (("--trace", "plan.json"), ("--trace", "x.png", "--plot", "x.png")):
        done = hrm("simulate", "plan.json", *options, folder=folder)
        assert done.returncode == 2
        assert "is also" in done.stderr and "Traceback" not in done.stderr
    assert (folder / "plan.json").read_text() == before


def test_a_plan_with_everything_on_the_cpu_and_something_on_the_gpu_is_refused(folder: Path) -> None:
    document = json.loads((folder / "plan.json").read_text())
    document["policy"]["everything_on_cpu"] = True
    (folder / "odd.json").write_text(json.dumps(document))
    done = hrm("simulate", "odd.json", folder=folder)
    assert done.returncode == 2
    assert "policy.everything_on_cpu" in done.stderr


def test_the_quick_critical_path_is_that_of_the_whole_stack_within_a_percent_of_the_step(folder: Path) -> None:
    quick, whole = (
        json.loads(hrm("simulate", "plan.json", "--json", *options, folder=folder).stdout)
        for options in ((), ("--trace", "whole.json"))
    )
    for op, seconds in whole["critical_path"].items():
        assert quick["critical_path"].get(op, 0.0) == pytest.approx(seconds, abs=0.01 * whole["step_latency_s"]), op

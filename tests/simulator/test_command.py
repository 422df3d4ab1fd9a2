"""`hrm simulate`, as a person and as a script meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


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
        *("--weights-on-disk", "0", "-o", "plan.json", "--json"),
        folder=found,
    )
    assert done.returncode == 0, done.stderr
    return found


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    done = hrm("simulate", "plan.json", "--json", "--trace", "trace.json", folder=folder)
    assert done.returncode == 0, done.stderr
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


def test_the_simulated_layer_lies_above_its_bound_and_close_to_the_prediction(document: dict[str, Any]) -> None:
    assert document["layer_latency_s"] >= document["bound_layer_latency_s"] * (1 - 1e-9)
    assert document["predicted_over_simulated"]["layer_latency_s"] == pytest.approx(1.0, abs=0.02)


def test_the_trace_is_one_that_perfetto_opens(folder: Path, document: dict[str, Any]) -> None:
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {"M", "X", "s", "f"} <= {event["ph"] for event in events}
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

"""Memory seen from outside: what the kernel counts of a run of real shapes, in a process of its own, and the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import run

OLMOE = (
    *("--hw", "l4", "--model", "olmoe", "--requests", "64", "--prompt-len", "64", "--gen-len", "4"),
    *("--batch", "64", "--micro-batch", "64"),
)
STAGED = (
    *("--attention", "cpu", "--ffn", "gpu", "--no-pin-weights", "--weights-on-gpu", "0", "--weight-slots", "2"),
    *("--dense-weights", "streamed", "--embedding", "cpu", "--lm-head", "streamed"),
)
ON_THE_CPU = ("--set", "gpu.usable_memory=1 GiB", "--set", "link.host_to_device.pinned=0.001 GB/s")


@pytest.mark.parametrize("pins", [STAGED, ON_THE_CPU], ids=["two arenas", "CPU only"])
def test_a_run_takes_what_its_plan_says_and_no_more(pins: tuple[str, ...], tmp_path: Path) -> None:
    """Two layers of OLMoE, random weights: 2 to 3 GB. How close at full size: `benchmarks/memory.py`."""
    plan = tmp_path / "plan.json"
    assert run("plan", *OLMOE, *pins, "-o", plan).code == 0
    command = ("run", str(plan), "--random-weights", "--layers", "2", "--device", "cpu", "--json")
    done = subprocess.run([sys.executable, "-m", "hrm", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for level, use in json.loads(done.stdout)["memory"].items():
        if level != "disk":
            allowed = use["plan_bytes"] + use["reserve_bytes"]
            assert 0.85 * allowed <= use["running_bytes"] <= allowed, (level, use)

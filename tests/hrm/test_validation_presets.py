"""Presets of `hrm validate run`: refused without a GPU, and plans of the sizes they promise."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from command import refused

from hrm.errors import InfeasibleError
from hrm.host_facts import HostFacts
from hrm.pins import Pins
from hrm.plans import read_plan_document
from hrm.validation.presets import COLAB_GENERATED, COLAB_REQUESTS, COLAB_SHARE, PRESETS, plan_layers
from hrm.workload import load_workload

NO_GPU = HostFacts(torch="cpu", gpus=(), cpu_bytes=1e12, lockable_bytes=1e12, disk_bytes=1e12)


@pytest.mark.parametrize("name", PRESETS)
def test_without_a_gpu_a_preset_is_refused_and_the_dry_run_named(name: str) -> None:
    with mock.patch("hrm.validation.presets.read_host_facts", return_value=NO_GPU):
        line = refused("validate", "run", "--preset", name)
    assert "no CUDA device here" in line
    assert "--dry-run" in line


def test_colab_has_as_many_layers_as_fit_with_a_share_of_the_experts_on_the_gpu(tmp_path: Path) -> None:
    PRESETS["colab-t4"].plans["colab"](tmp_path / "plan.json")
    scenario, policy, document = read_plan_document(tmp_path / "plan.json")
    assert (scenario.profile.name, scenario.model.name) == ("colab-t4", "mixtral-8x7b")
    assert (policy.weights_on_disk, policy.kv_on_disk) == (0.0, 0.0)
    assert document["inputs"]["model"]["config"]["num_hidden_layers"] == scenario.model.n_layers
    workload = load_workload("mtbench", generation_length=COLAB_GENERATED, num_requests=COLAB_REQUESTS)
    pins = Pins(weights_on_disk=0.0, kv_on_disk=0.0, weights_on_gpu=COLAB_SHARE)
    plan_layers("colab-t4", workload, scenario.model.n_layers, pins)
    with pytest.raises(InfeasibleError):
        plan_layers("colab-t4", workload, scenario.model.n_layers + 1, pins)


def test_the_reviewers_setting_is_planned_whole_and_padded_or_not(tmp_path: Path) -> None:
    preset = PRESETS["reviewers-s1"]
    assert preset.layers == 2
    for name, padded in (("unpadded", False), ("padded", True)):
        preset.plans[name](tmp_path / "plan.json")
        scenario, _, _ = read_plan_document(tmp_path / "plan.json")
        assert (scenario.profile.name, scenario.model.n_layers) == ("t4", 32)
        assert (scenario.workload.name, scenario.workload.padded) == ("mtbench", padded)
        assert scenario.workload.generation_length == 128

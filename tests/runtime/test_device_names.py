"""Whether a GPU is the one that was planned for: names of profiles and names of drivers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runtime.device import Device
from runtime.device_names import DRIVER_NAMES, same_gpu, same_gpu_name

GPUS = sorted((Path(__file__).parents[2] / "hardware_profiles" / "components" / "gpus").glob("*.yaml"))


@pytest.mark.parametrize("file", GPUS, ids=lambda file: file.stem)
def test_every_bundled_gpu_has_its_drivers_names(file: Path) -> None:
    name = yaml.safe_load(file.read_text(encoding="utf-8"))["gpu"]["name"]
    assert all(same_gpu_name(name, driver) is True for driver in DRIVER_NAMES[name])


@pytest.mark.parametrize(
    ("planned", "here", "same"),
    [
        ("NVIDIA A100 80GB SXM", "NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A100 80GB SXM", "NVIDIA A100-SXM4-40GB", False),
        ("NVIDIA A100 80GB SXM", "NVIDIA A100 80GB PCIe", False),
        ("NVIDIA H100 SXM", "NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H100 SXM", "NVIDIA H100 PCIe", False),
        ("NVIDIA T4", "Tesla T4", True),
        ("NVIDIA L4", "NVIDIA L4", True),
        ("NVIDIA L4", "NVIDIA L40S", False),
        ("NVIDIA L40S", "NVIDIA L40", False),
        ("NVIDIA A10G", "NVIDIA A10", False),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", True),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D", False),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU", False),
        ("nvidia  geforce RTX 3090", "NVIDIA GeForce RTX 3090 ", True),
        ("NVIDIA RTX A6000", "NVIDIA RTX A6000", True),
        ("NVIDIA T4 (authors' planner)", "Tesla T4", None),
        ("NVIDIA RTX A6000", "NVIDIA L4", None),
    ],
)
def test_names_are_compared_whole_and_unknown_ones_not_at_all(planned: str, here: str, same: bool | None) -> None:
    assert same_gpu_name(planned, here) is same


def test_a_cpu_is_no_gpu() -> None:
    assert same_gpu("NVIDIA L4", Device("cpu", True, (0,))) is None

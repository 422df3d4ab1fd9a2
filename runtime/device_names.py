"""What a report calls this machine's compute device, and whether it is the one that was planned for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from runtime.device import Device

__all__ = ["DRIVER_NAMES", "device_name", "same_gpu", "same_gpu_name"]

DRIVER_NAMES: Mapping[str, tuple[str, ...]] = {
    "NVIDIA T4": ("Tesla T4",),
    "NVIDIA L4": ("NVIDIA L4",),
    "NVIDIA L40S": ("NVIDIA L40S",),
    "NVIDIA A10G": ("NVIDIA A10G", "A10G"),
    "NVIDIA A100 80GB SXM": ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    "NVIDIA H100 SXM": ("NVIDIA H100 80GB HBM3",),
    "NVIDIA H200": ("NVIDIA H200",),
    "NVIDIA GeForce RTX 3090": ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
    "NVIDIA GeForce RTX 4090": ("NVIDIA GeForce RTX 4090",),
}
"""What NVIDIA's drivers call the GPU models that come with the planner; older drivers leave the maker out."""


def device_name(device: Device) -> str:
    """What a report calls the machine's compute device."""
    if device.cuda:
        return str(torch.cuda.get_device_name())
    model = next(
        (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        "CPU",
    )
    words = f"{len(device.cores)} cores of {model}"
    return f"{words}, the accelerator emulated" if device.emulated else words


def same_gpu(planned: str, device: Device) -> bool | None:
    """Whether this GPU is the one of the profile; None without a GPU, or where that is not known."""
    return same_gpu_name(planned, str(torch.cuda.get_device_name())) if device.cuda else None


def same_gpu_name(planned: str, here: str) -> bool | None:
    """Whether the driver's name of a GPU is one of the model that a profile names.

    Exactly, but for case and spaces: an RTX 4090 D is no RTX 4090. None where neither the profile's words are the
    driver's nor any bundled model is called so.
    """
    drivers = {_plain(name): [_plain(each) for each in names] for name, names in DRIVER_NAMES.items()}
    wanted, found = _plain(planned), _plain(here)
    if wanted == found or found in drivers.get(wanted, ()):
        return True
    return False if wanted in drivers else None


def _plain(name: str) -> str:
    return " ".join(name.lower().split())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

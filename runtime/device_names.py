"""What a report calls this machine's compute device, and whether it is the one that was planned for."""

from __future__ import annotations

from pathlib import Path

import torch

from runtime.device import Device

__all__ = ["device_name", "same_gpu"]


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
    """Whether this GPU is the one of the profile; None without a GPU."""
    if not device.cuda:
        return None
    here = torch.cuda.get_device_name().lower().replace("-", " ").split()
    return all(word in here for word in planned.lower().replace("-", " ").split() if word not in ("nvidia", "tesla"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
